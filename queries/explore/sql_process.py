"""Queries in SQL of whoever asks, in processes of their own, which can be ended whatever they do.

DuckDB hears no interrupt inside of a function such as `repeat`, and does not count what that takes.
So each query has a process, which the explorer kills when its time is over, and which the system
allows little more memory than the query may take. A process answers one query after another: the
next one need not wait until it has started.

The explorer writes lines of JSON to it, first `Settings` and then queries, and reads a line for
each: that it has started, and answers.
"""

import json
import math
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Lock, Thread
from typing import IO, Any

from headcount.queries.ask.answers import rows_of, run_query
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.open.limits import (
    NEEDS_MEMORY,
    allow_all_memory,
    hold_to_memory,
    memory_errors_in_one_line,
    spill_directory,
)
from headcount.queries.open.run_memory import RunMemory
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.schemas.packages import PACKAGE
from headcount.schemas.process import leave_pandas_out

MOST_ROWS = 1_000  # rows that the page shows of an answer in SQL
MOST_CHARACTERS = 1_000  # characters that the page shows of a value
MOST_BYTES = 8 * 2**20  # bytes of rows that are read of an answer in SQL

NICENESS = 5  # clicks on the page go before queries in SQL

PROGRAM = f"""
import sys
sys.path.insert(0, sys.argv[1])
from {__name__} import answer_queries
answer_queries()
"""

Reply = dict[str, Any]  # columns and rows of an answer, or an error


@dataclass(frozen=True)
class Settings:
    """How the runs are opened."""

    path: str
    code: str | None
    memory: str


class SqlProcess:
    """A process that answers queries in SQL."""

    def __init__(self, settings: Settings, revision: int) -> None:
        # In a session of its own, so that Ctrl-C in the terminal is the explorer's alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(PACKAGE.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.has_started = False
        self._send(asdict(settings) | {"revision": revision})

    def start(self) -> None:
        """Wait until it can answer."""
        if not self.has_started:
            reply = self._receive()
            if "error" in reply:
                raise QueryError(reply["error"])
            self.has_started = True

    def answer(self, text: str, revision: int) -> Reply:
        """The answer to a query about the runs as they are at a revision, or later."""
        self._send({"text": text, "revision": revision})
        return self._receive()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def tidy_up(self) -> None:
        """Remove what a process that was killed leaves behind."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            _close(stream)
        shutil.rmtree(spill_directory(self._process.pid), ignore_errors=True)

    def _send(self, message: Reply) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            # It has ended, as the next look at its answers finds too.
            pass

    def _receive(self) -> Reply:
        assert self._process.stdout
        line = self._process.stdout.readline()
        # Who asks for more than the system gives may also be killed by it.
        return json.loads(line) if line.endswith(b"\n") else {"error": NEEDS_MEMORY, "ends": True}


def _close(stream: IO[bytes] | None) -> None:
    try:
        if stream:
            stream.close()
    except OSError:
        # A line that was never read cannot be written now.
        pass


class SqlProcesses:
    """The processes that wait for a query, and those that answer one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[SqlProcess] = []
        self._all: set[SqlProcess] = set()
        self._lock = Lock()
        self._is_closed = False

    def prepare(self, revision: int) -> None:
        """Have a process ready before anybody asks."""
        self.give_back(self.take(revision))

    def take(self, revision: int) -> SqlProcess:
        """A process that nobody else has."""
        with self._lock:
            if self._is_closed:
                raise QueryError("the explorer has ended")
            if self._idle:
                return self._idle.pop()
            process = SqlProcess(self._settings, revision)
            self._all.add(process)
            return process

    def give_back(self, process: SqlProcess) -> None:
        """Keep a process for the next query."""
        with self._lock:
            self._idle.append(process)

    def drop(self, process: SqlProcess) -> None:
        """End a process."""
        with self._lock:
            self._all.discard(process)
        process.tidy_up()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            processes = [*self._all]
        for process in processes:
            process.kill()
        for process in processes:
            process.tidy_up()


class SqlQuery:
    """A query in SQL, which can be stopped."""

    def __init__(self, processes: SqlProcesses, text: str, revision: int) -> None:
        self._processes = processes
        self._text = text
        self._revision = revision
        self._process: SqlProcess | None = None  # which computes the answer
        self._is_stopped = False
        self._lock = Lock()
        self._starting_since: float | None = None  # while it waits for its process to start
        self._seconds_started = 0.0

    @property
    def seconds_starting(self) -> float:
        """Seconds for which it has waited for its process to start: these are not its own."""
        since = self._starting_since
        return self._seconds_started if since is None else time.monotonic() - since

    def answer(self) -> Reply:
        """The answer. It is an error if there is none."""
        process = self._processes.take(self._revision)
        # A process that has not started is never killed: the next query would wait for another.
        self._starting_since = time.monotonic()
        try:
            process.start()
        except QueryError:
            self._processes.drop(process)
            raise
        with self._lock:
            self._seconds_started = self.seconds_starting
            self._starting_since = None
            if self._is_stopped:
                self._processes.give_back(process)
                raise QueryError("stopped")
            self._process = process
        reply = process.answer(self._text, self._revision)
        with self._lock:
            self._process = None
        if self._is_stopped or reply.pop("ends", False):
            self._processes.drop(process)
            self._processes.prepare(self._revision)
        else:
            self._processes.give_back(process)
        if "error" in reply:
            raise QueryError(reply["error"])
        return reply

    def interrupt(self) -> None:
        """End the process that computes the answer."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """Nothing of it is left open."""


def answer_queries() -> None:
    """Answer queries from stdin until it ends, as the process that does nothing else."""
    os.nice(NICENESS)
    leave_pandas_out()
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    messages: queue.Queue[Reply] = queue.Queue()
    Thread(target=_read_messages, args=[messages], daemon=True).start()
    first = messages.get()
    revision = first.pop("revision")
    runs = _Runs(Settings(**first))
    reply = _in_one_line(lambda: {"has_started": bool(runs.at(revision))})
    while True:
        answers.write(json.dumps(reply, allow_nan=False).encode() + b"\n")
        answers.flush()
        message = messages.get()
        reply = _in_one_line(lambda: runs.answer(**message))  # noqa: B023 - called at once


def _read_messages(messages: "queue.Queue[Reply]") -> None:
    """Read messages while a query is being answered: if they end, so does this process."""
    for line in sys.stdin.buffer:
        messages.put(json.loads(line))
    shutil.rmtree(spill_directory(os.getpid()), ignore_errors=True)
    os._exit(0)


def _in_one_line(reply: Callable[[], Reply]) -> Reply:
    """A reply, or what it fails with."""
    try:
        with memory_errors_in_one_line():
            return reply()
    except HeadcountError as error:
        # A query that took all memory leaves it in pieces.
        return {"error": str(error), "ends": str(error) == NEEDS_MEMORY}


class _Runs:
    """The runs that queries are about."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._memory_of_runs = RunMemory()
        self._database: RunDatabase | None = None
        self._revision: int | None = None

    def at(self, revision: int) -> RunDatabase:
        """The runs, opened anew if the explorer has done so."""
        if self._database is None or revision != self._revision:
            if self._database is not None:
                self._database.close()
                self._database = None
            allow_all_memory()
            settings = self._settings
            read = self._memory_of_runs.read_run
            database = open_runs(
                settings.path, code=settings.code, memory=settings.memory, read=read
            )
            hold_to_memory(database.cursor())
            self._database, self._revision = database, revision
        return self._database

    def answer(self, text: str, revision: int) -> Reply:
        """The first rows of an answer."""
        # One row more than is shown tells whether there are more.
        answer = run_query(self.at(revision), text, MOST_ROWS + 1)
        rows: list[list[object]] = []
        byte_count = 0
        for batch in answer.batches():
            byte_count += batch.nbytes
            if byte_count > MOST_BYTES:
                raise QueryError(
                    f"the answer has more than {MOST_BYTES // 2**20} MB; ask for fewer columns or "
                    "rows, or write it to a file with headcount query -o"
                )
            rows += [[_cell(value) for value in row] for row in rows_of(batch)]
        return {
            "columns": answer.schema.names,
            "rows": rows[:MOST_ROWS],
            "has_more": len(rows) > MOST_ROWS,
        }


def _cell(value: object) -> object:
    """A value as the page shows it. Text is cut, and what JSON does not have becomes text."""
    # JavaScript would round a larger number. As text it keeps its digits.
    is_exact = isinstance(value, int) and abs(value) < 2**53
    if value is None or is_exact or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
