"""Compaction changes only where rows lie, even if it is killed at any moment."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from headcount import app
from headcount.jobs.run.lock import locked
from headcount.jobs.upkeep import compaction, compaction_lease, merged_files
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.compaction import compact
from headcount.jobs.upkeep.compaction_lease import leased
from headcount.jobs.upkeep.merge_processes import merged_by_processes
from headcount.jobs.upkeep.merge_tasks import merged_by_tasks
from headcount.schemas.errors import RunError
from headcount.schemas.files import places
from headcount.schemas.files.commits import taken_back, write_segment
from headcount.schemas.files.places import write_whole
from headcount.schemas.files.run_directory import RunDirectory, check_merged
from headcount.schemas.scans.kinds import TABLES
from tests import ROOT
from tests.tools.deaths import killed_after
from tests.tools.workers import joined_cluster
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

FILES_OF_GROUPS = len(INTERVENTIONS) * (3 * len(WRITTEN) + 2) + 2
"""Files of a run that was merged so: three of each table, roll-ups of the first two groups (the
last is a shard alone), the weights and the segment.
"""

PAIRS = 2 * SHARD + 1
"""Rows of a merged file: shards 0 and 1, 2 and 3, 4 and 5. The last one has no partner."""

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


@pytest.fixture(scope="module")
def compacted(original: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run after a compaction, for tests that copy it."""
    run = copy_of(original, tmp_path_factory.mktemp("compacted"))
    compact(run, GROUPS)
    return run


@pytest.fixture
def merged(compacted: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(compacted, tmp_path / "a")


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
    """Every row that counts of every table, by its keys; roll-ups repeat what these say.

    A text has every bit of a number, NULLs and the sign of a zero.
    """
    commit_log = run.commit_log()
    check_merged(commit_log)
    files = [file for files in commit_log["files"].to_pylist() for file in files]
    tables: Rows = {}
    for table, intervention in {(f["table"], f["intervention"]) for f in files}:
        mine = [f for f in files if (f["table"], f["intervention"]) == (table, intervention)]
        paths = dict.fromkeys(f["path"] for f in mine)
        joined = pa.concat_tables([open_parquet(run, path).read() for path in paths])
        if table != "rollups":
            assert joined.num_rows == sum(f["rows"] for f in mine)
            joined = joined.sort_by([(key, "ascending") for key in TABLES[table].order])
            description = joined.schema.serialize().to_pybytes()
            tables[table, intervention] = (description, repr(joined.to_pylist()))
    return tables


def data_files(run: RunDirectory) -> list[str]:
    found = local(run.path).glob("*/intervention=*/*")
    return sorted(file.relative_to(local(run.path)).as_posix() for file in found)


def commit_log_files(run: RunDirectory) -> list[str]:
    return sorted(file.name for file in local(run.commits_directory).iterdir())


def assert_same_and_tidy(run: RunDirectory, expected: Rows | None = None) -> None:
    """Check the rows, and that every file has its commit in the only segment."""
    assert expected is None or read_rows(run) == expected
    referred = {file.path for commit in run.commits() for file in commit.files}
    assert data_files(run) == sorted(referred)
    (name,) = commit_log_files(run)
    assert re.fullmatch(r"segment-[0-9a-f]{6,}-[0-9a-f]{6,}\.parquet", name)


# What is merged


def test_a_compacted_run_has_the_same_rows_in_few_sorted_files(run: RunDirectory, expected: Rows):
    commits = list(run.commits())
    done = compact(run, GROUPS)
    files = (done.before.files, done.after.files)
    assert (*files, done.problems) == (SHARDS * 7 + 1, FILES_OF_GROUPS, [])
    assert_same_and_tidy(run, expected)
    before, after = (
        [c.model_copy(update={"files": []}) for c in of_run] for of_run in (commits, run.commits())
    )
    assert before == after
    committed = [file for commit in run.commits() for file in commit.files]
    shapes = {(f.table, f.intervention, f.path[-28:-14], f.shards) for f in committed}
    assert len(shapes) == len(data_files(run))
    for file in (file for file in committed if file.shards > 1):
        assert file.bytes == (local(run.path) / file.path).stat().st_size
        table, keys = open_parquet(run, file.path).read(), TABLES[file.table].order
        assert table.equals(table.sort_by([(key, "ascending") for key in keys]))
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
        f"{table}/intervention={i}/merged-000000-000004.parquet"
        for table in ("heads", "profiles", "rollups", "sequences")
        for i in INTERVENTIONS
    ]


def test_what_a_late_replica_left_is_deleted_and_what_was_taken_back_is_merged_anew(
    merged: RunDirectory, original: RunDirectory, expected: Rows
):
    copy_shards(original, merged, tuple(range(SHARDS)))
    half = local(merged.path) / "heads/intervention=none/.shard-000001.parquet.1a2b.tmp"
    half.write_bytes(b"PAR1 half")
    assert read_rows(merged) == expected
    compact(merged, GROUPS)
    assert_same_and_tidy(merged, expected)
    (lost,) = local(merged.path).glob("heads/intervention=none/merged-000003-*.parquet")
    lost.unlink()
    (problem,) = compact(merged, GROUPS).problems
    assert problem.startswith("shards 3 to 5: heads/intervention=none/merged-000003-")
    write_segment(merged.commits_directory, taken_back(merged.run_id, [3, 4, 5]))
    compact(merged, GROUPS)
    assert [c.shard for c in merged.commits()] == [0, 1, 2, 6]
    assert_same_and_tidy(merged)
    copy_shards(original, merged, (3, 4, 5))
    compact(merged, GROUPS)
    assert_same_and_tidy(merged, expected)


def test_tiny_shards_are_merged_in_rounds(
    run: RunDirectory, expected: Rows, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compaction, "MOST_UNITS", 2)
    lines: list[str] = []
    assert compact(run, tell=lines.append).problems == []
    # Seven shards become three pairs and one, then two files, then one.
    merged = [(number + 1, groups) for groups in (3, 2, 1) for number in range(groups)]
    assert [line.partition(": ")[2] for line in lines] == [
        f"group {number} of {groups} merged" for number, groups in merged
    ]
    assert len(data_files(run)) == 9
    assert_same_and_tidy(run, expected)


# Damage


def damage_file(run: RunDirectory, how: str) -> Path:
    file = local(data_file(run, "sequences", "none", 4))
    content = file.read_bytes()
    zeros = content[:4] + bytes(len(content) - 404) + content[-400:]
    file.write_bytes(content[:-9] if how == "cut" else zeros)
    return file


@pytest.mark.parametrize(("how", "problem"), [
    ("cut", "has [0-9,]+ bytes where [0-9,]+ were committed"),
    ("zeros", "has other content than was committed"),
])  # fmt: skip
def test_a_damaged_file_is_left_and_the_command_fails(
    how: str, problem: str, run: RunDirectory, original: RunDirectory, expected: Rows
):
    file = damage_file(run, how)
    left, commit = file.read_bytes(), local(run.commit_file(4)).read_bytes()
    words = ["compact", str(run.path), "--rows", str(4 * SHARD), "--processes", "1"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, RunError)
    assert re.fullmatch(
        f"toy-1: shard 4: sequences/intervention=none/shard-000004[.]parquet {problem}; "
        f"headcount resume {run.path} --verify, then compact",
        str(done.exception).splitlines()[0],
    )
    assert (file.read_bytes(), local(run.commit_file(4)).read_bytes()) == (left, commit)
    # Three files of each table, the roll-ups of two of them, and the weights.
    assert len(data_files(run)) == 3 * 6 + 2 * 2 + 1
    copy_shards(original, run, (4,))
    assert compact(run, 4 * SHARD).problems == []
    assert_same_and_tidy(run, expected)


def rollup_digests(run: RunDirectory) -> dict[tuple[str, int], str]:
    """The committed digests of roll-ups, by intervention and shard."""
    return {
        (file.intervention, commit.shard): file.digest
        for commit in run.commits()
        for file in commit.files
        if file.table == "rollups"
    }


def damage_rollup(run: RunDirectory, how: str, shards: str = "000000-000002") -> None:
    """Damage the roll-up of a merged group under the first intervention."""
    (file,) = local(run.path).glob(f"rollups/intervention=none/merged-{shards}-*.parquet")
    if how == "gone":
        shutil.rmtree(file.parent)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        flip_middle_bit(file)


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_damaged_roll_ups_come_back_to_the_last_bit(merged: RunDirectory, expected: Rows, how: str):
    digests = rollup_digests(merged)
    rows_before = [path for path in data_files(merged) if not path.startswith("rollups/")]
    damage_rollup(merged, how)
    words = ["check", str(merged.path)]
    checked = CliRunner().invoke(app, words, env={"COLUMNS": "1000"})
    first, *_, remedy = checked.stdout.splitlines()
    assert checked.exit_code == 1
    assert first.startswith("toy-1: shards 0 to 2: rollups/intervention=none/merged-000000-")
    count = "2 roll-ups" if how == "gone" else "1 roll-up"
    assert remedy.startswith(f"toy-1: {count} damaged, in ")
    assert remedy.endswith(f"headcount compact {merged.path} writes them again from their rows")
    assert compact(merged, GROUPS).problems == []
    assert rollup_digests(merged) == digests
    assert CliRunner().invoke(app, words).exit_code == 0
    # Files of rows stay where they are.
    assert [path for path in data_files(merged) if not path.startswith("rollups/")] == rows_before
    assert_same_and_tidy(merged, expected)
    # Without whole rows it is left, and the rows are reported.
    damage_rollup(merged, "flipped")
    (heads,) = local(merged.path).glob("heads/intervention=none/merged-000000-*.parquet")
    flip_middle_bit(heads)
    (problem,) = compact(merged, GROUPS).problems
    assert problem.startswith("shards 0 to 2: heads/intervention=none/merged-000000-")
    assert rollup_digests(merged) == digests


def test_the_roll_up_of_one_shard_comes_back(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    # Every shard is large enough for roll-ups of its own.
    monkeypatch.setattr(compaction, "ROWS", SHARD)
    compact(run, SHARD)
    digests = rollup_digests(run)
    assert len(digests) == SHARDS * len(INTERVENTIONS)
    damage_rollup(run, "flipped", "000003-000003")
    compact(run, SHARD)
    assert (rollup_digests(run), check_run(run).damaged) == (digests, [])


# Killed


def test_a_compaction_that_is_killed_repeatedly_still_ends(run: RunDirectory, expected: Rows):
    # Fifteen changes: to delete what another death left, and to merge a group.
    deaths = 0
    while killed_after(15, lambda: compact(run, GROUPS)):
        assert read_rows(run) == expected, deaths
        deaths += 1
        assert deaths < 10
    assert deaths > 2
    assert_same_and_tidy(run, expected)


def begin_second_compaction(run: RunDirectory, original: RunDirectory) -> None:
    """Leave a merged file beside shards that were measured later."""
    for shard in (5, 6):
        local(run.commit_file(shard)).unlink()
    compact(run, 4 * SHARD)
    copy_shards(original, run, (5, 6))


def begin_mending(run: RunDirectory, original: RunDirectory) -> None:
    compact(run, 4 * SHARD)
    damage_rollup(run, "flipped", "000000-000003")


@pytest.mark.long
@pytest.mark.parametrize("begin", [begin_second_compaction, begin_mending])
def test_killed_after_any_change_all_rows_count_once_and_the_next_compaction_ends_it(
    original: RunDirectory,
    expected: Rows,
    tmp_path: Path,
    begin: Callable[[RunDirectory, RunDirectory], None],
):
    begun = copy_of(original, tmp_path / "begun")
    begin(begun, original)
    digests = rollup_digests(begun)
    for changes in count():
        run = copy_of(begun, tmp_path / f"killed-{changes}")
        if not killed_after(changes, partial(compact, run, 4 * SHARD)):
            break
        assert read_rows(run) == expected, changes
        compact(run, 4 * SHARD)
        assert begin is begin_second_compaction or rollup_digests(run) == digests, changes
        assert check_run(run).damaged == [], changes
        assert_same_and_tidy(run, expected)
    # Mending writes roll-ups and two segments, and deletes as many.
    assert changes == 8 if begin is begin_mending else changes > 15


@pytest.mark.long
def test_killed_while_processes_merge_it_goes_on_and_leaves_none(run: RunDirectory, expected: Rows):
    command = [sys.executable, "-m", "headcount", "compact", str(run.path)]
    command += ["--rows", str(PAIRS), "--processes", "2"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Three groups of two shards. The first is committed, the others are being merged.
        assert "group 1 of 3 merged" in process.stderr.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert read_rows(run) == expected
    compact(run, PAIRS, merge_groups=partial(merged_by_processes, 1))
    assert_same_and_tidy(run, expected)


# Several at once


def test_two_compactions_that_overlapped_are_noticed_and_mended(
    run: RunDirectory, compacted: RunDirectory, expected: Rows
):
    compact(run)
    for table in (*WRITTEN, "rollups", "weights"):
        shutil.copytree(local(compacted.path) / table, local(run.path) / table, dirs_exist_ok=True)
    write_segment(run.commits_directory, compacted.commit_log().slice(0, 3))
    problem = r"merged-000000-000006-\w+\.parquet: holds the rows of 7 shards, and 4 commits"
    with pytest.raises(RunError, match=problem):
        check_merged(run.commit_log())
    compact(run, GROUPS)
    assert_same_and_tidy(run, expected)


@pytest.mark.long
def test_the_command_merges_in_processes_and_reports_files_and_sizes(
    run: RunDirectory, expected: Rows, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(local(run.path))
    done = CliRunner().invoke(app, ["compact", ".", "--rows", str(GROUPS)])
    assert done.exit_code == 0
    line = rf"toy-1: 50 files are now {FILES_OF_GROUPS}, [\d.]+ kB are now [\d.]+ kB, in \d"
    assert re.search(line, done.output)
    assert_same_and_tidy(run, expected)


@pytest.mark.long
def test_a_cluster_merges_what_is_not_damaged(run: RunDirectory):
    file = damage_file(run, "cut")
    with joined_cluster(num_cpus=1):
        done = compact(run, PAIRS, merge_groups=partial(merged_by_tasks, "here"))
    assert [problem.partition(":")[0] for problem in done.problems] == ["shard 4"]
    assert file.exists()
    # With its partner gone, shard 5 is merged with shard 6 in the next round.
    assert [c.shard for c in run.commits() if c.files[0].shards == 2] == [0, 1, 2, 3, 5, 6]


@pytest.fixture
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with object_store(monkeypatch):
        yield


@pytest.mark.usefixtures("_store")
def test_in_a_store_a_second_compaction_is_refused_until_the_first_is_dead(
    original: RunDirectory, expected: Rows, monkeypatch: pytest.MonkeyPatch
):
    for name, seconds in (("RENEWAL", 0.1), ("STALE", 2.0), ("LOOK", 0.1)):
        monkeypatch.setattr(compaction_lease, f"{name}_SECONDS", seconds)
    run = RunDirectory(copied_to_store(original, "s3://bucket/runs"))
    before = sorted(places.names(run.commits_directory))
    with leased(run), pytest.raises(RunError, match=r"another compaction is at work .*process \d"):
        compact(run, GROUPS)
    assert sorted(places.names(run.commits_directory)) == before
    # One that died leaves its lease, which nobody writes again, and merged files.
    write_whole(run.path / "compactions" / "dead.json", b"{}")
    heads = run.path / "heads/intervention=none"
    write_whole(heads / "merged-000000-000002-1a2b3c4d.parquet", b"of a dead one")
    done = compact(run, GROUPS)
    assert (done.after.files, done.problems) == (FILES_OF_GROUPS, [])
    assert read_rows(run) == expected
    assert len(list(places.names(heads))) == 3
    assert len(list(places.names(run.commits_directory))) == 1
    assert list(places.names(run.path / "compactions")) == []


def test_a_compaction_of_a_run_in_use_or_without_its_lease_changes_nothing(
    run: RunDirectory, expected: Rows, monkeypatch: pytest.MonkeyPatch
):
    def lost(self: object) -> None:
        raise RunError("another one may have begun")

    commits = commit_log_files(run)
    with locked(run), pytest.raises(RunError, match="another process is at work on this run"):
        compact(run)
    monkeypatch.setattr(compaction_lease.Lease, "check", lost)
    with pytest.raises(RunError, match="another one may have begun"):
        compact(run, GROUPS)
    assert commit_log_files(run) == commits
    assert read_rows(run) == expected
