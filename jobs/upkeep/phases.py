"""What the driver of a run is doing: the first commit may come an hour after the scan was begun.

Whoever works for a driver says so with one call, which costs nothing and never fails. Outside of a
command that takes notes, it does nothing:

    from headcount.jobs.upkeep import phases

    phases.about(run)  # As soon as the run is known.
    phases.note("preparing tokens", "12.4 of about 42.8 million")

A command that measures takes notes inside `with phases.taken():`. `phases.of_outcomes` notes by
itself that a run waits for a replica, and then that it is measured.

A thread writes the last note to a small file beside the runs, `OUT/.phases/RUN_ID.json`, on a disk
or in a store, and again every `BEAT_SECONDS`: so a reader knows whether the driver lives. The file
does not lie in the run's directory, which need not exist yet; nobody takes it for a run. It is
deleted when the driver ends well. The reason why a job ended is kept, because nobody saw it. Of two
drivers of a run in a store, the note is that of the one that wrote last.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict

from headcount.jobs.console import duration
from headcount.schemas.errors import HeadcountError, RunError, printable
from headcount.schemas.files.places import Place, names, place, reason, write_whole
from headcount.schemas.files.run_directory import RunDirectory

PhaseName = Literal[
    "submitted",
    "starting",
    "loading the model",
    "preparing tokens",
    "waiting for a replica",
    "measuring",
]
"""What a run goes through, in this order."""

NOTES = ".phases"
"""The directory of the notes, beside the runs."""

BEAT_SECONDS = 20.0
"""A driver that lives writes its note at least this often."""

PATIENCE_SECONDS = 90.0
"""A driver that has not written for this long has probably ended."""

PAUSE_SECONDS = 1.0
"""Least time between two writes: progress may be noted a thousand times a second."""

END_SECONDS = 10.0
"""A command that ends waits this long for the last word about it to be written."""

LOG_PREFIX = "phase: "
"""How a line in the log of a job begins that says a phase."""

PLANNING: tuple[str, ...] = ("loading the model", "preparing tokens")
"""Phases in which a new run has no directory yet."""

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets in the driver of a job, with what the job was submitted with."""

Item = TypeVar("Item")


class Note(BaseModel):
    """What a driver does, as its file says it."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    phase: PhaseName
    detail: str = ""
    """How far the phase is, in words."""
    since: AwareDatetime
    """When the phase began, by the driver's clock."""
    heard: AwareDatetime
    """When the note was written, by the driver's clock."""
    began: bool = False
    """Whether the run has a manifest. If it has none any more, it was deleted."""
    ended: str | None = None
    """Why the driver ended; none while it lives, and if it was killed."""
    host: str = ""
    machine: str = ""
    """Where the number of the process means the same; empty if that is not known."""
    process: int = 0
    """The driver's process; 0 if it has not begun."""
    process_started: str = ""
    """When the process started, as the system counts it."""

    @property
    def text(self) -> str:
        """The phase and how far it is."""
        return f"{self.phase}: {self.detail}" if self.detail else self.phase

    def end(self) -> str | None:
        """Why the driver has ended; none if it lives, or if that cannot be known here."""
        if self.ended is not None:
            return self.ended
        if not self.process or not self.machine or self.machine != _machine():
            return None
        if _process_started(self.process) == self.process_started:
            return None
        return f"process {self.process} of {self.host} is gone, and did not say why"

    def is_alive(self, now: float) -> bool:
        """Whether the driver was heard of lately; `now` is the time here, in seconds since 1970."""
        return bool(self.process) and self.end() is None and self._silence(now) <= PATIENCE_SECONDS

    def _silence(self, now: float) -> float:
        return _seconds_between(self.heard, now)

    def line(self, now: float) -> str:
        """What is known of the driver, in one line; `now` is the time here."""
        if (end := self.end()) is not None:
            return f"ended while {self.phase}: {end}"
        silence = self._silence(now)
        if silence <= PATIENCE_SECONDS:
            return f"{self.text}, for {duration(_seconds_between(self.since, now))}"
        if not self.process:
            return f"{self.text} {duration(silence)} ago; its driver was not heard of"
        return (
            f"{self.text}, but its driver on {self.host} was not heard of for {duration(silence)} "
            "and has probably ended"
        )


def _seconds_between(time: datetime, now: float) -> float:
    """Seconds from a noted time to now; 0 if the clock that noted it is ahead."""
    return max(0.0, now - time.timestamp())


def read_note(run: RunDirectory) -> Note | None:
    """The note about a run; none if there is none, or if the run was deleted since."""
    try:
        note = Note.model_validate_json(_file(run).read_bytes())
        deleted = note.began and not run.manifest_file.is_file()
    except (OSError, ValueError, RunError):
        return None
    return None if deleted or note.run_id != run.run_id else note


def runs_with_notes(out: Place) -> list[RunDirectory]:
    """The runs among those in `out` that have a note, whether or not they have begun."""
    stems = (name.removesuffix(".json") for name in names(out / NOTES) if name.endswith(".json"))
    # A temporary file that a killed driver left begins with a dot.
    return [RunDirectory.of(out, stem) for stem in sorted(stems) if not stem.startswith(".")]


def note_submission(run: RunDirectory, address: str) -> None:
    """Note that a run was submitted to a cluster, where this machine sees the runs.

    The driver writes over it as soon as it works.
    """
    if isinstance(run.path, Path) and not run.path.parent.is_dir():
        return
    now = _now()
    note = Note(run_id=run.run_id, phase="submitted", detail=f"to {address}", since=now, heard=now)
    _write(run, note)


def note_end(run: RunDirectory, why: str) -> None:
    """Note why a driver has ended that could not say it itself; only if it has a note."""
    note = read_note(run)
    if note is not None and note.ended is None:
        _write(run, note.model_copy(update={"ended": why, "heard": _now()}))


def forget(run: RunDirectory) -> None:
    """Delete the note about a run, and the directory of the notes if it was the last one there."""
    with contextlib.suppress(RunError, OSError):
        file = _file(run)
        file.unlink(missing_ok=True)
        if isinstance(file, Path):
            # Raises if there are other notes.
            file.parent.rmdir()


def last_in_log(log: str) -> str | None:
    """The last phase that a driver has said in the log of its job; none if it has said none."""
    said = [line for line in log.splitlines() if line.startswith(LOG_PREFIX)]
    return said[-1].removeprefix(LOG_PREFIX) if said else None


def note(phase: PhaseName, detail: str = "") -> None:
    """Note what this driver does from now on, and how far that is."""
    if _State.notes is not None:
        _State.notes.note(phase, detail)


def about(run: RunDirectory) -> None:
    """Say which run the notes are about. Notes taken before are kept until then."""
    if _State.notes is not None:
        _State.notes.about(run)


def of_outcomes(outcomes: Iterable[Item]) -> Iterator[Item]:
    """Pass outcomes of shards on; note that the run waits for a replica, then that it measures."""
    note("waiting for a replica")
    for number, outcome in enumerate(outcomes):
        if number == 0:
            note("measuring")
        yield outcome


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Take notes of what this process does for one run, until the block ends."""
    notes = PhaseNotes(in_job=JOB_VARIABLE in os.environ)
    _State.notes = notes
    try:
        if (run := _run_of_job()) is not None:
            notes.about(run)
        yield
    except BaseException as error:
        notes.end(_reason(error))
        raise
    else:
        notes.end(None)
    finally:
        _State.notes = None


class _State:
    """The notes of this process. There is one command in a process, so this is a class attribute.

    A parameter would go through every function between a command and the tokenising of its corpus.
    """

    notes: PhaseNotes | None = None


@dataclass(frozen=True)
class _Said:
    """What the driver said last."""

    phase: PhaseName
    detail: str
    since: datetime


class PhaseNotes:
    """The notes of one driver, and the thread that writes them."""

    def __init__(self, in_job: bool) -> None:
        self._run: RunDirectory | None = None
        self._in_job = in_job
        self._said: _Said | None = None
        self._news = threading.Event()
        self._ended = threading.Event()
        self._why_ended: str | None = None
        self._thread: threading.Thread | None = None
        self._process = _this_process()

    def note(self, phase: PhaseName, detail: str = "") -> None:
        """Note a phase. The thread writes the last one of those that come fast."""
        said = self._said
        if said is not None and said.phase == phase:
            self._said = replace(said, detail=detail)
        else:
            self._said = _Said(phase, detail, _now())
            if self._in_job:
                # `headcount submit` waits for this line.
                print(f"{LOG_PREFIX}{printable(phase)}", file=sys.stderr, flush=True)
        self._news.set()
        self._start()

    def about(self, run: RunDirectory) -> None:
        """Say which run the notes are about."""
        previous, self._run = self._run, run
        if previous is not None and previous != run:
            # The job was submitted for one run and continues another.
            forget(previous)
        self._news.set()
        self._start()

    def end(self, why: str | None) -> None:
        """Stop taking notes: keep the reason why a job ended, and delete the note otherwise."""
        self._why_ended = why
        self._ended.set()
        self._news.set()
        if self._thread is not None:
            # A store that does not answer must not keep a command from ending.
            self._thread.join(END_SECONDS)

    def _start(self) -> None:
        """Start the thread once there is a run and something to write."""
        if self._thread is not None or self._run is None or self._said is None:
            return
        out = self._run.path.parent
        # A scan that is refused here leaves no directory behind.
        if not self._in_job and isinstance(out, Path) and not out.is_dir():
            return
        self._thread = threading.Thread(target=self._keep_written, name="phases", daemon=True)
        self._thread.start()

    def _keep_written(self) -> None:
        """Write the last note when there is news, and from time to time; at the end, the end."""
        while not self._ended.is_set():
            # Cleared before the write: news that comes during it is written by the next round.
            self._news.clear()
            self._write(None)
            self._ended.wait(PAUSE_SECONDS)
            self._news.wait(BEAT_SECONDS)
        if self._why_ended is not None and self._in_job:
            self._write(self._why_ended)
        elif self._run is not None:
            forget(self._run)

    def _write(self, ended: str | None) -> None:
        """Write the note as it is now."""
        run, said = self._run, self._said
        if run is None or said is None:
            return
        machine, number, started = self._process
        began = False
        with contextlib.suppress(OSError, RunError):
            began = run.manifest_file.is_file()
        note = Note(
            run_id=run.run_id,
            phase=said.phase,
            detail=said.detail,
            since=said.since,
            heard=_now(),
            began=began,
            ended=ended,
            host=socket.gethostname(),
            machine=machine,
            process=number,
            process_started=started,
        )
        _write(run, note)


def _run_of_job() -> RunDirectory | None:
    """The run that this process was submitted for; none if it is not the driver of such a job."""
    try:
        metadata = json.loads(os.environ.get(JOB_VARIABLE, "{}")).get("metadata", {})
        return RunDirectory(place(metadata["run"]))
    except (ValueError, KeyError, TypeError, AttributeError, HeadcountError):
        return None


def _file(run: RunDirectory) -> Place:
    return run.path.parent / NOTES / f"{run.run_id}.json"


def _write(run: RunDirectory, note: Note) -> None:
    """Write a note, if that is possible: a run must not end because of a note about it."""
    with contextlib.suppress(RunError, OSError):
        write_whole(_file(run), note.model_dump_json(indent=1).encode())


def _reason(error: BaseException) -> str:
    """Why a command ended, in one line."""
    cause: BaseException | None = error
    while cause is not None:
        # An interrupt, or a signal from a scheduler. Ray makes an error of its own of it.
        if not isinstance(cause, Exception):
            return "it was stopped"
        cause = cause.__cause__ or cause.__context__
    name = "" if isinstance(error, HeadcountError) else f"{type(error).__name__}: "
    return f"{name}{reason(error)}"


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _this_process() -> tuple[str, int, str]:
    """This machine, this process and its start, by which a reader knows whether it lives."""
    number = os.getpid()
    return _machine(), number, _process_started(number)


def _machine() -> str:
    """What the processes that see each other's numbers have in common; empty if not known.

    Containers of one machine have numbers of their own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_started(number: int) -> str:
    """When a process started, as the system counts it; empty if it is gone."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name, in brackets, may hold spaces and brackets. The state follows it, then 18 fields.
    state, *fields = stat.rpartition(")")[2].split()
    # A zombie has ended.
    return "" if state == "Z" else fields[18]
