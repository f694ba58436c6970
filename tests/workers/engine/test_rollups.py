"""Roll-ups: the same answers as the rows, whether they were written or not."""

import math
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.histogram_bins import Axis
from headcount.workers.measurements.rollups import rolled_up
from tests.toys.toy_runs import Cell, Row, copy_of, local, write_run

PARTS = ("ArXiv", None, "Github")
LEVELS = {"p01": 0.01, "p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99}
VIEWS = ("subset_summaries", "head_summaries", "distributions", "head_quantiles")

PAIRS = 2 * 8 * 6 + 1
"""Rows of a merged file: shards 0 and 1, 2 and 3, and 4."""

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


def cells_of(database: RunDatabase, by_subset: bool) -> Cells:
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
            part = (record["pile_set_name"],) if by_subset else ()
            cells[(*key, *part)].append(math.nan if value is None else value)
    return {key: np.array(values) for key, values in cells.items()}


def key_of(record: dict[str, Any]) -> tuple[Any, ...]:
    names = ("intervention", "statistic", "layer", "head", "pile_set_name")
    return tuple(record[name] for name in names if name in record)


def check_summaries(database: RunDatabase) -> None:
    """Both summaries say what numpy says of the rows."""
    for view in ("head_summaries", "subset_summaries"):
        cells = cells_of(database, by_subset=view == "subset_summaries")
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
    for key, values in cells_of(database, by_subset=True).items():
        defined = values[~np.isnan(values)]
        assert sum(record["count"] for record in bins[key]) == len(defined)
        for record in bins[key]:
            is_inside = (record["low"] <= defined) & (defined < record["high"])
            # The last of the equal bins holds its high end too.
            if record["statistic"] == "sink_mass" and record["high"] == 1:
                is_inside |= defined == 1
            assert is_inside.sum() == record["count"] >= 1, (key, record)


def check_quantiles(database: RunDatabase) -> None:
    """A quantile is off by less than the wider bin of the two values that it lies between."""
    records = {key_of(record): record for record in database.records("head_quantiles")}
    for key, values in cells_of(database, by_subset=False).items():
        defined = values[~np.isnan(values)]
        if not len(defined):
            assert key not in records
            continue
        record = records[key]
        levels = list(LEVELS.values())
        exact = np.quantile(defined, levels)
        ends = [np.quantile(defined, levels, method=side) for side in ("lower", "higher")]
        for name, value, size in zip(LEVELS, exact, np.abs(ends).max(axis=0), strict=True):
            width = 1 / 256 if key[1] == "sink_mass" else max(2.0**-40, size * 0.0443)
            assert abs(record[name] - value) <= width, (key, name)
        assert abs(record["p50"] - exact[3]) <= record["width"]


def test_a_run_has_no_rows_of_what_it_did_not_measure(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.5}, layers=1, heads=1)
    write_run(tmp_path, "b-1", {"entropy": lambda row: 2.0}, layers=1, heads=1)
    # Two that have nothing to show.
    write_run(tmp_path, "c-1", {}, layers=1, heads=1)
    write_run(tmp_path, "d-1", {"entropy": lambda row: 2.0}, commit=[])
    database = open_runs(tmp_path)
    for view in VIEWS:
        rows = database.rows(f"SELECT run_id, statistic FROM {view}")
        assert rows == [("a-1", "sink_mass"), ("b-1", "entropy")], view


def check_all(database: RunDatabase) -> None:
    """All views say what the rows say."""
    check_summaries(database)
    check_distributions(database)
    check_quantiles(database)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Five shards of eight sequences under two interventions."""
    return write_run(
        tmp_path_factory.mktemp("runs"), "a-1", random_columns(), sequences=40, per_shard=8,
        pile_sets=PARTS, interventions=("none", "zero_query_bias"),
    )  # fmt: skip


@pytest.fixture
def run(written: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(written, tmp_path)


def test_views_say_what_the_rows_say_before_and_after_shards_are_merged(run: RunDirectory) -> None:
    exact_views = ("distributions", "head_quantiles")
    from_rows = open_runs(run.path)
    check_all(from_rows)
    rows_of_views = [from_rows.records(view) for view in exact_views]
    compact(run)
    database = open_runs(run.path)
    check_all(database)
    assert [database.records(view) for view in exact_views] == rows_of_views
    assert not database.rows("FROM internal.unrolled_heads")
    # One row per intervention, statistic and head, and one for each of its three parts.
    assert database.rows("SELECT count(*) FROM rollups") == [(2 * 3 * 6 * 4,)]


def test_shards_without_roll_ups_are_answered_from_rows(run: RunDirectory) -> None:
    file = local(run.commit_file(4))
    commit = file.read_bytes()
    file.unlink()
    compact(run, PAIRS)
    file.write_bytes(commit)
    database = open_runs(run.path)
    check_all(database)
    unrolled = database.rows("SELECT DISTINCT shard FROM internal.unrolled_heads")
    assert unrolled == [(4,)]
    assert database.rows("SELECT count(*) FROM rollups") == [(2 * 2 * 3 * 6 * 4,)]


def test_merged_shards_are_answered_without_their_rows(run: RunDirectory) -> None:
    compact(run)
    (file,) = local(run.path).glob("heads/intervention=none/*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(100) + content[104:])
    database = open_runs(run.path)
    count = "SELECT sum(count + undefined) FROM head_summaries WHERE statistic = 'entropy'"
    assert database.rows(count) == [(2 * 40 * 6,)]
    assert database.damage() == []
    # A question of the rows reads the file, and finds the damage.
    assert database.rows("SELECT count(*) FROM heads") == [(0,)]
    assert database.rows(count) == [(None,)]


@pytest.mark.parametrize("is_shortened", [False, pytest.param(True, marks=pytest.mark.long)])
def test_damaged_roll_ups_are_answered_from_rows(run: RunDirectory, is_shortened: bool) -> None:
    compact(run, PAIRS)
    file = min(local(run.path).glob("rollups/intervention=none/*.parquet"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] if is_shortened else content[:4] + bytes(9) + content[13:])
    database = open_runs(run.path)
    assert database.rows("SELECT sum(count + undefined) FROM head_summaries WHERE head = 0") == [
        (2 * 40 * 3 * 2,)
    ]
    assert database.rows("SELECT count(*) FROM heads") == [(2 * 40 * 6,)]
    assert database.rows("SELECT DISTINCT status FROM shards") == [("done",)]
    (line,) = database.damage()
    assert "its shards are answered from rows" in line
    assert "shards 0 to 1: rollups/intervention=none/merged-000000-000001-" in line
    assert line.endswith(f"headcount compact {run.path} writes it again")
    check_summaries(database)


def test_merged_shards_are_left_out_together(tmp_path: Path) -> None:
    weights = [{"weight": "query_bias_norm", "layer": 0, "head": 1, "value": 1.0}]
    run = write_run(
        tmp_path, "a-1", random_columns(), sequences=24, per_shard=8, pile_sets=PARTS,
        weights=weights,
    )  # fmt: skip
    compact(run, PAIRS)
    # The weights were measured with shard 0, which was merged with shard 1.
    (file,) = local(run.path).glob("weights/*/*.parquet")
    file.unlink()
    database = open_runs(run.path)
    check_all(database)
    assert database.rows("SELECT DISTINCT shard FROM heads ORDER BY 1") == [(2,)]
    assert database.rows("SELECT count(*) FROM rollups") == [(3 * 6 * 4,)]


def test_memory_does_not_grow_with_the_span_of_sequences() -> None:
    count = 10_000
    numbers = np.arange(count) * 10**12
    sequences = pa.table({
        "sequence": numbers, "pile_set_name": ["Github"] * count, "document": numbers,
    })  # fmt: skip
    heads = pa.table({
        "input_family": ["pile"] * count, "sequence": numbers, "layer": [0] * count,
        "head": [0] * count, "entropy": np.geomspace(1e-12, 1e18, count),
    })  # fmt: skip
    tracemalloc.start()
    rows = rolled_up(heads, sequences, {"entropy": Axis(0, math.inf)})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Each document may go on elsewhere, so each has a row of its own, on both levels.
    assert rows["counts"].to_pylist() == [[1]] * (2 * count)
    assert most < 64e6
