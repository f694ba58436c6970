"""A DuckDB connection over runs: views of what is committed, and nothing else within reach."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import duckdb
import pyarrow as pa

from headcount.queries.ask.named_queries import QUERIES, read_queries
from headcount.queries.open import run_tables
from headcount.queries.open.descriptions import VIEWS, describe_views
from headcount.queries.open.rollup_views import (
    MeasuredStatistic,
    create_rollup_views,
    measured_statistics,
)
from headcount.queries.open.run import READINGS, ReadRun, Run, read_run, read_runs
from headcount.queries.open.shipped_views import (
    BLIND,
    DYNAMIC,
    FOUNDED,
    ShippedViews,
    tables_named,
)
from headcount.queries.open.table_sql import (
    SOURCES,
    UNROLLED_HEADS,
    UNROLLED_SEQUENCES,
    Source,
    path_pattern,
    source_sql,
)
from headcount.queries.open.verified_files import Tell, damage_in
from headcount.queries.sql_text import quoted_name, text_literal
from headcount.schemas.errors import QueryError
from headcount.schemas.kinds import TABLES
from headcount.schemas.places import Place, StorePath, place
from headcount.schemas.tables import HEADS, PARTITIONS

MACROS = Path(__file__).with_name("internal") / "macros.sql"  # of spreads and errors

AT_AN_END = """
    OR lag(sequence) OVER in_order IS DISTINCT FROM sequence - 1
    OR lead(sequence) OVER in_order IS DISTINCT FROM sequence + 1"""
"""Whether a document may go on in sequences that are not among these. `internal.documents` has the
document of each sequence, or NULL if it has no other: most queries need no group for it."""

MEMORY = "50%"  # Memory that a query may take. What needs more goes to the temporary directory.

MEMORY_SIZE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)", re.IGNORECASE)
"""A size that is not zero, and its unit."""


def check_memory(size: str) -> str:
    """A size of memory as DuckDB reads it."""
    match = MEMORY_SIZE.fullmatch(size.strip())
    if match is None or (match[2] == "%" and float(match[1]) > 100):
        raise QueryError(f"--memory: expected a size such as 4GB or 50%, got {size!r}")
    return size.strip()


def share_of(memory: str, parts: int) -> str:
    """An equal part of some memory.

    >>> share_of("300MB", 4), share_of("50%", 2)
    ('75MB', '25%')
    """
    match = MEMORY_SIZE.fullmatch(memory)
    assert match is not None
    return f"{float(match[1]) / parts:g}{match[2]}"


@dataclass(eq=False)
class OpenedRuns:
    """The runs that a connection reads, without what was found damaged so far."""

    runs: list[Run]
    left_out: list[str]  # for each run that cannot be read at all, why
    tell: Tell
    shipped: ShippedViews = field(default_factory=lambda: ShippedViews({}))
    """The named queries, whose views are made when a query names them."""
    is_described: bool = False  # whether its views and columns have comments
    added_views: dict[str, str] = field(default_factory=dict[str, str])
    """The SQL of views that the caller added, by name. Each stands on earlier ones at most."""
    source_views: dict[str, str] = field(default_factory=dict[str, str])
    """The SQL of the view of each source."""
    unrolled: list[MeasuredStatistic] = field(default_factory=list[MeasuredStatistic])
    """The statistics that the views of roll-ups read from rows."""
    committed: dict[str, Any] = field(default_factory=dict[str, Any])
    """What commits say about the objects of stores that count, by key (`queries.open.stores`)."""

    @property
    def in_stores(self) -> list[tuple[StorePath, pa.Table]]:
        """The runs that lie in stores, each with its commits that count."""
        paths = [(run.directory.path, run) for run in self.runs]
        return [(path, run.done) for path, run in paths if isinstance(path, StorePath)]

    lock: Lock = field(default_factory=Lock)  # held while views are made: threads share them


OPENED: WeakKeyDictionary[duckdb.DuckDBPyConnection, OpenedRuns] = WeakKeyDictionary()
"""What each connection reads."""


def connect(
    path: str | Place,
    queries: Path = QUERIES,
    code: str | None = None,
    memory: str = MEMORY,
    tell: Tell = lambda line: None,
    read: ReadRun = read_run,
) -> duckdb.DuckDBPyConnection:
    """Open a run directory, or a directory of runs: views of what is committed, and nothing else.

    `code` reads only the shards that it measured. `memory` is what queries may take: `4GB`, or a
    share of the machine's, `50%`. The view of a named query is made when `run_query` or
    `hold_to_commits` first meets its name, and comments when a query reads them: all take half a
    second. `read` may remember runs that were opened before.

    Opening compares the names and sizes of files with their commits. Pass a user's SQL to
    `queries.ask.answers.run_query`: that also compares the content of the files which the query
    reads (`tell` hears of damage), and refuses to write.
    """
    runs, unreadable = read_runs(place(path), code, read)
    connection = duckdb.connect()
    opened = OpenedRuns(
        runs, [str(error) for error in unreadable], tell, ShippedViews(read_queries(queries))
    )
    build(connection, opened)
    _lock_down(connection, runs, memory)
    OPENED[connection] = opened
    return connection


def build(connection: duckdb.DuckDBPyConnection, opened: OpenedRuns) -> None:
    """Create the tables of some runs in an empty database, and point them at the files."""
    runs = opened.runs
    if in_stores := opened.in_stores:
        # This imports fsspec, which other runs need not wait for.
        from headcount.queries.open.stores import register_stores

        register_stores(connection, [path for path, _ in in_stores], opened.committed)
    # DuckDB would otherwise take a misspelt view for a Python variable of the caller.
    connection.execute("SET python_enable_replacements = false")
    # Seventy statements, each of which would be a transaction of its own.
    connection.begin()
    connection.execute("CREATE SCHEMA internal")
    # Creating a view opens a file of every run below it. So all views are created over empty
    # tables, and the tables are pointed at the files last.
    measured = run_tables.measured_columns(runs)
    partitions = [pa.field(column.name, pa.string()) for column in PARTITIONS]
    for table in TABLES.values():
        columns = [*partitions, *table.schema(measured[table.name].values())]
        # Seven times as fast as a copy of an Arrow table without rows.
        connection.execute(f"CREATE TABLE internal.{table.name}_content ({_sql_columns(columns)})")
    # Their rows come when the tables are pointed at the files.
    for name in ("runs", "shards"):
        columns = _sql_columns(run_tables.schema_of(name))
        connection.execute(f"CREATE TABLE internal.{name}_content ({columns})")
    for name, content in (
        ("statistics", run_tables.statistics_table(runs)),
        ("formulas", run_tables.formulas_table(runs)),
    ):
        _store_content(connection, name, content)
    for name in ("runs", "shards", "statistics", "formulas"):
        connection.execute(f"CREATE VIEW internal.{name} AS FROM internal.{name}_content")
    opened.source_views = {name: source_sql(source, []) for name, source in SOURCES.items()}
    for name, sql in opened.source_views.items():
        connection.execute(f"CREATE VIEW internal.{name} AS {sql}")
    for name in VIEWS:
        # Every view with layers and heads also has the name that people write, L5H1.
        columns = TABLES[name].schema().names if name in TABLES else []
        needs_label = {"layer", "head"} <= {*columns} and "label" not in columns
        label = ", 'L' || layer || 'H' || head AS label" if needs_label else ""
        connection.execute(f"CREATE VIEW main.{name} AS SELECT *{label} FROM internal.{name}")
    connection.execute(MACROS.read_text(encoding="utf-8"))
    # Where all is rolled up, the latter reads nothing.
    for prefix, at_an_end in (("", ""), ("unrolled_", AT_AN_END)):
        connection.execute(
            f"""
            CREATE VIEW internal.{prefix}documents AS
            SELECT
                run_id, intervention, sequence, pile_set_name,
                CASE
                    WHEN count(*) OVER (PARTITION BY run_id, intervention, document) > 1 {at_an_end}
                    THEN document
                END AS document
            FROM internal.{prefix}sequences
            WINDOW in_order AS (PARTITION BY run_id, intervention ORDER BY sequence)"""
        )
    connection.commit()
    opened.shipped.foundation = partial(_create_rollup_views, opened=opened)
    _point_at_files(connection, opened)


def view_descriptions(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Every view and what it is for, tables first."""
    sql = "SELECT view_name FROM duckdb_views() WHERE schema_name = 'main' AND NOT internal"
    # Views that the caller has added are among them, without a description.
    created = {name: "" for (name,) in connection.cursor().execute(sql).fetchall()}
    descriptions = created | OPENED[connection].shipped.descriptions
    return VIEWS | dict(sorted((descriptions | VIEWS).items()))


def make_views(connection: duckdb.DuckDBPyConnection, query: str | None = None) -> None:
    """Make the views that a query may stand on and that are not there yet, or all views."""
    opened = OPENED[connection]
    with opened.lock:
        _make_views(connection.cursor(), opened, query)


def make_described_views(cursor: duckdb.DuckDBPyConnection, opened: OpenedRuns) -> None:
    """Make all views, with comments that say what they and their columns mean. The caller has the
    lock, or needs none.
    """
    _make_views(cursor, opened, None)
    if not opened.is_described:
        descriptions = VIEWS | opened.shipped.descriptions
        describe_views(cursor, descriptions, run_tables.measured_columns(opened.runs))
        opened.is_described = True


def _make_views(cursor: duckdb.DuckDBPyConnection, opened: OpenedRuns, query: str | None) -> None:
    try:
        opened.shipped.create(cursor, query)
    except duckdb.Error:
        # DuckDB opens a file to create a view. This one was damaged after the runs were opened.
        opened.runs = [_verified(run, list(TABLES), opened.tell) for run in opened.runs]
        _point_at_files(cursor, opened)
        opened.shipped.create(cursor, query)
    # Such a query may ask the database itself what its views mean.
    if query is not None and BLIND.search(query.lower()):
        make_described_views(cursor, opened)


def hold_to_commits(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Make the views that a query names, and take what is damaged of its files out of all views."""
    opened = OPENED[connection]
    with opened.lock:
        _make_views(connection.cursor(), opened, sql)
        sources = sources_read(opened, sql)
        # Under the lock: a thread that asks meanwhile waits, and reads what was compared.
        verified = [_with_verified_sources(run, sources, opened.tell) for run in opened.runs]
        if all(new is old for new, old in zip(verified, opened.runs, strict=True)):
            return
        known_lines = set(damage_lines(opened))
        opened.runs = verified
        _point_at_files(connection.cursor(), opened)
    # The lock is free again: `tell` is the caller's, and may ask for something itself.
    for line in damage_lines(opened):
        if line not in known_lines:
            opened.tell(f"warning: {line}")


def damage_lines(opened: OpenedRuns) -> list[str]:
    """One line for each run that cannot be read, or has files that are not as committed."""
    lines = [f"{why}; the run is left out of every view" for why in opened.left_out]
    for run in opened.runs:
        path = run.directory.path
        data_remedy = f"headcount resume {path} --verify measures it anew"
        rollup_remedy = f"headcount compact {path} writes it again"
        for damaged, consequence, remedy in (
            (run.damaged_data, "is left out of every view", data_remedy),
            (run.damaged_rollups, "its shards are answered from rows", rollup_remedy),
        ):
            if damaged:
                first, *others = damaged
                more = f"; so are {len(others):,} more files" if others else ""
                lines.append(
                    f"run {run.directory.run_id}: {first} and {consequence}{more}. {remedy}"
                )
    return lines


def sources_read(opened: OpenedRuns, sql: str) -> list[str]:
    """The sources of rows that a query may read, whether it names them or views over them.

    A name that stands anywhere in the query, or in a view that the caller added, counts: comparing
    one table too many does no harm. In named queries, only what they select from does.
    """
    text = sql.lower()
    for name, code in reversed(opened.added_views.items()):
        if name.lower() in text:
            text += f" {code.lower()}"
    if DYNAMIC.search(text):
        return list(SOURCES)
    shipped = [opened.shipped.queries[name].code for name in opened.shipped.named_in(text)]
    names = {*re.findall(r"\w+", text), *tables_named(" ".join(shipped))}
    if FOUNDED.search(" ".join([text, *shipped])):
        names |= {"rollups", UNROLLED_HEADS.name, UNROLLED_SEQUENCES.name}
    # The documents of sequences.
    names |= {"sequences"} if "documents" in names else set()
    return [name for name in SOURCES if name in names]


def _with_verified_sources(run: Run, sources: Iterable[str], tell: Tell) -> Run:
    """The run without what is damaged of some sources. The same object if nothing is."""
    verified: set[str] = set()
    while True:
        # Where all is rolled up, rows are not read, until they stand in for a damaged roll-up.
        tables = {
            SOURCES[name].table.name
            for name in sources
            if not SOURCES[name].unrolled or run.files(SOURCES[name].table.name, unrolled=True)
        }
        if tables <= verified:
            return run
        run = _verified(run, sorted(tables - verified), tell)
        verified |= tables


def _verified(run: Run, tables: list[str], tell: Tell) -> Run:
    """The run without what is damaged of some tables. The same object if nothing is."""
    for _ in range(READINGS):
        known_paths = {damage.path for damage in run.damaged}
        found = damage_in(run, tables, tell) if tables else []
        damage = [each for each in found if each.path not in known_paths]
        if not damage:
            return run
        # The run may have changed since it was opened: files that were measured again, extended
        # or merged are not damaged, so look again with the commit log of now.
        run_now = read_run(run.directory, run.code)
        if run_now.commit_log.equals(run.commit_log):
            return replace(run, damaged=[*run.damaged, *damage])
        run = run_now
    raise _changing_too_fast(run)


def _changing_too_fast(run: Run) -> QueryError:
    return QueryError(
        f"the files of {run.directory.path} change faster than they are read; wait for whoever is "
        "at work on the run, then ask again"
    )


def _point_at_files(connection: duckdb.DuckDBPyConnection, opened: OpenedRuns) -> None:
    """Point the tables at the files that count, and fill the tables that describe the runs."""
    # DuckDB opens a file of each run to create a view. If that fails, damage is looked for now; it
    # takes a shard out of all tables, so all tables are tried again.
    for _ in range(READINGS):
        # Before anything is opened: stores are not asked for what a commit says. A shard may have
        # been measured again.
        for path, commits in opened.in_stores:
            from headcount.queries.open.stores import committed_objects

            opened.committed |= committed_objects(path, commits)
        unfit_sources: list[Source] = []
        for name, source in SOURCES.items():
            sql = source_sql(source, opened.runs)
            # To make a view opens files; one that reads the same files stays.
            if sql == opened.source_views[name]:
                continue
            if _problem(connection, f"CREATE OR REPLACE VIEW internal.{name} AS {sql}"):
                unfit_sources.append(source)
            else:
                opened.source_views[name] = sql
        if not unfit_sources:
            break
        names = [source.table.name for source in unfit_sources]
        opened.runs = [_verified(run, names, opened.tell) for run in opened.runs]
        for source in unfit_sources:
            _leave_out_misfits(connection, source, opened)
    else:
        raise _changing_too_fast(opened.runs[0])
    _store_content(connection, "runs", run_tables.runs_table(opened.runs))
    _store_content(connection, "shards", run_tables.shards_table(opened.runs))
    if opened.shipped.foundation is None and _unrolled_statistics(opened) != opened.unrolled:
        _create_rollup_views(connection, opened)


def _create_rollup_views(connection: duckdb.DuckDBPyConnection, opened: OpenedRuns) -> None:
    opened.unrolled = _unrolled_statistics(opened)
    create_rollup_views(connection, opened.unrolled)


def _unrolled_statistics(opened: OpenedRuns) -> list[MeasuredStatistic]:
    """The statistics of rows that are in no roll-up. A select of each would take time to plan."""
    runs = [run for run in opened.runs if run.files(HEADS.name, unrolled=True)]
    return measured_statistics(runs)


def _problem(connection: duckdb.DuckDBPyConnection, sql: str) -> str | None:
    """The first line of what DuckDB says against a statement. None if it ran."""
    try:
        connection.execute(sql)
    except duckdb.Error as error:
        return str(error).partition("\n")[0]
    return None


def is_of_gone_file(message: str) -> bool:
    """Whether DuckDB says that a file is gone, which somebody may have merged meanwhile."""
    return "No such file" in message or "No files found" in message


def _leave_out_misfits(
    connection: duckdb.DuckDBPyConnection, source: Source, opened: OpenedRuns
) -> None:
    """Leave out runs whose files do not fit their manifests; it is an error if none is left."""
    fitting: list[Run] = []
    misfits: list[str] = []
    for run in opened.runs:
        # Only planned, not run: that is enough to compare the columns of its files.
        why = _problem(connection, f"EXPLAIN {source_sql(source, [run])}")
        # A file that was merged into another one is gone: the caller looks again.
        if why is None or is_of_gone_file(why):
            fitting.append(run)
        else:
            misfits.append(
                f"{run.directory.path}: the files of table {source.table.name} do not fit the "
                f"manifest: {why}; if older code wrote them, read them with that code; else bring "
                f"back a copy of manifest.json"
            )
    if misfits and not fitting:
        raise QueryError(misfits[0])
    opened.runs = fitting
    opened.left_out += misfits


def _sql_columns(fields: Iterable[pa.Field]) -> str:
    return ", ".join(f"{quoted_name(each.name)} {_sql_type(each.type)}" for each in fields)


def _sql_type(type_: pa.DataType) -> str:
    """What DuckDB makes of the type of a column. It knows simple ones by Arrow's names too."""
    if pa.types.is_list(type_):
        return f"{_sql_type(type_.value_type)}[]"
    if pa.types.is_struct(type_):
        return f"STRUCT({_sql_columns(type_.fields)})"
    return "TIMESTAMPTZ" if pa.types.is_timestamp(type_) else str(type_)


def _store_content(connection: duckdb.DuckDBPyConnection, name: str, content: pa.Table) -> None:
    connection.register("content", content)
    connection.execute(f"CREATE OR REPLACE TABLE internal.{name}_content AS FROM content")
    connection.unregister("content")


def spill_directory(process_id: int) -> Path:
    """Where a process puts what does not fit into memory. DuckDB removes it at a regular end."""
    return Path(tempfile.gettempdir()) / f"headcount-{process_id}"


def _lock_down(connection: duckdb.DuckDBPyConnection, runs: list[Run], memory: str) -> None:
    """Leave the runs readable and nothing else."""
    # A query too big for its memory may fill half of what is free there.
    spills = spill_directory(os.getpid())
    free_mebibytes = shutil.disk_usage(spills.parent).free // 2**20
    paths = [str(run.directory.path) for run in runs]
    # DuckDB compares a path with these as the SQL writes it, so the escaped form is allowed too.
    allowed = dict.fromkeys([*map(text_literal, paths), *map(path_pattern, paths)])
    # The order matters: directories cannot be allowed once access is closed, and no setting can
    # change once the configuration is locked.
    for setting in (
        "parquet_metadata_cache = true",
        f"memory_limit = {text_literal(memory)}",
        f"temp_directory = {text_literal(str(spills))}",
        f"max_temp_directory_size = '{free_mebibytes // 2}MiB'",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        f"allowed_directories = [{', '.join(allowed)}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        try:
            connection.execute(f"SET {setting}")
        except duckdb.OutOfMemoryException:
            raise QueryError(
                f"--memory {memory}: is less than the runs themselves need; try 1GB"
            ) from None
