"""What is wrong with a query: one line instead of DuckDB's many, and the place in the SQL."""

import difflib
import re
from collections.abc import Mapping

import duckdb

from headcount.queries.open.column_facts import views_read
from headcount.queries.open.limits import NEEDS_MEMORY, OUT_OF_MEMORY
from headcount.queries.open.opened_runs import OpenedRuns, said_by
from headcount.queries.open.shipped_views import base_names, unmeasured_statistic, way_to
from headcount.schemas.errors import LISTINGS, SqlMistake, printable, unknown_among
from headcount.schemas.filled_tables import TABLES

PLACE = re.compile(r"LINE \d+: (?P<line>.*)\n(?P<indent> *)(?P<carets>\^+)\s*$")
"""How DuckDB's messages end that know a place in the SQL."""

COLUMNS = """
    SELECT table_name, column_name FROM duckdb_columns()
    WHERE schema_name = 'main' ORDER BY table_name, column_index
"""

KEYS = ("run_id", "intervention", "sequence", "layer", "head", "statistic")
"""Columns by which views are joined."""

MISSING_COLUMN = re.compile(r'[Cc]olumn (?:named )?"([^"]+)"')


def query_error(error: Exception) -> SqlMistake:
    """Say in one line what DuckDB says in many."""
    message = said_by(error)
    if isinstance(error, OUT_OF_MEMORY) or "Out of Memory" in message:
        return SqlMistake(NEEDS_MEMORY)
    if "data-modifying" in message or "containing a COPY" in message:
        return SqlMistake("queries are read-only: a WITH clause cannot write")
    # Views that cannot be answered fail with a message of ours, which DuckDB prefixes.
    text = message.removeprefix("Invalid Input Error: ").partition("\n\n")[0]
    column = MISSING_COLUMN.search(message)
    candidates = re.search(r"Candidate bindings: (.*)", message)
    if column and candidates:
        # A candidate may be qualified, as in "heads.layer".
        names = [name.rpartition(".")[2] for name in re.findall(r'"([^"]+)"', candidates[1])]
        nearest = difflib.get_close_matches(column[1], names, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"Near: {', '.join(names)}"
        text = f"unknown column {column[1]!r}: {hint}"
    return SqlMistake(printable(" ".join(text.split())), pointer_in(message))


def explained(error: duckdb.Error, opened: OpenedRuns, sql: str) -> SqlMistake:
    """What is wrong with a query that names a view, a column or a statistic in vain."""
    mistake = query_error(error)
    message = str(error)
    if not isinstance(error, duckdb.BinderException | duckdb.CatalogException):
        return mistake
    pointer = mistake.pointer
    if pointer is None:
        # DuckDB leaves the place out of the messages of relations, and says it of a statement.
        try:
            opened.fetched(f"EXPLAIN {sql}")
        except duckdb.Error as error_of_statement:
            pointer = pointer_in(str(error_of_statement))
    return SqlMistake(_what_is_missing(message, opened, sql) or str(mistake), pointer)


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
    indent = len(match["indent"]) - match.start("line") + match.start()
    line = match["line"]
    # A query runs in parentheses, on lines of its own: the first line is not the user's.
    if indent < 0 or line == "FROM (" or not line.isprintable():
        return None
    return f"{line}\n{' ' * indent}{match['carets']}"


def _what_is_missing(message: str, opened: OpenedRuns, sql: str) -> str | None:
    """What these runs do not have, if that is why a query fails."""
    shipped = opened.shipped
    if problem := shipped.problem_of(sql):
        return problem
    # The view of a query that needs a parameter has one column, and its macro no default.
    if '"missing"' in message or "Macro" in message:
        for name in reversed(shipped.named_in(sql)):
            if required := shipped.queries[name].required:
                return shipped.queries[name].what_is_missing(required)
    # DuckDB does not know the views that are made when they are asked for.
    if missing := re.search(r"Table with name (\S+) does not exist", message):
        return unknown_among("view", missing[1], opened.view_descriptions, LISTINGS["view"])
    if (statistic := unmeasured_statistic(message)) is not None:
        if remedy := way_to(statistic):
            return f"statistic {statistic!r} was not measured in these runs{remedy}"
        names = [name for (name,) in opened.fetched("SELECT name FROM statistics")]
        return unknown_among("statistic", statistic, names, "SELECT name FROM statistics")
    column = MISSING_COLUMN.search(message)
    return column and _why_no_column(column[1], message, opened, sql)


def _why_no_column(column: str, message: str, opened: OpenedRuns, sql: str) -> str | None:
    """Why there is no such column: another view has it, no run measured it, or it is misspelt."""
    read = views_read(opened, sql)
    opened.make_views()
    rows = opened.fetched(COLUMNS)
    views = {view: [name for of, name in rows if of == view] for view in dict(rows)}
    # Tables come first, as in the list of views.
    order = [view for view in opened.view_descriptions if view in views]
    owners = [view for view in order if column in views[view] and view not in read]
    if owners:
        return _is_elsewhere(column, owners, [view for view in read if view in views], views)
    known = {name for _, name in rows}
    # What is measured stands in tables; views have names of their own.
    measured = {name for view, name in rows if view in TABLES}
    if (remedy := way_to(column)) and not base_names(column) & measured:
        return f"column {column!r} was not measured in these runs{remedy}"
    if not read and "Candidate bindings" in message:
        return None  # DuckDB knows the columns of a subquery.
    of_query = [name for view in read for name in views.get(view, [])]
    listing = f"DESCRIBE {read[0]}" if read else "FROM duckdb_columns()"
    return unknown_among("column", column, {*of_query} or known, listing)


def _is_elsewhere(
    column: str, owners: list[str], read: list[str], views: Mapping[str, list[str]]
) -> str:
    """Which views have a column that those of a query lack, and how to join one."""
    more = f" and {len(owners) - 1} more views" if len(owners) > 1 else ""
    where = f"{owners[0]}{more}" if len(owners) != 2 else " and ".join(owners)
    has = "have" if len(owners) > 1 else "has"
    absent = f"column {column!r} is not in {' or '.join(read)}" if read else f"column {column!r}"
    if not read:
        return f"{absent}: {where} {has} it"
    keys = [key for key in KEYS if key in views[owners[0]] and key in views[read[0]]]
    join = f": FROM {read[0]} JOIN {owners[0]} USING ({', '.join(keys)})" if keys else ""
    return f"{absent}; {where} {has} it{join}"
