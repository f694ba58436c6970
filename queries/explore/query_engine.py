"""Answers queries about runs on threads: each has a deadline, and can be interrupted."""

import asyncio
import contextlib
import json
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Annotated, Any, Literal, Protocol, TypeVar

import duckdb
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headcount.queries.answers.examples import Texts, with_texts
from headcount.queries.answers.page_queries import Answer, Query
from headcount.queries.answers.page_runs import PageQuery, PageRuns
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.ask.mistakes import query_error
from headcount.queries.ask.text_formats import json_value
from headcount.queries.explore.attention import Attention
from headcount.queries.explore.sql_process import Settings, SqlProcesses, SqlQuery
from headcount.queries.open.limits import MEMORY, share_of
from headcount.queries.open.run_memory import RunMemory
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.schemas.values import EXPECTED, wrong_value
from headcount.workers.run_model import RunModels

DEADLINE = 20.0  # seconds after which a query is given up by default

FRESH_SECONDS = 2.0  # a page that asks so soon gets the runs as they were seen last
INTERRUPT_SECONDS = 0.02  # between two interrupts: one that comes too early is lost

CLOSING_SECONDS = 2.0  # seconds in which running queries are stopped when the server ends
THREADS = 2  # Queries of the page that are answered at once. DuckDB uses all cores for each.

T = TypeVar("T")


class Stoppable(Protocol):
    """What computes an answer on a thread."""

    @property
    def seconds_starting(self) -> float:
        """Seconds that are not its own: it could not begin yet."""
        ...

    def interrupt(self) -> None:
        """Stop it. What has not begun may have to be interrupted again."""

    def close(self) -> None:
        """Let go of what it holds, at its end."""


S = TypeVar("S", bound=Stoppable)


class Overview(BaseModel):
    """Asks for the list of runs as they are committed now."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["overview"]


class Sql(BaseModel):
    """A query in SQL, as `headcount query` answers it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["sql"]
    text: Annotated[str, Field(max_length=100_000)]


Asked = Annotated[PageQuery | Attention | Overview | Sql, Field(discriminator="kind")]

ASKED: TypeAdapter[Query | Overview | Sql] = TypeAdapter(Asked)  # reads whatever the page may ask


class Engine:
    """Answers the queries of a page about the runs at a place."""

    def __init__(
        self,
        path: str,
        *,
        code: str | None = None,
        model: str | None = None,
        memory: str = MEMORY,
        deadline: float = DEADLINE,
        fresh_seconds: float = FRESH_SECONDS,
    ) -> None:
        self.path = path
        self.code = code
        self.memory = memory
        self.deadline = deadline
        self.fresh_seconds = fresh_seconds
        self.models = RunModels(path, model)
        self.cache = AnswerCache()
        self.memory_of_runs = RunMemory()
        self.threads = ThreadPoolExecutor(THREADS, "query")
        # A long query of the user's must not hold up the page. Each has a process of its own; all
        # processes together take as much memory as the page may.
        self.sql_threads = ThreadPoolExecutor(THREADS, "sql")
        self.sql_processes = SqlProcesses(Settings(path, code, share_of(memory, 2 * THREADS)))
        # A model is loaded once, and by one thread, which holds up no other query.
        self.model_thread = ThreadPoolExecutor(1, "model")
        # A tokenizer is opened once, and by one thread.
        self.text_thread = ThreadPoolExecutor(1, "text")
        # One look at a time: files may take long to read.
        self.look_thread = ThreadPoolExecutor(1, "look")
        self.interrupted = 0  # queries that were stopped: too long, or nobody waited
        self._running: dict[Future[Any], Stoppable] = {}
        # asyncio itself holds tasks weakly: one that nobody else holds may vanish before it ends.
        self._stopping: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self.runs = self._open()
        self._looked = time.monotonic()

    async def ask(self, body: bytes) -> bytes:
        """The packed answer to a query in JSON."""
        try:
            query = ASKED.validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "query"
            is_known = first["type"] in EXPECTED
            why = wrong_value(field, [first]) if is_known else f"{field}: {first['msg']}"
            raise QueryError(why) from None
        if isinstance(query, Overview):
            # While another look is on its way, the page gets what is known. It asks again soon.
            is_stale = time.monotonic() - self._looked > self.fresh_seconds
            if is_stale and not self._opening.locked():
                await self.look_again()
            return _packed(self.runs, Answer(self.runs.overview()))
        if isinstance(query, Sql):
            began = time.perf_counter()
            text = query.text
            # Kept by a name: the runs may be opened anew before the rows are there.
            runs = self.runs
            query_in_sql = SqlQuery(self.sql_processes, text, runs.revision)
            header = await self._in_thread(self.sql_threads, query_in_sql, SqlQuery.answer)
            seconds = round(time.perf_counter() - began, 3)
            return _packed(runs, Answer(header | {"seconds": seconds}))
        key = f"{self.runs.revision} {query.model_dump_json()}"
        return await self.cache.get(key, lambda: self._answer(query))

    async def prepare(self) -> None:
        """Look at the files, and answer what a page asks first, before it does."""
        # What fails here fails again when the page asks, and is said there.
        with contextlib.suppress(HeadcountError):
            await self.look_again()
            query = self.runs.first_query()
            await self.ask(query.model_dump_json().encode())
            # A first click needs the axes of the histograms that are shown first, perhaps a sample,
            # and whole rows.
            runs, histograms = self.runs, self.runs.first_histograms()
            with contextlib.suppress(duckdb.Error):
                await self._in_thread(
                    self.threads,
                    self._interruptible(runs),
                    lambda cursors: runs.facts_for(histograms, cursors.cursor()),
                )
            self.sql_processes.prepare(self.runs.revision)
            await self.look_again(rows=True)

    async def look_again(self, rows: bool = False) -> None:
        """Open the runs anew if they changed; `rows` compares their rows with the commits."""
        async with self._opening:
            loop = asyncio.get_running_loop()
            self.runs = await loop.run_in_executor(self.look_thread, self._current_runs, rows)
            self._looked = time.monotonic()

    def close(self) -> None:
        """Take no more queries, and stop those that are being answered."""
        self.sql_processes.close()
        pools = (
            self.threads,
            self.sql_threads,
            self.text_thread,
            self.model_thread,
            self.look_thread,
        )
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)
        give_up = time.monotonic() + CLOSING_SECONDS
        while self._running and time.monotonic() < give_up:
            for query in list(self._running.values()):
                query.interrupt()
            time.sleep(INTERRUPT_SECONDS)

    def _open(self) -> PageRuns:
        memory = share_of(self.memory, 2)
        read = self.memory_of_runs.read_run
        database = open_runs(self.path, code=self.code, memory=memory, read=read)
        return PageRuns(database, revision=time.time_ns())

    def _current_runs(self, rows: bool) -> PageRuns:
        """The runs as they are now: the opened ones, if nothing has changed."""
        self.runs.verify(rows)
        if self.runs.is_current(self.path, self.code, self.memory_of_runs.read_run):
            return self.runs
        # Before it answers: rows that were compared before are compared in the new state too.
        runs = self._open().verified(self.runs.has_verified_rows)
        self.cache.clear()
        return runs

    async def _answer(self, query: Query) -> bytes:
        while True:
            runs = self.runs
            needs_rows = query.reads_rows(runs.facts(query.scope.run_id))
            if runs.is_verified and (runs.has_verified_rows or not needs_rows):
                break
            # Without a damaged roll-up, the query may read rows.
            await self.look_again(rows=needs_rows)
        try:
            answer = await self._compute(runs, query)
        except duckdb.Error as error:
            if isinstance(error, duckdb.InterruptException | duckdb.OutOfMemoryException):
                raise query_error(error) from None
            # A file may have gone or changed under the page. Whole ones are still read, once more.
            await self.look_again()
            if self.runs is runs:
                raise query_error(error) from None
            runs = self.runs
            answer = await self._compute(runs, query)
        if isinstance(query, Attention):
            stored, models = answer, self.models
            answer = await self._in_thread(
                self.model_thread,
                self._interruptible(runs),
                lambda _: query.with_weights(stored, models),
            )
        if isinstance(query, Texts | Attention):
            # Without a deadline: a tokenizer has nothing that could interrupt it.
            answer = await asyncio.get_running_loop().run_in_executor(
                self.text_thread, with_texts, answer, self.models, query.scope.run_id
            )
        return _packed(runs, answer)

    async def _compute(self, runs: PageRuns, query: Query) -> Answer:

        return await self._in_thread(
            self.threads,
            self._interruptible(runs),
            lambda cursors: runs.answer(query, cursors.cursor()),
        )

    def _interruptible(self, runs: PageRuns) -> "Interruptible":
        return Interruptible(runs.database)

    async def _in_thread(self, threads: ThreadPoolExecutor, query: S, work: Callable[[S], T]) -> T:
        """Do some work on a thread, until the deadline or until nobody waits for it."""
        job = threads.submit(work, query)
        # In this order: a job that has ended by now calls back at once.
        self._running[job] = query
        job.add_done_callback(self._ended)
        result = asyncio.wrap_future(job)
        result.add_done_callback(_take_error)
        try:
            began = time.monotonic()
            while (left := began + self.deadline + query.seconds_starting - time.monotonic()) > 0:
                # Whoever leaves does not cancel the result, which would not stop the thread.
                done, _ = await asyncio.wait([result], timeout=left)
                if done:
                    return result.result()
        except asyncio.CancelledError:
            self._stop(job)
            raise
        self._stop(job)
        raise QueryError(
            f"stopped after {self.deadline:g} s without an answer; headcount explore --timeout "
            "SECONDS waits longer"
        )

    def _ended(self, job: Future[Any]) -> None:
        query = self._running.pop(job, None)
        if query is not None:
            query.close()

    def _stop(self, job: Future[Any]) -> None:
        """Stop a query: at once if it has not begun, and else by interrupts."""
        self.interrupted += 1
        if not job.cancel():
            task = asyncio.create_task(self._interrupt(job))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def _interrupt(self, job: Future[Any]) -> None:
        while query := self._running.get(job):
            query.interrupt()
            await asyncio.sleep(INTERRUPT_SECONDS)


def _take_error(result: asyncio.Future[Any]) -> None:
    """Take note of an error that nobody waits for any more: Python would print it at the end."""
    if not result.cancelled():
        result.exception()


def _packed(runs: PageRuns, answer: Answer) -> bytes:
    """An answer as bytes: the length of the header, the header as JSON, the arrays.

    The header says which state of the runs it is of. All begin at a multiple of eight bytes, so
    that the page reads the arrays where they are.
    """
    arrays = [np.ascontiguousarray(array) for array in answer.arrays]
    kinds = [[array.dtype.str, list(array.shape)] for array in arrays]
    content = answer.header | {"revision": str(runs.revision), "arrays": kinds}
    header = json.dumps(json_value(content), allow_nan=False, default=str).encode()
    # Four bytes, the length, stand before the header.
    header += b" " * (-(len(header) + 4) % 8)
    parts = [struct.pack("<I", len(header)), header]
    for array in arrays:
        parts += [array.tobytes(), b"\0" * (-array.nbytes % 8)]
    return b"".join(parts)


MOST_ANSWERS = 256  # answers that are kept
MOST_KEPT_BYTES = 64 * 2**20  # bytes of all answers that are kept
Compute = Callable[[], Coroutine[Any, Any, bytes]]  # computes an answer


class AnswerCache:
    """Answers by key. What is committed never changes, so a key that names it is enough."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._pending: dict[str, tuple[asyncio.Task[bytes], list[object]]] = {}
        """Queries that are being answered, each with one object for whoever waits for it."""
        self._bytes = 0

    async def get(self, key: str, compute: Compute) -> bytes:
        """The answer, from the cache if it is there."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        if key not in self._pending:
            self._pending[key] = asyncio.create_task(compute()), []
        pending = task, waiting = self._pending[key]
        waiting.append(None)
        try:
            # Shielded: one page that leaves does not stop it for the others.
            answer = await asyncio.shield(task)
        finally:
            waiting.pop()
            if not waiting:
                # Nobody waits any more: an unfinished query is stopped.
                task.cancel()
                if self._pending.get(key) is pending:
                    del self._pending[key]
        # Another that waited for the same answer may have kept it.
        if key not in self._answers and len(answer) <= MOST_KEPT_BYTES:
            self._answers[key] = answer
            self._bytes += len(answer)
            while len(self._answers) > MOST_ANSWERS or self._bytes > MOST_KEPT_BYTES:
                _, oldest = self._answers.popitem(last=False)
                self._bytes -= len(oldest)
        return answer

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()
        self._bytes = 0


class Interruptible:
    """Remembers the cursors that a query makes of a database, so that they can be stopped."""

    seconds_starting = 0.0

    def __init__(self, database: RunDatabase) -> None:
        self._database = database
        self._cursors: list[duckdb.DuckDBPyConnection] = []
        self._lock = Lock()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A new cursor."""
        cursor = self._database.cursor()
        with self._lock:
            self._cursors.append(cursor)
        return cursor

    def interrupt(self) -> None:
        """Stop whatever its cursors compute. One that has not begun must be interrupted again."""
        with self._lock:
            for cursor in self._cursors:
                with contextlib.suppress(duckdb.Error):
                    cursor.interrupt()

    def close(self) -> None:
        """Close its cursors. Nothing may use them any more."""
        with self._lock:
            for cursor in self._cursors:
                cursor.close()
            self._cursors.clear()
