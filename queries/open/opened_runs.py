"""Opened runs: a DuckDB connection, views of what is committed, and nothing else within reach."""

import re
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, Self

import duckdb
import pyarrow as pa

from headcount.queries.open import rooms
from headcount.queries.open.base_views import (
    BASE,
    MACRO_NAMES,
    MACROS_SQL,
    base_columns,
    create_base,
    store_content,
    with_foundations,
)
from headcount.queries.open.descriptions import VIEWS
from headcount.queries.open.limits import MEMORY, lock_down
from headcount.queries.open.named_queries import QUERIES, NamedQuery, read_queries
from headcount.queries.open.run import READINGS, ReadRun, Run, read_run, read_runs
from headcount.queries.open.run_tables import CONTENTS, measured_columns
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
    source_sql,
)
from headcount.queries.open.verified_files import Tell, changing_too_fast, verified
from headcount.schemas.errors import QueryError, StoreError
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.packages import entered
from headcount.schemas.places import Place, StorePath, place
from headcount.schemas.tables import HEADS

NO_RUNS: list[Run] = []

FOUNDATION = {"rollups", "unrolled_documents", UNROLLED_HEADS.name, UNROLLED_SEQUENCES.name}
"""What the views of roll-ups stand on."""


def say_nothing(line: str) -> None:
    """Tell nobody of damage that a query finds."""


class OpenedRuns:
    """Runs and the connection that reads them, without what was found damaged so far."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        runs: Iterable[Run] = (),
        unreadable: Iterable[Exception] = (),
        queries: Path = QUERIES,
        tell: Tell = say_nothing,
    ) -> None:
        self.connection = connection
        self.runs = list(runs)  # another list once damage was found
        self.left_out = [str(error) for error in unreadable]  # why some cannot be read at all
        self.tell = tell  # called with a line whenever a query finds damage
        own_queries: dict[str, NamedQuery] = {}
        if any(run.queries for run in self.runs):
            own_queries = entered(rooms.QUERIES_OF_RUNS)(self.runs, connection)
        self.shipped = ShippedViews(
            own_queries | read_queries(queries),
            lambda: base_columns(measured_columns(self.runs)),
        )
        """The named queries, whose views are made when a query names them."""
        self._lock = Lock()  # held while views are made: threads share them
        self._is_described = False  # whether views and columns have comments
        self._added_views: dict[str, str] = {}
        """The SQL of views that the caller added, by name. Each stands on earlier ones at most."""
        self._filled_from: dict[str, list[Run]] = {}
        """What was made of `BASE` by now, each with the runs that it shows: none at first."""
        self._source_views: dict[str, str] = {}  # the SQL of the view of each source
        self._are_macros_made = False
        self._unrolled: list[str] | None = None
        """The runs whose rows the views of roll-ups read; None before there are such views."""
        self._told = set(self.damage())  # whoever opens the runs asks for these lines
        self._committed: dict[str, Any] = {}
        """What commits say about objects of stores that count, by key (`queries.open.stores`)."""

    @classmethod
    def open(
        cls,
        path: str | Place,
        queries: Path = QUERIES,
        code: str | None = None,
        memory: str = MEMORY,
        tell: Tell = say_nothing,
        read: ReadRun = read_run,
    ) -> Self:
        """Open a run directory, or a directory of runs.

        `code` reads only the shards that it measured. `memory` is what queries may take: `4GB`, or
        a share of the machine's, `50%`. `read` may remember runs that were opened before.

        Opening looks for files that are gone, or in a store have another size, and makes nothing:
        `hold_to_commits` makes what a query names, and compares the content of files that it reads.
        """
        runs, unreadable = read_runs(place(path), code, read)
        opened = cls(duckdb.connect(), runs, unreadable, queries, tell)
        opened.build()
        lock_down(opened.connection, [str(run.directory.path) for run in runs], memory)
        return opened

    def build(self) -> None:
        """Prepare an empty database."""
        if in_stores := self._in_stores:
            register_stores = entered(rooms.REGISTER_STORES)
            register_stores(self.connection, [path for path, _ in in_stores], self._committed)
        # DuckDB would otherwise take a misspelt view for a Python variable of the caller.
        self.connection.execute("SET python_enable_replacements = false")

    def add_view(self, name: str, sql: str) -> None:
        """Add a view of the caller's."""
        self._added_views[name] = sql
        # DuckDB opens a file to create a view, and a damaged one would fail.
        self.hold_to_commits(sql)
        self.connection.execute(f"CREATE VIEW {name} AS {sql}")

    def close(self) -> None:
        """Free the memory and the files. Nothing can be asked afterwards."""
        self.connection.close()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor of the connection, for a thread or a transaction of its own."""
        return self.connection.cursor()

    def fetched(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows about the runs or the database itself, which no damage of files changes."""
        with self._lock:
            self._make_base(self.cursor(), self._text_of(sql))
            self._point_at_files(self.cursor())
        return self.cursor().execute(sql, parameters).fetchall()

    @property
    def view_descriptions(self) -> dict[str, str]:
        """Every view and what it is for, tables first."""
        # Views that the caller has added are among them, without a description.
        added = dict.fromkeys(self._added_views, "")
        return VIEWS | dict(sorted((added | self.shipped.descriptions | VIEWS).items()))

    def columns(self, view: str) -> frozenset[str]:
        """Names of a view's columns."""
        self.make_views(view)
        sql = (
            "SELECT column_name FROM duckdb_columns() WHERE schema_name = 'main' AND table_name = ?"
        )
        return frozenset(name for (name,) in self.fetched(sql, view))

    def unmeasured_views(self, query: str | None = None) -> dict[str, str]:
        """Views of a query, or all, that cannot be answered, each with the column it lacks."""
        self.make_views(query)
        return dict(self.shipped.unmeasured)

    def make_views(self, query: str | None = None) -> None:
        """Make the views that a query may stand on and that are not there yet, or all views."""
        with self._lock:
            self._make_views(self.cursor(), query)

    def make_tables(self) -> None:
        """Make all tables, for queries on cursors of their own, which make nothing."""
        with self._lock:
            self._make_base(self.cursor(), "", everything=True)
            self._point_at_files(self.cursor())

    def make_described_views(self) -> None:
        """Make all views, with comments that say what they and their columns mean."""
        with self._lock:
            self._make_described_views(self.cursor())

    def _make_described_views(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._make_views(cursor, None)
        if not self._is_described:
            descriptions = VIEWS | self.shipped.descriptions
            entered(rooms.DESCRIBE_VIEWS)(cursor, descriptions, measured_columns(self.runs))
            self._is_described = True

    def _make_views(self, cursor: duckdb.DuckDBPyConnection, query: str | None) -> None:
        """Make what a query may stand on, or everything, and point it at the files last."""
        named = self.shipped.queries if query is None else self.shipped.named_in(query)
        code = " ".join(self.shipped.queries[name].code for name in named)
        text = f"{self._text_of(query or '')} {code}"
        self._make_base(cursor, text, everything=query is None)
        if self._unrolled is None and (query is None or FOUNDED.search(text)):
            self._create_rollup_views(cursor)
        try:
            self.shipped.create(cursor, query)
        except duckdb.Error:
            # DuckDB opens a file to create a view. This one was damaged after the runs were opened.
            self.runs = [verified(run, list(TABLES), self.tell) for run in self.runs]
            self._point_at_files(cursor)
            self.shipped.create(cursor, query)
        self._point_at_files(cursor)
        # Such a query may ask the database itself what its views mean.
        if query is not None and BLIND.search(query.lower()):
            self._make_described_views(cursor)

    def _make_base(
        self, cursor: duckdb.DuckDBPyConnection, text: str, everything: bool = False
    ) -> None:
        """Make the tables and macros that a text names, without rows."""
        words = {*re.findall(r"\w+", text)}
        if FOUNDED.search(text):
            words |= FOUNDATION
        names = [name for name in BASE if everything or name in words]
        new = [name for name in with_foundations(names) if name not in self._filled_from]
        if new:
            create_base(cursor, new, measured_columns(self.runs))
            self._filled_from |= dict.fromkeys(new, NO_RUNS)
        if not self._are_macros_made and (everything or MACRO_NAMES & words):
            cursor.execute(MACROS_SQL)
            self._are_macros_made = True

    def _text_of(self, sql: str) -> str:
        """A query in small letters, with the SQL of views in it that the caller added."""
        text = sql.lower()
        for name, code in reversed(self._added_views.items()):
            if name.lower() in text:
                text += f" {code.lower()}"
        return text

    def hold_to_commits(self, sql: str) -> None:
        """Make the views that a query names, and take what is damaged of its files out of all."""
        with self._lock:
            self._make_views(self.cursor(), sql)
            sources = self.sources_read(sql)
            # Under the lock: a thread that asks meanwhile waits, and reads what was compared.
            runs = [_with_verified_sources(run, sources, self.tell) for run in self.runs]
            if any(new is not old for new, old in zip(runs, self.runs, strict=True)):
                self.runs = runs
                self._point_at_files(self.cursor())
        # The lock is free again: `tell` is the caller's, and may ask for something itself.
        for line in self.damage():
            if line not in self._told:
                self._told.add(line)
                self.tell(f"warning: {line}")

    def damage(self) -> list[str]:
        """One line for each run that cannot be read, or of which damage was found until now."""
        lines = [f"{why}; the run is left out of every view" for why in self.left_out]
        for run in self.runs:
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

    def sources_read(self, sql: str) -> list[str]:
        """The sources of rows that a query may read, whether it names them or views over them.

        A name that stands anywhere in the query, or in a view that the caller added, counts:
        comparing one table too many does no harm. In named queries, only what they select from
        does.
        """
        text = self._text_of(sql)
        if DYNAMIC.search(text):
            return list(SOURCES)
        shipped = [self.shipped.queries[name].code for name in self.shipped.named_in(text)]
        names = {*re.findall(r"\w+", text), *tables_named(" ".join(shipped))}
        if FOUNDED.search(" ".join([text, *shipped])):
            names |= FOUNDATION
        # The documents of sequences.
        names |= {"sequences"} if "documents" in names else set()
        return [name for name in SOURCES if name in names]

    @property
    def _in_stores(self) -> list[tuple[StorePath, pa.Table]]:
        """The runs that lie in stores, each with its commits that count."""
        paths = [(run.directory.path, run) for run in self.runs]
        return [(path, run.done) for path, run in paths if isinstance(path, StorePath)]

    def _point_at_files(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """Point what was made at the files that count, and fill the tables about the runs."""
        # DuckDB opens a file of each run to create a view. If that fails, damage is looked for now;
        # it takes a shard out of all tables, so all tables are tried again.
        for _ in range(READINGS):
            outdated = [name for name, runs in self._filled_from.items() if runs is not self.runs]
            unfit = self._unfit_of(cursor, [SOURCES[name] for name in outdated if name in SOURCES])
            if not unfit:
                break
            names = [source.table.name for source in unfit]
            self.runs = [verified(run, names, self.tell) for run in self.runs]
            for source in unfit:
                self._leave_out_misfits(cursor, source)
        else:
            raise changing_too_fast(self.runs[0])
        for name in outdated:
            if name in CONTENTS:
                store_content(cursor, name, CONTENTS[name](self.runs))
            self._filled_from[name] = self.runs
        if outdated and self._unrolled is not None and self._unrolled != self._unrolled_runs():
            self._create_rollup_views(cursor)

    def _unfit_of(self, cursor: duckdb.DuckDBPyConnection, sources: list[Source]) -> list[Source]:
        """Point sources at their files; those whose files DuckDB does not take."""
        # Before anything is opened: stores are not asked for what a commit says. A shard may have
        # been measured again.
        for path, commits in self._in_stores if sources else ():
            self._committed |= entered(rooms.COMMITTED_OBJECTS)(path, commits)
        unfit: list[Source] = []
        for source in sources:
            sql = source_sql(source, self.runs)
            # To make a view opens files; one that reads the same files stays.
            if sql == self._source_views.get(source.name, source_sql(source, NO_RUNS)):
                continue
            if _error_of(cursor, f"CREATE OR REPLACE VIEW internal.{source.name} AS {sql}"):
                unfit.append(source)
            else:
                self._source_views[source.name] = sql
        return unfit

    def _create_rollup_views(self, cursor: duckdb.DuckDBPyConnection) -> None:
        self._unrolled = self._unrolled_runs()
        runs = [run for run in self.runs if run.directory.run_id in self._unrolled]
        entered(rooms.CREATE_ROLLUP_VIEWS)(cursor, runs)

    def _unrolled_runs(self) -> list[str]:
        """The runs with rows in no roll-up; a select of each statistic takes time to plan."""
        return [run.directory.run_id for run in self.runs if run.files(HEADS.name, unrolled=True)]

    def _leave_out_misfits(self, cursor: duckdb.DuckDBPyConnection, source: Source) -> None:
        """Leave out runs whose files do not fit their manifests; an error if none is left."""
        fitting: list[Run] = []
        misfits: list[str] = []
        for run in self.runs:
            # Only planned, not run: that is enough to compare the columns of its files.
            error = _error_of(cursor, f"EXPLAIN {source_sql(source, [run])}")
            why = "" if error is None else said_by(error).partition("\n")[0]
            # A file that was merged into another one is gone: the caller looks again.
            if error is None or is_of_gone_file(str(error)):
                fitting.append(run)
            elif str(error).startswith(CALLS):
                # What the store has not given may be whole: an answer without it is wrong.
                raise StoreError(f"{run.directory.path}: cannot be read ({why})")
            else:
                misfits.append(
                    f"{run.directory.path}: the files of table {source.table.name} do not fit the "
                    f"manifest: {why}; if older code wrote them, read them with that code; else "
                    f"bring back a copy of manifest.json"
                )
        if misfits and not fitting:
            raise QueryError(misfits[0])
        self.runs = fitting
        self.left_out += misfits


CALLS = "Traceback (most recent call last)"
"""How DuckDB's message begins where a file system in Python failed, which stores are read with."""

CALLED = re.compile(r"^\w+: (?:\[Errno \d+\] )?(.*)", re.MULTILINE)
"""The line behind the calls, with the kind of the error and what it says."""

GONE = re.compile("No such file|No files found|^FileNotFoundError", re.MULTILINE)


def is_of_gone_file(message: str) -> bool:
    """Whether DuckDB says that a file is gone, which somebody may have merged meanwhile."""
    return GONE.search(message) is not None


def said_by(error: Exception) -> str:
    """What an error of DuckDB says, without the calls that led to one of a store.

    >>> said_by(duckdb.Error(f"{CALLS}:\\n  File …\\nOSError: [Errno 5] no answer\\n\\nLINE 1: …"))
    'no answer'
    """
    message = str(error)
    error_behind = CALLED.search(message) if message.startswith(CALLS) else None
    return error_behind[1] if error_behind else message


def _with_verified_sources(run: Run, sources: Iterable[str], tell: Tell) -> Run:
    """The run without what is damaged of some sources. The same object if nothing is."""
    compared: set[str] = set()
    while True:
        # Where all is rolled up, rows are not read, until they stand in for a damaged roll-up.
        tables = {
            SOURCES[name].table.name
            for name in sources
            if not SOURCES[name].unrolled or run.files(SOURCES[name].table.name, unrolled=True)
        }
        if tables <= compared:
            return run
        run = verified(run, sorted(tables - compared), tell)
        compared |= tables


def _error_of(cursor: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Error | None:
    """What DuckDB has against a statement. None if it ran."""
    try:
        cursor.execute(sql)
    except duckdb.Error as error:
        return error
    return None
