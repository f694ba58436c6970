"""Runs opened for queries: SQL goes in, rows come out, and a mistake is one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from headcount.queries.ask.answers import run_query
from headcount.queries.ask.mistakes import explained, query_error
from headcount.queries.ask.named_queries import QUERIES
from headcount.queries.open.connection import (
    MEMORY,
    OPENED,
    connect,
    damage_lines,
    hold_to_commits,
    make_views,
)
from headcount.queries.open.run import ReadRun, read_run
from headcount.queries.open.verified_files import Tell
from headcount.schemas.errors import QueryError
from headcount.schemas.places import Place

Row: TypeAlias = tuple[Any, ...]
Record: TypeAlias = dict[str, Any]  # a row by the names of its columns

NO_VIEWS: Mapping[str, str] = {}


class RunDatabase:
    """The views of some runs, and what these runs did not measure."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection

    def rows(self, sql: str) -> list[Row]:
        """The rows of an answer."""
        hold_to_commits(self.connection, sql)
        try:
            return self.connection.execute(sql).fetchall()
        except duckdb.Error as error:
            raise explained(error, self.connection, sql) from None

    def records(self, query: str) -> list[Record]:
        """The rows of an answer by name of column. `query` is SQL or the name of a view."""
        answer = run_query(self.connection, query)
        names = answer.schema.names
        return [dict(zip(names, row, strict=True)) for row in answer.rows()]

    def table(self, query: str) -> pa.Table:
        """The rows of an answer to SQL or a view's name, as a table with `to_pandas`."""
        return run_query(self.connection, query).table()

    def columns(self, view: str) -> frozenset[str]:
        """Names of a view's columns."""
        make_views(self.connection, view)
        sql = (
            "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main' AND table_name = ?"
        )
        return frozenset(name for (name,) in self.connection.execute(sql, [view]).fetchall())

    def unmeasured_views(self, query: str | None = None) -> dict[str, str]:
        """Views of a query, or all, that cannot be answered, each with the column it lacks."""
        make_views(self.connection, query)
        return dict(OPENED[self.connection].shipped.unmeasured)

    def damage(self) -> list[str]:
        """One line for each run that cannot be read, or of which damage was found until now."""
        return damage_lines(OPENED[self.connection])


def open_runs(
    path: str | Place,
    views: Mapping[str, str] = NO_VIEWS,
    queries: Path = QUERIES,
    code: str | None = None,
    memory: str = MEMORY,
    tell: Tell = lambda line: None,
    read: ReadRun = read_run,
) -> RunDatabase:
    """Open a run directory or a directory of runs.

    `views` adds views, SQL by name. `code` reads only the shards that it measured. `memory` is
    what queries may take. `tell` is called with a line whenever a query finds damage. `read` may
    remember runs that were opened before.
    """
    connection = connect(path, queries, code, memory, tell, read)
    for name, sql in views.items():
        OPENED[connection].added_views[name] = sql
        # DuckDB opens a file to create a view, and a damaged one would fail.
        hold_to_commits(connection, sql)
        try:
            connection.execute(f"CREATE VIEW {name} AS {sql}")
        except duckdb.Error as error:
            raise QueryError(f"view {name}: {query_error(error)}") from None
    return RunDatabase(connection)
