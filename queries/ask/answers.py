"""Asking a query: SQL or the name of a view goes in, rows come out, read once."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from headcount.queries.ask.values import python_values
from headcount.queries.open.limits import spill_directory
from headcount.queries.open.opened_runs import OpenedRuns, is_of_gone_file
from headcount.queries.open.rooms import CHECK_VALUES, EXPLAINED, QUERY_ERROR
from headcount.queries.open.sql_text import quoted_name
from headcount.schemas.errors import LISTINGS, QueryError, unknown_among
from headcount.schemas.packages import entered
from headcount.schemas.process import UNENDING

BATCH_ROWS = 10_000  # rows that DuckDB hands over at once
ATTEMPTS = 20  # how often a query is asked whose files are merged before it has read them

INTERRUPT_SECONDS = 0.1  # between two tries to interrupt a query
STOPPING_SECONDS = 1.0  # in which DuckDB stops after an interrupt, unless it is inside a function

TEXT_TYPES = {"uhugeint", "bignum", "bit", "time with time zone", "variant"}
"""DuckDB's types whose values Arrow has otherwise: above 2^127 an integer becomes negative, a time
loses its zone, and others are bytes of DuckDB's own. They leave as text.
"""

EXPLAIN = re.compile(r"(?:\s|--.*\n|/\*.*?\*/)*EXPLAIN(?:\s+ANALYZE)?\b", re.IGNORECASE)
"""What an EXPLAIN begins with, after spaces and comments."""

T = TypeVar("T")


class Patience:
    """Waits for DuckDB, and stops it after some seconds or on Ctrl-C.

    DuckDB computes in a thread of its own, because Python handles no signal while it is inside a
    library. Only the seconds that DuckDB computes count, not those in which somebody reads rows.
    """

    def __init__(self, cursor: duckdb.DuckDBPyConnection, seconds: float | None) -> None:
        self.cursor = cursor
        self.seconds_allowed = seconds
        # Python cannot wait longer than this, three centuries.
        self.seconds_left = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)

    def wait(self, call: Callable[[], T]) -> T:
        """What a call to DuckDB returns."""
        answer: Future[T] = Future()

        def settle() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        began = time.monotonic()
        # A daemon: if DuckDB cannot be stopped, Python ends without it.
        threading.Thread(target=settle, daemon=True).start()
        try:
            return answer.result(self.seconds_left)
        except BaseException as error:
            if answer.done():
                # The call's own error.
                raise
            # A timeout, Ctrl-C, or another signal that ends the command.
            self._stop(answer)
            if not isinstance(error, TimeoutError):
                raise
            raise QueryError(
                f"stopped after {self.seconds_allowed:g} s without an answer; --timeout SECONDS "
                "waits longer, --timeout 0 as long as it takes"
            ) from None
        finally:
            if self.seconds_left is not None:
                # Never 0: a result that is there already is still worth taking.
                self.seconds_left = max(self.seconds_left - time.monotonic() + began, 0.001)

    def _stop(self, answer: Future[Any]) -> None:
        """Interrupt what DuckDB computes, for a while here and then on another thread.

        An interrupt before DuckDB has begun is lost, so one is not enough. And DuckDB hears none
        inside of a function, such as `repeat`.
        """
        give_up = time.monotonic() + STOPPING_SECONDS
        while not self._is_stopped(answer):
            if time.monotonic() > give_up:
                UNENDING[answer] = partial(
                    shutil.rmtree, spill_directory(os.getpid()), ignore_errors=True
                )
                answer.add_done_callback(lambda _: UNENDING.pop(answer, None))
                threading.Thread(target=self._keep_stopping, args=[answer], daemon=True).start()
                return

    def _keep_stopping(self, answer: Future[Any]) -> None:
        while not self._is_stopped(answer):
            pass

    def _is_stopped(self, answer: Future[Any]) -> bool:
        self.cursor.interrupt()
        return bool(wait([answer], INTERRUPT_SECONDS).done)


@dataclass
class Answer:
    """The rows of an answer, read once, batch by batch."""

    patience: Patience
    reader: pa.RecordBatchReader
    schema: pa.Schema  # names and types of the columns
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    """Metadata of columns, by name, for files that carry some."""
    change: Callable[[pa.RecordBatch], pa.RecordBatch] | None = None
    """What becomes of each batch before it is handed out."""
    rows_read: int = 0
    first_rows: dict[Any, int] = field(default_factory=dict[Any, int])
    """The row in which each run is met first, if the answer has a column run_id."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as Arrow batches."""
        while True:
            try:
                # DuckDB computes while it is read, so every batch may fail or take too long.
                batch = self.patience.wait(lambda: next(iter(self.reader), None))
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                raise entered(QUERY_ERROR)(error) from None
            if batch is None:
                return
            self._note_runs(batch)
            self.rows_read += batch.num_rows
            yield self.change(batch) if self.change else batch

    def _note_runs(self, batch: pa.RecordBatch) -> None:
        if self.schema.names.count("run_id") != 1:
            return
        column = batch.column("run_id")
        for run_id in column.unique().to_pylist():
            if run_id not in self.first_rows:
                row_in_batch = column.to_pylist().index(run_id)
                self.first_rows[run_id] = self.rows_read + row_in_batch

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows, as Python values."""
        for batch in self.batches():
            yield from rows_of(batch)

    def table(self) -> pa.Table:
        """The rows as one table."""
        # The schema is given because an answer without rows has no batch that would have it.
        return pa.Table.from_batches(self.batches(), schema=self.schema)


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch, as Python values."""
    return zip(*map(python_values, batch.columns), strict=True)


def run_query(
    opened: OpenedRuns,
    text: str,
    limit: int | None = None,
    timeout: float | None = None,
) -> Answer:
    """Ask for a view by name, or in SQL. Nothing is computed twice and nothing can be written."""
    if not text.strip():
        raise QueryError(
            "the query is empty: expected the name of a view, or SQL; without a query, "
            "headcount query RUNS lists the views"
        )
    views = opened.view_descriptions
    is_view = text.strip().lower() in views
    # A single word is no SQL, so it is a view with a mistake in its name.
    if not is_view and re.fullmatch(r"\s*\w+\s*", text):
        raise QueryError(unknown_among("view", text.strip(), views, LISTINGS["view"]))
    explain, sql = _one_query(f"FROM {text}" if is_view else text)
    # The rows of an EXPLAIN are the plan, not the answer, so a limit would cut the plan.
    limit_clause = f" LIMIT {limit}" if limit is not None and not explain else ""
    # In a subquery nothing can write. On lines of its own: the query may end in a comment.
    subquery = f"FROM (\n{sql}\n)"
    if opened.shipped.called_in(sql):
        entered(CHECK_VALUES)(opened, sql)
    cursor = opened.cursor()
    patience = Patience(cursor, timeout)

    def start() -> pa.RecordBatchReader:
        # A second lock, beside the subquery: nothing can be written in this transaction.
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        relation = cursor.sql(f"{explain}{subquery}{limit_clause}")
        return with_text_types(relation).to_arrow_reader(BATCH_ROWS)

    for attempt in range(1, ATTEMPTS + 1):
        opened.hold_to_commits(subquery)
        try:
            reader = patience.wait(start)
            return Answer(patience, reader, reader.schema)
        except duckdb.Error as error:
            # Files may be merged into others after they were compared with their commits.
            if attempt == ATTEMPTS or not is_of_gone_file(str(error)):
                raise entered(EXPLAINED)(error, opened, subquery) from None
            cursor.rollback()
    raise AssertionError


def with_text_types(relation: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """An answer whose values Arrow has as they are; those that it has not are text."""
    text_types = [text_type(each) for each in relation.types]
    if text_types == list(map(str, relation.types)):
        return relation
    columns = zip(map(quoted_name, relation.columns), relation.types, text_types, strict=True)
    return relation.project(
        ", ".join(
            name if text == str(type_) else f"{name}::{text} AS {name}"
            for name, type_, text in columns
        )
    )


def text_type(type_: Any) -> str:  # noqa: ANN401 - DuckDB's own
    """The type in SQL that has text for what Arrow does not have, also inside of others.

    >>> text_type(duckdb.type('STRUCT("a b" UHUGEINT[], c FLOAT)'))
    'STRUCT("a b" VARCHAR[], c FLOAT)'
    """
    kind: str = type_.id
    if kind in TEXT_TYPES:
        return "VARCHAR"
    if kind in ("list", "array"):
        child, *size = (value for _, value in type_.children)
        return f"{text_type(child)}[{''.join(map(str, size))}]"
    if kind in ("map", "tuple"):
        return f"{kind.upper()}({', '.join(text_type(child) for _, child in type_.children)})"
    if kind in ("struct", "union"):
        # The first child of a union says which of the others a value is.
        members = type_.children[1:] if kind == "union" else type_.children
        listed = (f"{quoted_name(name)} {text_type(child)}" for name, child in members)
        text = f"{kind.upper()}({', '.join(listed)})"
        return str(duckdb.type(text))
    return str(type_)


def _one_query(text: str) -> tuple[str, str]:
    """Split a single statement that reads into its EXPLAIN (empty if it has none) and its SQL."""
    try:
        statements = duckdb.extract_statements(text)
    except duckdb.Error as error:
        raise entered(QUERY_ERROR)(error) from None
    if len(statements) != 1:
        raise QueryError(
            f"expected the name of a view or one SQL statement, got {len(statements)} statements"
        )
    # So that it can stand in parentheses; semicolons inside strings and comments stay.
    content = bytearray(text.encode())
    for position, token_type in duckdb.tokenize(text):
        if token_type == duckdb.token_type.operator and content[position] == ord(";"):
            content[position] = ord(" ")
    sql = content.decode()
    statement_type = statements[0].type
    if statement_type == duckdb.StatementType.EXPLAIN:
        match = EXPLAIN.match(sql)
        end = match.end() if match else len(sql)
        # EXPLAIN ANALYZE runs its statement, so that one must be a query too.
        _, explained = _one_query(sql[end:])
        return f"{sql[:end]} ", explained
    # PIVOT without an IN list counts as several statements.
    if statement_type not in (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI):
        word = statement_type.name.replace("_", " ")
        raise QueryError(
            f"{word} is refused: queries are read-only; ask with SELECT, FROM, DESCRIBE or "
            "SUMMARIZE"
        )
    return "", sql
