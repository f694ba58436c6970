"""What is wrong with a query: one line instead of DuckDB's many, and the place in the SQL."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import duckdb

from headcount.queries.ask.named_queries import NamedQuery
from headcount.queries.open.connection import OPENED, view_descriptions
from headcount.queries.open.shipped_views import base_names, unmeasured_statistic, way_to
from headcount.schemas.errors import QueryError, printable, unknown

PLACE = re.compile(r"LINE \d+: (?P<line>.*)\n(?P<indent> *)(?P<carets>\^+)\s*$")
"""How DuckDB's messages end that know a place in the SQL."""


class SqlMistake(QueryError):
    """A query that DuckDB does not understand."""

    def __init__(self, text: str, pointer: str | None = None) -> None:
        super().__init__(text)
        self.pointer = pointer
        """The line of SQL with the mistake, and below it carets. None if no place is known."""


def query_error(error: Exception) -> SqlMistake:
    """Say in one line what DuckDB says in many."""
    message = str(error)
    if isinstance(error, duckdb.OutOfMemoryException):
        return SqlMistake(
            "the query needs more memory than it may take, or more disk than is free for what "
            "does not fit; --memory 8GB gives it more, fewer columns or runs need less"
        )
    if "data-modifying" in message or "containing a COPY" in message:
        return SqlMistake("queries are read-only: a WITH clause cannot write")
    # Views that cannot be answered fail with a message of ours, which DuckDB prefixes.
    text = message.removeprefix("Invalid Input Error: ")
    column = _missing_column(message)
    if column is not None and (line := _nearest_column(column, message)):
        text = line
    first_paragraph = text.partition("\n\n")[0]
    return SqlMistake(printable(" ".join(first_paragraph.split())), pointer_in(message))


def explained(error: duckdb.Error, connection: duckdb.DuckDBPyConnection, sql: str) -> SqlMistake:
    """What is wrong with a query, with the name of a view or column that was probably meant."""
    mistake = query_error(error)
    message = str(error)
    if not isinstance(error, duckdb.BinderException | duckdb.CatalogException):
        return mistake
    pointer = mistake.pointer
    if pointer is None:
        # DuckDB leaves the place out of the messages of relations, and says it of a statement.
        try:
            connection.cursor().execute(f"EXPLAIN {sql}")
        except duckdb.Error as error_of_statement:
            pointer = pointer_in(str(error_of_statement))
    line = _why_unknown(message, connection, sql)
    return SqlMistake(line or str(mistake), pointer)


def pointer_in(message: str) -> str | None:
    """The line of SQL that a message of DuckDB points at, and carets below the place.

    >>> print(pointer_in("no such column\\n\\nLINE 2: SELECT lyer\\n               ^^^^"))
    SELECT lyer
           ^^^^
    """
    match = PLACE.search(message)
    if match is None:
        return None
    # The carets stand below the line as DuckDB wrote it, with "LINE 2: " before it.
    offset = match.start("line") - match.start()
    indent = len(match["indent"]) - offset
    line = match["line"]
    # A query runs in parentheses, on lines of its own: the first line is not the user's.
    if indent < 0 or line == "FROM (" or not line.isprintable():
        return None
    return f"{line}\n{' ' * indent}{match['carets']}"


def _why_unknown(message: str, connection: duckdb.DuckDBPyConnection, sql: str) -> str | None:
    """Why a query names a view, column, query or parameter in vain. None if it does not."""
    shipped = OPENED[connection].shipped
    problem = shipped.problem_of(sql)
    if problem is not None:
        return problem
    if 'Candidate bindings: "missing"' in message:
        # The view of a query that needs a parameter has this one column.
        return shipped.missing_parameter(sql)
    if missing := re.search(r"Table with name (\S+) does not exist", message):
        return unknown("view", missing[1], view_descriptions(connection))
    if called := re.search(r"Macro (\w+)\(\) does not support", message):
        query = shipped.queries.get(called[1])
        return None if query is None else _wrong_call(query, sql)
    if (statistic := unmeasured_statistic(message)) is not None:
        if remedy := way_to(statistic):
            return f"statistic {statistic!r} was not measured in these runs{remedy}"
        rows = connection.cursor().execute("SELECT name FROM statistics").fetchall()
        return unknown("statistic", statistic, [name for (name,) in rows])
    return _why_no_column(message, connection)


def _why_no_column(message: str, connection: duckdb.DuckDBPyConnection) -> str | None:
    """Why a query names a column in vain, if DuckDB's message says less than we can."""
    column = _missing_column(message)
    if column is None:
        return None
    sql = "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main'"
    known_columns = {name for (name,) in connection.cursor().execute(sql).fetchall()}
    remedy = way_to(column)
    if remedy and not base_names(column) & known_columns:
        return f"column {column!r} was not measured in these runs{remedy}"
    # Of a table that is named, DuckDB knows no candidates.
    nearest = difflib.get_close_matches(column, known_columns, n=1)
    if "Candidate bindings" in message or column in known_columns or not nearest:
        return None
    return f"unknown column {column!r}: did you mean {nearest[0]!r}?"


def _wrong_call(query: NamedQuery, sql: str) -> str:
    """What is wrong with the arguments of a query in SQL."""
    call = re.search(rf'{query.name}"?\s*\((.*)', sql, re.IGNORECASE | re.DOTALL)
    names = re.findall(r"(\w+)\s*:=", call[1]) if call else []
    known = [parameter.name for parameter in query.parameters]
    for name in names:
        if name not in known:
            return unknown(f"parameter of {query.name}", name, known)
    missing = [parameter for parameter in query.required if parameter.name not in names]
    if missing:
        return query.what_is_missing(missing)
    declared = ", ".join(parameter.declaration for parameter in query.parameters)
    return f"query {query.name!r}: expected values of the types ({declared})"


def _missing_column(message: str) -> str | None:
    column = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', message)
    return column[1] if column else None


def _nearest_column(name: str, message: str) -> str | None:
    """The columns that come nearest to one that is missing. None if DuckDB names none."""
    candidates = re.search(r"Candidate bindings: (.*)", message)
    if candidates is None:
        return None
    quoted_names: Iterable[str] = re.findall(r'"([^"]+)"', candidates[1])
    # A candidate may be qualified, as in "heads.layer".
    candidate_names = [quoted.rpartition(".")[2] for quoted in quoted_names]
    nearest = difflib.get_close_matches(name, candidate_names, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown column {name!r}: {hint}Nearest: {', '.join(candidate_names)}"
