"""The views of named queries, made when they are asked, and why one cannot be answered."""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import duckdb

from headcount.queries.open.descriptions import PREFIXES
from headcount.queries.open.named_queries import NamedQuery
from headcount.queries.open.rooms import KINDS
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.packages import entered

DYNAMIC = re.compile(r'\bquery(?:_table)?"?\s*(?:\(|/\*|--)')
"""A function that runs a text, in which any table may be named, or pieced together.

Profiles have a column `query`, so only a function of this name counts.
"""

BLIND = re.compile(
    rf"{DYNAMIC.pattern}|\b(?:duckdb_\w+|information_schema|pg_\w+|sqlite_\w+|show)\b"
)
"""Words of queries that may ask for any view without its name standing in them."""

FOUNDED = re.compile(r"\binternal\.(?:head|subset)_")
"""Names of the internal views that some queries stand on, which take time to create."""


REFUSALS = (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException)
"""What DuckDB has against a query itself, whatever its files hold."""

CALL = r"\"?(?:\s|--.*\n|/\*.*?\*/)*\("
"""What follows the name of a query that is called with values."""

NOT_GROUPED = "must appear in the GROUP BY clause"
"""What DuckDB says of a column that stands beside groups and is none of them."""


def tables_named(code: str) -> set[str]:
    """The tables and views that a named query selects from, by the last part of their names."""
    steps = re.findall(r"(\w+)\s+as\s+(?:not\s+materialized\s+)?\(", code)
    return {*re.findall(r'\b(?:from|join)\s+(?:internal\.)?"?(\w+)', code)} - {*steps}


@dataclass
class ShippedViews:
    """The named queries of a connection, and which of them have a view by now.

    A query with parameters also gets a table macro of its name, once it is called with values. A
    query that needs a column which no run has gets a view that says so when it is asked.
    """

    queries: dict[str, NamedQuery]
    columns: Callable[[], Collection[str]]  # those of all tables, also of tables not made yet
    views: set[str] = field(default_factory=set[str])  # those that answer, or say why not
    macros: set[str] = field(default_factory=set[str])  # likewise
    reasons: dict[str, str] = field(default_factory=dict[str, str])  # why some cannot be answered
    unmeasured: dict[str, str] = field(default_factory=dict[str, str])
    """The column that a view needs and no run has, by name of the view."""

    @property
    def descriptions(self) -> dict[str, str]:
        """What each query is for."""
        return {name: query.description for name, query in self.queries.items()}

    def named_in(self, sql: str) -> list[str]:
        """The queries anywhere in a query's text, each after those that it stands on itself."""
        text = sql.lower()
        may_name_all = BLIND.search(text) is not None
        ordered: dict[str, None] = {}
        seen: set[str] = set()

        def add(name: str) -> None:
            # Before its foundations are looked at: two queries may name each other.
            if name not in seen:
                seen.add(name)
                for other in self._foundations_of(name):
                    add(other)
                ordered[name] = None

        for name in self.queries:
            if may_name_all or re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", text):
                add(name)
        return list(ordered)

    def _foundations_of(self, name: str) -> list[str]:
        """The other queries that a query selects from."""
        tables = tables_named(self.queries[name].code)
        return [other for other in self.queries if other != name and other.lower() in tables]

    def called_in(self, sql: str) -> list[str]:
        """The queries with parameters that a query's text calls, or may call."""
        text = sql.lower()
        may_call_all = BLIND.search(text) is not None
        return [
            name
            for name, query in self.queries.items()
            if query.parameters
            and (may_call_all or re.search(rf"(?<!\w){re.escape(name.lower())}{CALL}", text))
        ]

    def create(self, connection: duckdb.DuckDBPyConnection, sql: str | None = None) -> None:
        """Create the views that a query may stand on, and the macros that it calls, or all."""
        names = self.named_in(" ".join(self.queries) if sql is None else sql)
        if sql is None:
            called = [name for name in names if self.queries[name].parameters]
        else:
            called = self.called_in(" ".join([sql, *(self.queries[name].code for name in names)]))
        for name in names:
            if name not in self.views:
                self._create_view(connection, name)
            # Before the views that stand on it, which may call it.
            if name in called and name not in self.macros:
                self._create_macro(connection, name)

    def _create_view(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        """Create the view of a query, or one that says why it has no answer."""
        if problem := self._why_no_view(connection, name):
            sql = _failing_query(problem)
            connection.execute(f"CREATE VIEW {quoted_name(name)} AS {sql}")
        self.views.add(name)

    def _why_no_view(self, connection: duckdb.DuckDBPyConnection, name: str) -> str | None:
        """Create the view of a query; if it has no answer, say why."""
        query = self.queries[name]
        for other in self._foundations_of(name):
            if other in self.reasons:
                reason = f"it stands on {other!r}: {self.reasons[other]}"
                self._note(name, reason, self.unmeasured.get(other))
                return self._problem(name)
        if query.required:
            # Of columns that no run has, its macro is the one that knows.
            self._create_macro(connection, name)
            is_sound = name not in self.reasons
            return query.what_is_missing(query.required) if is_sound else self._problem(name)
        # DuckDB binds a view when it is created, and so finds a column that no run has.
        try:
            connection.execute(f"CREATE VIEW {quoted_name(name)} AS {query.sql_by_default}")
        except REFUSALS as error:
            # The runs did not measure the statistic that is the default; the macro takes others.
            statistic = unmeasured_statistic(str(error))
            if statistic is not None and query.parameters:
                return (
                    f"statistic {statistic!r} was not measured in these runs{way_to(statistic)}; "
                    f"--statistic names another (in SQL: FROM {name}(statistic := …))"
                )
            self._note_refusal(connection, name, error)
            return self._problem(name)
        return None

    def _create_macro(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        """Create the macro of a query, or one that says why it has no answer."""
        query = self.queries[name]
        if name not in self.reasons:
            try:
                _create_macro(connection, query, self._foundations_of(name))
            except REFUSALS as error:
                self._note_refusal(connection, name, error)
        if name in self.reasons:
            body = _failing_query(self._problem(name))
            connection.execute(
                f"CREATE MACRO {quoted_name(name)}({query.declared}) AS TABLE {body}"
            )
        self.macros.add(name)

    def _note_refusal(
        self, connection: duckdb.DuckDBPyConnection, name: str, error: duckdb.Error
    ) -> None:
        """Note why DuckDB does not take a query: mostly for a column that no run has."""
        reason = str(error).partition("\n")[0]
        column = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', reason)
        # A column that some table has is missing for another reason.
        is_missing = column is not None and not self._is_known(connection, column[1])
        is_binding = isinstance(error, duckdb.BinderException)
        self._note(name, reason, column[1] if column and is_missing and is_binding else None)

    def _is_known(self, connection: duckdb.DuckDBPyConnection, column: str) -> bool:
        """Whether a table, or a view that is there, has a column."""
        sql = "SELECT 1 FROM duckdb_columns() WHERE schema_name = 'main' AND column_name = ?"
        return column in self.columns() or bool(connection.execute(sql, [column]).fetchall())

    def _note(self, name: str, reason: str, column: str | None) -> None:
        """Note why a query has no answer: for a reason, or for a column that no run has."""
        if column is not None:
            # A uniform baseline is measured with its statistic.
            column = column.removeprefix("uniform_")
            reason = f"it needs column {column!r}, which none of them measured{way_to(column)}"
            self.unmeasured[name] = column
        self.reasons[name] = reason

    def _problem(self, name: str) -> str:
        return f"view {name!r} cannot be answered from these runs: {self.reasons[name]}"

    def problem_of(self, sql: str) -> str | None:
        """Why a query cannot be answered that stands on a query without an answer."""
        # A query that may name any view is about those that it does name.
        text = BLIND.sub("", sql.lower())
        problems = [name for name in self.named_in(text) if name in self.reasons]
        # Foundations come first, so the last one is nearest to what was written.
        return self._problem(problems[-1]) if problems else None


def _create_macro(
    connection: duckdb.DuckDBPyConnection, query: NamedQuery, foundations: Iterable[str]
) -> None:
    """Create the macro of a query with parameters."""
    begin = f"CREATE MACRO {quoted_name(query.name)}({query.declared}) AS TABLE"
    try:
        _create_beside_columns(connection, f"{begin} {query.macro_body}", foundations)
    except duckdb.BinderException as error:
        if NOT_GROUPED not in str(error):
            raise
        # DuckDB takes a parameter for a column, which HAVING and the columns beside groups may not
        # name. In a query of its own it may stand there.
        _create_beside_columns(connection, f"{begin} {query.grouped_macro_body}", foundations)


def _create_beside_columns(
    connection: duckdb.DuckDBPyConnection, macro: str, foundations: Iterable[str]
) -> None:
    """Create a macro, also if a view that it reads has columns with the names of its parameters."""
    try:
        connection.execute(macro)
    except duckdb.BinderException as error:
        if "Conflicting column names" not in str(error):
            raise
        _create_over_tables(connection, macro, foundations)


def _create_over_tables(
    connection: duckdb.DuckDBPyConnection, macro: str, views: Iterable[str]
) -> None:
    """Create a macro while empty tables stand in the place of the views that it reads.

    DuckDB 2.0 takes columns inside of these views for parameters of the same name, but only while
    it creates the macro.
    """
    names = [(quoted_name(view), quoted_name(f"{view} (aside)")) for view in views]
    connection.execute("BEGIN TRANSACTION")
    try:
        for name, aside in names:
            connection.execute(f"ALTER VIEW {name} RENAME TO {aside}")
            connection.execute(f"CREATE TABLE {name} AS FROM {aside} LIMIT 0")
        connection.execute(macro)
        for name, aside in names:
            connection.execute(f"DROP TABLE {name}")
            connection.execute(f"ALTER VIEW {aside} RENAME TO {name}")
        connection.execute("COMMIT")
    except duckdb.Error:
        connection.execute("ROLLBACK")
        raise


def _failing_query(message: str) -> str:
    error = f"error({text_literal(message)})"
    # The condition makes SELECT count(*) fail too, which does not compute the column.
    return f"SELECT {error} AS missing WHERE {error} IS NULL"


def base_names(column: str) -> set[str]:
    """A column and those that it may sum up: `entropy` for `mean_entropy`."""
    return {column.removeprefix(prefix) for prefix in ("", *PREFIXES, "uniform_")}


def way_to(column: str) -> str:
    """How the next scan measures a column that no run has. Empty if no scan can."""
    for kind in entered(KINDS):
        for name in sorted(base_names(column)):
            if kind.named_by is None and name in kind:
                text = kind[name].text
                return f"; add {text!r} to {kind.field} in a scan, and scan again"
    return ""


def unmeasured_statistic(message: str) -> str | None:
    """The value of a parameter `statistic` that is a column of no run, by a message of DuckDB's."""
    chosen = re.search(r"c = CAST\('(.*?)' AS VARCHAR\).* empty set of columns", message)
    return None if chosen is None else chosen[1]
