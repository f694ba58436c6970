"""Thirteen checks of quality, by number.

1 A pattern is a causal distribution. 2 Shares add up. 3 Scores are the sum of their four terms.
4 Δ is the stream times its coupling (test_weights). 5 What is of position 0 knows nothing after it.
6 Batches and replicas change nothing (test_batch, test_faults, test_inputs). 7 The loss is the
library's own; every column is its definition (test_measure). 8 Controls do nothing and edits do
something (also test_interventions, test_reproduce). 9 Uniform attention has its published levels.
10 Published bands of GPT-2's sink (test_reproduce). 11 Aggregates merge (test_profiles). 12 Each
row once (test_faults, test_shard). 13 A number that is none is an error, and what is undefined is
NULL (test_measure, test_models, test_profiles, test_shard).
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from headcount.schemas.formulas import evaluate
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.fused_pattern import uniform_pattern
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.model.files.model_info import find_model
from headcount.workers.model.model import bridge_of
from tests.toys import toy_models as toy

BLOCK = 12
T = 1 + 2 * BLOCK
BOS = 256
Activations = dict[str, Any]


def repeated_blocks(count: int = 3) -> np.ndarray:
    """BOS and a block of different tokens twice."""
    blocks = [np.random.default_rng(i).permutation(192)[:BLOCK] for i in range(count)]
    return np.array([[BOS, *block, *block] for block in blocks], np.int32)


@cache
def replica(engine: str) -> toy.TextReplica:
    return toy.replica(find_model("bundled:gpt2-mini"), engine=engine, predictions=["loss"])


@cache
def shown_by_layer(engine: str) -> list[Activations]:
    """What the layers show of repeated blocks."""
    tokens = torch.from_numpy(repeated_blocks()).long()
    shown_layers: list[Activations] = []

    def keep_layer(layer: int, activations: Any) -> None:
        # The fused engine shows a layer twice, the first time with everything that is needed here.
        if layer == len(shown_layers) and "pattern" in activations:
            pattern = activations["pattern"]
            matrices = {"matrix": pattern.dense(), "scores": pattern.dense_scores()}
            shown_layers.append({**activations, **matrices})

    with torch.inference_mode():
        replica(engine).engine.run(tokens, find_matches(tokens), keep_layer)
    assert len(shown_layers) == 3
    return shown_layers


both_engines = pytest.mark.parametrize("engine", ["fused", "dense"])


@both_engines
def test_01_a_pattern_is_a_causal_distribution(engine: str) -> None:
    for activations in shown_by_layer(engine):
        matrix: Tensor = activations["matrix"]
        assert matrix.shape == (3, 8, T, T)
        assert (matrix.sum(-1) - 1).abs().max() <= 1e-5
        assert matrix.min() >= 0
        assert (matrix.triu(1) == 0).all()
        assert (matrix[..., 0, 0] - 1).abs().max() <= 1e-6


@both_engines
def test_02_shares_add_up(engine: str) -> None:
    q = torch.arange(1 + BLOCK, T)  # The second copy, whose keys of the four kinds are four.
    for activations in shown_by_layer(engine):
        pattern, matrix = activations["pattern"], activations["matrix"]
        assert (pattern.key(0).mean(-1) >= 1 / T).all()
        assert (pattern.by_lag() * (T - torch.arange(T))).sum(-1).sub(T).abs().max() <= 1e-5 * T
        mass_of_three_keys = (
            pattern.lag(0)[..., q] + pattern.lag(1)[..., q - 1] + pattern.key(0)[..., q]
        )
        other_keys = matrix.clone()
        for key in (0 * q, q, q - 1, q - BLOCK + 1):
            other_keys[..., q, key] = 0
        total_mass = (
            mass_of_three_keys
            + pattern.mass(activations["successors"])[..., q]
            + other_keys[..., q, :].sum(-1)
        )
        assert (total_mass - 1).abs().max() <= 1e-5


@both_engines
def test_03_scores_are_the_sum_of_their_four_terms(engine: str) -> None:
    for layer, activations in enumerate(shown_by_layer(engine)):
        attn = bridge_of(replica(engine).model).blocks[layer].attn
        q, k = (activations[name].transpose(1, 2).double() for name in "qk")
        b_Q, b_K = (bias.double()[:, None] for bias in (attn.b_Q, attn.b_K))
        # q·k = content + query · key bias + query bias · key + bias · bias
        content = (q - b_Q) @ (k - b_K).mT
        query_term = (q - b_Q) @ b_K.mT
        key_term = b_Q @ (k - b_K).mT
        bias_term = b_Q @ b_K.mT
        root = math.sqrt(q.shape[-1])
        future = torch.ones(T, T).triu(1).bool()
        scores = (root * activations["scores"].double()).masked_fill(future, 0)
        error = (content + query_term + key_term + bias_term).masked_fill(future, 0) - scores
        assert error.abs().max() <= 1e-4 * scores.abs().max() + 1e-3
        # The terms without the key are the same for all keys, so the softmax does not see them.
        pattern = ((content + key_term) / root).masked_fill(future, -torch.inf).softmax(-1)
        assert (pattern - activations["matrix"]).abs().max() <= 1e-5


@both_engines
def test_05_what_is_of_position_0_knows_nothing_after_it(engine: str) -> None:
    names = [
        "sink_key_norm",
        "sink_value_norm",
        "sink_score_shift",
        "sink_resid_pre_norm",
        "sink_resid_post_norm",
    ]
    tokens = repeated_blocks()
    alone = replica(engine).measure(tokens[:1, :1]).heads
    for n_ctx in (1, 2, 7, T):
        measured = replica(engine).measure(tokens[:, :n_ctx]).heads
        for name in names:
            np.testing.assert_allclose(
                measured[name], alone[name].repeat(3, 0), rtol=1e-5, err_msg=name
            )


@both_engines
def test_07_the_loss_is_the_library_s_own(engine: str) -> None:
    model: Any = GPT2LMHeadModel.from_pretrained(
        find_model("bundled:gpt2-mini"), attn_implementation="eager"
    ).eval()
    tokens = torch.from_numpy(repeated_blocks()).long()
    with torch.no_grad():
        expected = [model(sequence[None], labels=sequence[None]).loss.item() for sequence in tokens]
    losses = replica(engine).measure(tokens.int().numpy()).sequences["loss"]
    assert losses.tolist() == pytest.approx(expected, abs=1e-5)


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
        (40, 0.1070, 0.0340),
        (64, 0.0741, 0.0214),
        (128, 0.0424, 0.0108),
        (256, 0.0239, 0.0054),
        (512, 0.0133, 0.0027),
        (1024, 0.0073, 0.0014),
    ],
)
def test_09_uniform_attention_has_its_published_levels(
    n_ctx: int, all_queries: float, late: float
) -> None:
    levels = uniform_levels(torch.zeros(1, n_ctx, dtype=torch.long), "sink_alpha", "sink_mass_late")
    assert levels == pytest.approx([all_queries, late], abs=5e-5)


def test_09_uniform_attention_has_its_published_induction_score() -> None:
    block = torch.arange(25)
    levels = uniform_levels(
        torch.cat([torch.tensor([BOS]), block, block])[None], "induction_diagonal_strict"
    )
    assert levels == pytest.approx([0.0266], abs=5e-5)


def uniform_levels(tokens: Tensor, *names: str) -> list[float]:
    """Statistics of uniform attention."""
    matches = find_matches(tokens)
    activations = {"pattern": uniform_pattern(matches, tokens), "tokens": tokens, **matches}
    return [evaluate(STATISTICS[name].compute, activations).item() for name in names]
