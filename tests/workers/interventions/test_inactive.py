"""Edits of heads that are inactive on an input, and of as many random heads in each layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headcount.workers.interventions.inactive import Score
from tests.toys import toy_models as toy

TOKENS = toy.repeating_tokens(17, batch=4)
THRESHOLDS: dict[str, tuple[float, float]] = {
    "sink_alpha": (0.2, 1.0),
    "entropy": (1.2, 1.0),
    "head_output_norm": (4.3, 1.0),
    "head_output_norm_last": (3.8, 0.9),
    "sink_value_norm": (4.4, 1.0),
    "value_norm": (5.0, 1.0),
}
"""By score: as it is, and in parts of the layer's mean."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.save_model(tmp_path_factory.mktemp("gpt2"), toy.gpt2())


@pytest.fixture(scope="module")
def replica(path: Path) -> toy.TextReplica:
    return toy.replica(path)


def silent(replica: toy.TextReplica, name: str, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Heads that move nothing `[sequence layer head]`."""
    return replica.measure(tokens, name).heads["head_output_norm"] == 0


def inactive(heads: dict[str, np.ndarray], score: str, scale: str) -> np.ndarray:
    values = heads[score]
    if scale == "layer_mean":
        base = heads["head_output_norm" if score == "head_output_norm_last" else score]
        values = values / base.mean(-1, keepdims=True)
    threshold = THRESHOLDS[score][scale == "layer_mean"]
    return values > threshold if score == "sink_alpha" else values < threshold


@pytest.mark.parametrize("scale", ["raw", "layer_mean"])
@pytest.mark.parametrize("score", get_args(Score))
def test_inactive_heads_move_nothing(replica: toy.TextReplica, score: str, scale: str) -> None:
    options = f"({score},{THRESHOLDS[score][scale == 'layer_mean']},{scale})"
    edited = replica.measure(TOKENS, f"zero_inactive_heads{options}").heads
    zero = edited["head_output_norm"] == 0
    assert 0.1 < zero.mean() < 0.9
    np.testing.assert_array_equal(
        zero[:, 0], inactive(replica.measure(TOKENS).heads, score, scale)[:, 0]
    )
    if not score.startswith("head_output"):
        # Patterns and values of a layer are not edited, so what is measured of them is what was
        # decided by.
        np.testing.assert_array_equal(zero, inactive(edited, score, scale))
    control = silent(replica, f"zero_random_heads{options}")
    np.testing.assert_array_equal(control[:, 0].sum(-1), zero[:, 0].sum(-1))


def test_random_heads_depend_on_the_sequence_and_the_draw_alone(replica: toy.TextReplica) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, toy.D_VOCAB, size=(200, 9)).astype(np.int32)
    # Two of four heads have a value at key 0 that is shorter than the layer's mean, whatever the
    # tokens.
    name = "zero_random_heads(sink_value_norm,4.4,raw,{})"
    first, second = (silent(replica, name.format(draw), tokens) for draw in (0, 1))
    one_by_one = [silent(replica, name.format(0), row[None]) for row in tokens[:20]]
    np.testing.assert_array_equal(first[:20], np.concatenate(one_by_one))
    counts = first[:, 0].sum(-1)
    np.testing.assert_array_equal(counts, second[:, 0].sum(-1))
    expected = counts.mean() / 4
    assert 0 < expected < 1
    for share in (first[:, 0].mean(0), second[:, 0].mean(0)):
        # Four standard errors of a share of 200.
        np.testing.assert_allclose(
            share, expected, atol=4 * math.sqrt(expected * (1 - expected) / 200)
        )
    assert (first[:, 0] != second[:, 0]).any(-1).mean() > 0.3


def patterns(replica: toy.TextReplica, layer: int) -> np.ndarray:
    """The patterns of a layer of the untouched model `[sequence head query key]`."""
    pattern_of_layer: dict[int, Any] = {}

    def keep(number: int, activations: Any) -> None:
        pattern_of_layer[number] = activations["pattern"].dense()

    with torch.inference_mode():
        replica.engine.run(torch.from_numpy(TOKENS).long(), {}, keep)
    return pattern_of_layer[layer].double().numpy()


def entropies(pattern: np.ndarray) -> tuple[float, float]:
    """The mean of the row entropies and the largest column entropy of one pattern, as shares of the
    uniform one's.
    """

    def entropy(distribution: np.ndarray) -> float:
        return -sum(share * math.log(share) for share in distribution if share > 0)

    n = len(pattern)
    rows = [entropy(pattern[q, : q + 1]) / math.log(q + 1) for q in range(1, n)]
    columns = [
        entropy(pattern[key:, key] / pattern[key:, key].sum()) / math.log(n - key)
        for key in range(n - 1)
    ]
    return sum(rows) / len(rows), max(columns)


def test_sinks_are_found_by_the_entropies_of_rows_and_columns(replica: toy.TextReplica) -> None:
    entropies_of_heads = np.array(
        [[entropies(pattern) for pattern in heads] for heads in patterns(replica, 0)]
    )
    row, column = (
        np.quantile(entropies_of_heads[..., 0], 0.7),
        np.quantile(entropies_of_heads[..., 1], 0.3),
    )
    sinks = (entropies_of_heads[..., 0] < row) & (entropies_of_heads[..., 1] > column)
    assert {
        sinks.mean() > 0,
        sinks.mean() < 1,
        (sinks != (entropies_of_heads[..., 0] < row)).any(),
    } == {True}
    zero = replica.measure(TOKENS, f"zero_entropy_sinks({row:.6f},{column:.6f})")
    forced = replica.measure(TOKENS, f"entropy_sinks_to_first({row:.6f},{column:.6f})")
    assert zero.method.engine == forced.method.engine == "fused"
    assert zero.method.built_layers == forced.method.built_layers == [0, 1, 2]
    np.testing.assert_array_equal(zero.heads["head_output_norm"][:, 0] == 0, sinks)
    np.testing.assert_array_equal(zero.heads["sink_alpha"][:, 0] == 0, sinks)
    np.testing.assert_array_equal(forced.heads["sink_alpha"][:, 0] == 1, sinks)
    unedited_norms = replica.measure(TOKENS).heads["head_output_norm"][:, 0]
    np.testing.assert_allclose(
        zero.heads["head_output_norm"][:, 0], np.where(sinks, 0, unedited_norms), rtol=1e-5
    )


def test_one_token_is_nobodys_sink(replica: toy.TextReplica) -> None:
    assert not silent(replica, "zero_entropy_sinks(2,-1)", TOKENS[:, :1]).any()
