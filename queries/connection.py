"""A DuckDB connection over runs: views of what is committed, and nothing else within reach."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Container, Mapping
from itertools import groupby
from pathlib import Path

import duckdb
import pyarrow as pa

from queries import run_tables
from queries.run_tables import Run
from queries.stores import register_stores
from schemas.errors import QueryError
from schemas.kinds import KINDS, TABLES
from schemas.places import Place, place
from schemas.tables import OF_HEAD, SEQUENCES, Column, Table

QUERIES = Path(__file__).parent
"""The folder whose `.sql` files become views: the stem is the name, the first comment the
description.
"""

VIEWS = {
    **{table.name: table.description for table in TABLES.values()},
    "runs": "One row per run: what was scanned, with which model, and how far it got.",
    "shards": "One row per shard: done, missing or damaged, and who made it.",
    "statistics": "One row per statistic: unit, range, meaning, formula and source.",
    "formulas": "One row per formula of every kind: the table it fills, unit, meaning and source.",
}

PARTITIONS = {
    "run_id": (pa.string(), "Run that the row belongs to."),
    "intervention": (
        pa.string(),
        "Edit of the model under which it was measured; none is the untouched model.",
    ),
}

OWN: dict[str, dict[str, str]] = {
    name: {column: text for column, (_, text) in columns.items()}
    for name, columns in {
        "runs": run_tables.RUNS,
        "shards": run_tables.SHARDS,
        "statistics": run_tables.STATISTICS,
        "formulas": run_tables.FORMULAS,
    }.items()
}
OWN |= {
    table.name: {name: column.description for name, column in table.own.items()}
    for table in TABLES.values()
}
OWN["profile_means"] = OWN["profiles"] | {
    "count": "Sequences, over all shards.",
    "mean": "Mean over the sequences of all shards.",
    "sd": "Standard deviation over the sequences; NULL for a single one.",
    "standard_error": "Standard error of the mean, sd / √count.",
}
"""What columns mean in one view, and perhaps not elsewhere."""

KEYS = {column.name: column.description for column in (*OF_HEAD, *SEQUENCES.columns)}
KEYS["label"] = "Layer and head as people write them, L5H1; NULL where heads share the values."
KEYS["statistic"] = "Statistic that the row is about."
KEYS["pairs"] = "Sequences on which both sides are defined."
KEYS["change"] = "Mean over the pairs of one side less the other."
KEYS["standard_error"] = "Standard error of the mean change; NULL for a single pair."
KEYS["untouched"] = "Mean over the pairs under none."
KEYS["edited"] = "Mean over the pairs under the intervention."
KEYS["other_run"] = "Run that run_id is held against."
KEYS["other"] = "Mean over the pairs in other_run."
KEYS["this"] = "Mean over the pairs in run_id."
KEYS["sink_rate"] = "Share of sequences with sink_alpha above 0.3."
"""What columns mean in every other view."""

MEMORY = "50%"
"""Memory that a query may take; what is more goes to the temporary directory."""


SIZE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)", re.IGNORECASE)


def check_memory(size: str) -> str:
    """A size of memory as DuckDB reads it."""
    found = SIZE.fullmatch(size.strip())
    if found is None or (found[2] == "%" and float(found[1]) > 100):
        raise QueryError(f"--memory: expected a size such as 4GB or 50%, got {size!r}")
    return size.strip()


def connect(
    path: str | Place, queries: Path = QUERIES, code: str | None = None, memory: str = MEMORY
) -> duckdb.DuckDBPyConnection:
    """Open a run directory, or a directory of runs: views of what is committed, locked against
    everything else. Only the shards that `code` measured, if it is given. `memory` is what queries
    may take: `4GB`, or a share of the machine's, `50%`.

    Hand user SQL to `queries.answers.run_query`, which also refuses to write.
    """
    runs = run_tables.read_runs(place(path), code)
    connection = duckdb.connect()
    register_stores(connection, [run.directory.path for run in runs])
    # DuckDB would otherwise take a misspelt view for a Python variable of whoever calls.
    connection.execute("SET python_enable_replacements = false")
    connection.execute("CREATE SCHEMA ledger")
    measured = run_tables.measured_columns(runs)
    for name, table in TABLES.items():
        _create(connection, name, _empty(table, measured[name]))
    _create(connection, "runs", run_tables.runs_table(runs))
    _create(connection, "shards", run_tables.shards_table(runs))
    _create(connection, "statistics", run_tables.statistics_table(runs))
    _create(connection, "formulas", run_tables.formulas_table(runs))
    _record_damage(connection, runs)
    descriptions = VIEWS | _create_queries(connection, queries)
    _comment(connection, descriptions, measured)
    # Binding a view opens a file of every run, so the views above are made while the tables below
    # them are empty.
    for table in TABLES.values():
        _point_at_files(connection, table, runs)
    _lock(connection, runs, memory)
    return connection


def view_descriptions(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Every view and what it is for, tables first."""
    sql = "SELECT view_name, comment FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal ORDER BY view_name"
    descriptions = dict(connection.cursor().execute(sql).fetchall())
    return {name: descriptions[name] for name in VIEWS} | descriptions


def _empty(table: Table, measured: Mapping[str, Column]) -> pa.Table:
    partitions = [pa.field(name, type_) for name, (type_, _) in PARTITIONS.items()]
    return pa.schema([*partitions, *table.schema(measured.values())]).empty_table()


def _create(connection: duckdb.DuckDBPyConnection, name: str, content: pa.Table) -> None:
    connection.register("content", content)
    connection.execute(f"CREATE TABLE ledger.{name}_content AS FROM content")
    connection.unregister("content")
    connection.execute(f"CREATE VIEW ledger.{name} AS FROM ledger.{name}_content")
    label = ", 'L' || layer || 'H' || head AS label" if _labelled(content.schema.names) else ""
    connection.execute(f"CREATE VIEW main.{name} AS SELECT *{label} FROM ledger.{name}")


def _labelled(columns: list[str]) -> bool:
    """Whether rows are of heads, so that a view can name them as people do."""
    return {"layer", "head"} <= set(columns) and "label" not in columns


def _record_damage(connection: duckdb.DuckDBPyConnection, runs: list[Run]) -> None:
    """Keep the names of damaged files as a table: who asks decides whether to warn of them."""
    connection.execute("CREATE TABLE ledger.damaged_files (run_id TEXT, file TEXT)")
    for run in runs:
        for file in run.damaged:
            connection.execute(
                "INSERT INTO ledger.damaged_files VALUES (?, ?)", [run.directory.run_id, file]
            )


def _point_at_files(connection: duckdb.DuckDBPyConnection, table: Table, runs: list[Run]) -> None:
    """Let the view of a table read the committed files: one `read_parquet` for all runs that have
    the same columns.

    `union_by_name` would open every file whenever a query is planned (20,000 files: 3 s); this
    opens one per call.
    """
    keys = [*PARTITIONS, *table.own]

    def own(run: Run) -> list[str]:
        return sorted(run_tables.measured_columns([run])[table.name])

    selects = [f"FROM ledger.{table.name}_content"]
    for names, group in groupby(sorted(runs, key=own), key=own):
        files = [file for run in group for file in run.files(table.name)]
        if files:
            selects.append(
                f"SELECT {', '.join(map(_name, [*keys, *names]))} FROM "
                f"read_parquet([{', '.join(map(_text, files))}], "
                "hive_partitioning = true, hive_types = {'run_id': VARCHAR, 'intervention': "
                "VARCHAR})"
            )
    try:
        connection.execute(
            f"CREATE OR REPLACE VIEW ledger.{table.name} AS {' UNION ALL BY NAME '.join(selects)}"
        )
    except duckdb.Error as error:
        raise QueryError(
            f"the files of table {table.name} do not fit their manifests: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None


def _create_queries(connection: duckdb.DuckDBPyConnection, folder: Path) -> dict[str, str]:
    """Make each `.sql` file a view, whatever their order; return the descriptions.

    A query that needs a column that no run has becomes a view that says so when it is asked for.
    """
    connection.execute("CREATE TABLE ledger.unmeasured_views (view TEXT, column_name TEXT)")
    uncreated = {
        file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.sql"))
    }
    descriptions = {name: first_comment(sql) for name, sql in uncreated.items()}
    errors: dict[str, duckdb.Error] = {}
    # A view may stand on another one, so each round creates those whose views are there by now.
    progress = True
    while uncreated and progress:
        progress = False
        for name, sql in list(uncreated.items()):
            try:
                connection.execute(f"CREATE VIEW {_name(name)} AS {sql}")
            except duckdb.Error as error:
                errors[name] = error
            else:
                del uncreated[name]
                progress = True
    sql = "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main'"
    columns = {column for (column,) in connection.execute(sql).fetchall()}
    for name in uncreated:
        problem = str(errors[name]).partition("\n")[0]
        column = _unmeasured_column(name, errors, columns)
        if column is not None:
            problem = f"it needs column {column!r}, which none of them measured{way_to(column)}"
            connection.execute("INSERT INTO ledger.unmeasured_views VALUES (?, ?)", [name, column])
        message = _text(f"view {name!r} cannot be answered from these runs: {problem}")
        connection.execute(
            f"CREATE VIEW {_name(name)} AS SELECT error({message}) AS missing WHERE "
            f"error({message}) IS NULL"
        )
    return descriptions


def way_to(column: str) -> str:
    """How the next scan measures a column that no run has; nothing where no scan can."""
    names = [column.removeprefix(prefix) for prefix in ("", *PREFIXES, "chance_")]
    for kind in KINDS:
        for name in names:
            if kind.named_by is None and name in kind.registry:
                return f"; add {name!r} to {kind.field} in a scan, and scan again"
    return ""


def _unmeasured_column(
    name: str, errors: Mapping[str, duckdb.Error], columns: Container[str]
) -> str | None:
    """The column that a view, or one that it stands on, reads and no table has; none if something
    else is wrong with the view.
    """
    for _ in errors:
        message = str(errors[name]).partition("\n")[0]
        column = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', message)
        if column and isinstance(errors[name], duckdb.BinderException):
            return None if column[1] in columns else column[1]
        table = re.search(r"Table with name (\S+) does not exist", message)
        if table is None or table[1] not in errors:
            return None
        name = table[1]
    return None


def first_comment(sql: str) -> str:
    """The comment that a query starts with, on one line.

    >>> first_comment("-- Heads, ranked.\\n-- Two lines.\\nFROM heads -- not this")
    'Heads, ranked. Two lines.'
    """
    lines = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return " ".join(lines)


def _comment(
    connection: duckdb.DuckDBPyConnection,
    descriptions: dict[str, str],
    measured: Mapping[str, Mapping[str, Column]],
) -> None:
    for name, text in descriptions.items():
        connection.execute(f"COMMENT ON VIEW {_name(name)} IS {_text(text)}")
    shared = {name: text for name, (_, text) in PARTITIONS.items()} | KEYS
    every = {n: c.description for columns in measured.values() for n, c in columns.items()}
    sql = "SELECT table_name, column_name FROM duckdb_columns() WHERE schema_name = 'main' AND NOT internal"
    for view, column in connection.execute(sql).fetchall():
        of_view = {n: c.description for n, c in measured.get(view, {}).items()}
        known = every | shared | of_view | OWN.get(view, {})
        text = known.get(column) or _derived(column, every)
        if text:
            connection.execute(f"COMMENT ON COLUMN {_name(view)}.{_name(column)} IS {_text(text)}")


PREFIXES = {
    "mean_": "Mean over sequences: ",
    "sd_": "Standard deviation over sequences: ",
    "se_": "Standard error of the mean over sequences: ",
    "max_": "Largest mean of a head: ",
}
"""What views put before the name of a column that they sum up."""


def _derived(column: str, described: Mapping[str, str]) -> str | None:
    """What a column means that sums up another one."""
    for prefix, words in PREFIXES.items():
        text = described.get(column.removeprefix(prefix))
        if column.startswith(prefix) and text:
            return words + text
    return None


def _lock(connection: duckdb.DuckDBPyConnection, runs: list[Run], memory: str) -> None:
    """Leave the runs readable and nothing else; a query too big for its memory may fill up to half
    of what is free in the temporary directory.
    """
    temporary = tempfile.gettempdir()
    spill = os.path.join(temporary, f"headcount-{os.getpid()}")
    free = shutil.disk_usage(temporary).free // 2**20
    directories = ", ".join(_text(str(run.directory.path)) for run in runs)
    for setting in (
        "parquet_metadata_cache = true",
        f"memory_limit = {_text(memory)}",
        f"temp_directory = {_text(spill)}",
        f"max_temp_directory_size = '{free // 2}MiB'",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        f"allowed_directories = [{directories}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        try:
            connection.execute(f"SET {setting}")
        except duckdb.OutOfMemoryException:
            raise QueryError(
                f"--memory {memory}: is less than the runs themselves need; try 1GB"
            ) from None


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
