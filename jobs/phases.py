"""What the drivers of a run are doing: each of them says it in a file, every ten seconds.

The first commit may come an hour after a scan was begun. Whoever works for a driver says so with
one call, which costs nothing and never fails. Outside of a command that measures, it does nothing:

    with phases.taken():
        phases.about(run)  # As soon as the run is known.
        phases.note("preparing tokens", "12.4 of about 42.8 million")

A thread writes the last note to `OUT/.drivers/RUN_ID/HOST-PROCESS.json`, on a disk or in a store:
at every change of the phase, and every `BEAT_SECONDS`, so that a reader knows whether the driver
lives. The file does not lie in the run's directory, which need not exist yet; nobody takes it for a
run. A driver that ends well deletes its file; one that was stopped or failed leaves its reason.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from headcount.jobs.clocks import changed
from headcount.jobs.console import duration
from headcount.schemas.errors import HeadcountError, RunError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import Place, names, read_as, unread, write_whole
from headcount.schemas.reasons import reason

Phase = Literal[
    "planning",
    "preparing tokens",
    "waiting for machines",
    "loading the model",
    "measuring",
    "compacting",
    "stopped",
    "failed",
]
"""What a driver goes through, in this order; the last two are its end."""

BEAT_SECONDS = 10.0  # a driver that lives writes its file at least this often
SILENT_SECONDS = 30.0  # a driver that has not written for this long may have ended
END_SECONDS = 10.0  # a command that ends waits this long for its last word to be written

NOT_TOLD = (RunError, OSError, pa.ArrowInvalid)
"""Why a word cannot be written; the last: pyarrow ends before the threads of its process."""

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets in the driver of a job, of whose end nobody sees the reason."""


class Driver(BaseModel):
    """What a driver does, as its file says it. Times are seconds since 1970, in the file by its own
    clock: how old the file is, says the disk or the store.
    """

    model_config = ConfigDict(frozen=True)
    host: str
    process: int
    phase: Phase
    detail: str = ""  # how far the phase is, in words; of an end, what it ended and why
    since: float  # when the phase began
    at: float  # when this was written
    tokens_per_second: float | None = None  # how fast it measures; none before its first batch
    tokens_in_hand: int = 0  # that are measured and not committed yet

    def by_clock_here(self, at: float | None) -> "Driver":
        """The same with its times by the clock here: its file was changed at that time."""
        if at is None:
            return self
        return self.model_copy(update={"at": at, "since": at - (self.at - self.since)})

    @property
    def ended(self) -> bool:
        """Whether it has said that it ended."""
        return self.phase in ("stopped", "failed")

    def is_alive(self, now: float) -> bool:
        """Whether it was heard of lately; `now` is the time here."""
        return not self.ended and now - self.at <= SILENT_SECONDS

    def line(self, now: float) -> str:
        """What is known of it, in one line; `now` is the time here."""
        if self.ended:
            return f"{self.phase} {self.detail}, {_time_between(self.at, now)} ago"
        text = f"{self.phase}: {self.detail}" if self.detail else self.phase
        if self.is_alive(now):
            return f"{text}, for {_time_between(self.since, now)}"
        return (
            f"{text}; its driver, process {self.process} of {self.host}, is silent for "
            f"{_time_between(self.at, now)}"
        )


def _time_between(then: float, now: float) -> str:
    # The clock of the driver may be ahead.
    return duration(max(0.0, now - then))


def drivers_of(run: RunDirectory) -> list[Driver]:
    """The drivers that a run has or had, by when they were last heard of."""
    return sorted((driver for _, driver in _files_of(run)), key=lambda driver: driver.at)


def runs_with_drivers(out: Place) -> list[RunDirectory]:
    """The runs among those in `out` that have a driver's file, whether or not they have begun."""
    return [RunDirectory.of(out, run_id) for run_id in sorted(names(out / ".drivers"))]


def forget(run: RunDirectory) -> None:
    """Delete what the drivers of a run have said."""
    for file, _ in _files_of(run):
        _delete(file)


def _files_of(run: RunDirectory) -> Iterator[tuple[Place, Driver]]:
    """The drivers' files of a run, without broken ones; raises `RunError` if one cannot be read."""
    folder = run.path.parent / ".drivers" / run.run_id
    if isinstance(folder, Path) and folder.is_symlink():
        return  # What another run's drivers say.
    try:
        # A temporary file that a killed driver left begins with a dot.
        for name in [name for name in names(folder) if not name.startswith(".")]:
            with contextlib.suppress(FileNotFoundError, ValueError):
                driver = read_as(folder / name, Driver.model_validate_json)
                yield folder / name, driver.by_clock_here(changed(folder / name))
    except OSError as error:
        raise unread(folder, error) from None


def _delete(file: Place) -> None:
    """Delete a driver's file, and the directories above it if it was the last one there."""
    with contextlib.suppress(*NOT_TOLD):
        file.unlink(missing_ok=True)
        if isinstance(file, Path):
            # Raises if there are others.
            file.parent.rmdir()
            file.parent.parent.rmdir()


class _Heartbeat:
    """What the driver in this process says, and the thread that writes it."""

    of_process: "_Heartbeat | None" = None
    """That of the one command of this process. As a parameter it would go through every function
    between a command and the tokenising of its corpus.
    """

    def __init__(self, beat_seconds: float) -> None:
        self.beat_seconds = beat_seconds
        host, process, now = socket.gethostname(), os.getpid(), time.time()
        phase: Phase = "planning"
        self.driver = Driver(host=host, process=process, phase=phase, since=now, at=now)
        self.has_news = threading.Event()
        self.has_ended = threading.Event()
        self.thread: threading.Thread | None = None

    def beat(self, run: RunDirectory) -> None:
        """Write the file about a run until the driver has ended."""
        # Earlier drivers have nothing more to say.
        with contextlib.suppress(*NOT_TOLD):
            for file, driver in list(_files_of(run)):
                if not driver.is_alive(time.time()):
                    _delete(file)
        out, is_job = run.path.parent, JOB_VARIABLE in os.environ
        name = f"{self.driver.host}-{self.driver.process}.json"
        file = out / ".drivers" / run.run_id / name
        is_last = False
        while not is_last:
            self.has_news.clear()
            is_last = self.has_ended.is_set()
            driver = self.driver.model_copy(update={"at": time.time()})
            # A run must not end because of what is told of it.
            with contextlib.suppress(*NOT_TOLD):
                # The user of a command that was refused here has read why, and no directory is
                # left.
                if is_last and not (driver.ended and (is_job or run.manifest_file.is_file())):
                    _delete(file)
                elif is_job or not isinstance(out, Path) or out.is_dir():
                    write_whole(file, driver.model_dump_json(indent=1).encode())
            if not is_last:
                self.has_news.wait(self.beat_seconds)

    def end(self, why: str | None) -> None:
        """Write the last word: why it failed, empty if it was stopped, none if all is done."""
        if why is not None:
            ended = f"while {self.driver.phase}{f': {why}' if why else ''}"
            note("failed" if why else "stopped", ended)
        self.has_ended.set()
        self.has_news.set()
        if self.thread is not None:
            # A store that does not answer must not keep a command from ending.
            self.thread.join(END_SECONDS)


@contextlib.contextmanager
def taken(beat_seconds: float = BEAT_SECONDS) -> Iterator[None]:
    """Take notes of what this process does for one run, until the block ends; they are written at
    least every so many seconds.
    """
    heartbeat = _Heartbeat.of_process = _Heartbeat(beat_seconds)
    why = None
    try:
        yield
    except BaseException as error:
        why = _reason(error)
        raise
    finally:
        heartbeat.end(why)
        _Heartbeat.of_process = None


def fail(why: str) -> None:
    """Write why this process fails, which is about to end at once."""
    if _Heartbeat.of_process is not None:
        _Heartbeat.of_process.end(why)


def note(
    phase: Phase,
    detail: str = "",
    tokens_per_second: float | None = None,
    tokens_in_hand: int = 0,
) -> None:
    """Note what this driver does, how far and how fast: a new phase at once, progress later."""
    heartbeat = _Heartbeat.of_process
    if heartbeat is None:
        return
    is_new = phase != heartbeat.driver.phase
    said = {
        "phase": phase,
        "detail": detail,
        "tokens_per_second": tokens_per_second,
        "tokens_in_hand": tokens_in_hand,
    }
    # A new object, so that the thread never sees half of it.
    heartbeat.driver = heartbeat.driver.model_copy(
        update=said | ({"since": time.time()} if is_new else {})
    )
    if is_new:
        heartbeat.has_news.set()


def about(run: RunDirectory) -> None:
    """Write the notes about a run from now on; what is already written goes on."""
    heartbeat = _Heartbeat.of_process
    if heartbeat is not None and heartbeat.thread is None:
        heartbeat.thread = threading.Thread(target=heartbeat.beat, args=[run], daemon=True)
        heartbeat.thread.start()


def _reason(error: BaseException) -> str:
    """Why a command failed, in one line; empty if it was stopped."""
    cause: BaseException | None = error
    while cause is not None:
        # An interrupt, or a signal from a scheduler. Ray makes an error of its own of it.
        if not isinstance(cause, Exception):
            return ""
        cause = cause.__cause__ or cause.__context__
    name = "" if isinstance(error, HeadcountError) else f"{type(error).__name__}: "
    return f"{name}{reason(error)}"
