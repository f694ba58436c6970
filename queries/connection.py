"""A DuckDB connection over runs: views of what is committed, and nothing else within reach."""

from __future__ import annotations

import os
import re
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
from schemas.kinds import TABLES
from schemas.places import Place, place
from schemas.scan import SAFE_NAME
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
"""What columns mean in every other view."""


def connect(
    path: str | Place, queries: Path = QUERIES, code: str | None = None
) -> duckdb.DuckDBPyConnection:
    """Open a run directory, or a directory of runs: views of what is committed, locked against
    everything else. Only the shards that `code` measured, if it is given.

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
    _lock(connection, runs)
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
    connection.execute(f"CREATE VIEW main.{name} AS FROM ledger.{name}")


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
    plain = [run for run in runs if SAFE_NAME.fullmatch(run.directory.run_id)]
    for names, group in groupby(sorted(plain, key=own), key=own):
        files = [file for run in group for file in run.files(table.name)]
        if files:
            selects.append(
                f"SELECT {', '.join(map(_name, [*keys, *names]))} FROM "
                f"read_parquet([{', '.join(map(_file, files))}], "
                "hive_partitioning = true, hive_types = {'run_id': VARCHAR, 'intervention': "
                "VARCHAR})"
            )
    for run in runs:
        if run not in plain:
            selects += _selects_of_odd(run, table, own(run))
    try:
        connection.execute(
            f"CREATE OR REPLACE VIEW ledger.{table.name} AS {' UNION ALL BY NAME '.join(selects)}"
        )
    except duckdb.Error as error:
        raise QueryError(
            f"the files of table {table.name} do not fit their manifests: "
            f"{str(error).partition(chr(10))[0]}"
        ) from None


def _file(path: str) -> str:
    """A path that DuckDB takes for itself alone, whatever characters it has."""
    return _text(re.sub(r"[*?\[]", r"[\g<0>]", path))


def _selects_of_odd(run: Run, table: Table, names: list[str]) -> list[str]:
    """How to read a table of a run of an older version, whose name has characters that DuckDB does
    not read off a path: one select for each intervention.
    """

    def folder(file: str) -> str:
        return file.split("/")[-2]

    columns = ", ".join(map(_name, [*table.own, *names]))
    return [
        f"SELECT {_text(run.directory.run_id)} AS run_id, "
        f"{_text(partition.removeprefix('intervention='))} AS intervention, {columns} FROM "
        f"read_parquet([{', '.join(map(_file, files))}], hive_partitioning = false)"
        for partition, files in groupby(sorted(run.files(table.name), key=folder), key=folder)
    ]


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
            problem = f"it needs column {column!r}, which none of them measured"
            connection.execute("INSERT INTO ledger.unmeasured_views VALUES (?, ?)", [name, column])
        message = _text(f"view {name!r} cannot be answered from these runs: {problem}")
        connection.execute(
            f"CREATE VIEW {_name(name)} AS SELECT error({message}) AS missing WHERE "
            f"error({message}) IS NULL"
        )
    return descriptions


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


def _lock(connection: duckdb.DuckDBPyConnection, runs: list[Run]) -> None:
    """Leave the runs readable and nothing else; a query too big for memory may spill to the
    temporary directory.
    """
    spill = os.path.join(tempfile.gettempdir(), f"headcount-{os.getpid()}")
    paths = [str(run.directory.path) for run in runs]
    # DuckDB holds a path against these as it is written, with what `_file` puts into it.
    directories = ", ".join(dict.fromkeys([*map(_text, paths), *map(_file, paths)]))
    for setting in (
        "parquet_metadata_cache = true",
        f"temp_directory = {_text(spill)}",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        f"allowed_directories = [{directories}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _name(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
