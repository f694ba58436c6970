"""Kinds of measurement and tables: the two lists, and what is derived from them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from headcount.schemas import predictions, profiles, statistics
from headcount.schemas.files.tables import CURVES, HEADS, PROFILES, SEQUENCES
from headcount.schemas.formulas import Along
from headcount.schemas.predictions import PREDICTIONS
from headcount.schemas.scans.kind import Kind
from headcount.schemas.scans.kinds import KINDS, TABLES, table_schema
from headcount.schemas.scans.scan import Scan
from tests.toys import toy_models as toy


def test_every_field_is_of_one_kind_and_every_table_is_filled() -> None:
    fields = [kind.field for kind in KINDS]
    assert len(set(fields)) == len(fields)
    assert [field for field in Scan.model_fields if field in fields] == fields
    for table in TABLES.values():
        assert set(table.order) <= set(table.own), table.name


def test_no_two_columns_of_a_table_have_one_name() -> None:
    formulas_by_field = {kind.field: list(kind.registry.values()) for kind in KINDS}
    for table in TABLES.values():
        names = table_schema(table, formulas_by_field).names
        assert len(set(names)) == len(names), table.name


def test_a_table_says_what_one_row_is() -> None:
    assert HEADS.description == (
        "One row per run, intervention, sequence, layer and head: every statistic as it was "
        "measured."
    )
    assert HEADS.has("head")
    assert not SEQUENCES.has("layer")
    assert not PROFILES.has("head")  # NULL if all heads of a layer share the values.


def test_a_scan_is_the_same_after_ray_has_pickled_it() -> None:
    scan = toy.toy_scan(curves=["value_norm_by_key"])
    assert pickle.loads(pickle.dumps(scan)) == scan
    assert [kind.field for kind in scan.kinds()] == ["statistics", "curves"]
    assert [kind.field for kind in scan.kinds("from the weights")] == []
    assert [f.name for f in scan.formulas(statistics.KIND)] == list(statistics.STATISTICS)


def test_a_kind_with_contradictory_facts_is_refused() -> None:
    registry: dict[str, Along] = {}

    def kind(**facts: object) -> Kind[Along]:
        fields = {"field": "x", "word": "x", "meaning": "", "registry": registry, "table": CURVES}
        return Kind(**(fields | {"page": "x.md", "introduction": ""} | facts))  # pyright: ignore[reportArgumentType]

    with pytest.raises(
        ValueError, match=r"kind 'x': expected `named_by` where .* got named_by = None"
    ):
        kind(computed="in every layer", averaged=True)
    with pytest.raises(ValueError, match=r"kind 'x': only what is computed in every layer"):
        kind(computed="after the pass", averaged=True, named_by="name")


@pytest.mark.parametrize(
    ("n_ctx", "undefined"),
    [
        (1, {"loss", "loss_early", "loss_late"}),
        (2, {"loss_early"}),
        (3, set[str]()),
        (6, set[str]()),
    ],
)
def test_predictions_have_values_exactly_where_their_rules_say(
    tmp_path: Path, n_ctx: int, undefined: set[str]
) -> None:
    path = toy.save_model(tmp_path / "toy", toy.gpt2())
    tokens = toy.repeating_tokens(n_ctx, batch=2)
    sequences = toy.measure(path, tokens, predictions=list(PREDICTIONS)).sequences
    for name in PREDICTIONS:
        values = np.isnan(sequences[name])
        if values.ndim == 1:
            assert values.tolist() == [name in undefined] * 2, name
        else:
            assert values.tolist() == [[name == "losses", *[False] * (n_ctx - 1)]] * 2, name


def test_without_positions_their_cosines_are_undefined(tmp_path: Path) -> None:
    path = toy.save_model(tmp_path / "llama", toy.family("LlamaConfig", num_key_value_heads=2))
    names = ["position_cosine_mlp", "position_cosine_layer", "loss"]
    sequences = toy.measure(path, toy.repeating_tokens(5, batch=2), predictions=names).sequences
    assert np.isnan(sequences["position_cosine_mlp"]).all()
    assert np.isnan(sequences["position_cosine_layer"]).all()
    assert np.isfinite(sequences["loss"]).all()


def test_the_docs_say_where_a_prediction_has_a_value() -> None:
    assert PREDICTIONS["losses"].undefined_when == "NULL unless some token stands before it"
    assert {kind.page for kind in (predictions.KIND, profiles.KIND)} == {
        "predictions.md",
        "profiles.md",
    }
