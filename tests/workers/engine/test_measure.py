"""Every column equals its definition, written out plainly in float64 (`tests/reference`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from headcount.schemas.errors import MeasureError
from headcount.schemas.files.tables import uniform_column
from headcount.schemas.scans.scan import Scan, parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.number_formats import LinearProducts
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.model.files.model_info import describe, find_model
from headcount.workers.model.model import bridge_of
from headcount.workers.replica import InterventionMeasurements, Replica
from tests.reference.definitions import recompute
from tests.reference.weights import read_weights

TEXT = """To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer
the slings and arrows of outrageous fortune, or to take arms against a sea of troubles, and by
opposing end them. Σ A[q,k] = 1; naïve café. for i in range(10): print(i, i * i, sum(range(i)))
# 0 0 0, 1 1 0, 2 4 1, 3 9 3, 4 16 6, 5 25 10, 6 36 15, 7 49 21
"""


def scan_of(n_ctx: int, **fields: Any) -> Scan:
    base = {
        "model": "bundled:gpt2-mini",
        "n_ctx": n_ctx,
        "sequences": 1,
        "statistics": "all",
        "input": {"family": "uniform_random"},
    }
    return parse_scan(base | fields)


@cache
def replica(engine: str = "fused") -> Replica:
    return Replica(describe(find_model("bundled:gpt2-mini")), scan_of(256, engine=engine))


def tokens_of(n_ctx: int, starts: tuple[int, ...] = (0, 40, 97)) -> np.ndarray:
    text = (TEXT * 2).encode()
    return np.array([[256, *text[start : start + n_ctx - 1]] for start in starts], np.int32)


def is_trigger(token: int) -> bool:
    return token % 3 == 0


def labels_of(tokens: np.ndarray) -> list[list[str]]:
    return [["trigger" if is_trigger(token) else "" for token in row] for row in tokens.tolist()]


@cache
def reference(n_ctx: int) -> dict[str, np.ndarray]:
    """The statistics `[sequence layer head]` by their formulas, one query at a time, in float64."""
    tokens = tokens_to_define(n_ctx)
    weights = read_weights(find_model("bundled:gpt2-mini"))
    return recompute(weights, tokens, labels=labels_of(tokens)).heads


def tokens_to_define(n_ctx: int) -> np.ndarray:
    """Three sequences; one if it is long, because definitions are slow."""
    return tokens_of(n_ctx, (0, 40, 97) if n_ctx < 200 else (40,))


def assert_equal(
    measured: np.ndarray, expected: np.ndarray, name: str, tolerance: float = 1e-5
) -> None:
    np.testing.assert_array_equal(np.isnan(measured), np.isnan(expected), err_msg=name)
    probability = STATISTICS[name].range == (0, 1)
    scale = 1 if probability else np.maximum(1, np.abs(expected))
    assert np.nanmax(np.abs(measured - expected) / scale, initial=0) <= tolerance, name


@pytest.mark.parametrize("engine", ["fused", "dense"])
@pytest.mark.parametrize("n_ctx", [1, 2, 3, 97, 256])
def test_every_column_equals_its_definition_in_float64(engine: str, n_ctx: int) -> None:
    tokens = tokens_to_define(n_ctx)
    expected = reference(n_ctx)
    measured = replica(engine).measure(tokens, labels=labels_of(tokens)).heads
    assert set(measured) == set(expected) == set(STATISTICS)
    for name in STATISTICS:
        assert_equal(measured[name], expected[name], name)


@pytest.mark.parametrize("name", STATISTICS)
def test_every_registered_statistic_is_the_same_in_both_engines(name: str) -> None:
    tokens = tokens_of(131)
    fused, dense = both_engines()
    assert_equal(fused.heads[name], dense.heads[name].astype(np.float64), name)
    assert fused.heads[name].shape == (len(tokens), 3, 8)
    assert fused.heads[name].dtype == np.float32


@cache
def both_engines() -> tuple[InterventionMeasurements, InterventionMeasurements]:
    tokens = tokens_of(131)
    labels = labels_of(tokens)
    return replica("fused").measure(tokens, labels=labels), replica("dense").measure(
        tokens, labels=labels
    )


def test_formulas_make_no_call_through_the_mode_that_directs_linear_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    direct = LinearProducts.__torch_function__

    def counted(self: LinearProducts, func: Any, *others: Any) -> object:
        calls.append(func)
        return direct(self, func, *others)

    monkeypatch.setattr(LinearProducts, "__torch_function__", counted)
    counts: list[int] = []
    for statistics in (["sink_mass", "resid_post_norm"], ["all"]):
        calls.clear()
        scan = scan_of(9, precision="tf32", statistics=statistics)
        Replica(describe(find_model("bundled:gpt2-mini")), scan, "cpu").measure(tokens_of(9))
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_values_lie_in_the_registered_range() -> None:
    for name, values in both_engines()[0].heads.items():
        low, high = STATISTICS[name].range
        defined = values[~np.isnan(values)]
        assert ((low - 1e-6 <= defined) & (defined <= high + 1e-6)).all(), name


def test_uniform_baseline_is_what_uniform_attention_scores() -> None:
    tokens = tokens_of(60)
    labels = labels_of(tokens)
    names = [s.name for s in STATISTICS.values() if s.uniform_baseline]
    weights = read_weights(find_model("bundled:gpt2-mini"))
    expected = recompute(weights, tokens, labels=labels, uniform_baseline=names).uniform_baseline
    measured = replica().measure(tokens, labels=labels).sequences
    assert set(measured) == {uniform_column(name) for name in names}
    for name in names:
        np.testing.assert_allclose(
            measured[uniform_column(name)], expected[name], rtol=1e-5, err_msg=name
        )


def test_induction_score_on_a_repeated_block_is_the_strict_score() -> None:
    info = describe(find_model("bundled:gpt2-mini"))
    options = {"family": "repeated_random", "period": 25, "distinct": True}
    tokens = Sequences(scan_of(51, sequences=4, input=options), info).shard(0).tokens
    path = find_model("bundled:gpt2-mini")
    model: Any = GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager").double().eval()
    with torch.no_grad():
        patterns = model(torch.from_numpy(tokens).long(), output_attentions=True).attentions
    strict = torch.stack([p.diagonal(-24, 2, 3)[..., 2:].mean(-1) for p in patterns], dim=1).numpy()
    np.testing.assert_allclose(
        replica().measure(tokens).heads["induction_score"], strict, atol=1e-6
    )


def test_batches_do_not_change_a_row() -> None:
    tokens = np.concatenate([tokens_of(64)] * 4)
    in_one_batch = Replica(replica().model.info, scan_of(64, batch_size=12)).measure(tokens)
    in_batches = Replica(replica().model.info, scan_of(64, batch_size=5)).measure(tokens)
    for name in STATISTICS:
        np.testing.assert_allclose(
            in_one_batch.heads[name], in_batches.heads[name], rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_not_a_number_fails_and_names_layer_and_statistic() -> None:
    broken = Replica(replica().model.info, scan_of(16))
    bridge_of(broken.model).blocks[1].attn.b_V[3] = torch.nan
    with pytest.raises(
        MeasureError, match=r"layer 1, head 3: head_output_norm_last is not finite for sequence 0"
    ):
        broken.measure(tokens_of(16))


@pytest.mark.parametrize("model", ["attn-only-2l-mini", "backcopy-3l-mini", "gpt2-mini"])
def test_bundled_models_show_what_their_cards_say(model: str) -> None:
    info = describe(find_model(f"bundled:{model}"))
    ids = {"low": 65, "high": 192} if model == "backcopy-3l-mini" else {}

    def measure(**options: Any) -> dict[str, np.ndarray]:
        scan = parse_scan(
            {
                "model": f"bundled:{model}",
                "n_ctx": 51,
                "sequences": 128,
                "seed": 7,
                "input": options | ids | {"distinct": True},
            }
        )
        return {
            statistic_name: statistic_values.mean(0)
            for statistic_name, statistic_values in Replica(info, scan)
            .measure(Sequences(scan, info).shard(0).tokens)
            .heads.items()
        }

    repeated, unrepeated = (
        measure(family="repeated_random", period=25),
        measure(family="uniform_random"),
    )
    assert unrepeated["previous_token_score"][0].max() > 0.9
    resting = (repeated["induction_score"] > 0.6) & (unrepeated["sink_mass"] > 0.9)
    assert resting[1].any()
    if model != "attn-only-2l-mini":
        other_norms = (51 * unrepeated["value_norm"] - unrepeated["sink_value_norm"]) / 50
        assert (unrepeated["sink_value_norm"] / other_norms)[resting].min() < 0.3


def test_the_bundled_tokenizer_is_bytes() -> None:
    sequences = Sequences(scan_of(64), describe(find_model("bundled:gpt2-mini")))
    text = "naïve ☕ \x00\n<|endoftext|>"
    assert sequences.tokenizer.encode(text) == list(text.encode())
    assert Path(sequences.info.path).name == "gpt2-mini"
