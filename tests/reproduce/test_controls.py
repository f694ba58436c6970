"""Controls of figures: what passes for random weights or for interventions that do nothing is
found, and a model that is right passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from headcount.reproduce.published_values import PublishedValue
from headcount.reproduce.replication import replications
from headcount.reproduce.replication_runs import open_replication_runs
from tests.reproduce.controls import (
    FULL,
    QUICK,
    Control,
    ControlRuns,
    Extent,
    ReplicationControls,
    passing_share,
    runs_shown,
    scatter_problems,
    short_replication,
    with_untouched,
)
from tests.toys.random_model import LIVELY
from tests.toys.toy_replications import toy_replication

REPLICATIONS = replications()

# The one-layer toy has uniform attention if it is untrained: 1/2 for the first key of 2, and so on.
SCAN = {
    "n_ctx": 8, "sequences": 2, "bos": False, "statistics": ["sink_mass_late"],
    "input": {"family": "uniform_random"},
    "interventions": ["none", "zero_positions", "zero_head(0,0)"],
}  # fmt: skip
SIZES = {"n_layers": 2, "n_heads": 2, "n_ctx": 16, "d_vocab": 300}
MEANS_BY_NAME = (
    "SELECT intervention, avg(sink_mass_late) AS mean FROM replication_heads GROUP BY ALL"
)
TOY: dict[str, Any] = {
    "scan": {"interventions": SCAN}, "view": {"means": MEANS_BY_NAME}, "published_sizes": SIZES,
}  # fmt: skip

RATIO = (
    "SELECT intervention || ' ratio', "
    "mean / (SELECT mean FROM means WHERE intervention = 'none') FROM means"
)


def toy(**check: object) -> Any:
    return toy_replication(**TOY, check=[check])


def names(controls: Iterable[Control], control: str = "random") -> list[str]:
    """What passes a control of this kind, and must not."""
    return [each.name for each in controls if each.is_wrong and each.control == control]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ControlRuns:
    """Models with random weights and their runs, which replications of the same sizes share."""
    return ControlRuns(tmp_path_factory.mktemp("controls"), QUICK)


def passing(runs: ControlRuns, control: str, **check: object) -> list[str]:
    """What passes a control of this kind on the toy, and must not."""
    controls = ReplicationControls("toy", toy(**check), runs)
    return names(controls.measure(), control)


MEANS = "SELECT intervention, mean FROM means"


def test_a_figure_that_random_weights_pass_is_found_unless_it_says_why(runs: ControlRuns) -> None:
    # The mean of 1/5, 1/6, 1/7 and 1/8: attention that is the same everywhere.
    published = {"none": np.mean([1 / 5, 1 / 6, 1 / 7, 1 / 8]), "zero_positions": 0.9}
    check = {"sql": MEANS, "tolerance": 0.02, "published": published}
    assert passing(runs, "random", **check) == ["none"]
    excused = toy(**check, passes_random={"no*": "a control"})
    (control,) = ReplicationControls("toy", excused, runs).measure()
    assert (control.is_wrong, control.text) == (False, "a control")


def test_a_figure_that_an_intervention_without_effect_passes_is_found(runs: ControlRuns) -> None:
    values = {"none ratio": 1.0, "zero_positions ratio": 0.9, "zero_head(0,0) ratio": 0.5}
    # The untouched model depends on no intervention, and 0.5 is too far from 1.
    wrong = passing(runs, "null", sql=RATIO, tolerance=0.2, published=values)
    assert wrong == ["zero_positions ratio"]
    absolute = {"none": 0.6, "zero_positions": 0.55, "zero_head(0,0)": 0.1}
    # Doing nothing gives what was published for the untouched model, 0.6.
    wrong = passing(runs, "null", sql=MEANS, tolerance=0.1, published=absolute)
    assert wrong == ["zero_positions"]


def test_an_intervention_that_does_nothing_has_the_untouched_rows(runs: ControlRuns) -> None:
    replication = toy(sql="", tolerance=1, published={"a": 1})
    # One scan has the untouched model, and one lacks it.
    alone = replication.scan["interventions"] | {"interventions": ["zero_positions"]}
    replication = replication.model_copy(update={"scan": replication.scan | {"alone": alone}})
    short = short_replication(replication, replication.published_sizes, QUICK)
    model = runs.model(short, LIVELY)
    plans = runs.measure("both", short.replication, model)
    untouched = runs.measure("both", with_untouched(short.replication), model)
    pairs = zip(plans, untouched, strict=True)
    assert [plan.run == other.run for plan, other in pairs] == [True, False]
    database = open_replication_runs(replication, str(runs.runs("both")))
    sql = "SELECT scan, intervention, count(*), list(sink_mass_late ORDER BY sequence, label) "
    sql += "FROM replication_heads GROUP BY ALL ORDER BY ALL"

    def shown() -> dict[Any, Any]:
        return {(scan, name): values for scan, name, *values in database.rows(sql)}

    runs_shown(plans).show(database)
    changed = shown()
    assert [*changed] == [
        ("alone", "zero_positions"), ("interventions", "none"), ("interventions", "zero_head(0,0)"),
        ("interventions", "zero_positions"),
    ]  # fmt: skip
    assert changed["interventions", "none"] != changed["interventions", "zero_positions"]
    runs_shown(plans, untouched).show(database)
    assert shown() == dict.fromkeys(changed, changed["interventions", "none"])


def test_what_would_take_too_long_is_smaller_and_says_so() -> None:
    sizes = {"n_layers": 12, "n_heads": 12, "n_ctx": 1024, "d_vocab": 50257}
    short = short_replication(REPLICATIONS["masked_keys"], sizes, QUICK)
    assert short.notes == [
        "4 of 12 layers and 1 of 12 heads",
        "a vocabulary of 1,024, published 50,257",
    ]
    # Positions, lengths and interventions stay as published: checks refer to them.
    scans, published = short.replication.scan, REPLICATIONS["masked_keys"].scan
    assert scans.keys() == published.keys()
    for name, scan in scans.items():
        assert scan["n_ctx"] == published[name]["n_ctx"]
        assert scan.get("interventions") == published[name].get("interventions")
    assert short_replication(REPLICATIONS["first_keys"], sizes, QUICK).notes == []


def test_a_model_has_its_published_layers_if_a_figure_is_of_one_of_its_heads() -> None:
    def layers(name: str, extent: Extent) -> int:
        sizes = REPLICATIONS[name].published_sizes
        return short_replication(REPLICATIONS[name], sizes, extent).sizes["n_layers"]

    assert (layers("sink_rates", QUICK), layers("sink_rates", FULL)) == (12, 48)
    medium = {"n_layers": 24, "n_heads": 16, "n_ctx": 1024, "d_vocab": 50257}
    short = short_replication(REPLICATIONS["first_keys"], medium, QUICK)
    assert short.sizes["n_layers"] == 24


UNMEASURED = {
    # No token of a text that stands for another is the trigger t.
    "active_dormant_one_layer": 1,
    # No head of random weights is of these classes.
    "first_keys": 4,
    # Coordinates beyond the width of narrow heads, and biases that are 0 before training.
    "sink_circuit_models": 9,
    "sink_circuit_structure": 9,
    "sink_circuit_training": 2,
}
"""Published figures that have no value for random weights, so that they fail there."""


@pytest.mark.long
@pytest.mark.parametrize("name", REPLICATIONS)
def test_no_figure_passes_that_must_not(name: str, runs: ControlRuns) -> None:
    # Claims under interventions that do nothing are tried on the miniatures: test_reproduce.
    controls = ReplicationControls(name, REPLICATIONS[name], runs)
    wrong = [control for control in controls.measure() if control.is_wrong]
    assert [f"{control.control}: {control.name}: {control.text}" for control in wrong] == []
    assert {*controls.without_null} <= {*controls.unmeasured}
    assert len(controls.unmeasured) == UNMEASURED.get(name, 0), controls.unmeasured


@pytest.mark.parametrize(("scale", "tolerance", "expected"), [
    # The difference of two values has √2 times their standard error.
    ("absolute", 2.5758 * math.sqrt(2) * 0.1, 0.99),
    ("absolute", math.sqrt(2) * 0.1, 0.683),
    ("relative", math.sqrt(2) * 0.1, 0.683),
    ("log10", math.sqrt(2) * 0.1 / math.log(10), 0.683),
])  # fmt: skip
def test_the_share_of_right_models_that_pass(scale: str, tolerance: float, expected: float) -> None:
    published = PublishedValue("p", 1.0, tolerance, scale, standard_error=0.1)  # type: ignore[arg-type]
    assert passing_share(published) == pytest.approx(expected, abs=0.01)
    assert passing_share(PublishedValue("p", 1.0, tolerance)) == 1


def test_no_figure_fails_a_model_that_is_right() -> None:
    for name, replication in REPLICATIONS.items():
        assert scatter_problems(name, replication) == []


def test_a_figure_that_is_too_narrow_is_found() -> None:
    replication = toy(sql="", tolerance=0.1, published={"a": 1.0}, standard_error=0.1)
    assert names(scatter_problems("toy", replication), "scatter") == ["a"]
