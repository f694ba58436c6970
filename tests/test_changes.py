"""Paired changes: interventions against none and run against run, held against numpy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from queries.answers import run_query
from queries.connection import connect
from tests.toy_runs import Cell, Row, write_run

INTERVENTIONS = ("none", "zero_query_bias", "zero_mlps")


def cell(name: str, missing: int) -> Cell:
    """Numbers that differ everywhere, without a value in every `missing`-th place."""

    def value(row: Row) -> float | None:
        place = row.sequence * 31 + row.layer * 7 + row.head * 3 + len(row.intervention) + len(name)
        return None if place % missing == 0 else math.sin(place * 1.7) / 2 + 0.5

    return value


def columns(shift: float = 0.0) -> dict[str, Cell]:
    first, second = cell("sink_mass", 5), cell("entropy", 4)

    def shifted(row: Row) -> float | None:
        value = first(row)
        return None if value is None else value + shift * (row.sequence + 1)

    return {"sink_mass": shifted, "entropy": second, "value_norm": lambda row: None}


def rows(path: Path, question: str) -> list[dict[str, Any]]:
    answer = run_query(connect(path), question)
    return [dict(zip(answer.schema.names, row, strict=True)) for row in answer.rows()]


def paired(before: list[float | None], after: list[float | None]) -> dict[str, float | int | None]:
    """The numbers of a row, from values of each sequence; stored ones are float32."""
    both = [
        (np.float32(b), np.float32(a))
        for b, a in zip(before, after, strict=True)
        if b is not None and a is not None
    ]
    old, new = np.array(both, np.float64).T
    error = (new - old).std(ddof=1) / math.sqrt(len(both)) if len(both) > 1 else None
    means = {"before": old.mean(), "after": new.mean(), "change": (new - old).mean()}
    return means | {"standard_error": error, "pairs": len(both)}


def test_effects_are_those_of_numpy(tmp_path: Path) -> None:
    cells = columns()
    write_run(tmp_path, "a-1", cells, sequences=11, interventions=INTERVENTIONS)
    write_run(tmp_path, "b-2", cells, sequences=3)  # Has no intervention, so it has no effects.
    found = rows(tmp_path, "effects")
    assert {row["run_id"] for row in found} == {"a-1"}
    assert len(found) == 2 * 2 * 3 * 2  # interventions, layers, heads; value_norm is never defined
    for row in found:
        values = [
            [cells[row["statistic"]](Row(edit, s, row["layer"], row["head"])) for s in range(11)]
            for edit in ("none", row["intervention"])
        ]
        expected = paired(*values)
        assert row["label"] == f"L{row['layer']}H{row['head']}"
        assert row["pairs"] == expected["pairs"]
        assert row["pairs"] < 11
        for name, known in (
            ("untouched", "before"), ("edited", "after"), ("change", "change"),
            ("standard_error", "standard_error"),
        ):  # fmt: skip
            assert row[name] == pytest.approx(expected[known], rel=1e-12, abs=1e-14)


def test_a_single_pair_has_no_standard_error_and_no_pair_no_row(tmp_path: Path) -> None:
    def only_first(row: Row) -> float | None:
        return 0.5 if row.sequence == 0 or row.intervention == "none" else None

    def never_both(row: Row) -> float | None:
        return 0.5 if (row.sequence % 2 == 0) == (row.intervention == "none") else None

    cells = {"sink_mass": only_first, "entropy": never_both}
    write_run(tmp_path, "a-1", cells, interventions=("none", "zero_mlps"), layers=1, heads=1)
    (row,) = rows(tmp_path, "effects")
    assert (row["statistic"], row["change"], row["standard_error"], row["pairs"]) == (
        "sink_mass", 0, None, 1,
    )  # fmt: skip


def test_run_changes_are_those_of_numpy_in_both_directions(tmp_path: Path) -> None:
    one, other = columns(), columns(shift=0.01)
    del other["entropy"]  # Only one of the runs measured it.
    write_run(tmp_path, "a-1", one, sequences=9, interventions=INTERVENTIONS[:2])
    write_run(tmp_path, "b-2", other, sequences=7, heads=2, interventions=INTERVENTIONS)
    found = rows(tmp_path, "run_changes")
    assert len(found) == 2 * 2 * 2 * 2  # directions, interventions, layers, heads
    assert {row["statistic"] for row in found} == {"sink_mass"}
    for row in found:
        sides = (other, one) if row["run_id"] == "a-1" else (one, other)
        values = [
            [
                side["sink_mass"](Row(row["intervention"], s, row["layer"], row["head"]))
                for s in range(7)
            ]
            for side in sides
        ]
        expected = paired(*values)
        assert row["pairs"] == expected["pairs"]
        for name, known in (
            ("other", "before"), ("this", "after"), ("change", "change"),
            ("standard_error", "standard_error"),
        ):  # fmt: skip
            assert row[name] == pytest.approx(expected[known], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("different", [{"n_ctx": 6}, {"family": "repeated_random"}])
def test_runs_on_other_sequences_are_not_compared(
    tmp_path: Path, different: dict[str, Any]
) -> None:
    write_run(tmp_path, "a-1", columns())
    write_run(tmp_path, "b-2", columns(), **different)
    assert rows(tmp_path, "run_changes") == []


def test_parts_of_the_pile_have_standard_errors_and_sink_rates(tmp_path: Path) -> None:
    masses = [0.1, 0.2, 0.15, 0.9, 0.4, 0.05]

    def mass(row: Row) -> float | None:
        return masses[row.sequence] if (row.sequence, row.head) != (5, 1) else None

    write_run(
        tmp_path, "a-1", {"entropy": lambda row: row.sequence / 8, "sink_mass": mass},
        sequences=6, layers=1, heads=2, pile_sets=("Github", "ArXiv"),
    )  # fmt: skip
    found = rows(tmp_path, "FROM by_pile_set WHERE pile_set_name = 'ArXiv' ORDER BY head")
    of_part = np.array([0.2, 0.9, 0.05], np.float32).astype(float)
    sinks = ((1 + 4 * of_part) / 5 > 0.3).astype(float)  # n_ctx is 5
    assert sinks.tolist() == [1, 1, 0]
    first, second = found
    assert first["sink_rate"] == pytest.approx(2 / 3)
    assert first["se_sink_rate"] == pytest.approx(sinks.std(ddof=1) / math.sqrt(3))
    assert first["se_sink_mass"] == pytest.approx(of_part.std(ddof=1) / math.sqrt(3))
    assert first["se_entropy"] == pytest.approx(np.array([1, 3, 5]).std(ddof=1) / 8 / math.sqrt(3))
    # A sequence without a value counts in neither.
    assert (second["sink_rate"], second["se_sink_rate"], second["sequences"]) == (1, 0, 3)


def test_parts_of_the_pile_without_sink_mass_have_no_rate(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"entropy": lambda row: 0.5}, pile_sets=("Github",))
    found = rows(tmp_path, "by_pile_set")
    assert {(row["sink_rate"], row["mean_entropy"]) for row in found} == {(None, 0.5)}


def test_tables_and_views_of_heads_name_them(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.5}, interventions=INTERVENTIONS)
    connection = connect(tmp_path)
    for view in ("heads", "by_head", "effects", "inactive_scores", "inactive_flags"):
        sql = f"SELECT DISTINCT label, layer, head FROM {view} ORDER BY ALL"
        found = list(run_query(connection, sql).rows())
        assert found == [(f"L{la}H{h}", la, h) for la in range(2) for h in range(3)]
    for view in ("curves", "profiles", "profile_means", "weights"):
        assert "label" in run_query(connection, view).schema.names
