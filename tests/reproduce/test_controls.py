"""Controls of figures: what passes for random weights or for idle interventions is found."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from headcount.reproduce.replication import Replication
from headcount.workers.known_models import KnownModels
from headcount.workers.replica import Replica
from tests.reproduce.controls import (
    FEW_SEQUENCES,
    MOST_SEQUENCES,
    Control,
    ReplicationControls,
    UntouchedReplica,
    short_replication,
)
from tests.toys.random_model import LIVELY
from tests.toys.toy_replications import REPLICATIONS, toy_replication

# The one-layer toy has uniform attention if it is untrained: 1/2 for the first key of 2, and so on.
SCAN = {
    "n_ctx": 8, "sequences": 2, "bos": False, "statistics": ["sink_mass_late"],
    "input": {"family": "uniform_random"},
    "interventions": ["none", "zero_positions", "zero_head(0,0)"],
}  # fmt: skip
SIZES = {"n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": 16, "d_vocab": 300}
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


def toy(*checks: dict[str, Any]) -> Any:
    return toy_replication(**TOY, check=[{"tolerance_reason": "a toy"} | each for each in checks])


def names(controls: Iterable[Control], control: str) -> list[str]:
    """What passes a control of this kind, and must not."""
    return [each.name for each in controls if not each.reason and each.control == control]


Controls = Callable[[str, Replication], ReplicationControls]


@pytest.fixture(scope="module")
def controls_of(tmp_path_factory: pytest.TempPathFactory) -> Controls:
    """Controls in one directory: replications of the same sizes share models."""
    home, models = tmp_path_factory.mktemp("controls"), KnownModels()
    return lambda name, replication: ReplicationControls(
        name, replication, home, models, seeds=range(2)
    )


MEANS = "SELECT intervention, mean FROM means"


def test_what_passes_that_must_not_is_found_unless_it_says_why(controls_of: Controls) -> None:
    # The mean of 1/5, 1/6, 1/7 and 1/8: attention that is the same everywhere.
    uniform = np.mean([1 / 5, 1 / 6, 1 / 7, 1 / 8])
    random = {
        "sql": "SELECT intervention || ' at random', mean FROM means", "tolerance": 0.02,
        "published": {"none at random": uniform, "zero_positions at random": 0.9,
                      "zero_head(0,0) at random": uniform},
        "passes_random": {"zero*": "a control"},
    }  # fmt: skip
    # The untouched model depends on no intervention, and 0.5 is too far from 1.
    ratios = {"none ratio": 1, "zero_positions ratio": 0.9, "zero_head(0,0) ratio": 0.5}
    # Doing nothing gives what was published for the untouched model, 0.6.
    means = {"none": 0.6, "zero_positions": 0.55, "zero_head(0,0)": 0.1}
    replication = toy(
        random,
        {"sql": RATIO, "tolerance": 0.2, "published": ratios},
        {"sql": MEANS, "tolerance": 0.1, "published": means},
    )
    controls = controls_of("toy", replication).measure()
    at_random = [each for each in controls if each.name.endswith(" at random")]
    assert names(at_random, "random") == ["none at random"] * 2
    excused = [(each.name, each.reason) for each in at_random if each.reason]
    assert excused == [("zero_head(0,0) at random", "a control")] * 2
    others = [each for each in controls if each not in at_random]
    assert names(others, "null") == ["zero_positions ratio", "zero_positions"]


def test_an_intervention_that_does_nothing_has_the_untouched_rows(controls_of: Controls) -> None:
    controls = controls_of("toy", toy({"sql": "", "tolerance": 1, "published": {"a": 1}}))
    changed, untouched = (
        dict(
            controls.database(controls.runs(SIZES, LIVELY, replica_class=replica)).rows(
                "SELECT intervention, list(sink_mass_late ORDER BY sequence, label) "
                "FROM replication_heads GROUP BY ALL ORDER BY ALL"
            )
        )
        for replica in (Replica, UntouchedReplica)
    )
    assert [*changed] == [*untouched] == ["none", "zero_head(0,0)", "zero_positions"]
    assert changed["none"] != changed["zero_positions"]
    assert untouched == dict.fromkeys(changed, changed["none"])


def test_what_would_take_too_long_is_smaller() -> None:
    published = REPLICATIONS["masked_keys"]
    short, sizes = short_replication(published, published.published_sizes)
    assert (sizes["n_layers"], sizes["n_heads"], sizes["n_ctx"]) == (2, 1, 1024)
    # Untrained models are as wide as their heads have time for.
    circuit = REPLICATIONS["sink_circuit"]
    _, sizes = short_replication(circuit, circuit.published_sizes, FEW_SEQUENCES)
    assert sizes["n_heads"] * sizes["d_head"] == circuit.published_sizes["d_model"]
    # Positions, lengths and interventions stay as published: checks refer to them.
    assert short.scan.keys() == published.scan.keys()
    for name, scan in short.scan.items():
        assert scan["n_ctx"] == published.scan[name]["n_ctx"]
        assert scan["sequences"] <= MOST_SEQUENCES
        assert scan.get("interventions") == published.scan[name].get("interventions")
    # Layers and heads stay as published if a figure is of one of the heads.
    medium = {"n_layers": 24, "n_heads": 16, "n_ctx": 1024, "d_vocab": 50257}
    _, sizes = short_replication(REPLICATIONS["first_keys"], medium)
    assert (sizes["n_layers"], sizes["n_heads"]) == (24, 16)
    sink_rates = REPLICATIONS["sink_rates"]
    assert short_replication(sink_rates, sink_rates.published_sizes)[1]["n_layers"] == 2


UNMEASURED = {
    # No token of a text that stands for another is the trigger t.
    "active_dormant_one_layer": 1,
    # No head of random weights is of these classes.
    "first_keys": 4,
    # The whole run restores nothing.
    "sequence_patching": 17,
    # Coordinates beyond the width of the model, and biases that are 0 before training.
    "sink_circuit_models": 9,
    "sink_circuit_structure": 1,
    "sink_circuit_training": 2,
}
"""Published figures that have no value for random weights, so that they fail there."""


@pytest.mark.long
@pytest.mark.parametrize("name", REPLICATIONS)
def test_no_figure_passes_that_must_not(name: str, controls_of: Controls) -> None:
    # Claims under interventions that do nothing are tried on the miniatures: test_reproduce.
    controls = controls_of(name, REPLICATIONS[name])
    assert [control for control in controls.measure() if not control.reason] == []
    assert {*controls.without_null} <= {*controls.unmeasured}
    assert len(controls.unmeasured) == UNMEASURED.get(name, 0), controls.unmeasured
