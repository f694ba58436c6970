"""Compaction changes only where rows lie, even if it is killed at any moment."""

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headcount.jobs.lock import locked
from headcount.jobs.upkeep import cleaning, merged_files
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.compaction import compact, merge_finished
from headcount.jobs.upkeep.merge_workers import merged_by_tasks
from headcount.jobs.upkeep.merged_files import Group, Merged, merged_here
from headcount.queries.ask.answers import run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.schemas.errors import RunError
from headcount.schemas.files.commits import taken_back, write_segment
from headcount.schemas.files.run_directory import RunDirectory, check_merged
from headcount.schemas.filled_tables import OF_MERGED, TABLES
from headcount.schemas.places import names
from tests import ROOT
from tests.tools.deaths import killed_after
from tests.tools.workers import joined_cluster
from tests.toys.commands import ended, error_of, printed
from tests.toys.object_stores import copied_to_store, object_store
from tests.toys.toy_runs import Entry, Row, copy_of, data_file, flip_middle_bit, local, write_run

INTERVENTIONS = ("none", "zero_query_bias")
SHARDS, PER_SHARD, LAYERS, HEADS = 7, 3, 2, 3
SHARD = PER_SHARD * LAYERS * HEADS
"""Rows of `heads` in a shard, under one intervention."""

WRITTEN = ("heads", "profiles", "sequences")
"""Tables of which every shard has a file."""

GROUPS = 3 * SHARD
"""Rows of a merged file: shards 0 to 2, 3 to 5, and 6."""

FILES_OF_GROUPS = len(INTERVENTIONS) * 3 * (len(WRITTEN) + 2) + 1
"""Data files of a run that was merged so: three of each table, of roll-ups and of samples, and the
weights.
"""

Rows = dict[tuple[str, str], tuple[bytes, str]]
"""The description and the rows of each table under each intervention."""


def entropy(row: Row) -> float | None:
    """Every third value is NULL; the others need all bits of a float32."""
    place = (row.sequence * LAYERS + row.layer) * HEADS + row.head
    number = place * 2 + INTERVENTIONS.index(row.intervention)
    return None if number % 3 == 0 else float(np.float32(abs(np.sin(number)) / 3))


def sink_mass(row: Row) -> float | None:
    """Zeros of both signs, and the smallest positive float32."""
    return (0.0, -0.0, float(np.float32(1e-45)))[(row.sequence + row.head) % 3]


def profiles(shard: int) -> list[Entry]:
    """A profile along lags, one along pairs, and one that the heads of a layer share."""
    moments = {"count": PER_SHARD, "mean": np.sin(shard) / 3, "m2": np.cos(shard) ** 2}
    entry = {"layer": 1, "head": 2, **moments}
    lags = [entry | {"profile": "attention_by_lag", "lag": lag} for lag in range(2)]
    pair = entry | {"profile": "score_by_pair", "key": 0}
    pairs = [pair | {"query": query} for query in range(2)]
    return [*lags, *pairs, entry | {"profile": "resid_pre_norm_by_key", "head": None, "key": 0}]


WEIGHTS: list[Entry] = [
    {"weight": "query_bias_norm", "layer": 0, "head": 1, "value": np.sin(1)},
    {"weight": "position_norm", "position": 2, "value": None},
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A small run."""
    return write_run(
        tmp_path_factory.mktemp("original"),
        "toy-1",
        {"entropy": entropy, "sink_mass": sink_mass, "match_coverage": lambda row: None},
        layers=LAYERS,
        heads=HEADS,
        sequences=SHARDS * PER_SHARD,
        per_shard=PER_SHARD,
        interventions=INTERVENTIONS,
        pile_sets=("Github", None),
        profiles=profiles,
        weights=WEIGHTS,
    )


@pytest.fixture(scope="module")
def expected(original: RunDirectory) -> Rows:
    return read_rows(original)


@pytest.fixture
def run(original: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(original, tmp_path / "a")


@pytest.fixture
def merged(run: RunDirectory) -> RunDirectory:
    compact(run, GROUPS)
    return run


def copy_shards(original: RunDirectory, run: RunDirectory, shards: tuple[int, ...]) -> None:
    """Put shards as they were measured into a run."""
    for commit in original.commits():
        if commit.shard in shards:
            paths = [file.path for file in commit.files]
            for path in [*paths, f"commits/shard-{commit.shard:06d}.json"]:
                shutil.copy(local(original.path) / path, local(run.path) / path)


def open_parquet(run: RunDirectory, path: str) -> pq.ParquetFile:
    return pq.ParquetFile(io.BytesIO((run.path / path).read_bytes()))


def read_rows(run: RunDirectory) -> Rows:
    """Every row that counts of every table, by its keys, but what repeats them.

    A text has every bit of a number, NULLs and the sign of a zero.
    """
    commit_log = run.commit_log()
    check_merged(commit_log)
    files = [file for files in commit_log["files"].to_pylist() for file in files]
    tables: Rows = {}
    for table, intervention in {(f["table"], f["intervention"]) for f in files}:
        mine = [f for f in files if (f["table"], f["intervention"]) == (table, intervention)]
        paths = dict.fromkeys(f["path"] for f in mine)
        # What repeats rows may be damaged.
        if table not in OF_MERGED:
            joined = pa.concat_tables([open_parquet(run, path).read() for path in paths])
            assert joined.num_rows == sum(f["rows"] for f in mine)
            joined = joined.sort_by([(key, "ascending") for key in TABLES[table].order])
            description = joined.schema.serialize().to_pybytes()
            tables[table, intervention] = (description, repr(joined.to_pylist()))
    return tables


def data_files(run: RunDirectory) -> list[str]:
    return sorted(
        f"{table}/{folder}/{name}"
        for table in TABLES
        for folder in names(run.path / table)
        for name in names(run.path / table / folder)
    )


def assert_same_and_tidy(run: RunDirectory, expected: Rows | None = None) -> None:
    """Check the rows, and that every file has its commit in the only segment."""
    assert expected is None or read_rows(run) == expected
    assert data_files(run) == sorted({f.path for commit in run.commits() for f in commit.files})
    (name,) = names(run.commits_directory)
    assert re.fullmatch(r"segment-[0-9a-f]{6,}-[0-9a-f]{6,}\.parquet", name)


# What is merged


def test_a_compacted_run_has_the_same_rows_in_few_sorted_files(run: RunDirectory, expected: Rows):
    commits = list(run.commits())
    done = compact(run, GROUPS)
    files = (done.before.files, done.after.files)
    assert (*files, done.problems) == (SHARDS * 7 + 1, FILES_OF_GROUPS + 1, [])
    assert_same_and_tidy(run, expected)
    before, after = (
        [c.model_copy(update={"files": []}) for c in of_run] for of_run in (commits, run.commits())
    )
    assert before == after
    committed = {file.path: file for commit in run.commits() for file in commit.files}
    shards = [file.shards for file in committed.values() if file.table != "weights"]
    assert sorted(shards) == [1] * 10 + [3] * 20
    for file in committed.values():
        assert file.bytes == (local(run.path) / file.path).stat().st_size
        table, keys = open_parquet(run, file.path).read(), TABLES[file.table].order
        is_sorted = table.equals(table.sort_by([(key, "ascending") for key in keys]))
        assert is_sorted or "/shard-" in file.path
    assert sum(file.endswith(".parquet") and "samples/" in file for file in committed) == 6
    # A bare glob counts each row once.
    sql = (
        "SELECT intervention, count(*), count(DISTINCT (sequence, layer, head)) "
        f"FROM '{local(run.path)}/heads/*/*.parquet' GROUP BY 1 ORDER BY 1"
    )
    assert duckdb.connect().execute(sql).fetchall() == [
        (intervention, SHARDS * SHARD, SHARDS * SHARD) for intervention in INTERVENTIONS
    ]
    # The same again changes nothing.
    times = {file: file.stat().st_mtime_ns for file in local(run.path).rglob("*.*")}
    compact(run, GROUPS)
    assert {file: file.stat().st_mtime_ns for file in local(run.path).rglob("*.*")} == times


def test_a_query_on_one_head_skips_other_groups(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merged_files, "ROW_GROUP", SHARDS * PER_SHARD)
    compact(run)
    (path,) = local(run.path).glob("heads/intervention=none/*.parquet")
    sql = f"EXPLAIN ANALYZE SELECT avg(entropy) FROM '{path}' WHERE layer = 1 AND head = 2"
    assert "Row Groups Scanned: 1 / 6" in duckdb.connect().execute(sql).fetchall()[0][1]


def test_a_compacted_run_continues(run: RunDirectory, original: RunDirectory, expected: Rows):
    for shard in (1, 2, 6):
        local(run.commit_file(shard)).unlink()
    compact(run, GROUPS)
    first = data_files(run)
    # A shard that is not done is left alone.
    assert "heads/intervention=none/shard-000001.parquet" in first
    assert [c.shard for c in run.commits()] == [0, 3, 4, 5]
    copy_shards(original, run, (1, 2, 6))
    assert read_rows(run) == expected
    compact(run, GROUPS)
    assert_same_and_tidy(run, expected)
    kept = [path for path in first if path in data_files(run) and "merged" in path]
    assert [re.sub("-[0-9a-f]{8}[.]", ".", path) for path in kept] == [
        f"{table}/intervention={i}/merged-000003-000005.parquet"
        for table in ("heads", "profiles", "rollups", "samples", "sequences")
        for i in INTERVENTIONS
    ]


def test_files_that_were_merged_in_other_groups_stay_whole(run: RunDirectory, expected: Rows):
    compact(run, GROUPS)
    # Groups of two split no file, and groups of four take the file that begins in them.
    for shards, counts in ((2, [3, 3, 3, 3, 3, 3, 1]), (4, [6, 6, 6, 6, 6, 6, 1])):
        compact(run, shards * SHARD)
        assert_same_and_tidy(run, expected)
        assert [commit.files[0].shards for commit in run.commits()] == counts


def test_what_a_late_replica_left_is_deleted_and_what_was_taken_back_is_merged_anew(
    merged: RunDirectory, original: RunDirectory, expected: Rows
):
    copy_shards(original, merged, tuple(range(SHARDS)))
    half = local(merged.path) / "heads/intervention=none/.shard-000001.parquet.1a2b.tmp"
    half.write_bytes(b"PAR1 half")
    assert read_rows(merged) == expected
    compact(merged, GROUPS)
    assert_same_and_tidy(merged, expected)
    write_segment(merged.commits_directory, taken_back(merged.run_id, [3, 4, 5]))
    compact(merged, GROUPS)
    assert [c.shard for c in merged.commits()] == [0, 1, 2, 6]
    assert_same_and_tidy(merged)
    copy_shards(original, merged, (3, 4, 5))
    compact(merged, GROUPS)
    assert_same_and_tidy(merged, expected)


# Damage


def damage_file(run: RunDirectory) -> Path:
    file = local(data_file(run, "sequences", "none", 4))
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(len(content) - 404) + content[-400:])
    return file


def test_a_damaged_file_is_left_and_the_command_fails(
    run: RunDirectory, original: RunDirectory, expected: Rows
):
    file = damage_file(run)
    left, commit = file.read_bytes(), local(run.commit_file(4)).read_bytes()
    words = ["compact", str(run.path), "--processes", "1"]
    assert re.fullmatch(
        "toy-1: shard 4: sequences/intervention=none/shard-000004[.]parquet has other content than "
        f"was committed; headcount resume {run.path} --verify, then compact",
        error_of(*words),
    )
    assert (file.read_bytes(), local(run.commit_file(4)).read_bytes()) == (left, commit)
    # Two files of each table, the roll-ups and the samples of one of them, and the weights.
    assert len(data_files(run)) == 2 * 6 + 2 * 2 + 1
    copy_shards(original, run, (4,))
    merged = r"toy-1: 19 files are now 12, [\d.]+ kB are now [\d.]+ kB, in \d"
    assert re.search(merged, printed(*words))
    assert_same_and_tidy(run, expected)


def rollup_digests(run: RunDirectory) -> dict[tuple[str, str, int], str]:
    """The committed digests of roll-ups and samples, by table, intervention and shard."""
    return {
        (file.table, file.intervention, commit.shard): file.digest
        for commit in run.commits()
        for file in commit.files
        if file.table in OF_MERGED
    }


def damage_rollup(
    run: RunDirectory, how: str, shards: str = "000000-000002", table: str = "rollups"
) -> None:
    """Damage the roll-up, or the sample, of a merged group under the first intervention."""
    (file,) = local(run.path).glob(f"{table}/intervention=none/merged-{shards}-*.parquet")
    if how == "gone":
        file.unlink()
    else:
        flip_middle_bit(file)


@pytest.mark.parametrize(
    ("table", "how", "shards"),
    [("rollups", "gone", "000000-000002"), ("samples", "flipped", "000003-000005")],
)
def test_damaged_roll_ups_and_samples_come_back_to_the_last_bit(
    merged: RunDirectory, expected: Rows, table: str, how: str, shards: str
):
    digests, files = rollup_digests(merged), data_files(merged)
    damage_rollup(merged, how, shards, table)
    words = ["check", str(merged.path)]
    checked = ended(*words, columns=1000)
    first, *_, remedy = checked.stdout.splitlines()
    assert checked.code == 1
    assert f": {table}/intervention=none/merged-{shards}-" in first
    assert remedy.startswith("toy-1: 1 roll-up damaged, in ")
    assert remedy.endswith(f"headcount compact {merged.path} writes them again from their rows")
    assert compact(merged, GROUPS).problems == []
    assert (rollup_digests(merged), data_files(merged)) == (digests, files)
    printed(*words)
    assert_same_and_tidy(merged, expected)
    # Without whole rows it is left, and the rows are reported.
    damage_rollup(merged, "flipped")
    (heads,) = local(merged.path).glob("heads/intervention=none/merged-000000-*.parquet")
    flip_middle_bit(heads)
    (problem,) = compact(merged, GROUPS).problems
    assert problem.startswith("shards 0 to 2: heads/intervention=none/merged-000000-")
    assert rollup_digests(merged) == digests


# Killed


def test_a_compaction_that_is_killed_repeatedly_still_ends(run: RunDirectory, expected: Rows):
    # Twenty changes: more than it takes to merge a group, so each attempt ends one.
    deaths = 0
    while killed_after(20, lambda: compact(run, GROUPS)):
        assert read_rows(run) == expected, deaths
        deaths += 1
        assert deaths < 10
    assert deaths > 2
    assert_same_and_tidy(run, expected)


@pytest.mark.long
def test_killed_after_any_change_all_rows_count_once_and_the_next_compaction_ends_it(
    original: RunDirectory, expected: Rows, tmp_path: Path
):
    """From a merged file with a damaged roll-up, beside shards that were measured later."""
    begun = copy_of(original, tmp_path / "begun")
    for shard in (5, 6):
        local(begun.commit_file(shard)).unlink()
    compact(begun, 4 * SHARD)
    digests = rollup_digests(begun)
    damage_rollup(begun, "flipped", "000000-000003")
    copy_shards(original, begun, (5, 6))
    for changes in count():
        run = copy_of(begun, tmp_path / f"killed-{changes}")
        if not killed_after(changes, partial(compact, run, 4 * SHARD)):
            break
        assert read_rows(run) == expected, changes
        compact(run, 4 * SHARD)
        # The first group has its roll-ups again, and the second has others.
        assert rollup_digests(run).items() > {k: d for k, d in digests.items() if k[2] < 4}.items()
        assert check_run(run).damaged == [], changes
        assert_same_and_tidy(run, expected)
    assert changes > 25


@pytest.mark.long
def test_killed_while_processes_merge_it_goes_on_and_leaves_none(run: RunDirectory, expected: Rows):
    code = (
        "from functools import partial; from headcount.jobs.upkeep.compaction import compact\n"
        "from headcount.jobs.upkeep.merge_workers import merged_by_processes\n"
        "from headcount.schemas.files.run_directory import find_runs, place\n"
        f"(run,) = find_runs(place({str(run.path)!r}))\n"
        f"compact(run, {GROUPS}, lambda line: print(line, flush=True), "
        "partial(merged_by_processes, 2))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        # Two groups of three shards and one of one. The first is committed, others are at work.
        assert "group 1 of 3 merged" in process.stdout.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert read_rows(run) == expected
    compact(run, GROUPS)
    assert_same_and_tidy(run, expected)


@pytest.mark.long
def test_a_cluster_merges_what_is_not_damaged(run: RunDirectory):
    file = damage_file(run)
    with joined_cluster(num_cpus=1):
        done = compact(run, GROUPS, merge_groups=partial(merged_by_tasks, "here"))
    assert [problem.partition(":")[0] for problem in done.problems] == ["shard 4"]
    assert file.exists()
    assert [c.files[0].shards for c in run.commits()] == [3, 3, 3, 2, 1, 2, 1]


# Several at once


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    """A run of three shards with a row each in a store, which has no locks."""
    columns = {"sink_mass": sink_mass}
    run = write_run(tmp_path, "toy-1", columns, layers=1, heads=1, sequences=3, per_shard=1)
    with object_store(monkeypatch):
        yield RunDirectory(copied_to_store(run, "s3://bucket/runs"))


def test_two_compactions_at_once_write_the_same_and_delete_after_an_hour(
    stored: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    expected, small_files = read_rows(stored), data_files(stored)
    files_between: list[str] = []
    lines: list[str] = []

    def merged_twice(groups: Iterable[Group]) -> Iterator[Merged]:
        """Merges groups; another compaction begins and ends before their first segment."""
        for merged in merged_here(groups):
            if not files_between:
                compact(stored, rows=2)
                assert read_rows(stored) == expected
                files_between.extend(data_files(stored))
            yield merged

    done = compact(stored, rows=2, merge_groups=merged_twice)
    assert read_rows(stored) == expected
    # The one that ends last wrote no other files, and nobody's files are gone. Of the six small
    # files, two are of shard 2, which was not merged.
    assert data_files(stored) == files_between
    assert set(small_files) < set(files_between)
    assert (done.before.files, done.after.files) == (9, 9)
    (segment,) = names(stored.commits_directory)
    compact(stored, 2, lines.append)
    assert lines[0].startswith(
        "toy-1: 4 files may still be read and can go in an hour, by headcount"
    )
    monkeypatch.setattr(cleaning, "GRACE", timedelta(0))
    compact(stored, 2, lines.append)
    assert (list(names(stored.commits_directory)), len(lines)) == ([segment], 1)
    assert_same_and_tidy(stored, expected)


def test_a_scan_and_a_compaction_at_once_in_a_store_are_noticed_and_mended(
    run: RunDirectory, original: RunDirectory, expected: Rows
):
    compact(run)
    copy_shards(original, run, (0, 1, 2))
    # A driver that read the commit log before the compaction, and gathers after it.
    write_segment(run.commits_directory, original.commit_log().slice(0, 3))
    with pytest.raises(RunError, match=r"parquet: holds the rows of 7 shards, and \d commits"):
        check_merged(run.commit_log())
    compact(run)
    assert_same_and_tidy(run, expected)


def test_a_compaction_of_a_run_in_use_changes_nothing(run: RunDirectory):
    files = list(names(run.commits_directory))
    with locked(run), pytest.raises(RunError, match="another process is at work on this run"):
        compact(run)
    assert list(names(run.commits_directory)) == files


def test_a_query_whose_files_are_merged_before_it_reads_them_has_every_row(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
):
    database = open_runs(run.path)
    sql = "SELECT count(*), count(entropy), max(entropy) FROM heads"
    before = list(run_query(database, sql).rows())
    unmerged = [run]

    class Merging(RunDatabase):
        """Runs whose files are merged after they were compared with their commits."""

        def hold_to_commits(self, sql: str) -> None:
            super().hold_to_commits(sql)
            if unmerged:
                compact(unmerged.pop())

    assert list(run_query(Merging.open(run.path), sql).rows()) == before


# Runs that are complete


ALL_ROWS = SHARDS * SHARD * len(INTERVENTIONS)


def said_at_its_end(run: RunDirectory, large_rows: int = ALL_ROWS) -> list[str]:
    lines: list[str] = []
    merge_finished(run, merged_here, lines.append, large_rows)
    return lines


def rows_in_roll_ups(run: RunDirectory) -> int | None:
    sql = "SELECT sum(count + undefined) FROM rollups WHERE NOT by_subset AND statistic = 'entropy'"
    return open_runs(run.path).rows(sql)[0][0]


def test_a_large_run_is_merged_when_it_is_complete(run: RunDirectory, original: RunDirectory):
    assert said_at_its_end(run, ALL_ROWS + 1) == []
    local(run.commit_file(6)).unlink()
    assert said_at_its_end(run) == []
    copy_shards(original, run, (6,))
    with locked(run):
        (line,) = said_at_its_end(run)
    assert line.startswith("warning: toy-1 is complete, but not all of it is merged: ")
    assert line.endswith(f"headcount compact {run.path} tries again")
    damage_file(run)
    progress, warning = said_at_its_end(run)
    assert progress == "toy-1: group 1 of 1 merged"
    assert warning.startswith("warning: toy-1 is complete, but ")
    assert rows_in_roll_ups(run) == ALL_ROWS - SHARD * len(INTERVENTIONS)
    copy_shards(original, run, (4,))
    assert said_at_its_end(run) == [progress]
    assert rows_in_roll_ups(run) == ALL_ROWS
    assert said_at_its_end(run) == []
