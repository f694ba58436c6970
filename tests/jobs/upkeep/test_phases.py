"""What a driver says of itself: where it lies, and what is told of a driver that has ended."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headcount.jobs import phases
from headcount.jobs.commands import runs as run_commands
from headcount.jobs.commands.runs import list_runs
from headcount.jobs.endings import Stopped
from headcount.jobs.run_names import next_run
from headcount.jobs.upkeep.removal import check_removable, remove
from headcount.jobs.upkeep.status import as_lines, read_status
from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.files.run_directory import RunDirectory, find_runs
from headcount.schemas.places import place
from tests import ROOT
from tests.jobs.upkeep.test_status import NOW, gather_shards, make_run, say
from tests.s3.s3_server import Rule
from tests.toys.commands import printed
from tests.toys.object_stores import object_store

PATIENCE_SECONDS = 60


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that is not there yet, among others that may be."""
    return RunDirectory.of(tmp_path, "toy-1a2b3c4d")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process the driver of a job."""
    monkeypatch.setenv(phases.JOB_VARIABLE, "{}")


def heard(run: RunDirectory, words: str) -> phases.Driver:
    """The one driver of a run, as soon as it says this."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        drivers = phases.drivers_of(run)
        if drivers and drivers[0].line(time.time()).startswith(words):
            return drivers[0]
        assert time.monotonic() < deadline, drivers
        time.sleep(0.005)


def test_a_driver_says_what_it_does_and_leaves_nothing_behind(run: RunDirectory, tmp_path: Path):
    # What an earlier driver left.
    say(run, phase="failed", detail="while measuring: no memory")
    with phases.taken(beat_seconds=0.01):
        # Which run it is, is known only now.
        phases.about(run)
        assert heard(run, "planning, for ").is_alive(time.time())
        for million in range(1, 200):
            phases.note("preparing tokens", f"{million} of 199 million")
        heard(run, "preparing tokens: 199 of 199 million, for 0.")
        phases.note("measuring", tokens_per_second=12.5)
        assert heard(run, "measuring").tokens_per_second == 12.5
    # Where there was no run before, the driver is heard as soon as its own has begun.
    first = RunDirectory.of(tmp_path / "runs", "toy-1")
    with phases.taken(beat_seconds=0.01):
        phases.about(first)
        (tmp_path / "runs").mkdir()
        heard(first, "planning")
    (tmp_path / "runs").rmdir()
    # Outside of a command that takes notes, nothing happens.
    phases.note("measuring")
    phases.about(run)
    # A scan that is refused makes no directory, either, and nothing in one that is there.
    for other in (first, run):
        with pytest.raises(CorpusError):
            scan_that_fails(other, CorpusError("no text"))
    assert list(tmp_path.iterdir()) == []


@phases.taken()
def scan_that_fails(run: RunDirectory, error: BaseException) -> None:
    phases.about(run)
    phases.note("preparing tokens", "1 of 9")
    raise error


def test_a_killed_driver_is_silent(run: RunDirectory):
    program = f"""
import time
from pathlib import Path
from headcount.jobs import phases
from headcount.schemas.files.run_directory import RunDirectory
with phases.taken():
    phases.about(RunDirectory(Path({str(run.path)!r})))
    phases.note("preparing tokens", "1 of 9")
    time.sleep(120)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as killed:
        driver = heard(run, "preparing tokens: 1 of 9, for ")
        killed.send_signal(signal.SIGKILL)
    assert phases.drivers_of(run) == [driver]
    assert driver.is_alive(driver.at + 30)
    assert driver.line(driver.at + 31) == (
        f"preparing tokens: 1 of 9; its driver, process {killed.pid} of {driver.host}, is silent "
        "for 31 s"
    )
    # A driver whose clock is ahead.
    assert driver.line(driver.since - 3600).endswith(", for 0.0 s")


@pytest.mark.usefixtures("job")
def test_the_end_of_a_job_is_kept_with_its_reason_until_the_run_goes_on(
    run: RunDirectory, tmp_path: Path
):
    with pytest.raises(CorpusError):
        scan_that_fails(run, CorpusError("input: no file matches\nor so"))
    end = "failed while preparing tokens: input: no file matches or so, "
    first_line, last_line = printed("status", run.path).splitlines()
    assert first_line == f"run       {run.path}"
    assert last_line.startswith(f"phase     {end}")
    record = json.loads(printed("status", "toy", "--runs", tmp_path, "--format=json"))
    assert (record["begun"], record["complete"]) == (False, False)
    # It is no run: not for queries, and not for the next run's number.
    with pytest.raises(RunError, match="no run here"):
        find_runs(tmp_path)
    assert next_run(run) == run
    words = printed("list", tmp_path).splitlines()[1].split()
    assert words[:7] == [run.run_id, *"------"]
    assert " ".join(words[7:]).startswith(end)
    remove(check_removable(str(run.path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(signal.SIGTERM), SystemError()])
def test_a_job_that_was_stopped_says_so(run: RunDirectory, error: BaseException):
    # A library may make an error of its own of it.
    error.__cause__ = Stopped(signal.SIGTERM)
    with pytest.raises(type(error)):
        scan_that_fails(run, error)
    heard(run, "stopped while preparing tokens, ")


def test_drivers_are_told_beside_a_run_that_has_begun(tmp_path: Path):
    run = make_run(tmp_path)
    say(run, phase="waiting for machines")
    assert "phase     waiting for machines, for 0.0 s" in as_lines(read_status(run, NOW))
    # Two machines share its shards. A speed says more than a phase.
    gather_shards(run, np.arange(3))
    for host, speed in (("far", 24.0), ("near", 8.0)):
        say(run, host, phase="measuring", tokens_per_second=speed)
    lines = as_lines(read_status(run, NOW))
    assert "speed     32 tokens/s, 14 s left" in lines
    assert not any(line.startswith("phase") for line in lines)
    say(run, "near", phase="failed", detail="while measuring: no memory")
    assert read_status(run, NOW).tokens_per_second == 24.0
    (Path(str(run.path)).parent / ".drivers" / run.run_id / "far-7.json").unlink()
    lines = as_lines(read_status(run, NOW))
    assert lines[3].startswith("stopped   no driver was heard of lately; headcount resume ")
    assert "phase     failed while measuring: no memory, 0.0 s ago" in lines
    gather_shards(run, np.arange(3, 10))
    assert read_status(run, NOW).phase is None


def test_broken_files_are_none_and_those_that_cannot_be_written_disturb_nobody(
    run: RunDirectory, tmp_path: Path
):
    say(run)
    folder = tmp_path / ".drivers" / run.run_id
    for content in ("", "{", '{"phase": "dreaming"}', "[1]", '{"since": "x"}'):
        (folder / "far-7.json").write_text(content)
        assert phases.drivers_of(run) == [], content
    (folder / "far-7.json").unlink()
    folder.rmdir()
    folder.write_text("a file where a directory should be")
    with phases.taken():
        phases.about(run)
        phases.note("measuring")
    assert phases.drivers_of(run) == []


@pytest.mark.usefixtures("job")
def test_drivers_are_heard_in_a_store_too_and_a_store_that_is_silent_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    run = RunDirectory.of(place("s3://bucket/runs"), "toy-1")
    with object_store(monkeypatch) as store:
        with phases.taken():
            phases.about(run)
            heard(run, "planning")
            list_runs("s3://bucket/runs")
            assert "planning, for " in capfd.readouterr().out
        assert phases.drivers_of(run) == []
        with pytest.raises(CorpusError):
            scan_that_fails(run, CorpusError("no text"))
        heard(run, "failed while preparing tokens: no text")
        phases.forget(run)
        monkeypatch.setattr(run_commands, "SILENCE_SECONDS", 0.1)
        store.set_rules(Rule({"delay": 0.5}))
        with pytest.raises(RunError, match="no run here"):
            list_runs("s3://bucket/none")
    assert "s3://bucket/none: the store has not answered for 0 s" in capfd.readouterr().err
