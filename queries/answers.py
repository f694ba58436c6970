"""Asking a question: SQL or the name of a view goes in, rows come out, read once."""

from __future__ import annotations

import difflib
import re
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from queries.connection import hold_to_commits, view_descriptions, way_to
from schemas.errors import QueryError, printable, unknown

BATCH_ROWS = 10_000

STOPPING = 300
"""Tenths of a second that DuckDB has for stopping."""

T = TypeVar("T")


class Patience:
    """Waits for DuckDB, and stops it after some seconds or on Ctrl-C.

    DuckDB computes in a thread of its own: Python hears no signal while it is inside a library.
    Only the seconds that DuckDB computes count, not those in which somebody reads its rows.
    """

    def __init__(self, cursor: duckdb.DuckDBPyConnection, seconds: float | None) -> None:
        self.cursor, self.allowed, self.left = cursor, seconds, seconds

    def wait(self, call: Callable[[], T]) -> T:
        """What a call returns."""
        answer: Future[T] = Future()
        began = time.monotonic()
        threading.Thread(target=_settle, args=(answer, call), daemon=True).start()
        try:
            value = answer.result(self.left)
        except TimeoutError:
            self._stop(answer)
            raise QueryError(
                f"stopped after {self.allowed:g} s without an answer; --timeout SECONDS waits "
                "longer, --timeout 0 as long as it takes"
            ) from None
        except KeyboardInterrupt:
            self._stop(answer)
            raise
        if self.left is not None:
            self.left = max(self.left - (time.monotonic() - began), 0.001)
        return value

    def _stop(self, answer: Future[Any]) -> None:
        """Stop DuckDB and wait for its thread: Python cannot end while one is inside a library.

        An interrupt before DuckDB has begun is lost, so there are several.
        """
        for _ in range(STOPPING):
            self.cursor.interrupt()
            if wait([answer], timeout=0.1).done:
                return


def _settle(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)


@dataclass
class Answer:
    """The rows of an answer, read once, batch by batch."""

    patience: Patience
    reader: pa.RecordBatchReader
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Metadata of columns, by name, for files that carry some."""
    rows_read: int = 0

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        return self.reader.schema

    @property
    def described_schema(self) -> pa.Schema:
        """The same, with metadata."""
        return pa.schema([f.with_metadata(dict(self.facts.get(f.name, {}))) for f in self.schema])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as Arrow batches."""
        while (batch := self._next()) is not None:
            self.rows_read += batch.num_rows
            yield batch

    def _next(self) -> pa.RecordBatch | None:
        try:
            return self.patience.wait(lambda: next(iter(self.reader), None))
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise query_error(error) from None

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows, as Python values."""
        for batch in self.batches():
            yield from rows_of(batch)


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch, as Python values."""
    columns = [_values(column) for column in batch.columns]
    return zip(*columns, strict=True)


def run_query(
    connection: duckdb.DuckDBPyConnection,
    text: str,
    limit: int | None = None,
    timeout: float | None = None,
) -> Answer:
    """Ask for a view by name, or in SQL; nothing is computed twice and nothing can be written.

    The question runs as a subquery, in which DuckDB itself allows no statement that writes.
    """
    if not text.strip():
        raise QueryError(
            "the question is empty: expected the name of a view, or SQL; without a question, "
            "headcount query RUNS lists the views"
        )
    views = view_descriptions(connection)
    is_view = text.strip().lower() in views
    if not is_view and re.fullmatch(r"\s*\w+\s*", text):
        raise QueryError(unknown("view", text.strip(), views))
    prefix, sql = _one_question(f"FROM {text}" if is_view else text)
    # The rows of an EXPLAIN are the plan, not the answer.
    ending = f" LIMIT {limit}" if limit is not None and not prefix else ""
    hold_to_commits(connection, f"FROM (\n{sql}\n)")
    cursor = connection.cursor()
    patience = Patience(cursor, timeout)

    def start() -> pa.RecordBatchReader:
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        return cursor.sql(f"{prefix}FROM (\n{sql}\n){ending}").to_arrow_reader(BATCH_ROWS)

    try:
        reader = patience.wait(start)
    except duckdb.Error as error:
        raise query_error(error, views, _columns(connection)) from None
    return Answer(patience, reader)


def _one_question(text: str) -> tuple[str, str]:
    """Split a single SELECT-like statement into its EXPLAIN, if any, and the rest."""
    try:
        statements = duckdb.extract_statements(text)
    except duckdb.Error as error:
        raise query_error(error) from None
    if len(statements) != 1:
        raise QueryError(
            f"expected the name of a view or one SQL statement, got {len(statements)} statements"
        )
    sql, kind = _without_semicolons(text), statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        prefix = re.match(r"(?:\s|--.*\n|/\*.*?\*/)*EXPLAIN(?:\s+ANALYZE)?\b", sql, re.IGNORECASE)
        inner = sql[prefix.end() :] if prefix else ""
        return (prefix.group() + " " if prefix else "", _one_question(inner)[1])
    # PIVOT without an IN list counts as several statements.
    if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI):
        word = kind.name.replace("_", " ")
        raise QueryError(
            f"{word} is refused: queries are read-only; ask with SELECT, FROM, DESCRIBE or "
            "SUMMARIZE"
        )
    return "", sql


def _without_semicolons(text: str) -> str:
    """The one statement in `text` as it can stand in parentheses; inside strings and comments
    nothing changes.
    """
    content = bytearray(text.encode())
    for position, kind in duckdb.tokenize(text):
        if kind == duckdb.token_type.operator and content[position] == ord(";"):
            content[position] = ord(" ")
    return content.decode()


def _columns(connection: duckdb.DuckDBPyConnection) -> frozenset[str]:
    """The columns of all views."""
    sql = "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main'"
    return frozenset(name for (name,) in connection.cursor().execute(sql).fetchall())


def query_error(
    error: Exception,
    views: Mapping[str, str] | None = None,
    columns: Container[str] | None = None,
) -> QueryError:
    """Say in one line what DuckDB says in many, with the name that was probably meant among the
    names of all `views` and `columns`.
    """
    if isinstance(error, duckdb.OutOfMemoryException):
        return QueryError(
            "the question needs more memory than it may take, or more disk than is free for what "
            "does not fit; --memory 8GB gives it more, fewer columns or runs need less"
        )
    message = str(error).replace("Invalid Input Error: view ", "view ")
    if views and (name := re.search(r"Table with name (\S+) does not exist", message)):
        return QueryError(unknown("view", name[1], views))
    column = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', message)
    candidates = re.search(r"Candidate bindings: (.*)", message)
    unmeasured = column and columns is not None and column[1] not in columns
    if column and unmeasured and (way := way_to(column[1])):
        return QueryError(f"column {column[1]!r} was not measured in these runs{way}")
    if column and candidates:
        names = [name.rpartition(".")[2] for name in re.findall(r'"([^"]+)"', candidates[1])]
        near = difflib.get_close_matches(column[1], names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return QueryError(f"unknown column {column[1]!r}: {hint}Nearest: {', '.join(names)}")
    if "data-modifying" in message or "containing a COPY" in message:
        return QueryError("queries are read-only: a WITH clause cannot write")
    return QueryError(printable(" ".join(message.partition("\n\n")[0].split())))


def _values(column: pa.Array) -> list[Any]:
    """Python values; a float32 becomes the shortest number that means it, 0.1 and not
    0.10000000149011612.
    """
    if pa.types.is_float32(column.type):
        return [
            None if text is None else float(text) for text in column.cast(pa.string()).to_pylist()
        ]
    if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
        rows = column.cast(pa.list_(pa.string())).to_pylist()
        return [row and [None if text is None else float(text) for text in row] for row in rows]
    return column.to_pylist()
