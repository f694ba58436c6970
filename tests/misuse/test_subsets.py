"""Refused `layers` and `heads` of a scan, by `headcount plan` and before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.toys import toy_models as toy

FILE = "TMP/toy.toml: "
NO_NAME = "expected a layer and a head in it, as L5H1, got "
NOTHING_NAMED = 'expected "all", or at least one'
CHANGES_NOTHING = "is measured, so it would change nothing; measure layer"
OR_ELSE = "or a later one, name a prediction, or leave it out"

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": "al"}, FILE + "layers: expected 'all' or an array, got 'al'"),
    ({"layers": 2}, FILE + "layers: expected 'all' or an array, got 2"),
    ({"layers": []}, FILE + f"layers: {NOTHING_NAMED} layer and each once, got []"),
    ({"layers": [1, 0, 1]}, FILE + f"layers: {NOTHING_NAMED} layer and each once, got [0, 1, 1]"),
    ({"layers": ["0"]}, FILE + "layers.0: expected an integer, got '0'"),
    ({"layers": [True]}, FILE + "layers.0: expected an integer, got true"),
    ({"layers": [0, 1.0]}, FILE + "layers.1: expected an integer, got 1.0"),
    ({"layers": [-1]}, FILE + "layers.0: expected 0 or more, got -1"),
    ({"layers": [3]}, "layers: layer 3 of deep, which has 3; expected layers from 0 to 2"),
    ({"heads": "L0H1"}, FILE + "heads: expected 'all' or an array, got 'L0H1'"),
    ({"heads": []}, FILE + f"heads: {NOTHING_NAMED} head and each once, got []"),
    (
        {"heads": ["L0H1", "L0H1"]},
        FILE + f"heads: {NOTHING_NAMED} head and each once, got [L0H1, L0H1]",
    ),
    ({"heads": [1]}, FILE + "heads.0: expected a string, got 1"),
    ({"heads": ["L0H1", "0.1"]}, FILE + f"heads.1: {NO_NAME}'0.1'"),
    ({"heads": ["l0h1"]}, FILE + f"heads.0: {NO_NAME}'l0h1'"),
    ({"heads": ["L00H1"]}, FILE + f"heads.0: {NO_NAME}'L00H1'"),
    ({"heads": ["L1\u0661H0"]}, FILE + f"heads.0: {NO_NAME}'L1\u0661H0'"),
    ({"heads": ["L0H" + "9" * 20]}, FILE + f"heads.0: {NO_NAME}'L0H{'9' * 20}'"),
    ({"heads": ["L0H4"]}, "heads: 'L0H4': head 4 of deep, which has 4; expected heads from 0 to 3"),
    (
        {"heads": ["L0H0", "L3H0"]},
        "heads: 'L3H0': layer 3 of deep, which has 3; expected layers from 0 to 2",
    ),
    (
        {"layers": [0], "heads": ["L0H1"]},
        FILE + "heads: these imply their layers, so layers and heads exclude each other; "
        "leave one of them out",
    ),
    (
        {"layers": [0], "interventions": ["none", "zero_head(1,0)"]},
        "interventions: 'zero_head(1,0)': edits layer 1, and nothing after layer 0 "
        f"{CHANGES_NOTHING} 1 {OR_ELSE}",
    ),
    (
        {"heads": ["L1H0"], "interventions": ["scale_query_bias(0.5)+zero_mlp(2)"]},
        "interventions: 'scale_query_bias(0.5)+zero_mlp(2)': edits layer 2, and nothing after "
        f"layer 1 {CHANGES_NOTHING} 2 {OR_ELSE}",
    ),
]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers of four heads."""
    return toy.save_model(tmp_path_factory.mktemp("deep") / "deep", toy.gpt2())


@pytest.mark.parametrize(("fields", "line"), REFUSED)
def test_layers_and_heads_that_are_refused(
    fields: dict[str, Any], line: str, deep: Path, plan_error: Callable[..., list[str]]
) -> None:
    assert plan_error(**{"model": str(deep)} | fields) == [line]


@pytest.mark.parametrize("override", ["layers=[0]", "random-48.heads=['L0H1']"])
def test_a_replication_is_of_the_heads_that_its_scans_name(
    override: str, command: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    code, err = command("reproduce", "recency_bias", "--set", override, "--out", tmp_path / "runs")
    assert (code, err) == (
        2,
        [
            f"error: --set {override}: a replication's figures are of the heads that its own "
            "scans name; "
            "leave it out, or measure some heads with headcount scan"
        ],
    )
    assert not (tmp_path / "runs").exists()
