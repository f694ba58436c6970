"""Roll-ups: the same answers as the rows, whether they were written or not."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from queries.asking import RunDatabase, open_runs
from tests.toy_runs import Cell, Row, write_run

PARTS = ("ArXiv", None, "Github")
LEVELS = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
VIEWS = ("part_summaries", "head_summaries", "distributions", "head_quantiles")

Cells = dict[tuple[Any, ...], np.ndarray]
"""The values of the rows, NaN if undefined, by intervention, statistic, layer, head and part."""


def random_columns(seed: int = 0) -> dict[str, Cell]:
    """A share, a positive number that is often undefined, and one of both signs, of any size."""

    def drawn(row: Row, column: int) -> float:
        place = [seed, column, row.sequence, row.layer, row.head, len(row.intervention)]
        return float(np.random.default_rng(place).random())

    def entropy(row: Row) -> float | None:
        value = drawn(row, 1)
        # The last head has no value at all.
        return None if value < 0.25 or row.head == 2 else 10 ** (30 * value - 20)

    def score(row: Row) -> float:
        value = drawn(row, 2) - 0.5
        return 0.0 if abs(value) < 0.05 else math.copysign(10 ** (30 * abs(value) - 8), value)

    return {"sink_mass": lambda row: drawn(row, 0) ** 4, "entropy": entropy, "score_shift": score}


def cells_of(database: RunDatabase, by_part: bool) -> Cells:
    """The values of every cell, from the rows."""
    records = database.records(
        "SELECT heads.*, pile_set_name FROM heads JOIN sequences "
        "USING (run_id, intervention, sequence)"
    )
    cells: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in records:
        for statistic in random_columns():
            key = (record["intervention"], statistic, record["layer"], record["head"])
            value = record[statistic]
            part = (record["pile_set_name"],) if by_part else ()
            cells[(*key, *part)].append(math.nan if value is None else value)
    return {key: np.array(values) for key, values in cells.items()}


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    names = ("intervention", "statistic", "layer", "head", "pile_set_name")
    return tuple(record[name] for name in names if name in record)


def check_summaries(database: RunDatabase) -> None:
    """Both summaries say what numpy says of the rows."""
    for view in ("head_summaries", "part_summaries"):
        cells = cells_of(database, by_part=view == "part_summaries")
        records = {key_of(record): record for record in database.records(view)}
        assert set(records) == set(cells)
        for key, values in cells.items():
            record, defined = records[key], values[~np.isnan(values)]
            assert record["count"] == len(defined)
            assert record["undefined"] == len(values) - len(defined)
            if len(defined):
                assert record["minimum"] == defined.min()
                assert record["maximum"] == defined.max()
                assert record["mean"] == pytest.approx(defined.mean(), rel=1e-6)
            else:
                assert record["minimum"] is record["maximum"] is record["mean"] is None
            if len(defined) > 1:
                sd = defined.std(ddof=1)
                assert record["sd"] == pytest.approx(sd, rel=1e-6)
                assert record["standard_error"] == pytest.approx(
                    sd / math.sqrt(len(defined)), rel=1e-6
                )
            else:
                assert record["sd"] is record["standard_error"] is None


def check_distributions(database: RunDatabase) -> None:
    """Every value lies in the bin that counts it."""
    bins: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for record in database.records("distributions"):
        bins[key_of(record)].append(record)
    for key, values in cells_of(database, by_part=True).items():
        defined = values[~np.isnan(values)]
        assert sum(record["count"] for record in bins[key]) == len(defined)
        for record in bins[key]:
            is_inside = (record["low"] <= defined) & (defined < record["high"])
            # The last of the equal bins holds its high end too.
            if record["statistic"] == "sink_mass" and record["high"] == 1:
                is_inside |= defined == 1
            assert is_inside.sum() == record["count"] >= 1, (key, record)


def check_quantiles(database: RunDatabase) -> None:
    """A quantile is off by less than the bin that holds it."""
    records = {key_of(record): record for record in database.records("head_quantiles")}
    for key, values in cells_of(database, by_part=False).items():
        defined = values[~np.isnan(values)]
        if not len(defined):
            assert key not in records
            continue
        record = records[key]
        exact = np.quantile(defined, list(LEVELS.values()), method="inverted_cdf")
        for name, value in zip(LEVELS, exact, strict=True):
            width = 1 / 256 if key[1] == "sink_mass" else max(2.0**-40, abs(value) * 0.0443)
            assert abs(record[name] - value) <= width, (key, name)
        assert abs(record["p50"] - exact[3]) <= record["width"]


def test_views_from_rows_say_what_the_rows_say(tmp_path: Path) -> None:
    write_run(
        tmp_path, "a-1", random_columns(), sequences=40, per_shard=16, pile_sets=PARTS,
        interventions=("none", "zero_query_bias"),
    )  # fmt: skip
    database = open_runs(tmp_path)
    check_summaries(database)
    check_distributions(database)
    check_quantiles(database)


def test_a_run_has_no_rows_of_what_it_did_not_measure(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.5}, layers=1, heads=1)
    write_run(tmp_path, "b-1", {"entropy": lambda row: 2.0}, layers=1, heads=1)
    database = open_runs(tmp_path)
    for view in VIEWS:
        rows = database.rows(f"SELECT run_id, statistic FROM {view}")
        assert rows == [("a-1", "sink_mass"), ("b-1", "entropy")], view


def test_runs_without_statistics_or_shards_have_empty_views(tmp_path: Path) -> None:
    write_run(tmp_path / "none", "a-1", {}, layers=1, heads=1)
    write_run(tmp_path / "new", "a-1", {"entropy": lambda row: 2.0}, commit=[])
    for folder in ("none", "new"):
        database = open_runs(tmp_path / folder)
        assert [database.rows(f"FROM {view}") for view in VIEWS] == [[], [], [], []]
