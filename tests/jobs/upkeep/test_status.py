"""The status of a run, read from its directory alone: how far, how fast, what failed.

A run may have a million shards, so reading must be quick and take little memory.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from headcount.jobs.upkeep.status import as_lines, read_status
from headcount.schemas.errors import RunError
from headcount.schemas.files.commits import COMMITS, COMMITS_PER_SEGMENT, DROPPED
from headcount.schemas.files.manifest import LAYOUT, Manifest
from headcount.schemas.files.run_directory import RunDirectory
from tests import ROOT
from tests.tools.processes import Command, Ended

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
SHARDS = 10
TOKENS = 4 * 8 * 2
"""Of a shard: sequences, tokens of each, interventions."""


def make_run(out: Path, shards: int = SHARDS) -> RunDirectory:
    """A run of 4 sequences of 8 tokens in each shard, under two interventions."""
    run = RunDirectory.of(out, "toy-1a2b3c4d")
    Path(str(run.path)).mkdir(parents=True)
    scan = {
        "model": "toy",
        "input": {"family": "pile"},
        "n_ctx": 8,
        "interventions": ["none", "zero_query_bias"],
        "sequences_per_shard": 4,
    }
    manifest = Manifest(
        layout=LAYOUT,
        run_id=run.run_id,
        created="2026-05-01T10:00:00+00:00",
        identity={"scan": scan},
        shards=shards,
        sequences=4 * shards,
        kinds={},
        model={},
        code="",
        versions={},
    )
    Path(str(run.manifest_file)).write_bytes(manifest.model_dump_json().encode())
    return run


def gather_shards(run: RunDirectory, shards: np.ndarray, **columns: Any) -> None:
    """Commit shards in one segment; a column is one value for all of them, or an array."""
    count = len(shards)
    values: dict[str, Any] = {
        "run_id": run.run_id,
        "shard": shards,
        "start": shards * 4,
        "stop": shards * 4 + 4,
        "rows": 12,
        "tokens": TOKENS,
        "seconds": 2.5,
        "compute_seconds": 1.5,
        "idle_seconds": 0.5,
        "finished": NOW - timedelta(seconds=5),
        "host": "one",
        "replica": "one-7",
        "attempt": 1,
        "code": "c0de",
        "device": "cpu toy",
        "versions": [],
        "methods": [],
        "bad_rows": [],
    }
    values |= columns
    # A hundred thousand empty lists, without a loop over them.
    no_files = pa.ListArray.from_arrays(
        np.zeros(count + 1, np.int32), pa.array([], COMMITS.field("files").type.value_type)
    )
    arrays: list[Any] = []
    for field in COMMITS:
        if field.name == "files":
            arrays.append(no_files)
        else:
            value = values[field.name]
            array = value if isinstance(value, np.ndarray) else [value] * count
            arrays.append(pa.array(array, field.type))
    table = pa.table(arrays, schema=COMMITS).append_column(DROPPED, pa.array(np.zeros(count, bool)))
    directory = Path(str(run.commits_directory))
    directory.mkdir(exist_ok=True)
    number = len(list(directory.glob("segment-*")))
    pq.write_table(table, directory / f"segment-{number:06d}-0123abcd.parquet", compression="zstd")


def note_failure(run: RunDirectory, shard: int, error: str) -> None:
    file = Path(str(run.failure_file(shard)))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"attempts": 3, "error": error}))


def headcount(*words: str) -> Ended:
    """Run a command of headcount to its end."""
    return Command(*words, environment=os.environ, directory=ROOT).ended(60)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    status = read_status(make_run(tmp_path), NOW)
    assert (status.done, status.missing, status.failed, status.complete) == (0, SHARDS, 0, False)
    assert (status.tokens_done, status.tokens) == (0, TOKENS * SHARDS)
    assert status.tokens_per_second is status.seconds_left is status.last_commit is None
    assert "commit    none yet" in as_lines(status)


def test_speeds_are_sums_over_the_replicas_at_work(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3))
    gather_shards(
        run, np.array([3, 4]), host="two", replica="two-9", compute_seconds=0.5, idle_seconds=0.5
    )
    # This replica was slow, and left an hour ago: it is not at work.
    gather_shards(
        run,
        np.array([5]),
        replica="one-1",
        compute_seconds=100.0,
        finished=NOW - timedelta(hours=1),
    )
    status = read_status(run, NOW)
    assert [
        (pace.replica, pace.tokens_per_second, pace.busy, pace.shards) for pace in status.replicas
    ] == [
        ("two-9", 64.0, 0.5, 2),
        ("one-7", 32.0, 0.75, 3),
    ]
    assert status.tokens_per_second == 96.0
    assert status.seconds_left == pytest.approx(4 * TOKENS / 96)
    assert "speed     96 tokens/s, 2.7 s left" in as_lines(status)


def test_a_speed_is_taken_from_recent_commits_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(5), compute_seconds=1000.0, finished=NOW - timedelta(minutes=30))
    gather_shards(run, np.arange(5, 8))
    assert read_status(run, NOW).tokens_per_second == 32.0


def test_a_run_without_recent_commits_has_no_speed_and_no_time_left(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3), finished=NOW - timedelta(hours=3))
    status = read_status(run, NOW)
    assert status.tokens_per_second is status.seconds_left is None
    assert (
        "commit    the last 3 h 0 min ago, at 2026-05-01T09:00:00+00:00 by the clock of one"
        in as_lines(status)
    )
    assert not any(line.startswith("speed") for line in as_lines(status))


@pytest.mark.parametrize(
    "clock_error", [timedelta(days=400), timedelta(seconds=90), timedelta(0), -timedelta(days=9000)]
)
def test_wrong_clocks_make_no_absurd_numbers(tmp_path: Path, clock_error: timedelta) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3))
    gather_shards(run, np.arange(3, 6), host="two", replica="two-9", finished=NOW + clock_error)
    status = read_status(run, NOW)
    assert status.tokens_per_second == (32.0 if clock_error < timedelta(0) else 64.0)
    assert status.seconds_left is not None
    assert 0 <= status.seconds_left < 60
    assert (status.seconds_since or 0) >= 0
    assert (status.seconds_ahead > 0) == (clock_error > timedelta(0))
    # No negative time is left.
    assert "-" not in next(line for line in as_lines(status) if line.startswith("speed"))


@pytest.mark.parametrize("seconds_measured", [(0.0, 0.0), (-1.0, -1.0), (float("nan"), 0.0)])
def test_a_replica_that_measured_no_time_has_no_speed(
    tmp_path: Path, seconds_measured: tuple[float, float]
) -> None:
    run = make_run(tmp_path)
    gather_shards(
        run, np.arange(3), compute_seconds=seconds_measured[0], idle_seconds=seconds_measured[1]
    )
    status = read_status(run, NOW)
    assert status.replicas == []
    assert status.seconds_left is None


def test_failures_exclude_shards_committed_since_and_ten_errors_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, 40)
    gather_shards(run, np.arange(5))
    # Shards 3 and 4 were committed in spite of a failed attempt.
    for shard in range(3, 20):
        note_failure(run, shard, f"out of\nmemory in {shard}")
    Path(str(run.failure_file(6))).write_text("{")
    status = read_status(run, NOW)
    assert status.failed == 15
    assert list(status.failures) == list(range(5, 15))
    lines = as_lines(status)
    assert "shards    5 of 40 done, 35 missing, 15 of them failed" in lines
    assert "failed    shard 5: out of memory in 5" in lines
    assert "failed    shard 6: its note cannot be read" in lines
    assert "failed    and 5 more" in lines


def test_a_complete_run_says_so_and_a_bad_row_of_two_shards_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(4), bad_rows=["a:1", "a:2"])
    gather_shards(run, np.arange(4, SHARDS))
    status = read_status(run, NOW)
    assert status.complete
    assert status.bad_rows == 2
    assert status.replicas == []
    assert "complete  every shard is committed" in as_lines(status)


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux tells who holds a lock")
def test_a_process_at_work_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert read_status(run, NOW).at_work is None
    with FileLock(Path(str(run.path)) / ".lock"):
        assert read_status(run, NOW).at_work is True
    assert not read_status(run, NOW).at_work


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux tells who holds a lock")
def test_a_stopped_run_has_no_speed_and_names_the_command_that_resumes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3), host=socket.gethostname())
    with FileLock(Path(str(run.path)) / ".lock"):
        assert as_lines(read_status(run, NOW))[3].startswith("speed     32 tokens/s, ")
    status = read_status(run, NOW)
    assert (status.tokens_per_second, status.seconds_left, status.replicas) == (None, None, [])
    assert as_lines(status)[3] == (
        "stopped   no process of this machine is at work on this run; headcount resume "
        f"{run.path} continues it"
    )
    # A replica of another machine may be at work on the same disk: only its commits tell.
    gather_shards(run, np.array([4]), host="two", replica="two-9")
    assert as_lines(read_status(run, NOW))[3].startswith("speed     ")


def test_a_directory_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no manifest\.json; expected the directory of a run"):
        read_status(RunDirectory(tmp_path / "run_id=none-1"))
    process = headcount("status", str(tmp_path))
    assert (process.code, process.stdout) == (2, "")
    assert (
        process.stderr
        == f"error: {tmp_path}: expected the directory of a run, …/run_id=NAME-HASH\n"
    )


def test_the_command_prints_lines_or_json_and_exits_with_0_for_an_incomplete_run(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3))
    process = headcount("status", os.path.relpath(str(run.path), ROOT))
    assert process.code == 0, process.stderr
    assert "shards    3 of 10 done, 7 missing, 0 of them failed" in process.stdout
    process = headcount("status", str(run.path), "--format", "json")
    record = json.loads(process.stdout)
    assert (record["complete"], record["done"], record["shards"], record["run_id"]) == (
        False,
        3,
        SHARDS,
        "toy-1a2b3c4d",
    )


def test_a_directory_of_runs_is_a_table(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3))
    note_failure(run, 2, "then it succeeded")
    note_failure(run, 9, "boom")
    (tmp_path / "run_id=broken-1").mkdir()
    (tmp_path / "run_id=broken-1" / "manifest.json").write_text("{}")
    process = headcount("list", str(tmp_path))
    assert process.code == 0, process.stderr
    assert [line.split() for line in process.stdout.splitlines()] == [
        ["run", "model", "input", "shards", "failed", "tokens", "created", "phase"],
        ["toy-1a2b3c4d", "toy", "pile", "3/10", "1", "192/640", "2026-05-01T10:00:00+00:00"],
    ]
    assert "not a manifest" in process.stderr


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux tells the peak memory of one program"
)
def test_a_hundred_thousand_gathered_shards_are_read_without_a_loop_over_them(
    tmp_path: Path,
) -> None:
    shards = 100_000
    run = make_run(tmp_path, shards + 1)
    for first_shard in range(0, shards, COMMITS_PER_SEGMENT):
        shards_of_segment = np.arange(first_shard, min(first_shard + COMMITS_PER_SEGMENT, shards))
        gather_shards(
            run,
            shards_of_segment,
            finished=(NOW - timedelta(seconds=5 + (shards - first_shard) / 1000)),
        )
    program = (
        "import sys, time\n"
        "from headcount.jobs.commands.cluster import status\n"
        "status(sys.argv[1], format_='json')\n"
        "print(time.process_time(), *[l.split()[1] for l in open('/proc/self/status') if "
        "l.startswith('VmHWM')])"
    )
    command = [sys.executable, "-c", program, str(run.path)]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    record, usage = process.stdout.splitlines()
    seconds, kilobytes = map(float, usage.split())
    assert json.loads(record)["missing"] == 1
    assert seconds < 5
    assert kilobytes < 300_000
