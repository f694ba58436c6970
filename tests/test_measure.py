"""Every column equals its definition, written out plainly in float64 on Hugging Face's own eager
attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from schemas.errors import MeasureError
from schemas.scan import Scan, parse_scan
from schemas.statistics import STATISTICS
from schemas.tables import chance_column
from tests.definitions import by_pattern, definitions
from workers.inputs.sequences import Sequences
from workers.model.model import bridge_of
from workers.model.model_info import describe, find_model
from workers.replica import InterventionMeasurements, Replica

TEXT = """To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of
outrageous fortune, or to take arms against a sea of troubles, and by opposing end them. Σ A[q,k] = 1; naïve café.
for i in range(10): print(i, i * i, sum(range(i)))  # 0 0 0, 1 1 0, 2 4 1, 3 9 3, 4 16 6, 5 25 10, 6 36 15, 7 49 21
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
    return Replica(
        describe(find_model("bundled:gpt2-mini")), scan_of(256, engine=engine), threads=1
    )


def tokens_of(n_ctx: int) -> np.ndarray:
    text = (TEXT * 2).encode()
    return np.array([[256, *text[start : start + n_ctx - 1]] for start in (0, 40, 97)], np.int32)


def is_trigger(token: int) -> bool:
    return token % 3 == 0


def labels_of(tokens: np.ndarray) -> list[list[str]]:
    return [["trigger" if is_trigger(token) else "" for token in row] for row in tokens.tolist()]


def reference(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The statistics `[sequence layer head]` by their formulas, one query at a time, in float64."""
    path = find_model("bundled:gpt2-mini")
    model: Any = GPT2LMHeadModel.from_pretrained(path, attn_implementation="eager").double().eval()
    qkv: list[torch.Tensor] = []
    z: list[torch.Tensor] = []
    resid_post: list[torch.Tensor] = []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda m, a, out: qkv.append(out))
        block.attn.c_proj.register_forward_pre_hook(lambda m, a: z.append(a[0]))
        block.register_forward_hook(
            lambda m, a, out: resid_post.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens).long(), output_attentions=True, output_hidden_states=True
        )
    columns: dict[str, list[float]] = {}
    n_layers, n_heads, n_ctx = len(qkv), model.config.n_head, tokens.shape[1]
    for s in range(len(tokens)):
        for layer in range(n_layers):
            pre, post = (
                r[s].norm(dim=-1).tolist() for r in (out.hidden_states[layer], resid_post[layer])
            )
            q, k, v = (x.view(n_ctx, n_heads, -1) for x in qkv[layer][s].chunk(3, dim=-1))
            for head in range(n_heads):
                heads_z = z[layer][s].view(n_ctx, n_heads, -1)[:, head]
                values = one_head(out.attentions[layer][s, head].numpy(), tokens[s].tolist())
                values |= norms("value", v[:, head]) | norms("key", k[:, head])
                values |= {
                    "query_norm": norms("q", q[:, head])["q_norm"],
                    "head_output_norm": norms("z", heads_z)["z_norm"],
                }
                values |= {"resid_pre_norm": sum(pre) / n_ctx, "sink_resid_pre_norm": pre[0]}
                values |= {"resid_post_norm": sum(post) / n_ctx, "sink_resid_post_norm": post[0]}
                scores = (q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1])).numpy()
                margins = [scores[i, 0] - scores[i, 1:i].mean() for i in range(2, n_ctx)]
                values["sink_logit_margin"] = float(np.mean(margins)) if margins else math.nan
                for name, value in values.items():
                    columns.setdefault(name, []).append(value)
    return {
        name: np.array(c).reshape(len(tokens), n_layers, n_heads) for name, c in columns.items()
    }


def norms(name: str, vectors: torch.Tensor) -> dict[str, float]:
    lengths = vectors.norm(dim=-1).tolist()
    return {f"{name}_norm": sum(lengths) / len(lengths), f"sink_{name}_norm": lengths[0]}


def one_head(a: np.ndarray, t: list[int]) -> dict[str, float]:
    """The statistics of one pattern `[query key]`."""
    n = len(t)
    queries = range(n)
    entropy = [-sum(x * math.log(x) for x in a[i] if x > 0) for i in queries]
    copies = {i: [j for j in range(i) if t[j] == t[i]] for i in queries}
    matched = [i for i in queries if copies[i]]

    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values)) if values else math.nan

    triggers, others = (
        [i for i in queries if i >= 1 and is_trigger(t[i]) == kind] for kind in (True, False)
    )
    both = bool(triggers and others)
    return {
        "sink_mass_triggers": mean([a[i, 0] for i in triggers if both]),
        "sink_mass_others": mean([a[i, 0] for i in others if both]),
        "previous_token_triggers": mean([a[i, i - 1] for i in triggers if both]),
        "sink_mass": mean([a[i, 0] for i in queries if i >= 1]),
        "sink_alpha": mean([a[i, 0] for i in queries]),
        "sink_mass_late": mean([a[i, 0] for i in queries if i >= n // 2]),
        "sink_mass_first4": mean([a[i, :4].sum() for i in queries if i >= n // 2]),
        "previous_token_score": mean([a[i, i - 1] for i in queries if i >= 1]),
        "lookback_two_score": mean([a[i, i - 2] for i in queries if i >= 2]),
        "self_attention": mean([a[i, i] for i in queries]),
        "induction_score": mean([sum(a[i, j + 1] for j in copies[i]) for i in matched]),
        "duplicate_score": mean([sum(a[i, j] for j in copies[i]) for i in matched]),
        "match_coverage": len(matched) / n,
        "entropy": mean(entropy),
        "entropy_normalised": mean([entropy[i] / math.log(i + 1) for i in queries if i >= 1]),
        "mean_distance": mean([sum(a[i, j] * (i - j) for j in queries) for i in queries]),
    }


def assert_equal(
    found: np.ndarray, expected: np.ndarray, name: str, tolerance: float = 1e-5
) -> None:
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
    probability = STATISTICS[name].range == (0, 1)
    scale = 1 if probability else np.maximum(1, np.abs(expected))
    assert np.nanmax(np.abs(found - expected) / scale, initial=0) <= tolerance, name


@pytest.mark.parametrize("engine", ["fused", "dense"])
@pytest.mark.parametrize("n_ctx", [1, 2, 3, 97, 256])
def test_every_column_equals_its_definition_in_float64(engine: str, n_ctx: int) -> None:
    tokens = tokens_of(n_ctx)
    expected = reference(tokens) | definitions(find_model("bundled:gpt2-mini"), tokens)
    found = replica(engine).measure(tokens, labels=labels_of(tokens)).heads
    assert set(found) == set(expected) == set(STATISTICS)
    for name in STATISTICS:
        assert_equal(found[name], expected[name], name)


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


def test_values_lie_in_the_registered_range() -> None:
    for name, values in both_engines()[0].heads.items():
        low, high = STATISTICS[name].range
        values = values[~np.isnan(values)]
        assert ((low - 1e-6 <= values) & (values <= high + 1e-6)).all(), name


def test_chance_is_what_uniform_attention_scores() -> None:
    tokens = tokens_of(60)
    uniform = np.tril(np.ones((60, 60))) / np.arange(1, 61)[:, None]
    found = replica().measure(tokens, labels=labels_of(tokens)).sequences
    assert set(found) == {chance_column(s.name) for s in STATISTICS.values() if s.chance}
    for i, sequence in enumerate(tokens):
        expected = one_head(uniform, sequence.tolist()) | by_pattern(uniform, sequence.tolist())
        for name in expected:
            if STATISTICS[name].chance:
                assert found[chance_column(name)][i] == pytest.approx(
                    expected[name], rel=1e-5, nan_ok=True
                ), name


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
    whole = Replica(replica().model.info, scan_of(64, batch_size=12), threads=1).measure(tokens)
    single = Replica(replica().model.info, scan_of(64, batch_size=5), threads=1).measure(tokens)
    for name in STATISTICS:
        np.testing.assert_allclose(
            whole.heads[name], single.heads[name], rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_not_a_number_fails_and_names_layer_and_statistic() -> None:
    broken = Replica(replica().model.info, scan_of(16), threads=1)
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
            n: v.mean(0)
            for n, v in Replica(info, scan)
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
        others = (51 * unrepeated["value_norm"] - unrepeated["sink_value_norm"]) / 50
        assert (unrepeated["sink_value_norm"] / others)[resting].min() < 0.3


def test_the_bundled_tokenizer_is_bytes() -> None:
    sequences = Sequences(scan_of(64), describe(find_model("bundled:gpt2-mini")))
    text = "naïve ☕ \x00\n<|endoftext|>"
    assert sequences.tokenizer.encode(text) == list(text.encode())
    assert Path(sequences.info.path).name == "gpt2-mini"
