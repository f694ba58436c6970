"""Paired changes, between interventions and between runs, compared with numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headcount.queries.ask.asking import open_runs
from tests.toys.toy_runs import Cell, Row, write_run

INTERVENTIONS = ("none", "zero_query_bias", "zero_mlps")


def varied_cell(name: str, missing_every: int) -> Cell:
    """Numbers that differ everywhere. Every `missing_every`-th has no value."""

    def value(row: Row) -> float | None:
        place = row.sequence * 31 + row.layer * 7 + row.head * 3 + len(row.intervention) + len(name)
        return None if place % missing_every == 0 else math.sin(place * 1.7) / 2 + 0.5

    return value


def varied_cells(shift: float = 0.0) -> dict[str, Cell]:
    """Three statistics: one shifted, one not, and one that is never defined."""
    sink_mass = varied_cell("sink_mass", 5)

    def shifted(row: Row) -> float | None:
        value = sink_mass(row)
        return None if value is None else value + shift * (row.sequence + 1)

    return {
        "sink_mass": shifted,
        "entropy": varied_cell("entropy", 4),
        "value_norm": lambda row: None,
    }


def check(row: dict[str, Any], before: list[Any], after: list[Any], names: tuple[str, str]) -> None:
    """Hold a row to the values on each sequence; its columns of means have these names."""
    # Files hold float32, so the exact change is that of the rounded values.
    pairs = [
        (np.float32(old), np.float32(new))
        for old, new in zip(before, after, strict=True)
        if old is not None and new is not None
    ]
    old_values, new_values = np.array(pairs, np.float64).T
    changes = new_values - old_values
    error = changes.std(ddof=1) / math.sqrt(len(pairs))
    expected = [old_values.mean(), new_values.mean(), changes.mean(), error]
    found = [row[name] for name in (*names, "change", "standard_error")]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert row["pairs"] == len(pairs) < len(before)


def test_effects_are_those_of_numpy(tmp_path: Path) -> None:
    cells = varied_cells()
    write_run(tmp_path, "a-1", cells, sequences=11, interventions=INTERVENTIONS)
    # A run without interventions has no effects.
    write_run(tmp_path, "b-2", cells, sequences=3)
    effects = open_runs(tmp_path).records("effects")
    assert {row["run_id"] for row in effects} == {"a-1"}
    # Interventions, layers, heads and statistics; value_norm is never defined.
    assert len(effects) == 2 * 2 * 3 * 2
    for row in effects:
        cell = cells[row["statistic"]]
        places = [(sequence, row["layer"], row["head"]) for sequence in range(11)]
        before = [cell(Row("none", *place)) for place in places]
        after = [cell(Row(row["intervention"], *place)) for place in places]
        assert row["label"] == f"L{row['layer']}H{row['head']}"
        check(row, before, after, ("untouched", "intervened"))


def test_a_single_pair_has_no_standard_error_and_no_pair_no_row(tmp_path: Path) -> None:
    def only_first(row: Row) -> float | None:
        return 0.5 if row.sequence == 0 or row.intervention == "none" else None

    def never_both(row: Row) -> float | None:
        return 0.5 if (row.sequence % 2 == 0) == (row.intervention == "none") else None

    cells = {"sink_mass": only_first, "entropy": never_both}
    write_run(tmp_path, "a-1", cells, interventions=("none", "zero_mlps"), layers=1, heads=1)
    (effect,) = open_runs(tmp_path).records("effects")
    assert effect["statistic"] == "sink_mass"
    assert (effect["change"], effect["standard_error"], effect["pairs"]) == (0, None, 1)


def test_run_changes_are_those_of_numpy_in_both_directions(tmp_path: Path) -> None:
    first_cells = varied_cells()
    second_cells = varied_cells(shift=0.01)
    # A statistic that only one of the runs measured has no change.
    del second_cells["entropy"]
    write_run(tmp_path, "a-1", first_cells, sequences=9, interventions=INTERVENTIONS[:2])
    write_run(tmp_path, "b-2", second_cells, sequences=7, heads=2, interventions=INTERVENTIONS)
    changes = open_runs(tmp_path).records("run_changes")
    # Directions, interventions, layers and heads that both runs have.
    assert len(changes) == 2 * 2 * 2 * 2
    assert {row["statistic"] for row in changes} == {"sink_mass"}
    for row in changes:
        places = [Row(row["intervention"], s, row["layer"], row["head"]) for s in range(7)]
        first, second = (
            [cells["sink_mass"](place) for place in places] for cells in (first_cells, second_cells)
        )
        before, after = (second, first) if row["run_id"] == "a-1" else (first, second)
        check(row, before, after, ("other", "this"))


@pytest.mark.parametrize("different", [{"n_ctx": 6}, {"family": "repeated_random"}])
def test_runs_on_other_input_are_not_compared(tmp_path: Path, different: dict[str, Any]) -> None:
    write_run(tmp_path, "a-1", varied_cells())
    write_run(tmp_path, "b-2", varied_cells(), **different)
    assert open_runs(tmp_path).records("run_changes") == []


def test_the_frontier_of_sink_and_loss_is_what_nothing_beats(tmp_path: Path) -> None:
    # By intervention: the mean sink and the mean loss. Two have the sink or the loss of another.
    points = {
        "none": (0.5, 2.0), "zero_mlps": (0.25, 3.0), "zero_tokens": (0.5, 3.0),
        "zero_positions": (0.625, 2.0), "zero_query_bias": (0.75, 4.0),
        "zero_first_token": (0.125, 5.0),
    }  # fmt: skip

    def sink_mass(row: Row) -> float:
        return (
            points[row.intervention][0] + 0.125 * (row.sequence - 1) + 0.0625 * (2 * row.head - 1)
        )

    def loss(intervention: str, sequence: int) -> float:
        return points[intervention][1] + (sequence - 1) / 2

    facts: dict[str, Any] = {"sequences": 3, "heads": 2, "interventions": [*points]}
    write_run(tmp_path, "a-1", {"sink_mass": sink_mass}, losses=loss, **facts)
    write_run(tmp_path, "b-2", {"sink_mass": sink_mass}, **facts)  # It has no losses.
    rows = open_runs(tmp_path).records("sink_against_loss")
    found = {row["intervention"]: (row["sink_mass"], row["loss"]) for row in rows}
    assert (found, len(rows)) == (points, len(points))
    assert [row["sink_mass"] for row in rows] == sorted(sink for sink, _ in points.values())
    for row in rows:
        sink, nats = points[row["intervention"]]
        assert (row["sink_change"], row["loss_change"]) == (sink - 0.5, nats - 2)
        assert row["sink_error"] == pytest.approx(0.125 / math.sqrt(3))
        assert row["loss_error"] == pytest.approx(0.5 / math.sqrt(3))
        assert (row["sink_change_error"], row["loss_change_error"]) == (0, 0)
        assert (row["documents"], row["sequences"]) == (3, 3)
    beaten = {row["intervention"] for row in rows if not row["on_frontier"]}
    assert beaten == {"zero_query_bias"}


def test_without_an_untouched_run_of_the_scan_there_are_no_changes(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"interventions": ["zero_mlps"], "losses": lambda *_: 1.0}
    write_run(tmp_path, "a-1", {"sink_mass": lambda _: 0.5}, **facts)
    (row,) = open_runs(tmp_path).records("sink_against_loss")
    changes = ("sink_change", "sink_change_error", "loss_change", "loss_change_error")
    assert [row[name] for name in changes] == [None] * 4
    assert (row["sink_mass"], row["loss"], row["on_frontier"]) == (0.5, 1, True)
