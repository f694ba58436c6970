"""What columns mean and what views need, as the database itself says it."""

from __future__ import annotations

import json
import math
import re

import duckdb

from queries.connection import PREFIXES, view_descriptions
from schemas.kinds import KINDS, TABLES

SAME_RANGE = ("mean_", "max_", "chance_")
"""Prefixes of columns that have the range of the column that they sum up."""

Facts = dict[str, dict[str, str]]


def read_views(connection: duckdb.DuckDBPyConnection, question: str) -> list[str]:
    """The views whose names stand in a question; DuckDB would name the tables below them."""
    words = re.findall(r"\w+", question.lower())
    views = view_descriptions(connection)
    return [word for word in dict.fromkeys(words) if word in views]


def column_facts(connection: duckdb.DuckDBPyConnection, question: str) -> Facts:
    """Meaning, unit, range and source of columns, by name: as the views that a question reads say
    it, or else as any view does.
    """
    sql = (
        "SELECT table_name, column_name, comment FROM duckdb_columns() "
        "WHERE schema_name = 'main' AND NOT internal AND comment IS NOT NULL"
    )
    first = [*read_views(connection, question), *TABLES]
    comments = connection.cursor().execute(sql).fetchall()
    comments.sort(key=lambda row: first.index(row[0]) if row[0] in first else len(first))
    facts: Facts = {}
    for _, column, comment in comments:
        facts.setdefault(column, {"description": comment})
    measured = _measured(connection)
    for column, known in facts.items():
        base = _base(column)
        for name, text in measured.get(base, {}).items():
            if name != "range" or base == column or column.startswith(SAME_RANGE):
                known[name] = text
    return facts


def _measured(connection: duckdb.DuckDBPyConnection) -> Facts:
    """Unit, source and range of every formula that some run measured."""
    sql = "SELECT name, unit, source, range_low, range_high FROM formulas"
    facts: Facts = {}
    for name, unit, source, low, high in connection.cursor().execute(sql).fetchall():
        known = {"unit": unit, "source": source}
        if low is not None:
            # JSON has no infinity: an open end is null.
            ends = [end if math.isfinite(end) else None for end in (low, high)]
            known["range"] = json.dumps(ends)
        facts[name] = {key: text for key, text in known.items() if text}
    return facts


def _base(column: str) -> str:
    """The column that another one sums up."""
    for prefix in (*PREFIXES, "chance_"):
        if column.startswith(prefix):
            return column.removeprefix(prefix)
    return column


def why_empty(connection: duckdb.DuckDBPyConnection, question: str) -> list[str]:
    """For each view that a question reads and that has no rows, what a scan must have for it."""
    lines: list[str] = []
    for view in read_views(connection, question):
        need = _need(connection, view)
        if need and not connection.cursor().execute(f'SELECT 1 FROM "{view}" LIMIT 1').fetchall():
            lines.append(f"{view} has no rows in these runs; it needs {need}")
    return lines


def _need(connection: duckdb.DuckDBPyConnection, view: str) -> str | None:
    """What a view needs: as its description says, or the field of a scan that fills a table."""
    if view in TABLES:
        fields = [f"{kind.field} = […]" for kind in KINDS if kind.table.name == view]
        if TABLES[view].written == "every shard":
            return "a shard that is done: headcount status RUN says how far a run is"
        return f"{' or '.join(fields)} in the scan"
    sql = "SELECT comment FROM duckdb_views() WHERE schema_name = 'main' AND view_name = ?"
    row = connection.cursor().execute(sql, [view]).fetchone()
    needs = re.search(r"Needs: (.+?)\.?$", row[0] or "") if row else None
    return needs[1] if needs else None
