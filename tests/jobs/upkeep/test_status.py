"""The status of a run, read from its directory alone: how far, how fast, what failed.

A run may have a million shards, so reading must be quick and take little memory.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headcount.jobs import phases
from headcount.jobs.upkeep.status import as_lines, read_status
from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.commits import COMMITS_PER_SEGMENT, write_segment
from headcount.schemas.files.manifest import LAYOUT, Manifest
from headcount.schemas.files.run_directory import RunDirectory
from tests import ROOT
from tests.toys.commands import ended, printed
from tests.toys.toy_runs import local

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
SHARDS = 10
TOKENS = 4 * 8 * 2
"""Of a shard: sequences, tokens of each, interventions."""


def make_run(out: Path, shards: int = SHARDS) -> RunDirectory:
    """A run of 4 sequences of 8 tokens in each shard, under two interventions."""
    run = RunDirectory.of(out, "toy-1a2b3c4d")
    scan = {"model": "toy", "input": {"family": "pile"}, "n_ctx": 8, "sequences_per_shard": 4}
    scan |= {"interventions": ["none", "zero_query_bias"]}
    manifest = Manifest(
        layout=LAYOUT, run_id=run.run_id, created="2026-05-01T10:00:00+00:00",
        identity={"scan": scan}, shards=shards, sequences=4 * shards, kinds={}, model={}, code="",
        versions={},
    )  # fmt: skip
    local(run.path).mkdir(parents=True)
    local(run.manifest_file).write_text(manifest.model_dump_json())
    return run


def gather_shards(run: RunDirectory, shards: np.ndarray, **columns: Any) -> None:
    """Commit shards in one segment; a column is one value for all of them, or an array."""
    count = len(shards)
    values: dict[str, Any] = {
        "run_id": run.run_id, "shard": shards, "start": shards * 4, "stop": shards * 4 + 4,
        "rows": 12, "tokens": TOKENS, "seconds": 2.5, "compute_seconds": 1.5, "idle_seconds": 0.5,
        "finished": NOW - timedelta(seconds=5), "host": "one", "replica": "one-7", "attempt": 1,
        "code": "c0de", "device": "cpu toy", "versions": [], "methods": [], "bad_rows": [],
    } | columns  # fmt: skip
    # A row without files would take its shard back. All of them have one empty file.
    file = local(run.path) / "heads/intervention=none/merged-0.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    record = {"path": str(file.relative_to(local(run.path))), "bytes": 0}
    one_file = pa.array([[record]], COMMITS.field("files").type)
    shared_file = one_file.take(pa.array(np.zeros(count, int)))
    of_files = columns.get("files", shared_file)
    arrays: list[Any] = []
    for field in COMMITS:
        value = values.get(field.name)
        array = value if isinstance(value, np.ndarray) else [value] * count
        arrays.append(of_files if field.name == "files" else pa.array(array, field.type))
    write_segment(run.commits_directory, pa.table(arrays, schema=COMMITS))


def write_shards(run: RunDirectory, shards: np.ndarray) -> list[Path]:
    """Commit shards in one segment, each with an empty file of its own; returns the files."""
    folder = local(run.path) / "sequences/intervention=none"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"shard-{shard:06d}-{shard % 97:08x}.parquet" for shard in shards]
    for file in files:
        file.touch()
    paths = [str(file.relative_to(local(run.path))) for file in files]
    records = [[{"path": path, "bytes": 0}] for path in paths]
    gather_shards(run, shards, files=pa.array(records, COMMITS.field("files").type))
    return files


def note_failure(run: RunDirectory, shard: int, error: str) -> None:
    file = local(run.failure_file(shard))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"attempts": 3, "error": error}))


def test_a_run_that_has_just_begun_and_one_that_is_complete(tmp_path: Path):
    run = make_run(tmp_path)
    assert as_lines(read_status(run, NOW))[1:] == [
        "shards    0 of 10 done, 10 missing, 0 of them failed",
        "tokens    0 of 640 (0.0%)",
        f"stopped   no driver was heard of lately; headcount resume {run.path} continues it",
        "commit    none yet",
    ]
    gather_shards(run, np.arange(4), bad_rows=["a:1", "a:2"])
    gather_shards(run, np.arange(4, SHARDS))
    status = read_status(run, NOW)
    # A bad row of two shards counts once.
    assert (status.complete, status.bad_rows, status.replicas) == (True, 2, [])
    assert "complete  every shard is committed" in as_lines(status)


def say(run: RunDirectory, host: str = "far", **fields: object) -> phases.Driver:
    """Write what a driver of another machine said at `NOW`."""
    values = {"host": host, "process": 7, "phase": "loading the model"}
    values |= {"since": NOW.timestamp(), "at": NOW.timestamp()}
    driver = phases.Driver.model_validate(values | fields)
    file = local(run.path).parent / ".drivers" / run.run_id / f"{host}-7.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(driver.model_dump_json())
    return driver


def test_the_driver_says_how_fast_it_goes_and_commits_what_each_replica_does(tmp_path: Path):
    run = make_run(tmp_path)
    say(run, phase="measuring", tokens_per_second=96.0)
    gather_shards(run, np.arange(3))
    two: dict[str, Any] = {"host": "two", "replica": "two-9", "idle_seconds": 0.5}
    gather_shards(run, np.array([3, 4]), **two, compute_seconds=0.5)
    # What was measured long before the last commit does not count.
    hour_ago = NOW - timedelta(hours=1)
    gather_shards(run, np.array([6]), **two, compute_seconds=1000.0, finished=hour_ago)
    # Broken times make no speed.
    for shard, seconds in ((7, -2.0), (8, float("nan"))):
        gather_shards(run, np.array([shard]), replica="one-8", compute_seconds=seconds)
    status = read_status(run, NOW)
    paces = [(p.replica, p.tokens_per_second, p.busy, p.shards) for p in status.replicas]
    assert paces == [("two-9", 64.0, 0.5, 2), ("one-7", 32.0, 0.75, 3)]
    assert status.tokens_per_second == 96.0
    assert status.seconds_left == pytest.approx(2 * TOKENS / 96)
    lines = as_lines(status)
    assert "speed     96 tokens/s, 1.3 s left" in lines
    assert "replica   two-9: 64 tokens/s, busy 50%" in lines


@pytest.mark.parametrize(("finished", "since"), [
    (NOW - timedelta(hours=3), "3 h 0 min ago, at 2026-05-01T09:00:00+00:00"),
    # The clock of the host is ahead.
    (NOW + timedelta(hours=3), "0.0 s ago, at 2026-05-01T15:00:00+00:00"),
])  # fmt: skip
def test_the_last_commit_is_told_by_the_clock_of_its_host(
    tmp_path: Path, finished: datetime, since: str
):
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3), finished=finished)
    status = read_status(run, NOW)
    assert (status.tokens_per_second, status.seconds_left, status.replicas) == (None, None, [])
    assert as_lines(status)[4:] == [f"commit    the last {since} by the clock of one"]


def test_failures_exclude_shards_committed_since_and_ten_errors_are_read(tmp_path: Path):
    run = make_run(tmp_path, 40)
    gather_shards(run, np.arange(5))
    # Shards 3 and 4 were committed in spite of a failed attempt.
    for shard in range(3, 20):
        note_failure(run, shard, f"out of\nmemory in {shard}")
    local(run.failure_file(6)).write_text("{")
    status = read_status(run, NOW)
    assert (status.failed, list(status.failures)) == (15, list(range(5, 15)))
    assert {
        "shards    5 of 40 done, 35 missing, 15 of them failed",
        "failed    shard 5: out of memory in 5",
        "failed    shard 6: its note cannot be read",
        "failed    and 5 more",
    } <= set(as_lines(status))


def test_the_commands_print_lines_a_table_or_json_and_what_is_no_run(tmp_path: Path):
    run = make_run(tmp_path)
    gather_shards(run, np.arange(3))
    note_failure(run, 2, "then it succeeded")
    note_failure(run, 9, "boom")
    (tmp_path / "run_id=broken-1").mkdir()
    (tmp_path / "run_id=broken-1" / "manifest.json").write_text("{}")
    assert "shards    3 of 10 done, 7 missing, 1 of them failed" in printed("status", run.path)
    record = json.loads(printed("status", run.path, "--format=json"))
    facts = [record[name] for name in ("complete", "done", "shards", "run_id")]
    assert facts == [False, 3, SHARDS, "toy-1a2b3c4d"]
    done = ended("list", tmp_path)
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["run", "model", "input", "shards", "failed", "tokens", "created", "phase"],
        ["toy-1a2b3c4d", "toy", "pile", "3/10", "1", "192/640", "2026-05-01T10:00:00+00:00"],
    ]
    assert "not a manifest" in done.stderr


def test_files_of_thousands_of_shards_are_noticed_by_name_without_a_call_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shards, gone = 2000, 7
    run = make_run(tmp_path, shards)
    # Replicas take turns: no segment holds neighbours alone.
    even, odd = (write_shards(run, np.arange(first, shards, 2)) for first in (0, 1))
    files = [*even, *odd]
    calls: list[object] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            calls.append(args)
            return call(*args, **options)

        return counting

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    assert read_status(run, NOW).complete
    calls_when_whole = len(calls)
    assert calls_when_whole < 40
    files[gone].unlink()
    files[-gone].rename(files[-gone].with_name("shard-001987-0a1b2c3d.parquet"))
    status = read_status(run, NOW)
    assert len(calls) < 100
    assert (status.done, status.damaged, status.damage) == (shards - 2, 2, [
        f"shard {shard}: {file.relative_to(local(run.path))} is gone"
        for shard, file in ((14, files[gone]), (1987, files[-gone]))
    ])  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="only Linux tells the peak memory of one program"
)
def test_a_hundred_thousand_gathered_shards_are_read_without_a_loop_over_them(tmp_path: Path):
    shards = 100_000
    run = make_run(tmp_path, shards + 1)
    for first_shard in range(0, shards, COMMITS_PER_SEGMENT):
        shards_of_segment = np.arange(first_shard, min(first_shard + COMMITS_PER_SEGMENT, shards))
        age = timedelta(seconds=5 + (shards - first_shard) / 1000)
        gather_shards(run, shards_of_segment, finished=NOW - age)
    program = (
        "import sys, time\n"
        "from headcount.jobs.commands.runs import status\n"
        "status(sys.argv[1], format_='json')\n"
        "assert 'pandas' not in sys.modules\n"
        "print(time.process_time(), *[l.split()[1] for l in open('/proc/self/status') if "
        "l.startswith('VmHWM')])"
    )
    command = [sys.executable, "-c", program, str(run.path)]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)
    record, usage = output.splitlines()
    seconds, kilobytes = map(float, usage.split())
    assert json.loads(record)["missing"] == 1
    assert seconds < 5
    assert kilobytes < 300_000
