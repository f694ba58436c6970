"""A DuckDB connection over runs: views of what is committed, and nothing else within reach."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa

from queries import run_tables
from queries.run_tables import Run
from queries.stores import register_stores
from queries.verified_files import Tell, damage_in
from schemas.errors import QueryError
from schemas.kinds import KINDS, TABLES
from schemas.places import Place, place
from schemas.scan import SAFE_NAME
from schemas.tables import OF_HEAD, PARTITIONS, SEQUENCES, Column, Table

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

KEYS = {c.name: c.description for c in (*PARTITIONS, *OF_HEAD, *SEQUENCES.columns)}
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
    path: str | Place,
    queries: Path = QUERIES,
    code: str | None = None,
    memory: str = MEMORY,
    tell: Tell = lambda line: None,
) -> duckdb.DuckDBPyConnection:
    """Open a run directory, or a directory of runs: views of what is committed, locked against
    everything else. Only the shards that `code` measured, if it is given. `memory` is what queries
    may take: `4GB`, or a share of the machine's, `50%`.

    Opening holds files to their names and sizes. Hand user SQL to `queries.answers.run_query`, which
    also holds what a question reads to its commits (`tell` hears of it), and refuses to write.
    """
    runs, unreadable = run_tables.read_runs(place(path), code)
    connection = duckdb.connect()
    register_stores(connection, [run.directory.path for run in runs])
    # DuckDB would otherwise take a misspelt view for a Python variable of whoever calls.
    connection.execute("SET python_enable_replacements = false")
    connection.execute("CREATE SCHEMA ledger")
    measured = run_tables.measured_columns(runs)
    for name, table in TABLES.items():
        _create(connection, name, _empty(table, measured[name]))
    _create(connection, "runs", run_tables.runs_table([]))
    _create(connection, "shards", run_tables.shards_table([]))
    _create(connection, "statistics", run_tables.statistics_table(runs))
    _create(connection, "formulas", run_tables.formulas_table(runs))
    descriptions = VIEWS | _create_queries(connection, queries)
    _comment(connection, descriptions, measured)
    # Binding a view opens a file of every run, so the views above are made while the tables below
    # them are empty.
    opened = OpenedRuns(runs, [str(error) for error in unreadable], tell)
    _fill(connection, opened)
    _lock(connection, runs, memory)
    OPENED[connection] = opened
    return connection


@dataclass(eq=False)
class OpenedRuns:
    """What a connection reads of runs, as far as it was found whole."""

    runs: list[Run]
    left_out: list[str]
    """Why a run cannot be read at all."""
    tell: Tell
    asking: Lock = field(default_factory=Lock)
    """One question at a time is looked at: which tables it reads, and whether they are whole."""


OPENED: WeakKeyDictionary[duckdb.DuckDBPyConnection, OpenedRuns] = WeakKeyDictionary()
"""What each connection reads."""


def hold_to_commits(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Find out which tables a question reads and hold their files to their commits; what is damaged
    is taken out of every view, and told of.
    """
    opened = OPENED[connection]
    if not opened.runs:
        return
    with opened.asking:
        tables = _tables_read(connection, sql)
        runs = [_verified(run, tables, opened.tell) for run in opened.runs] if tables else []
        if all(one is other for one, other in zip(runs, opened.runs, strict=False)):
            return
        known = set(damage_lines(opened))
        opened.runs = runs
        _fill(connection.cursor(), opened)
    for line in damage_lines(opened):
        if line not in known:
            opened.tell(f"warning: {line}")


def damage_lines(opened: OpenedRuns) -> list[str]:
    """One line for each run that cannot be read, or of which files are not as committed."""
    lines = [f"{why}; the run is left out of every view" for why in opened.left_out]
    for run in opened.runs:
        if run.damaged:
            first, *others = run.damaged
            more = f"; so are {len(others):,} more files" if others else ""
            lines.append(
                f"run {run.directory.run_id}: {first} and is left out of every view{more}. "
                f"headcount resume {run.directory.path} --verify measures it anew"
            )
    return lines


def _tables_read(connection: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """The tables with files that a question reads, through whatever views.

    DuckDB is asked while no table has files: for that it need not open one, which may be damaged.
    """
    cursor = connection.cursor()
    cursor.execute("BEGIN TRANSACTION")
    try:
        for name in TABLES:
            cursor.execute(f"CREATE OR REPLACE VIEW ledger.{name} AS FROM ledger.{name}_content")
        found = cursor.get_table_names(sql, qualified=True)
    except (duckdb.BinderException, duckdb.CatalogException, duckdb.ParserException):
        return []  # A mistake in the question, which whoever asks it will meet.
    except duckdb.Error:
        return list(TABLES)  # It cannot be told, as of PIVOT, which is several statements.
    finally:
        cursor.execute("ROLLBACK")
    return [name for name in TABLES if f"ledger.{name}_content" in found]


def _verified(run: Run, tables: list[str], tell: Tell) -> Run:
    """The run without what is damaged of some tables; the same run if nothing is."""
    found = damage_in(run, tables, tell)
    if not found:
        return run
    # A file that was measured again, extended or merged since the run was opened is no damage.
    now = run_tables.read_run(run.directory, run.code)
    if not now.ledger.equals(run.ledger):
        run, found = now, damage_in(now, tables, tell)
    return replace(run, damaged=[*run.damaged, *found]) if found else run


def _fill(connection: duckdb.DuckDBPyConnection, opened: OpenedRuns) -> None:
    """Point the tables at the files that count, and make them say what runs hold."""
    # DuckDB opens a file of each run to make a view: only where it cannot is it worth while to look
    # for damage now. What is damaged leaves a shard out of all tables, so all are looked at again.
    while misfits := [
        table for table in TABLES.values() if _misfit(connection, table, opened.runs)
    ]:
        opened.runs = [
            _verified(run, [table.name for table in misfits], opened.tell) for run in opened.runs
        ]
        for table in misfits:
            _leave_out_misfits(connection, table, opened)
    for table in TABLES.values():
        connection.execute(
            f"CREATE OR REPLACE VIEW ledger.{table.name} AS {_files_of(table, opened.runs)}"
        )
    for name, content in (
        ("runs", run_tables.runs_table(opened.runs)),
        ("shards", run_tables.shards_table(opened.runs)),
    ):
        connection.register("content", content)
        connection.execute(f"CREATE OR REPLACE TABLE ledger.{name}_content AS FROM content")
        connection.unregister("content")


def _misfit(connection: duckdb.DuckDBPyConnection, table: Table, runs: list[Run]) -> str | None:
    """Why DuckDB does not find the columns of a table in the files that it opens for that; none if
    it does.
    """
    try:
        connection.execute(f"EXPLAIN {_files_of(table, runs)}")
    except duckdb.Error as error:
        return str(error).partition("\n")[0]
    return None


def _leave_out_misfits(
    connection: duckdb.DuckDBPyConnection, table: Table, opened: OpenedRuns
) -> None:
    """Leave out runs whose files of a table do not fit their manifests, unless there is no other."""
    fitting: list[Run] = []
    misfits: list[str] = []
    for run in opened.runs:
        why = _misfit(connection, table, [run])
        if why is None:
            fitting.append(run)
        else:
            misfits.append(
                f"{run.directory.path}: the files of table {table.name} do not fit the manifest: "
                f"{why}; bring back a copy of manifest.json, or headcount rm {run.directory.path}"
            )
    if misfits and not fitting:
        raise QueryError(misfits[0])
    opened.runs = fitting
    opened.left_out += misfits


def view_descriptions(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Every view and what it is for, tables first."""
    sql = "SELECT view_name, comment FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal ORDER BY view_name"
    descriptions = dict(connection.cursor().execute(sql).fetchall())
    return {name: descriptions[name] for name in VIEWS} | descriptions


def _empty(table: Table, measured: Mapping[str, Column]) -> pa.Table:
    partitions = [pa.field(column.name, pa.string()) for column in PARTITIONS]
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


def _files_of(table: Table, runs: list[Run]) -> str:
    """The committed rows of a table, in SQL: one `read_parquet` for all runs that have the same
    columns.

    `union_by_name` would open every file whenever a query is planned (20,000 files: 3 s); this
    opens one per call.
    """
    keys = [*(column.name for column in PARTITIONS), *table.own]

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
                "VARCHAR})" + _but_hidden(table, runs)
            )
    for run in runs:
        if run not in plain:
            selects += _selects_of_odd(run, table, own(run))
    return " UNION ALL BY NAME ".join(selects)


def _but_hidden(table: Table, runs: list[Run]) -> str:
    """A condition that leaves out damaged shards with rows in merged files that count for others."""
    conditions = [
        f"(run_id = {_text(run.directory.run_id)} AND shard IN ({', '.join(map(str, shards))}))"
        for run in runs
        if (shards := run.hidden(table.name))
    ]
    return f" WHERE NOT ({' OR '.join(conditions)})" if conditions else ""


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
        f"{_but_hidden(table, [run])}"
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
    every = {n: c.description for columns in measured.values() for n, c in columns.items()}
    sql = "SELECT table_name, column_name FROM duckdb_columns() WHERE schema_name = 'main' AND NOT internal"
    for view, column in connection.execute(sql).fetchall():
        of_view = {n: c.description for n, c in measured.get(view, {}).items()}
        known = every | KEYS | of_view | OWN.get(view, {})
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
    paths = [str(run.directory.path) for run in runs]
    # DuckDB holds a path against these as it is written, with what `_file` puts into it.
    directories = ", ".join(dict.fromkeys([*map(_text, paths), *map(_file, paths)]))
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
