"""Profiles and weights: means of batches, what is undefined or no number, what is rotated back."""

import math
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headcount.schemas.errors import MeasureError, ModelError
from headcount.schemas.formulas import Formula
from headcount.schemas.measured_heads import MeasuredHeads
from headcount.schemas.profiles import PROFILES
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import CURVES, HEADS, Table
from headcount.schemas.tables import PROFILES as MEANS
from headcount.workers.measurements.moments import count_mean_m2, merged_moments
from headcount.workers.measurements.results import Column, check_finite, means_table
from headcount.workers.model.rotations import Rotation
from tests.toys import toy_models as toy

T = 7
ALL = list(PROFILES)
EVERY = MeasuredHeads.every(3, 4)


TOKENS = toy.repeating_tokens(T, batch=11)


def profiles_of(model: Path, tokens: np.ndarray = TOKENS, **changes: Any) -> dict[str, np.ndarray]:
    """Count, mean and M2 by profile."""
    fields = {"profiles": ALL, "statistics": ["sink_alpha", "value_norm"]} | changes
    return toy.measure(model, tokens, **fields).tables["profiles"]


# Moments, and numbers that are none


def test_the_moments_of_batches_are_the_moments_of_all_rows():
    rows = torch.from_numpy(np.random.default_rng(0).normal(1e4, 1e-2, (101, 2, 3)))
    batches = [count_mean_m2(batch).numpy() for batch in rows.tensor_split([1, 3, 40, 100])]
    count, mean, m2 = reduce(merged_moments, batches)
    assert (count == 101).all()
    np.testing.assert_allclose(mean, rows.numpy().mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(m2, rows.numpy().var(0) * 101, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize(
    ("table", "formula", "size", "place", "message"),
    [
        (
            MEANS, PROFILES["score_by_pair"], (3, 3, 4, 10), (1, 1, 2, 4),
            "layer 1, head 2: score_by_pair is not finite at query 2, key 1 for one of the "
            "sequences 8 to 10 of the shard; expected a finite number",
        ),
        (
            MEANS, PROFILES["resid_pre_norm_by_key"], (3, 3, 10), (1, 2, 9),
            "layer 2: resid_pre_norm_by_key is not finite at key 9 for one of",
        ),
        (
            CURVES, PROFILES["value_norm_by_key"], (3, 3, 4, 7), (1, 2, 3, 5),
            "layer 2, head 3: value_norm_by_key is not finite at key 5 for sequence 9 of",
        ),
    ],
)  # fmt: skip
def test_a_number_that_is_not_finite_is_an_error_that_says_where(
    table: Table, formula: Formula, size: Any, place: Any, message: str
):
    values = torch.ones(size)
    values[place] = math.inf
    later = torch.ones(3, 3, 4)
    later[0, 2] = math.inf
    columns = [
        Column(HEADS, "entropy", STATISTICS["entropy"], later),
        Column(table, formula.name, formula, values),
    ]
    # Of two in one layer the first is named.
    columns = columns if place[1] < 2 else columns[::-1]
    with pytest.raises(MeasureError, match=message):
        check_finite(columns, EVERY, first=8, sequences=3)


def test_an_entry_without_a_value_is_no_part_of_the_moments():
    first = torch.tensor([[[[1.0, math.nan, math.nan]]], [[[3.0, 5.0, math.nan]]]])
    second = torch.tensor([[[[2.0, math.nan, math.nan]]], [[[2.0, math.nan, 7.0]]]])
    batches = [count_mean_m2(rows).numpy() for rows in (first, second)]
    expected = [[2, 1, 0], [2, 5, math.nan], [2, 0, math.nan]]
    np.testing.assert_array_equal(batches[0][:, 0, 0], expected)
    merged = merged_moments(*batches)
    assert merged[:, 0, 0].tolist() == [[4, 1, 1], [2, 5, 7], [2, 0, 0]]
    one_head = MeasuredHeads.every(1, 1)
    table = means_table(PROFILES, 0, {"value_norm_by_key": batches[0]}, one_head)
    assert [table[name].to_pylist() for name in ("mean", "m2")] == [[2, 5, None], [2, 0, None]]


# Moments of queries

MOMENTS = [name for name in ALL if "query_mean" in name or "second_moment" in name]


def test_queries_that_a_module_rotates_in_its_own_way_are_an_error(tmp_path: Path):
    path = toy.save_model(tmp_path / "nanochat", toy.family("NanoChatConfig"))
    rotated = profiles_of(path, profiles=["rotated_query_mean"])
    assert np.isfinite(rotated["rotated_query_mean"]).all()
    message = "nanochat: the queries of layer 0 before their rotation are not known, because "
    with pytest.raises(ModelError, match=message):
        profiles_of(path, profiles=["query_mean"])


def test_a_rotation_that_is_not_all_that_a_layer_does_is_not_undone():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    given = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(3.0)[None, :, None].expand(1, 3, 4)
    rotation = Rotation(apply_rotary_pos_emb, angles.cos(), angles.sin(), 4, given)
    rotated = apply_rotary_pos_emb(given, given, angles.cos(), angles.sin())[0]
    assert rotation.checked(rotated).rotate is not None
    torch.testing.assert_close(rotation.undo(rotated.transpose(1, 2)), given.transpose(1, 2))
    assert rotation.checked(rotated * 2).rotate is None


def test_nothing_is_rotated_back_if_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", num_key_value_heads=2))
    # A model is made once, and its check rotates.
    profiles_of(path, profiles=["rotated_query_mean"])

    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("queries were rotated back")

    monkeypatch.setattr(Rotation, "undo", refuse)
    profiles_of(path, profiles=[name for name in ALL if name not in MOMENTS])
    with pytest.raises(AssertionError, match="rotated back"):
        profiles_of(path, profiles=["query_mean"])


# Weights


def changed_bias(folder: Path, place: slice, value: float) -> Path:
    """A GPT-2 with other query biases in layer 1."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer.h.1.attn.c_attn.bias"][place] = value

    path = toy.save_model(folder, toy.gpt2())
    toy.change_weights(path, change)
    return path


def weights_of(path: Path) -> list[dict[str, Any]]:
    fields = {"statistics": ["sink_alpha"], "weight_statistics": ["bias_position_cosine"]}
    return toy.replica(path, **fields).weights()["weights"].to_pylist()


def test_the_cosine_with_a_bias_of_zero_is_null(tmp_path: Path):
    rows = weights_of(changed_bias(tmp_path, slice(8, 16), 0))
    assert {(row["layer"], row["head"]) for row in rows if row["value"] is None} == {(1, 1)}
    assert sum(row["value"] is None for row in rows) == toy.N_CTX


def test_a_bias_that_is_no_number_is_an_error(tmp_path: Path):
    spoilt = changed_bias(tmp_path, slice(3, 4), math.nan)
    with pytest.raises(MeasureError, match=r"layer 1: b_Q is not finite; expected finite numbers"):
        weights_of(spoilt)
