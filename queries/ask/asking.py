"""Runs opened for queries: SQL goes in, rows come out, and a mistake is one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from headcount.queries.ask.answers import run_query
from headcount.queries.open.limits import MEMORY
from headcount.queries.open.named_queries import QUERIES
from headcount.queries.open.opened_runs import OpenedRuns, say_nothing
from headcount.queries.open.rooms import EXPLAINED, QUERY_ERROR
from headcount.queries.open.run import ReadRun, read_run
from headcount.queries.open.verified_files import Tell
from headcount.schemas.errors import QueryError
from headcount.schemas.packages import entered
from headcount.schemas.places import Place

Row: TypeAlias = tuple[Any, ...]
Record: TypeAlias = dict[str, Any]  # a row by the names of its columns

NO_VIEWS: Mapping[str, str] = {}


class RunDatabase(OpenedRuns):
    """Opened runs that answer queries."""

    def rows(self, sql: str) -> list[Row]:
        """The rows of an answer."""
        self.hold_to_commits(sql)
        try:
            return self.connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise entered(EXPLAINED)(error, self, sql) from None

    def records(self, query: str) -> list[Record]:
        """The rows of an answer by name of column. `query` is SQL or the name of a view."""
        answer = run_query(self, query)
        names = answer.schema.names
        return [dict(zip(names, row, strict=True)) for row in answer.rows()]

    def table(self, query: str) -> pa.Table:
        """The rows of an answer to SQL or a view's name, as a table with `to_pandas`."""
        return run_query(self, query).table()


def open_runs(
    path: str | Place,
    views: Mapping[str, str] = NO_VIEWS,
    queries: Path = QUERIES,
    code: str | None = None,
    memory: str = MEMORY,
    tell: Tell = say_nothing,
    read: ReadRun = read_run,
) -> RunDatabase:
    """Open a run directory or a directory of runs, as `OpenedRuns.open` says.

    `views` adds views, SQL by name.
    """
    database = RunDatabase.open(path, queries, code, memory, tell, read)
    for name, sql in views.items():
        try:
            database.add_view(name, sql)
        except duckdb.Error as error:
            raise QueryError(f"view {name}: {entered(QUERY_ERROR)(error)}") from None
    return database
