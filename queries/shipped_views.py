"""The views that are `.sql` files of a folder, and why one cannot be answered from some runs."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path

import duckdb

from queries.descriptions import PREFIXES
from queries.sql_text import quoted_name, text_literal
from schemas.kinds import KINDS

QUERIES = Path(__file__).parent
"""The folder whose `.sql` files become views. The stem is the name, the first comment the
description.
"""


def create_shipped_views(connection: duckdb.DuckDBPyConnection, folder: Path) -> dict[str, str]:
    """Make each `.sql` file a view, and return their descriptions by name.

    A query that needs a column which no run has becomes a view that says so when it is asked.
    """
    connection.execute("CREATE TABLE ledger.unmeasured_views (view TEXT, column_name TEXT)")
    queries = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.sql"))}
    errors = _create_in_rounds(connection, queries)
    sql = "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main'"
    known_columns = {column for (column,) in connection.execute(sql).fetchall()}
    for view in errors:
        _create_failing_view(connection, view, errors, known_columns)
    return {name: first_comment(sql) for name, sql in queries.items()}


def _create_in_rounds(
    connection: duckdb.DuckDBPyConnection, queries: Mapping[str, str]
) -> dict[str, duckdb.Error]:
    """Create the views in any order that works. Returns the errors of those that cannot be."""
    errors: dict[str, duckdb.Error] = {}
    uncreated = dict(queries)
    while uncreated:
        waiting: list[str] = []
        for name, sql in uncreated.items():
            try:
                connection.execute(f"CREATE VIEW {quoted_name(name)} AS {sql}")
                errors.pop(name, None)
            except duckdb.Error as error:
                errors[name] = error
                # It may read a view that the next round finds. Other errors would come again.
                if isinstance(error, duckdb.CatalogException):
                    waiting.append(name)
        if len(waiting) == len(uncreated):
            break
        uncreated = {name: queries[name] for name in waiting}
    return errors


def _create_failing_view(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    errors: Mapping[str, duckdb.Error],
    known_columns: Container[str],
) -> None:
    """Create a view that has no rows and fails with a message when it is asked."""
    problem = _first_line(errors[view])
    column = _unmeasured_column(view, errors, known_columns)
    if column is not None:
        problem = f"it needs column {column!r}, which none of them measured{way_to(column)}"
        connection.execute("INSERT INTO ledger.unmeasured_views VALUES (?, ?)", [view, column])
    message = text_literal(f"view {view!r} cannot be answered from these runs: {problem}")
    # The condition makes SELECT count(*) fail too, which does not compute the column.
    connection.execute(
        f"CREATE VIEW {quoted_name(view)} AS SELECT error({message}) AS missing WHERE "
        f"error({message}) IS NULL"
    )


def way_to(column: str) -> str:
    """How the next scan measures a column that no run has. Empty if no scan can."""
    base_names = [column.removeprefix(prefix) for prefix in ("", *PREFIXES, "chance_")]
    for kind in KINDS:
        for name in base_names:
            if kind.named_by is None and name in kind.registry:
                return f"; add {name!r} to {kind.field} in a scan, and scan again"
    return ""


def _unmeasured_column(
    view: str, errors: Mapping[str, duckdb.Error], known_columns: Container[str]
) -> str | None:
    """The column that a view, or one that it reads, needs and no table has.

    None if something else is wrong with the view.
    """
    # Follow the view to the one that it reads, as often as there are views that failed.
    for _ in errors:
        message = _first_line(errors[view])
        column = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', message)
        if column and isinstance(errors[view], duckdb.BinderException):
            return None if column[1] in known_columns else column[1]
        missing_view = re.search(r"Table with name (\S+) does not exist", message)
        if missing_view is None or missing_view[1] not in errors:
            return None
        view = missing_view[1]
    return None


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0]


def first_comment(sql: str) -> str:
    """The comment that a query starts with, on one line.

    >>> first_comment("-- Heads, ranked.\\n-- Two lines.\\nFROM heads -- not this")
    'Heads, ranked. Two lines.'
    """
    lines: list[str] = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)
