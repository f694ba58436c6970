"""Thirteen checks of quality, by number: here, or where `ELSEWHERE` says.

1 a pattern is a causal distribution · 2 shares add up · 3 scores are the sum of their four terms ·
4 Δ is the stream times its coupling · 5 what is of position 0 knows nothing after it · 6 batches
and replicas change nothing · 7 the library's own numbers · 8 controls do nothing and edits do
something · 9 uniform attention's published levels · 10 published bands of GPT-2's sink · 11
aggregates merge · 12 each row once · 13 no number that is none
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from schemas.formulas import evaluate
from schemas.statistics import STATISTICS
from tests import toy_models as toy
from workers.engine.fused_pattern import uniform_pattern
from workers.engine.token_pairs import find_matches
from workers.model.model import bridge_of
from workers.model.model_info import find_model

ELSEWHERE = {
    4: ["test_weights.py::test_the_shift_of_a_key_is_its_input_times_the_coupling"],
    6: [
        "test_batch.py::test_rows_do_not_depend_on_the_batches",
        "test_faults.py::test_a_run_comes_to_its_end",  # By one replica and by two, as by none.
        "test_inputs.py::test_shards_of_any_size_hold_the_same_sequences",
    ],
    7: ["test_measure.py::test_every_column_equals_its_definition_in_float64"],
    8: [
        "test_interventions.py::test_edits_do_what_they_say",
        "test_reproduce.py::test_every_system_runs_on_its_miniature_and_shows_its_phenomena",
        "test_reproduce.py::test_a_system_of_the_published_model_runs_where_its_weights_are",
    ],
    10: [
        "test_reproduce.py::test_every_system_runs_on_its_miniature_and_shows_its_phenomena",
        "test_reproduce.py::test_a_system_of_the_published_model_runs_where_its_weights_are",
    ],
    11: [
        "test_profiles.py::test_the_aggregate_of_batches_is_the_aggregate_of_all_rows",
        "test_profiles.py::test_sql_merges_exactly",
    ],
    12: [
        "test_faults.py::test_a_run_comes_to_its_end",
        "test_shard.py::test_heads_has_one_row_per_sequence_layer_and_head",
    ],
    13: [
        "test_measure.py::test_not_a_number_fails_and_names_layer_and_statistic",
        "test_models.py::test_nan_after_the_last_layer_names_the_output",
        "test_profiles.py::test_weights_that_are_not_numbers_are_an_error",
        "test_shard.py::test_undefined_is_null_and_never_zero",
    ],
}

BLOCK = 12
T = 1 + 2 * BLOCK
BOS = 256
Seen = dict[str, Any]


def test_every_check_has_its_test() -> None:
    here = {int(number[1]) for name in globals() if (number := re.match(r"test_(\d\d)_", name))}
    assert here | set(ELSEWHERE) == set(range(1, 14))
    for file, name in (place.split("::") for places in ELSEWHERE.values() for place in places):
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, flags=re.MULTILINE), f"{file} has no {name}"


def repeated(n: int = 3) -> np.ndarray:
    """BOS and a block of different tokens twice."""
    blocks = [np.random.default_rng(i).permutation(192)[:BLOCK] for i in range(n)]
    return np.array([[BOS, *block, *block] for block in blocks], np.int32)


@cache
def replica(engine: str) -> toy.TextReplica:
    return toy.replica(find_model("bundled:gpt2-mini"), engine=engine, predictions=["loss"])


@cache
def layers(engine: str) -> list[Seen]:
    """What the layers show of repeated blocks."""
    tokens, found = torch.from_numpy(repeated()).long(), list[Seen]()

    def keep(layer: int, seen: Any) -> None:
        if layer == len(found) and "pattern" in seen:
            questions = {
                "matrix": seen["pattern"].dense(),
                "scores": seen["pattern"].dense_scores(),
            }
            found.append({**seen, **questions})

    with torch.inference_mode():
        replica(engine).engine.run(tokens, find_matches(tokens), keep)
    assert len(found) == 3
    return found


both_engines = pytest.mark.parametrize("engine", ["fused", "dense"])


@both_engines
def test_01_a_pattern_is_a_causal_distribution(engine: str) -> None:
    for seen in layers(engine):
        a: Tensor = seen["matrix"]
        assert a.shape == (3, 8, T, T)
        assert (a.sum(-1) - 1).abs().max() <= 1e-5
        assert a.min() >= 0
        assert (a.triu(1) == 0).all()
        assert (a[..., 0, 0] - 1).abs().max() <= 1e-6


@both_engines
def test_02_shares_add_up(engine: str) -> None:
    q = torch.arange(1 + BLOCK, T)  # The second copy, whose keys of the four kinds are four.
    for seen in layers(engine):
        pattern, a = seen["pattern"], seen["matrix"]
        assert (pattern.key(0).mean(-1) >= 1 / T).all()
        assert (pattern.by_lag() * (T - torch.arange(T))).sum(-1).sub(T).abs().max() <= 1e-5 * T
        own = pattern.lag(0)[..., q] + pattern.lag(1)[..., q - 1] + pattern.key(0)[..., q]
        others = a.clone()
        for key in (0 * q, q, q - 1, q - BLOCK + 1):
            others[..., q, key] = 0
        whole = own + pattern.mass(seen["successors"])[..., q] + others[..., q, :].sum(-1)
        assert (whole - 1).abs().max() <= 1e-5


@both_engines
def test_03_scores_are_the_sum_of_their_four_terms(engine: str) -> None:
    for layer, seen in enumerate(layers(engine)):
        attn = bridge_of(replica(engine).model).blocks[layer].attn
        q, k = (seen[name].transpose(1, 2).double() for name in "qk")
        b_Q, b_K = (bias.double()[:, None] for bias in (attn.b_Q, attn.b_K))
        content = (q - b_Q) @ (k - b_K).mT
        t2, t3, t4 = (q - b_Q) @ b_K.mT, b_Q @ (k - b_K).mT, b_Q @ b_K.mT
        root = math.sqrt(q.shape[-1])
        future = torch.ones(T, T).triu(1).bool()
        scores = (root * seen["scores"].double()).masked_fill(future, 0)
        error = (content + t2 + t3 + t4).masked_fill(future, 0) - scores
        assert error.abs().max() <= 1e-4 * scores.abs().max() + 1e-3
        pattern = ((content + t3) / root).masked_fill(future, -torch.inf).softmax(-1)
        assert (pattern - seen["matrix"]).abs().max() <= 1e-5


@both_engines
def test_05_what_is_of_position_0_knows_nothing_after_it(engine: str) -> None:
    names = [
        "sink_key_norm",
        "sink_value_norm",
        "sink_score_shift",
        "sink_resid_pre_norm",
        "sink_resid_post_norm",
    ]
    tokens = repeated()
    alone = replica(engine).measure(tokens[:1, :1]).heads
    for n_ctx in (1, 2, 7, T):
        found = replica(engine).measure(tokens[:, :n_ctx]).heads
        for name in names:
            np.testing.assert_allclose(
                found[name], alone[name].repeat(3, 0), rtol=1e-5, err_msg=name
            )


@both_engines
def test_07_the_loss_is_the_library_s_own(engine: str) -> None:
    model: Any = GPT2LMHeadModel.from_pretrained(
        find_model("bundled:gpt2-mini"), attn_implementation="eager"
    ).eval()
    tokens = torch.from_numpy(repeated()).long()
    with torch.no_grad():
        expected = [model(one[None], labels=one[None]).loss.item() for one in tokens]
    found = replica(engine).measure(tokens.int().numpy()).sequences["loss"]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@both_engines
def test_08_a_zero_bias_set_to_zero_changes_no_bit(tmp_path: Path, engine: str) -> None:
    def without_query_bias(weights: dict[str, Tensor]) -> None:
        for layer in range(3):
            weights[f"transformer.h.{layer}.attn.c_attn.bias"][:32] = 0

    path = toy.save_model(tmp_path / "toy", toy.gpt2())
    biased = toy.replica(path, engine=engine)
    toy.change_weights(path, without_query_bias)
    plain = toy.replica(path, engine=engine)
    tokens = toy.repeating_tokens(20, batch=2)
    for model, changed in ((biased, True), (plain, False)):
        before, after = (model.measure(tokens, name).heads for name in ("none", "zero_query_bias"))
        assert np.array_equal(before["sink_mass"], after["sink_mass"]) != changed


@pytest.mark.parametrize(
    ("n_ctx", "all_queries", "late"),
    [
        (40, 0.1070, 0.0340), (64, 0.0741, 0.0214), (128, 0.0424, 0.0108), (256, 0.0239, 0.0054), (512, 0.0133, 0.0027),
        (1024, 0.0073, 0.0014),
    ],
)  # fmt: skip
def test_09_uniform_attention_has_its_published_levels(
    n_ctx: int, all_queries: float, late: float
) -> None:
    found = uniform(torch.zeros(1, n_ctx, dtype=torch.long), "sink_alpha", "sink_mass_late")
    assert found == pytest.approx([all_queries, late], abs=5e-5)


def test_09_uniform_attention_has_its_published_induction_score() -> None:
    block = torch.arange(25)
    found = uniform(
        torch.cat([torch.tensor([BOS]), block, block])[None], "induction_diagonal_strict"
    )
    assert found == pytest.approx([0.0266], abs=5e-5)


def uniform(tokens: Tensor, *names: str) -> list[float]:
    """Statistics of uniform attention."""
    matches = find_matches(tokens)
    given = {"pattern": uniform_pattern(matches, tokens), "tokens": tokens, **matches}
    return [evaluate(STATISTICS[name].compute, given).item() for name in names]
