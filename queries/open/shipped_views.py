"""The views of named queries, made when they are asked, and why one cannot be answered."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import duckdb

from headcount.queries.open.descriptions import PREFIXES
from headcount.queries.open.named_queries import NamedQuery
from headcount.queries.open.sql_text import quoted_name, text_literal

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


NOT_GROUPED = "must appear in the GROUP BY clause"
"""What DuckDB says of a column that stands beside groups and is none of them."""


def tables_named(code: str) -> set[str]:
    """The tables and views that a named query selects from, by the last part of their names."""
    steps = re.findall(r"(\w+)\s+as\s+(?:not\s+materialized\s+)?\(", code)
    return {*re.findall(r'\b(?:from|join)\s+(?:internal\.)?"?(\w+)', code)} - {*steps}


@dataclass
class ShippedViews:
    """The named queries of a connection, and which of them have a view by now.

    A query with parameters also has a table macro of its name. A query that needs a column which no
    run has gets a view that says so when it is asked.
    """

    queries: dict[str, NamedQuery]
    created: set[str] = field(default_factory=set[str])  # views that answer, or say why not
    reasons: dict[str, str] = field(default_factory=dict[str, str])  # why some cannot be answered
    unmeasured: dict[str, str] = field(default_factory=dict[str, str])
    """The column that a view needs and no run has, by name of the view."""
    foundation: Callable[[duckdb.DuckDBPyConnection], None] | None = None
    """Creates the internal views that some queries stand on, which takes time. None if done."""

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

    def create(self, connection: duckdb.DuckDBPyConnection, sql: str | None = None) -> None:
        """Create the views that a query may stand on, or all of them."""
        names = self.named_in(" ".join(self.queries) if sql is None else sql)
        text = " ".join([sql or "", *(self.queries[name].code for name in names)]).lower()
        if self.foundation and FOUNDED.search(text):
            self.foundation(connection)
            self.foundation = None
        for name in names:
            if name not in self.created:
                self._create_or_say_why_not(connection, name)
                self.created.add(name)

    def _create_or_say_why_not(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        query, foundations = self.queries[name], self._foundations_of(name)
        root = next((other for other in foundations if other in self.reasons), None)
        if root is not None:
            reason = f"it stands on {root!r}: {self.reasons[root]}"
            column = self.unmeasured.get(root)
        else:
            # DuckDB binds a view when it is created, and so finds a column that no run has.
            try:
                _create(connection, query, foundations)
                return
            except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException) as why:
                reason = str(why).partition("\n")[0]
                named = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', reason)
                sql = "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main'"
                known = {known for (known,) in connection.execute(sql).fetchall()}
                # A column that some table has is missing for another reason.
                column = named[1] if named and named[1] not in known else None
                if not isinstance(why, duckdb.BinderException):
                    column = None
        if column is not None:
            # A uniform baseline is measured with its statistic.
            column = column.removeprefix("uniform_")
            reason = f"it needs column {column!r}, which none of them measured{way_to(column)}"
            self.unmeasured[name] = column
        self.reasons[name] = reason
        # The query may have failed after its macro was there.
        view = quoted_name(name)
        connection.execute(f"DROP MACRO TABLE IF EXISTS {view}")
        connection.execute(_failing_view(name, self._problem(name)))
        if query.parameters:
            connection.execute(f"CREATE MACRO {view}({query.declared}) AS TABLE FROM {view}")

    def _problem(self, name: str) -> str:
        return f"view {name!r} cannot be answered from these runs: {self.reasons[name]}"

    def problem_of(self, sql: str) -> str | None:
        """Why a query cannot be answered that stands on a query without an answer."""
        # A query that may name any view is about those that it does name.
        text = BLIND.sub("", sql.lower())
        problems = [name for name in self.named_in(text) if name in self.reasons]
        # Foundations come first, so the last one is nearest to what was written.
        return self._problem(problems[-1]) if problems else None


def _create(
    connection: duckdb.DuckDBPyConnection, query: NamedQuery, foundations: Iterable[str]
) -> None:
    """Create the view of a query, and its macro if it has parameters."""
    view = quoted_name(query.name)
    if not query.parameters:
        connection.execute(f"CREATE VIEW {view} AS {query.sql}")
        return
    try:
        _create_macro(connection, query, query.macro_body, foundations)
    except duckdb.BinderException as error:
        if NOT_GROUPED not in str(error):
            raise
        # DuckDB takes a parameter for a column, which HAVING and the columns beside groups may not
        # name. In a query of its own it may stand there.
        _create_macro(connection, query, query.grouped_macro_body, foundations)
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


def _create_macro(
    connection: duckdb.DuckDBPyConnection, query: NamedQuery, body: str, foundations: Iterable[str]
) -> None:
    macro = f"CREATE MACRO {quoted_name(query.name)}({query.declared}) AS TABLE {body}"
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


def _failing_view(name: str, message: str) -> str:
    error = f"error({text_literal(message)})"
    # The condition makes SELECT count(*) fail too, which does not compute the column.
    return f"CREATE VIEW {quoted_name(name)} AS SELECT {error} AS missing WHERE {error} IS NULL"


def base_names(column: str) -> set[str]:
    """A column and those that it may sum up: `entropy` for `mean_entropy`."""
    return {column.removeprefix(prefix) for prefix in ("", *PREFIXES, "uniform_")}


def way_to(column: str) -> str:
    """How the next scan measures a column that no run has. Empty if no scan can."""
    # Every formula there is: nothing else in queries asks for it, and most never get here.
    from headcount.schemas.kinds import KINDS

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
