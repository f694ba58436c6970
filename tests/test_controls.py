"""Controls of figures: what passes for random weights or for edits that do nothing is found, and a
model that is right passes.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from reproduce.controls import (
    NullReplica,
    null_controls,
    passing_share,
    random_controls,
    scatter_problems,
)
from reproduce.published_values import PublishedValue
from reproduce.system import System, systems
from schemas.intervention import parse_intervention
from tests import toy_models as toy

SYSTEMS = systems()

# The one-layer toy has uniform attention if it is untrained: 1/2 for the first key of 2, and so on.
TOY = {
    "title": "",
    "source": "",
    "measured": "",
    "published_model": "m",
    "published_sizes": {"n_layers": 2, "n_heads": 2, "n_ctx": 16, "d_vocab": 300},
    "bundled_model": "bundled:gpt2-mini",
    "scan": {
        "edits": {
            "n_ctx": 8,
            "sequences": 2,
            "bos": False,
            "statistics": ["sink_mass_late"],
            "input": {"family": "uniform_random"},
            "interventions": ["none", "zero_positions", "zero_head(0,0)"],
        }
    },
    "view": {
        "means": "SELECT intervention AS edit, avg(sink_mass_late) AS mean FROM system_heads "
        "GROUP BY ALL",
    },
}

RATIO = "SELECT edit || ' ratio', mean / (SELECT mean FROM means WHERE edit = 'none') FROM means"


def toy_system(**check: object) -> System:
    return System.model_validate(TOY | {"check": [check]})


def names(controls: list[object]) -> list[str]:
    return [control.name for control in controls if control.is_wrong]  # type: ignore[attr-defined]


def test_a_figure_that_random_weights_pass_is_found_unless_it_says_why(tmp_path: Path) -> None:
    # The mean of 1/5, 1/6, 1/7 and 1/8: attention that is the same everywhere.
    uniform = np.mean([1 / 5, 1 / 6, 1 / 7, 1 / 8])
    check = {"sql": "SELECT edit, mean FROM means", "tolerance": 0.02}
    published = {"none": uniform, "zero_positions": 0.9}
    system = toy_system(**check, published=published)
    assert names([*random_controls("toy", system, tmp_path / "a")]) == ["none"]
    excused = toy_system(**check, published=published, passes_random={"no*": "a control"})
    (control,) = random_controls("toy", excused, tmp_path / "b")
    assert (control.is_wrong, control.text) == (False, "a control")


def test_a_figure_that_an_edit_without_effect_passes_is_found(tmp_path: Path) -> None:
    values = {"none ratio": 1.0, "zero_positions ratio": 0.9, "zero_head(0,0) ratio": 0.5}
    system = toy_system(sql=RATIO, tolerance=0.2, published=values)
    # The untouched model depends on no edit, and 0.5 is too far from 1.
    assert names([*null_controls("toy", system, tmp_path / "a")]) == ["zero_positions ratio"]
    absolute = {"none": 0.6, "zero_positions": 0.55, "zero_head(0,0)": 0.1}
    sql = "SELECT edit, mean FROM means"
    system = toy_system(sql=sql, tolerance=0.1, published=absolute)
    # Doing nothing gives what was published for the untouched model, 0.6.
    assert names([*null_controls("toy", system, tmp_path / "b")]) == ["zero_positions"]


def test_edits_of_a_null_replica_do_nothing(tmp_path: Path) -> None:
    path = toy.save_model(tmp_path / "m", toy.gpt2())
    scan = toy.replica(path, statistics=["sink_mass"]).scan
    replica = NullReplica(toy.replica(path).model.info, scan, "cpu")
    tokens = toy.repeating_tokens(8)
    untouched = replica.measure(tokens)
    edited = replica.measure(tokens, parse_intervention("zero_positions"))
    assert edited.method.intervention == "zero_positions"
    np.testing.assert_array_equal(edited.heads["sink_mass"], untouched.heads["sink_mass"])


@pytest.mark.parametrize(
    ("scale", "tolerance", "expected"),
    [
        # The difference of two values has √2 times their standard error.
        ("absolute", 2.5758 * math.sqrt(2) * 0.1, 0.99),
        ("absolute", math.sqrt(2) * 0.1, 0.683),
        ("relative", math.sqrt(2) * 0.1, 0.683),
        ("log10", math.sqrt(2) * 0.1 / math.log(10), 0.683),
    ],
)
def test_the_share_of_right_models_that_pass(scale: str, tolerance: float, expected: float) -> None:
    published = PublishedValue("p", 1.0, tolerance, scale, standard_error=0.1)  # type: ignore[arg-type]
    assert passing_share(published) == pytest.approx(expected, abs=0.01)
    assert passing_share(PublishedValue("p", 1.0, tolerance)) == 1


@pytest.mark.parametrize("name", SYSTEMS)
def test_no_figure_fails_a_model_that_is_right(name: str) -> None:
    assert scatter_problems(name, SYSTEMS[name]) == []


def test_a_figure_that_is_too_narrow_is_found() -> None:
    system = toy_system(sql="", tolerance=0.1, published={"a": 1.0}, standard_error=0.1)
    assert names([*scatter_problems("toy", system)]) == ["a"]


@pytest.mark.parametrize("name", ["position_geometry"])
def test_no_figure_of_a_quick_system_passes_that_must_not(name: str, tmp_path: Path) -> None:
    # `make controls` does this for every system, in minutes.
    system = SYSTEMS[name]
    controls = random_controls(name, system, tmp_path) + null_controls(name, system, tmp_path)
    assert names([*controls]) == []
