"""Compaction changes only where rows lie, even if it is killed at any moment."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from headcount.schemas.files.commits import drop, gather
from headcount.schemas.files.places import StorePath, place, write_whole
from headcount.schemas.files.run_directory import RunDirectory, check_merged
from headcount.schemas.scans.kinds import TABLES
from tests import ROOT
from tests.tools.s3_server import S3Server
from tests.tools.workers import joined_cluster
from tests.toys.toy_runs import Entry, Row, data_file, local, write_run

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

Rows = dict[str, pa.Table]


class Killed(BaseException):
    """Stands for the death of the process; no handler of Exception catches it."""


def entropy(row: Row) -> float | None:
    """Every third value is NULL; the others need all bits of a float32."""
    number = ((row.sequence * LAYERS + row.layer) * HEADS + row.head) * 2 + INTERVENTIONS.index(
        row.intervention
    )
    return None if number % 3 == 0 else float(np.float32(abs(np.sin(number)) / 3))


def sink_mass(row: Row) -> float | None:
    """Zeros of both signs, and the smallest positive float32."""
    return (0.0, -0.0, float(np.float32(1e-45)))[(row.sequence + row.head) % 3]


def profiles(shard: int) -> list[Entry]:
    """A profile along lags, one along pairs, and one that the heads of a layer share."""
    entry = {
        "layer": 1,
        "head": 2,
        "count": PER_SHARD,
        "mean": np.sin(shard) / 3,
        "m2": np.cos(shard) ** 2,
    }
    lags = [entry | {"profile": "attention_by_lag", "lag": lag} for lag in range(2)]
    pairs = [
        entry | {"profile": "score_by_pair", "query": q, "key": k}
        for q in range(2)
        for k in range(q + 1)
    ]
    return [*lags, *pairs, entry | {"profile": "resid_pre_norm_by_key", "head": None, "key": 0}]


WEIGHTS: list[Entry] = [
    {"weight": "query_bias_norm", "layer": 0, "head": 1, "value": np.sin(1)},
    {"weight": "position_norm", "position": 2, "value": None},
]


def write_toy_run(out: Path, interventions: Sequence[str] = INTERVENTIONS) -> RunDirectory:
    """A small run."""
    columns = {"entropy": entropy, "sink_mass": sink_mass, "match_coverage": lambda row: None}
    return write_run(
        out,
        "toy-1",
        columns,
        layers=LAYERS,
        heads=HEADS,
        sequences=SHARDS * PER_SHARD,
        per_shard=PER_SHARD,
        interventions=interventions,
        pile_sets=("Github", None),
        profiles=profiles,
        weights=WEIGHTS,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_toy_run(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def expected(original: RunDirectory) -> Rows:
    return read_rows(original)


@pytest.fixture
def run(original: RunDirectory, tmp_path: Path) -> RunDirectory:
    return copy_of(original, tmp_path / "a")


def copy_of(run: RunDirectory, out: Path) -> RunDirectory:
    return RunDirectory(Path(shutil.copytree(local(run.path), out / run.path.name)))


def open_parquet(run: RunDirectory, path: str) -> pq.ParquetFile:
    return pq.ParquetFile(io.BytesIO((run.path / path).read_bytes()))


def read_rows(run: RunDirectory) -> Rows:
    """Every row that counts of every table, by its keys; roll-ups repeat what these say."""
    commit_log = run.commit_log()
    check_merged(commit_log)
    tables: Rows = {}
    files = [file for files in commit_log["files"].to_pylist() for file in files]
    for table in TABLES.keys() - {"rollups"}:
        for intervention in INTERVENTIONS:
            mine = [f for f in files if (f["table"], f["intervention"]) == (table, intervention)]
            if not mine:
                continue
            joined = pa.concat_tables(
                [open_parquet(run, path).read() for path in dict.fromkeys(f["path"] for f in mine)]
            )
            assert joined.num_rows == sum(f["rows"] for f in mine)
            keys = [(key, "ascending") for key in TABLES[table].order]
            tables[f"{table} {intervention}"] = joined.sort_by(keys).combine_chunks()
    return tables


def same_rows(actual: Rows, expected: Rows) -> bool:
    """Whether two sets of rows are the same to the last bit, with descriptions and NULLs."""
    return all(
        a.schema.equals(b.schema, check_metadata=True)
        and a.equals(b)
        and all(
            bits_of(a[f.name]) == bits_of(b[f.name])
            for f in a.schema
            if pa.types.is_floating(f.type)
        )
        for a, b in ((actual[name], expected[name]) for name in expected)
    )


def bits_of(column: pa.ChunkedArray) -> bytes:
    return column.fill_null(0).to_numpy().tobytes()


def data_files(run: RunDirectory) -> list[str]:
    found = local(run.path).glob("*/intervention=*/*")
    return sorted(file.relative_to(local(run.path)).as_posix() for file in found)


def commit_log_files(run: RunDirectory) -> list[str]:
    return sorted(file.name for file in local(run.commits_directory).iterdir())


def assert_tidy(run: RunDirectory) -> None:
    """Check that a commit refers to every file, and that the commit log is one segment."""
    assert data_files(run) == sorted(
        {file.path for commit in run.commits() for file in commit.files}
    )
    assert [re.sub(r"[0-9a-f]{6,}", "#", name) for name in commit_log_files(run)] == [
        "segment-#-#.parquet"
    ]


def test_a_compacted_run_has_the_same_rows_in_few_sorted_files(
    run: RunDirectory, expected: Rows
) -> None:
    commits = list(run.commits())
    done = compact(run, GROUPS)
    assert (done.before.files, done.after.files, done.problems) == (
        SHARDS * 7 + 1,
        FILES_OF_GROUPS,
        [],
    )
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)
    hidden = {"files": []}
    assert [c.model_copy(update=hidden) for c in run.commits()] == [
        c.model_copy(update=hidden) for c in commits
    ]
    shapes = {
        (f.table, f.intervention, f.path[-28:-14], f.shards) for c in run.commits() for f in c.files
    }
    assert len(shapes) == len(data_files(run))
    for file in (f for c in run.commits() for f in c.files if f.shards > 1):
        assert file.bytes == (local(run.path) / file.path).stat().st_size
        table, keys = open_parquet(run, file.path).read(), TABLES[file.table].order
        assert table.equals(table.sort_by([(key, "ascending") for key in keys]))


def test_a_bare_glob_counts_each_row_once(run: RunDirectory) -> None:
    compact(run, GROUPS)
    files = local(run.path) / "heads" / "*" / "*.parquet"
    sql = (
        "SELECT intervention, count(*), count(DISTINCT (sequence, layer, head)) "
        f"FROM '{files}' GROUP BY 1 ORDER BY 1"
    )
    assert duckdb.connect().execute(sql).fetchall() == [
        (intervention, SHARDS * SHARD, SHARDS * SHARD) for intervention in INTERVENTIONS
    ]


def test_a_query_on_one_head_skips_the_other_row_groups(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_files, "ROW_GROUP", SHARDS * PER_SHARD)
    compact(run)
    (path,) = local(run.path).glob("heads/intervention=none/*.parquet")
    sql = f"EXPLAIN ANALYZE SELECT avg(entropy) FROM '{path}' WHERE layer = 1 AND head = 2"
    assert "Row Groups Scanned: 1 / 6" in duckdb.connect().execute(sql).fetchall()[0][1]


def test_compacting_again_changes_nothing(run: RunDirectory) -> None:
    compact(run, GROUPS)
    before = {file: file.stat().st_mtime_ns for file in local(run.path).rglob("*.*")}
    compact(run, GROUPS)
    assert {file: file.stat().st_mtime_ns for file in local(run.path).rglob("*.*")} == before


def count_changes(monkeypatch: pytest.MonkeyPatch, allowed: int | None) -> Callable[[], int]:
    """Count the changes on the disk; after `allowed` changes the process is killed."""
    count = 0
    replace, unlink = os.replace, Path.unlink

    def step() -> None:
        nonlocal count
        if count == allowed:
            raise Killed
        count += 1

    def counted_replace(source: Path, target: Path) -> None:
        step()
        replace(source, target)

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        if count == allowed or path.exists():
            step()
        unlink(path, missing_ok)

    monkeypatch.setattr(places.os, "replace", counted_replace)
    monkeypatch.setattr(Path, "unlink", counted_unlink)
    return lambda: count


def compact_until_killed(run: RunDirectory, after: int, rows: int) -> bool:
    """Compact a run; True if it was killed before the end."""
    with pytest.MonkeyPatch.context() as patch:
        count_changes(patch, after)
        try:
            compact(run, rows)
        except Killed:
            return True
    return False


def test_killed_after_any_change_all_rows_count_once_and_the_next_compaction_ends_it(
    tmp_path: Path,
) -> None:
    # Every table is written and deleted; a second intervention would repeat that.
    original = write_toy_run(tmp_path / "original", INTERVENTIONS[:1])
    expected = read_rows(original)
    # The second of two compactions: it merges the first one's last file with shards that were
    # measured later.
    begun = copy_of(original, tmp_path / "begun")
    for commit in list(begun.commits())[5:]:
        local(begun.commit_file(commit.shard)).rename(tmp_path / f"{commit.shard}.json")
    compact(begun, 4 * SHARD)
    for number in (5, 6):
        (tmp_path / f"{number}.json").rename(local(begun.commit_file(number)))
    whole = copy_of(begun, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        count = count_changes(patch, None)
        compact(whole, 4 * SHARD)
    assert_tidy(whole)
    assert count() > 15
    for after in range(count()):
        run = copy_of(begun, tmp_path / f"killed-{after}")
        assert compact_until_killed(run, after, 4 * SHARD)
        assert same_rows(read_rows(run), expected), after
        compact(run, 4 * SHARD)
        assert same_rows(read_rows(run), expected), after
        assert_tidy(run)


def test_a_compaction_that_is_killed_repeatedly_still_ends(
    run: RunDirectory, expected: Rows
) -> None:
    # Fifteen changes: to delete what another death left, and to merge a group.
    deaths = 0
    while compact_until_killed(run, 15, GROUPS):
        assert same_rows(read_rows(run), expected), deaths
        deaths += 1
        assert deaths < 10
    assert deaths > 2
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_a_compacted_run_can_be_continued(
    run: RunDirectory, original: RunDirectory, expected: Rows
) -> None:
    for shard in (1, 2, 6):
        local(run.commit_file(shard)).unlink()
    compact(run, GROUPS)
    first = data_files(run)
    assert "heads/intervention=none/shard-000001.parquet" in first, (
        "a shard that is not done is left alone"
    )
    assert [c.shard for c in run.commits()] == [0, 3, 4, 5]
    for shard in (1, 2, 6):
        shutil.copy(local(original.commit_file(shard)), local(run.commits_directory))
    assert same_rows(read_rows(run), expected)
    compact(run, GROUPS)
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)
    kept = set(first) & set(data_files(run))
    assert [re.sub("-[0-9a-f]{8}[.]", ".", path) for path in sorted(kept) if "merged" in path] == [
        f"{table}/intervention={i}/merged-000000-000004.parquet"
        for table in ("heads", "profiles", "rollups", "sequences")
        for i in INTERVENTIONS
    ]


def test_files_of_a_late_replica_are_deleted(
    run: RunDirectory, original: RunDirectory, expected: Rows
) -> None:
    compact(run, GROUPS)
    shutil.copytree(local(original.path), local(run.path), dirs_exist_ok=True)
    (local(run.path) / "heads/intervention=none/.shard-000001.parquet.1a2b.tmp").write_bytes(
        b"PAR1 half"
    )
    assert same_rows(read_rows(run), expected)
    compact(run, GROUPS)
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_shards_that_were_taken_back_and_measured_again_are_merged(
    run: RunDirectory, original: RunDirectory, expected: Rows
) -> None:
    compact(run, GROUPS)
    (lost,) = local(run.path).glob("heads/intervention=none/merged-000003-*.parquet")
    lost.unlink()
    found = run.damaged_files([run.commit_log()])
    assert [damage.shards for damage in found] == [[3, 4, 5]]
    (problem,) = compact(run, GROUPS).problems
    assert problem.startswith("shards 3 to 5: heads/intervention=none/merged-000003-")
    drop(run.commits_directory, run.run_id, [3, 4, 5])
    compact(run, GROUPS)
    assert [c.shard for c in run.commits()] == [0, 1, 2, 6]
    assert_tidy(run)
    for shard in (3, 4, 5):
        paths = [file.path for c in original.commits() if c.shard == shard for file in c.files]
        for path in [*paths, f"commits/shard-{shard:06d}.json"]:
            shutil.copy(local(original.path) / path, local(run.path) / path)
    compact(run, GROUPS)
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def damage_file(run: RunDirectory, how: str) -> Path:
    file = local(data_file(run, "sequences", "none", 4))
    content = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(content[:-9])
    elif how == "zeros":
        content[4:-400] = bytes(len(content) - 404)
        file.write_bytes(content)
    else:
        pq.write_table(pq.ParquetFile(file).read().slice(1), file)
    return file


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("cut", "has [0-9,]+ bytes where [0-9,]+ were committed"),
        ("zeros", "has other content than was committed"),
        ("short", "has [0-9,]+ bytes where [0-9,]+ were committed"),
    ],
)
def test_a_damaged_file_is_left_and_reported(
    how: str, problem: str, run: RunDirectory, original: RunDirectory, expected: Rows
) -> None:
    file = damage_file(run, how)
    left, commit = file.read_bytes(), local(run.commit_file(4)).read_bytes()
    (found,) = compact(run, 4 * SHARD).problems
    assert re.fullmatch(
        f"shard 4: sequences/intervention=none/shard-000004[.]parquet {problem}; "
        f"headcount resume {run.path} --verify, then compact",
        found,
    )
    assert file.read_bytes() == left
    assert local(run.commit_file(4)).read_bytes() == commit
    # Three files of each table, the roll-ups of two of them, and the weights.
    assert len(data_files(run)) == 3 * 6 + 2 * 2 + 1
    shutil.copy(local(original.path) / file.relative_to(local(run.path)), file)
    assert compact(run, 4 * SHARD).problems == []
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_two_compactions_that_overlapped_are_noticed_and_mended(
    run: RunDirectory, expected: Rows, original: RunDirectory, tmp_path: Path
) -> None:
    other = copy_of(original, tmp_path / "b")
    compact(run)
    compact(other, GROUPS)
    for table in (*WRITTEN, "rollups", "weights"):
        shutil.copytree(local(other.path) / table, local(run.path) / table, dirs_exist_ok=True)
    gather(run.commits_directory, list(other.commits())[:3])
    with pytest.raises(
        RunError,
        match=r"merged-000000-000006-\w+\.parquet: holds the rows of 7 shards, and 4 commits",
    ):
        check_merged(run.commit_log())
    compact(run, GROUPS)
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_tiny_shards_are_merged_in_rounds(
    run: RunDirectory, expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MOST_UNITS", 2)
    lines: list[str] = []
    assert compact(run, tell=lines.append).problems == []
    # Seven shards become three pairs and one, then two files, then one.
    assert [line.partition(": ")[2] for line in lines] == [
        f"group {number} of {groups} merged"
        for groups in (3, 2, 1)
        for number in range(1, groups + 1)
    ]
    assert len(data_files(run)) == 9
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


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
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[:-9])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def check_command(run: RunDirectory) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["check", str(run.path)], env={"COLUMNS": "1000"})
    return done.exit_code, done.stdout.splitlines()


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_damaged_roll_ups_are_written_again_to_the_last_bit(
    run: RunDirectory, expected: Rows, how: str
) -> None:
    compact(run, GROUPS)
    digests = rollup_digests(run)
    rows_before = [path for path in data_files(run) if not path.startswith("rollups/")]
    damage_rollup(run, how)
    code, lines = check_command(run)
    assert code == 1
    assert lines[0].startswith("toy-1: shards 0 to 2: rollups/intervention=none/merged-000000-")
    (remedy,) = lines[1:]
    assert remedy.startswith("toy-1: 1 roll-up damaged, in ")
    assert remedy.endswith(f"headcount compact {run.path} writes them again from their rows")
    assert compact(run, GROUPS).problems == []
    assert rollup_digests(run) == digests
    assert check_command(run)[0] == 0
    # Files of rows stay where they are.
    assert [path for path in data_files(run) if not path.startswith("rollups/")] == rows_before
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_the_roll_up_of_a_single_shard_is_written_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every shard is large enough for roll-ups of its own.
    monkeypatch.setattr(compaction, "ROWS", SHARD)
    compact(run, SHARD)
    digests = rollup_digests(run)
    assert len(digests) == SHARDS * len(INTERVENTIONS)
    damage_rollup(run, "flipped", "000003-000003")
    compact(run, SHARD)
    assert rollup_digests(run) == digests
    assert check_command(run)[0] == 0


def test_all_roll_ups_are_written_again_without_their_folder(
    run: RunDirectory, expected: Rows
) -> None:
    compact(run, GROUPS)
    digests = rollup_digests(run)
    shutil.rmtree(local(run.path) / "rollups")
    assert compact(run, GROUPS).problems == []
    assert rollup_digests(run) == digests
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_roll_ups_of_damaged_rows_are_left_and_the_rows_reported(run: RunDirectory) -> None:
    compact(run, GROUPS)
    damage_rollup(run, "flipped")
    (heads,) = local(run.path).glob("heads/intervention=none/merged-000000-*.parquet")
    content = heads.read_bytes()
    heads.write_bytes(content[:4] + bytes(9) + content[13:])
    left = data_files(run)
    (problem,) = compact(run, GROUPS).problems
    assert problem.startswith("shards 0 to 2: heads/intervention=none/merged-000000-")
    assert data_files(run) == left


def test_killed_while_a_roll_up_is_written_again_the_next_compaction_ends_it(
    tmp_path: Path,
) -> None:
    original = write_toy_run(tmp_path / "original", INTERVENTIONS[:1])
    expected = read_rows(original)
    begun = copy_of(original, tmp_path / "begun")
    compact(begun, GROUPS)
    digests = rollup_digests(begun)
    damage_rollup(begun, "flipped")
    whole = copy_of(begun, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        count = count_changes(patch, None)
        compact(whole, GROUPS)
    # A roll-up and two segments are written, a roll-up and two segments deleted.
    assert count() == 6
    for after in range(count()):
        run = copy_of(begun, tmp_path / f"killed-{after}")
        assert compact_until_killed(run, after, GROUPS)
        assert same_rows(read_rows(run), expected), after
        compact(run, GROUPS)
        assert same_rows(read_rows(run), expected), after
        assert rollup_digests(run) == digests, after
        assert check_run(run).damaged == [], after
        assert_tidy(run)


def start_compaction(run: RunDirectory, *options: str) -> subprocess.Popen[str]:
    """Start `headcount compact` in a process of its own."""
    command = [sys.executable, "-m", "headcount", "compact", str(run.path), *options]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_killed_while_processes_merge_it_goes_on_and_leaves_no_process(
    run: RunDirectory, expected: Rows
) -> None:
    with start_compaction(run, "--rows", str(PAIRS), "--processes", "2") as process:
        assert process.stderr is not None
        # Three groups of two shards. The first is committed, the others are being merged.
        assert "group 1 of 3 merged" in process.stderr.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert same_rows(read_rows(run), expected)
    compact(run, PAIRS, merge_groups=partial(merged_by_processes, 1))
    assert same_rows(read_rows(run), expected)
    assert_tidy(run)


def test_a_cluster_merges_the_same_rows(run: RunDirectory, expected: Rows) -> None:
    file = damage_file(run, "cut")
    with joined_cluster(num_cpus=1):
        done = compact(run, PAIRS, merge_groups=partial(merged_by_tasks, "here"))
    assert [problem.partition(":")[0] for problem in done.problems] == ["shard 4"]
    assert file.exists()
    # With its partner gone, shard 5 is merged with shard 6 in the next round.
    assert [c.shard for c in run.commits() if c.files[0].shards == 2] == [0, 1, 2, 3, 5, 6]


def test_a_run_in_use_is_refused(run: RunDirectory) -> None:
    with locked(run), pytest.raises(RunError, match="another process is at work on this run"):
        compact(run)


def test_the_command_reports_files_and_sizes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(local(run.path))
    done = CliRunner().invoke(app, ["compact", ".", "--rows", str(GROUPS)])
    assert done.exit_code == 0
    line = rf"toy-1: 50 files are now {FILES_OF_GROUPS}, [\d.]+ kB are now [\d.]+ kB, in \d"
    assert re.search(line, done.output)


def test_the_command_fails_if_a_file_is_damaged(run: RunDirectory) -> None:
    damage_file(run, "cut")
    done = CliRunner().invoke(app, ["compact", str(run.path)])
    assert isinstance(done.exception, RunError)
    assert str(done.exception).startswith(
        "toy-1: shard 4: sequences/intervention=none/shard-000004.parquet has "
    )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StorePath]:
    """A directory in an object store."""
    with S3Server() as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        places._filesystem.cache_clear()
        where = place("s3://bucket/runs")
        assert isinstance(where, StorePath)
        yield where
    places._filesystem.cache_clear()


def copy_to_store(run: RunDirectory, store: StorePath) -> RunDirectory:
    copy = RunDirectory.of(store, run.run_id)
    for file in local(run.path).rglob("*.*"):
        if file.is_file():
            path = file.relative_to(local(run.path)).as_posix()
            write_whole(copy.path / path, file.read_bytes())
    return copy


def test_in_a_store_it_is_the_same(
    original: RunDirectory, expected: Rows, store: StorePath
) -> None:
    run = copy_to_store(original, store)
    write_whole(
        run.path / "heads/intervention=none/merged-000000-000002-1a2b3c4d.parquet", b"of a dead one"
    )
    assert compact(run, GROUPS).after.files == FILES_OF_GROUPS
    assert same_rows(read_rows(run), expected)
    assert len(list(places.names(run.path / "heads/intervention=none"))) == 3
    assert len(list(places.names(run.commits_directory))) == 1
    assert list(places.names(run.path / "compactions")) == []


def test_in_a_store_a_second_compaction_is_refused_until_the_first_is_dead(
    original: RunDirectory, expected: Rows, store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction_lease, "RENEWAL_SECONDS", 0.2)
    monkeypatch.setattr(compaction_lease, "STALE_SECONDS", 3.0)
    monkeypatch.setattr(compaction_lease, "LOOK_SECONDS", 0.1)
    run = copy_to_store(original, store)
    before = sorted(places.names(run.commits_directory))
    with leased(run), pytest.raises(RunError, match=r"another compaction is at work .*process \d"):
        compact(run, GROUPS)
    assert sorted(places.names(run.commits_directory)) == before
    # One that died leaves its lease, and nobody writes it again.
    write_whole(run.path / "compactions" / "dead.json", b"{}")
    assert compact(run, GROUPS).problems == []
    assert same_rows(read_rows(run), expected)
    assert list(places.names(run.path / "compactions")) == []


def test_a_compaction_that_lost_its_lease_changes_nothing(
    run: RunDirectory, expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: object) -> None:
        raise RunError("another one may have begun")

    monkeypatch.setattr(compaction_lease.Lease, "check", lost)
    commits = commit_log_files(run)
    with pytest.raises(RunError, match="another one may have begun"):
        compact(run, GROUPS)
    assert commit_log_files(run) == commits
    assert same_rows(read_rows(run), expected)
