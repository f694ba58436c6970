"""The views of named queries, made when they are asked, and why one cannot be answered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from headcount.queries.ask.named_queries import QUERIES, NamedQuery, read_queries
from headcount.queries.open.descriptions import PREFIXES
from headcount.queries.sql_text import quoted_name, text_literal
from headcount.schemas.scans.kinds import KINDS

__all__ = ["BLIND", "QUERIES", "ShippedViews", "base_names", "way_to"]

BLIND = re.compile(
    r'\bquery(?:_table)?"?\s*(?:\(|/\*|--)'
    r"|\b(?:duckdb_\w+|information_schema|pg_\w+|sqlite_\w+|show)\b"
)
"""Words of queries that may name any view without its name standing in them.

Profiles have a column `query`, so only a function of this name counts.
"""

FOUNDED = re.compile(r"\binternal\.(?:head|subset)_")
"""Names of the internal views that some queries stand on, which take time to create."""


@dataclass
class ShippedViews:
    """The named queries of a connection, and which of them have a view by now.

    A query with parameters also has a table macro of its name. A query that needs a column which no
    run has gets a view that says so when it is asked.
    """

    queries: dict[str, NamedQuery]
    created: set[str] = field(default_factory=set[str])
    """Queries whose view answers."""
    errors: dict[str, duckdb.Error] = field(default_factory=dict[str, duckdb.Error])
    """Why the others have none that answers, by name, of those that were asked."""
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """The same in a line for the user."""
    unmeasured: dict[str, str] = field(default_factory=dict[str, str])
    """The column that a view needs and no run has, by name of the view."""
    foundation: Callable[[duckdb.DuckDBPyConnection], None] | None = None
    """Creates the internal views that some queries stand on, which takes time. None if done."""

    @classmethod
    def of(cls, folder: Path) -> ShippedViews:
        """The named queries of a folder."""
        return cls(read_queries(folder))

    @property
    def descriptions(self) -> dict[str, str]:
        """What each query is for."""
        return {name: query.description for name, query in self.queries.items()}

    def named_in(self, sql: str) -> list[str]:
        """The queries that a query may stand on, each after those that it stands on itself.

        A name that stands anywhere in the text counts: one view too many does no harm.
        """
        if BLIND.search(sql.lower()):
            return self._with_foundations(self.queries)
        return self._written_in(sql)

    def _written_in(self, sql: str) -> list[str]:
        """The queries whose names stand in a query, each after those that it stands on."""
        text = sql.lower()
        return self._with_foundations(name for name in self.queries if name.lower() in text)

    def code_of(self, sql: str) -> str:
        """The SQL of a query and of all queries that it stands on."""
        return " ".join([sql.lower(), *(self.queries[n].code for n in self.named_in(sql))])

    def _with_foundations(self, names: Iterable[str]) -> list[str]:
        ordered: dict[str, None] = {}
        seen: set[str] = set()

        def add(name: str) -> None:
            if name in seen:
                return
            # Before its foundations are looked at: two queries may name each other.
            seen.add(name)
            for other in self._foundations_of(name):
                add(other)
            ordered[name] = None

        for name in names:
            add(name)
        return list(ordered)

    def _foundations_of(self, name: str) -> list[str]:
        """The other queries whose names stand in the SQL of a query."""
        code = self.queries[name].code
        return [other for other in self.queries if other != name and other.lower() in code]

    def create(self, connection: duckdb.DuckDBPyConnection, sql: str | None = None) -> None:
        """Create the views that a query may stand on, or all of them."""
        names = self._with_foundations(self.queries) if sql is None else self.named_in(sql)
        missing = [name for name in names if name not in self.created]
        if self.foundation and (sql is None or FOUNDED.search(self.code_of(sql))):
            self.foundation(connection)
            self.foundation = None
        # What failed before is tried again: another query may stand on it and fail for its reason.
        for name in missing:
            if name in self.errors:
                connection.execute(f"DROP VIEW IF EXISTS {quoted_name(name)}")
                connection.execute(f"DROP MACRO TABLE IF EXISTS {quoted_name(name)}")
        # DuckDB binds a view when it is created, and so finds a column that no run has.
        for name in missing:
            try:
                _create(connection, self.queries[name], self._foundations_of(name))
                self.created.add(name)
            except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException) as why:
                self.errors[name] = why
        failed = [name for name in missing if name not in self.created]
        if failed:
            self._create_failing_views(connection, failed)

    def _create_failing_views(
        self, connection: duckdb.DuckDBPyConnection, names: list[str]
    ) -> None:
        """Create views, and macros, that have no rows and fail with a message when asked."""
        sql = "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main'"
        known_columns = {column for (column,) in connection.execute(sql).fetchall()}
        for name in names:
            root = self._root_of_failure(name)
            error = self.errors[root]
            problem = _first_line(error)
            missing = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', problem)
            # A column that some table has is missing for another reason.
            is_unmeasured = missing is not None and missing[1] not in known_columns
            if missing and is_unmeasured and isinstance(error, duckdb.BinderException):
                column = missing[1]
                problem = f"it needs column {column!r}, which none of them measured{way_to(column)}"
                self.unmeasured[name] = column
            elif root != name:
                problem = f"it stands on {root!r}: {problem}"
            self.problems[name] = f"view {name!r} cannot be answered from these runs: {problem}"
            view, query = quoted_name(name), self.queries[name]
            # The query may have failed after its macro was there.
            connection.execute(f"DROP MACRO TABLE IF EXISTS {view}")
            connection.execute(_failing_view(name, self.problems[name]))
            if query.parameters:
                declared = ", ".join(parameter.declaration for parameter in query.parameters)
                connection.execute(f"CREATE MACRO {view}({declared}) AS TABLE FROM {view}")

    def _root_of_failure(self, name: str) -> str:
        """The query that failed for its own reason, on which a failed one stands."""
        # As often as there are queries that failed: two could stand on each other.
        for _ in self.errors:
            message = _first_line(self.errors[name])
            missing = re.search(r"Table (?:Function )?with name (\S+) does not exist", message)
            if missing is None or missing[1] not in self.errors:
                break
            name = missing[1]
        return name

    def problem_of(self, sql: str) -> str | None:
        """Why a query cannot be answered that stands on a query without an answer."""
        # A query that may name any view is about those that it does name.
        problems = [self.problems[name] for name in self._written_in(sql) if name in self.problems]
        # Foundations come first, so the last one is nearest to what was written.
        return problems[-1] if problems else None

    def missing_parameter(self, sql: str) -> str | None:
        """Which parameters a query lacks, if it stands on a query that needs some."""
        for name in reversed(self.named_in(sql)):
            query = self.queries[name]
            if query.required:
                return query.what_is_missing(query.required)
        return None


def _create(
    connection: duckdb.DuckDBPyConnection, query: NamedQuery, foundations: Iterable[str]
) -> None:
    """Create the view of a query, and its macro if it has parameters."""
    view = quoted_name(query.name)
    if not query.parameters:
        connection.execute(f"CREATE VIEW {view} AS {query.sql}")
        return
    declared = ", ".join(parameter.declaration for parameter in query.parameters)
    macro = f"CREATE MACRO {view}({declared}) AS TABLE {query.macro_body}"
    try:
        connection.execute(macro)
    except duckdb.BinderException as error:
        if "Conflicting column names" not in str(error):
            raise
        _create_over_tables(connection, macro, foundations)
    if query.required:
        connection.execute(_failing_view(query.name, query.what_is_missing(query.required)))
        return
    try:
        connection.execute(f"CREATE VIEW {view} AS FROM {view}()")
    except duckdb.BinderException as error:
        # The runs did not measure the statistic that is the default; the macro takes others.
        if (statistic := unmeasured_statistic(str(error))) is None:
            raise
        problem = (
            f"statistic {statistic!r} was not measured in these runs{way_to(statistic)}; "
            f"--statistic names another (in SQL: FROM {query.name}(statistic := …))"
        )
        connection.execute(_failing_view(query.name, problem))


def _create_over_tables(
    connection: duckdb.DuckDBPyConnection, macro: str, views: Iterable[str]
) -> None:
    """Create a macro while empty tables stand in the place of the views that it reads.

    DuckDB 2.0 takes columns inside of these views for parameters of the same name, but only while
    it creates the macro.
    """
    connection.execute("BEGIN TRANSACTION")
    try:
        for view in views:
            name, aside = quoted_name(view), quoted_name(f"{view} (aside)")
            connection.execute(f"ALTER VIEW {name} RENAME TO {aside}")
            connection.execute(f"CREATE TABLE {name} AS FROM {aside} LIMIT 0")
        connection.execute(macro)
        for view in views:
            name, aside = quoted_name(view), quoted_name(f"{view} (aside)")
            connection.execute(f"DROP TABLE {name}")
            connection.execute(f"ALTER VIEW {aside} RENAME TO {name}")
        connection.execute("COMMIT")
    except duckdb.Error:
        connection.execute("ROLLBACK")
        raise


def _failing_view(name: str, message: str) -> str:
    error = f"error({text_literal(message)})"
    # The condition makes SELECT count(*) fail too, which does not compute the column.
    return f"CREATE VIEW {quoted_name(name)} AS SELECT {error} AS missing WHERE {error} IS NULL"


def base_names(column: str) -> set[str]:
    """A column and those that it may sum up: `entropy` for `mean_entropy`."""
    return {column.removeprefix(prefix) for prefix in ("", *PREFIXES, "uniform_")}


def way_to(column: str) -> str:
    """How the next scan measures a column that no run has. Empty if no scan can."""
    for kind in KINDS:
        for name in sorted(base_names(column)):
            if kind.named_by is None and name in kind:
                text = kind[name].text
                return f"; add {text!r} to {kind.field} in a scan, and scan again"
    return ""


def unmeasured_statistic(message: str) -> str | None:
    """The value of a parameter `statistic` that is a column of no run, by a message of DuckDB's."""
    chosen = re.search(r"c = CAST\('(.*?)' AS VARCHAR\).* empty set of columns", message)
    return None if chosen is None else chosen[1]


def _first_line(error: duckdb.Error) -> str:
    return str(error).partition("\n")[0]
