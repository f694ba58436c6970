"""What a driver notes before the first commit: where it lies, what is told of it, and that it never
lies about a driver that has ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from headcount.jobs.commands import cluster as cluster_commands
from headcount.jobs.commands.cluster import list_runs
from headcount.jobs.commands.cluster import status as print_status
from headcount.jobs.endings import Stopped
from headcount.jobs.plan.identity import next_run
from headcount.jobs.upkeep import phases
from headcount.jobs.upkeep.removal import check_removable, remove
from headcount.jobs.upkeep.status import as_lines, read_status, read_status_before
from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.files.places import place
from headcount.schemas.files.run_directory import RunDirectory, find_runs
from tests import ROOT
from tests.jobs.upkeep.test_status import NOW, gather_shards, make_run
from tests.s3.s3_server import Rule
from tests.toys.object_stores import object_store

PATIENCE_SECONDS = 60
SECONDS_NOW = NOW.timestamp()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note is written at once, as often as there is news."""
    monkeypatch.setattr(phases, "PAUSE_SECONDS", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that is not there yet, among others that may be."""
    return RunDirectory.of(tmp_path, "toy-1a2b3c4d")


def become_job(run: RunDirectory, patch: pytest.MonkeyPatch) -> None:
    """Make this process the driver of a job that was submitted for a run."""
    config = {"runtime_env": {}, "metadata": {"headcount": run.run_id, "run": str(run.path)}}
    patch.setenv(phases.JOB_VARIABLE, json.dumps(config))


@pytest.fixture
def job(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    become_job(run, monkeypatch)


def noted(run: RunDirectory, text: str) -> phases.Note:
    """The note about a run, as soon as it says this."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        note = phases.read_note(run)
        if note is not None and note.text == text:
            return note
        assert time.monotonic() < deadline, note
        time.sleep(0.005)


def note_of(run: RunDirectory, **fields: object) -> phases.Note:
    """A note that a driver of another machine wrote at `NOW`."""
    values = {"run_id": run.run_id, "phase": "loading the model", "since": NOW, "heard": NOW}
    values |= {"host": "far", "machine": "another machine", "process": 7, "process_started": "1"}
    note = phases.Note.model_validate(values | fields)
    file = Path(str(run.path)).parent / phases.NOTES / f"{run.run_id}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(note.model_dump_json())
    return note


def test_a_driver_says_what_it_does_and_leaves_nothing_behind(run: RunDirectory, tmp_path: Path):
    with phases.taken():
        phases.note("loading the model")
        # Which run it is, is known only now.
        assert list(tmp_path.iterdir()) == []
        phases.about(run)
        assert noted(run, "loading the model").is_alive(time.time())
        for million in range(1, 200):
            phases.note("preparing tokens", f"{million} of 199 million")
        last = noted(run, "preparing tokens: 199 of 199 million")
        assert last.line(last.since.timestamp() + 61).endswith("199 million, for 1 min 1 s")
    # Outside of a command that takes notes, nothing happens.
    phases.note("measuring")
    phases.about(run)
    # A scan that is refused makes no directory, either.
    other = RunDirectory.of(tmp_path / "runs", "toy-1")
    with pytest.raises(CorpusError):
        scan_that_fails(other, "measuring", CorpusError("no text"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_waits_for_a_replica_until_its_first_outcome(run: RunDirectory):
    with phases.taken():
        phases.about(run)
        outcomes = phases.of_outcomes(iter([noted, noted]))
        # A generator does nothing before it is asked.
        assert phases.read_note(run) is None
        next(outcomes)
        noted(run, "measuring")
        assert list(outcomes) == [noted]


def test_a_killed_driver_is_seen_to_be_gone(run: RunDirectory, tmp_path: Path):
    program = f"""
import time
from pathlib import Path
from headcount.jobs.upkeep import phases
from headcount.schemas.files.run_directory import RunDirectory
with phases.taken():
    phases.about(RunDirectory(Path({str(run.path)!r})))
    phases.note("preparing tokens", "1 of 9")
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as driver:
        note = noted(run, "preparing tokens: 1 of 9")
        assert (note.process, note.is_alive(time.time())) == (driver.pid, True)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert phases.read_note(run) == note
    assert not note.is_alive(time.time())
    line = note.line(time.time())
    if note.machine:
        assert line == (
            f"ended while preparing tokens: process {driver.pid} of {note.host} is gone, and did "
            "not say why"
        )


@phases.taken()
def scan_that_fails(run: RunDirectory, phase: phases.PhaseName, error: BaseException) -> None:
    """A command that notes some phases and ends with an error."""
    phases.note("loading the model")
    phases.about(run)
    phases.note(phase, "1 of 9")
    phases.note(phase, "2 of 9")
    raise error


def test_the_end_of_a_job_is_kept_with_its_reason_until_the_run_goes_on(
    run: RunDirectory, job: None, capfd: pytest.CaptureFixture[str], tmp_path: Path
):
    with pytest.raises(CorpusError):
        scan_that_fails(run, "preparing tokens", CorpusError("input: no file matches\nor so"))
    assert capfd.readouterr().err == "phase: loading the model\nphase: preparing tokens\n"
    status = read_status_before(run)
    assert status
    assert as_lines(status) == [
        f"run       {run.path}",
        "phase     ended while preparing tokens: input: no file matches or so",
    ]
    print_status(str(run.path), format_="json")
    assert json.loads(capfd.readouterr().out)["complete"] is False

    # It is no run: not for queries, and not for the next run's number.
    with pytest.raises(RunError, match="no run here"):
        find_runs(tmp_path)
    assert next_run(run) == run
    list_runs(str(tmp_path))
    assert [line.split() for line in capfd.readouterr().out.splitlines()[1:]] == [
        [run.run_id, *"------", *status.phase.split()]
    ]
    print_status("toy", runs=str(tmp_path))
    assert status.phase in capfd.readouterr().out
    remove(check_removable(str(run.path)))
    assert list(tmp_path.iterdir()) == []

    # A job that continues another run takes its note along.
    other = RunDirectory.of(tmp_path, f"{run.run_id}-2")
    with phases.taken():
        phases.note("loading the model")
        noted(run, "loading the model")
        phases.about(other)
        noted(other, "loading the model")
        assert phases.runs_with_notes(tmp_path) == [other]
    assert phases.read_note(other) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(signal.SIGTERM), SystemError()])
def test_a_job_that_was_stopped_says_so(run: RunDirectory, job: None, error: BaseException):
    # A library may make an error of its own of it.
    error.__cause__ = Stopped(signal.SIGTERM)
    with pytest.raises(type(error)):
        scan_that_fails(run, "waiting for a replica", error)
    note = phases.read_note(run)
    assert note is not None
    assert note.line(SECONDS_NOW) == "ended while waiting for a replica: it was stopped"


SUBMITTED = {"phase": "submitted", "detail": "to http://x", "process": 0}


@pytest.mark.parametrize(("fields", "seconds", "line"), [
    ({}, 5, "loading the model, for 5.0 s"),
    # The driver's clock is ahead.
    ({}, -3600, "loading the model, for 0.0 s"),
    ({"detail": "1 of 2"}, 3600,
     "loading the model: 1 of 2, but its driver on far was not heard of for 1 h 0 min and "
     "has probably ended"),
    (SUBMITTED, 30, "submitted: to http://x, for 30 s"),
    (SUBMITTED, 600, "submitted: to http://x 10 min 0 s ago; its driver was not heard of"),
])  # fmt: skip
def test_what_is_told_of_a_driver_on_another_machine(
    run: RunDirectory, fields: dict[str, object], seconds: float, line: str
):
    note = note_of(run, **fields)
    assert note.line(SECONDS_NOW + seconds) == line


def test_a_note_is_told_beside_a_run_that_has_begun(tmp_path: Path):
    run = make_run(tmp_path)
    note_of(run, phase="waiting for a replica", began=True)
    assert "phase     waiting for a replica, for 0.0 s" in as_lines(read_status(run, NOW))
    # A speed says more.
    gather_shards(run, np.arange(3))
    assert not any("waiting" in line for line in as_lines(read_status(run, NOW)))
    note_of(run, ended="no memory", began=True)
    assert "phase     ended while loading the model: no memory" in as_lines(read_status(run, NOW))
    gather_shards(run, np.arange(3, 10))
    assert read_status(run, NOW).phase is None
    # A run that was deleted does not come back because of its note.
    run.manifest_file.unlink()
    assert phases.read_note(run) is None


def test_broken_notes_are_none_and_those_that_cannot_be_written_disturb_nobody(
    run: RunDirectory, tmp_path: Path
):
    note_of(run)
    file = tmp_path / phases.NOTES / f"{run.run_id}.json"
    for content in ("", "{", '{"phase": "dreaming"}', "[1]", '{"since": "x"}'):
        file.write_text(content)
        assert phases.read_note(run) is None, content
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where a directory should be")
    with phases.taken():
        phases.about(run)
        phases.note("measuring")
        time.sleep(0.05)
    assert phases.read_note(run) is None


def test_notes_lie_in_a_store_too_and_one_that_is_silent_is_said_aloud(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    run = RunDirectory.of(place("s3://bucket/runs"), "toy-1")
    with object_store(monkeypatch) as store:
        phases.note_submission(run, "http://head:8265")
        list_runs("s3://bucket/runs")
        assert "submitted: to http://head:8265, for " in capfd.readouterr().out
        become_job(run, monkeypatch)
        with phases.taken():
            phases.note("loading the model")
            noted(run, "loading the model")
            phases.note_end(run, "its job was stopped")
            assert getattr(phases.read_note(run), "ended", None) == "its job was stopped"
        assert phases.read_note(run) is None
        monkeypatch.setattr(cluster_commands, "SILENCE_SECONDS", 0.1)
        store.set_rules(Rule({"delay": 0.5}))
        with pytest.raises(RunError, match="no run here"):
            list_runs("s3://bucket/none")
    assert "s3://bucket/none: the store has not answered for 0 s" in capfd.readouterr().err
