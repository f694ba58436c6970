"""Named queries that runs bring with them: they lay beside a plug-in of their scans.

A run may come from anybody, and so does its SQL. It may name tables, and reach nothing else: the
views of runs also stand in files that dashboards open, where nothing guards them.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import duckdb

from headcount.queries.open.named_queries import NamedQuery, parse_query
from headcount.queries.open.run import Run
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.errors import QueryError
from headcount.schemas.view_names import names_of_views

TABLE_FUNCTIONS = ("unnest", "range", "generate_series")
"""Functions in the place of a table that read no file."""

NAME = re.compile(r"(?!headcount_)[a-z][a-z0-9_]*")
"""Of such a query. The file of views has a table of its own, `headcount_notes`."""

LITERAL = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?|true|false|null|'[^']*'", re.IGNORECASE)
"""What a parameter of such a query may be by default."""


def queries_of_runs(
    runs: Iterable[Run], connection: duckdb.DuckDBPyConnection
) -> dict[str, NamedQuery]:
    """The named queries that some runs bring, by name, but for those with a name of ours.

    One that is refused says why when it is asked.
    """
    runs_by_name: dict[str, list[Run]] = {}
    for run in runs:
        for name in run.queries:
            runs_by_name.setdefault(name, []).append(run)
    if not runs_by_name:
        return {}
    functions, views = (
        {name for (name,) in connection.execute(sql).fetchall()}
        for sql in (
            "SELECT function_name FROM duckdb_functions()",
            "SELECT view_name FROM duckdb_views()",
        )
    )
    known = {*TABLE_FUNCTIONS, *names_of_views(), *(runs_by_name.keys() - functions)}
    queries: dict[str, NamedQuery] = {}
    for name, of_runs in sorted(runs_by_name.items()):
        # In its place no view may stand that says something else.
        if not NAME.fullmatch(name) or name in names_of_views() | views:
            continue
        try:
            if name in functions:
                raise QueryError(f"{name} is a function of DuckDB; call the file otherwise")
            query = _query_of(name, of_runs)
            _check_reach(query, known, connection)
        except QueryError as error:
            sql = f"SELECT error({text_literal(str(error))}) AS missing"
            query = NamedQuery(name, f"Refused: {error}", (), None, sql)
        queries[name] = query
    return queries


def _query_of(name: str, runs: list[Run]) -> NamedQuery:
    """The query of a name in some runs, which must all mean the same by it."""
    first = runs[0]
    for run in runs:
        if run.queries[name] != first.queries[name]:
            raise QueryError(
                f"{name} is one query in run {first.directory.run_id} and another in run "
                f"{run.directory.run_id}; ask one run directory at a time, or scan again with the "
                "newer file"
            )
    sql = first.queries[name]
    if sql is None:
        raise QueryError(
            f"{name}: run {first.directory.run_id} does not have its file as it was kept "
            f"({first.directory.query_file(first.manifest.queries[name])}); bring back a copy"
        )
    return parse_query(name, sql)


def _check_reach(query: NamedQuery, known: set[str], connection: duckdb.DuckDBPyConnection) -> None:
    """Refuse a query that is not one SELECT, or reads more than tables by their names."""
    for parameter in query.parameters:
        if parameter.default is not None and not LITERAL.fullmatch(parameter.default):
            raise QueryError(
                f"{query.name}: parameter {parameter.name}: expected a number, a text in quotes, "
                f"true, false or NULL as its default, got {parameter.default}"
            )
    sql = text_literal(query.macro_body)
    ((text,),) = connection.execute(f"SELECT json_serialize_sql({sql})").fetchall()
    parsed = json.loads(text)
    if parsed["error"]:
        raise QueryError(f"{query.name}: {parsed['error_message']}")
    if len(parsed["statements"]) != 1:
        raise QueryError(f"{query.name}: expected one SELECT, got {len(parsed['statements'])}")
    for node in _nodes_in(parsed["statements"]):
        if node.get("type") == "TABLE_FUNCTION":
            function = node["function"]["function_name"]
            if function.lower() not in known:
                raise QueryError(f"{query.name}: reads {function}(…), expected tables of the runs")
        # The name of a file would stand in quotes, and holds a dot or a slash.
        elif not re.fullmatch(r"\w*", table := node.get("table_name") or ""):
            raise QueryError(f"{query.name}: reads {table!r}, expected tables of the runs")


def _nodes_in(tree: object) -> Iterator[Mapping[str, Any]]:
    """All objects in a tree of JSON."""
    if isinstance(tree, dict):
        yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            yield from _nodes_in(branch)
