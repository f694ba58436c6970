"""The runs as they are committed now: what the page lists of them, and what queries need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from threading import Lock
from typing import Any, TypeAlias

import duckdb

from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.explore.axes import Axis, axis_of
from headcount.queries.explore.page_queries import (
    BINS_IN_MEMORY,
    Header,
    Heatmap,
    ProfileFacts,
    Query,
    RunFacts,
    Scope,
    sample_condition,
    where,
)
from headcount.queries.open.connection import OPENED, hold_to_commits, make_views
from headcount.queries.open.run import ReadRun, Run, read_runs
from headcount.queries.report.head_curves import AXES
from headcount.queries.sql_text import quoted_name, text_literal
from headcount.schemas.errors import QueryError, unknown
from headcount.schemas.files.places import place
from headcount.schemas.files.tables import CURVES, HEADS, PROFILES, ROLLUPS

LARGE_RUN_ROWS = 20_000_000
"""Above so many rows of one intervention, brushes and histograms read a sample of sequences."""

AXIS_ROWS = 50_000
"""Rows of the first sequences from which the ends of an axis are taken, about."""

TAIL = 0.0005
"""Share of the values that lie beyond each end of an axis."""

SAMPLE_ROWS = 10_000_000
"""Rows of a sample, about, if there is memory for them."""

MOST_SAMPLES = 2
"""Samples that are kept: of so many runs, or interventions of a run."""

MEMORY_SHARE = 1 / 8
"""Share of the memory for queries that a sample may take."""

BYTES_OF_KEYS = 27
"""Bytes of a row's layer, head and sequence, with what DuckDB notes about a row (measured).

Each statistic has four more.
"""

FIRST_STATISTICS = (
    "sink_mass",
    "entropy",
    "induction_score",
    "value_norm",
    "previous_token_mass",
    "head_output_norm",
)
"""Statistics that a page shows first, if a run has them. It shows as many of others if not."""


SampleKey: TypeAlias = tuple[str, str]
"""The run and the intervention of a sample."""

Ends: TypeAlias = tuple[float | None, float | None]
"""The smallest and the largest value of an axis. None if no value is defined."""


@dataclass(frozen=True)
class Sample:
    """Rows of some sequences of one run under one intervention, in memory.

    Every query about a head would open every file of the run, and decode rows of sequences that it
    does not want. In memory, the rows of a head lie side by side and nothing else is read.
    """

    table: str
    facts: RunFacts
    scope: Scope
    """The run and the intervention."""

    @property
    def drop(self) -> str:
        """SQL that removes the table."""
        return f"DROP TABLE IF EXISTS {self.table}"

    @property
    def statements(self) -> list[str]:
        """SQL that makes the table and fills it, layer by layer.

        Queries of the page are answered between two layers. Files are sorted by layer, so each
        statement reads what the others do not.
        """
        columns = ", ".join(map(quoted_name, self.facts.statistics))
        conditions = [*self.scope.conditions_on_run, sample_condition(self.facts.every)]
        rows = f"SELECT layer, head, sequence, {columns} FROM heads{where(conditions)}"
        # In this order, DuckDB knows of every block of rows which heads it has.
        return [f"CREATE TABLE {self.table} AS {rows} AND false"] + [
            f"INSERT INTO {self.table} {rows} AND layer = {layer} ORDER BY layer, head, sequence"
            for layer in range(self.facts.layers)
        ]


class PageRuns:
    """Runs opened once. They do not change; a newer state of them is opened anew."""

    def __init__(self, database: RunDatabase, revision: int) -> None:
        self.database = database
        self.revision = revision
        """Differs between two states, also after a restart."""
        self._runs = _runs_of(database)
        self._records = database.records("FROM runs ORDER BY run_id")
        self._statistics = database.records(
            "SELECT name, unit, range_low, range_high, meaning, formula, source, uniform_baseline "
            "FROM statistics ORDER BY name"
        )
        self._subsets: dict[str, list[str]] = {}
        """The subsets of the Pile that each run has sequences of."""
        subsets = database.rows(
            "SELECT DISTINCT run_id, pile_set_name FROM sequences "
            "WHERE pile_set_name IS NOT NULL ORDER BY ALL"
        )
        for run_id, subset in subsets:
            self._subsets.setdefault(run_id, []).append(subset)
        # Asked once and not for each of many runs: it binds the view.
        self._sequence_columns = database.columns("sequences")
        self._run_by_id = {run.directory.run_id: run for run in self._runs}
        self._facts = {record["run_id"]: self._facts_of(record) for record in self._records}
        self._samples: dict[SampleKey, Sample] = {}
        """Samples that are in memory, the oldest first."""
        self._unreadable_samples: set[SampleKey] = set()
        # No name is used twice: a query that comes late would read the rows of another sample.
        self._sample_numbers = count(1)
        if any(facts.has_rollups for facts in self._facts.values()):
            # Queries are asked on cursors of the connection, which make no views.
            make_views(database.connection, " ".join(_ROLLED_UP_VIEWS))
        self._bins: BinsInMemory | None = None
        if any(facts.keeps_sample for facts in self._facts.values()):
            self._bins = BinsInMemory(database.connection)
        self._has_profiles = any(facts.profiles for facts in self._facts.values())
        self._has_kept_curves = any(facts.kept_curves for facts in self._facts.values())
        if self._has_profiles:
            make_views(database.connection, "profile_means")
        self._axes: dict[tuple[str, str], Axis] = {}
        self.has_verified_rows = False
        """Whether the rows of heads were compared with their commits."""

    def is_current(self, path: str, code: str | None, read: ReadRun) -> bool:
        """Whether nothing was committed and no damage was found since it was opened.

        `read` may remember runs.
        """
        if _runs_of(self.database) is not self._runs:
            return False
        runs, _ = read_runs(place(path), code, read)
        return len(runs) == len(self._runs) and all(
            now is then
            or (
                now.directory.path == then.directory.path and now.commit_log.equals(then.commit_log)
            )
            for now, then in zip(runs, self._runs, strict=True)
        )

    def verify(self, rows: bool) -> None:
        """Compare files with their commits. What is damaged leaves every view.

        Roll-ups are compared always, and rows if they are asked for or were compared before: the
        rows of 10^9 tokens are 12 GB, and their roll-ups 0.5 GB.
        """
        rows = rows or self.has_verified_rows
        tables = [HEADS.name] if rows else []
        if rows and self._has_kept_curves:
            tables.append(CURVES.name)
        tables.append("sequences")
        if any(facts.has_rollups for facts in self._facts.values()):
            tables.append(ROLLUPS.name)
        if self._has_profiles:
            tables.append(PROFILES.name)
        for table in tables:
            hold_to_commits(self.database.connection, f"FROM {table}")
        # Not before: meanwhile another query may ask.
        self.has_verified_rows = rows

    def facts(self, run_id: str) -> RunFacts:
        """What queries need to know of a run, without axes."""
        if run_id not in self._facts:
            raise QueryError(unknown("run", run_id, self._facts))
        return self._facts[run_id]

    def facts_for(self, query: Query) -> RunFacts:
        """What a query needs to know of its run, without axes."""
        facts = self.facts(query.scope.run_id)
        key = facts.run_id, query.scope.intervention
        if not query.reads_sample or key in self._unreadable_samples:
            return replace(facts, keeps_sample=False)
        sample = self._samples.get(key)
        return replace(facts, sample=sample.table if sample else None)

    def lacks_sample(self, key: SampleKey) -> bool:
        """Whether a sample is to be read."""
        run_id, intervention = key
        return intervention in self._missing_samples(self.facts(run_id))

    def new_sample(self, key: SampleKey) -> Sample:
        """A sample that is to be read."""
        run_id, intervention = key
        table = f"internal.sample_{next(self._sample_numbers)}"
        return Sample(table, self.facts(run_id), Scope(run_id=run_id, intervention=intervention))

    def keep_sample(self, key: SampleKey, sample: Sample) -> list[Sample]:
        """Answer queries from a sample that was read. Returns those that are not kept longer."""
        self._samples[key] = sample
        # A dictionary has the order in which they came.
        oldest = list(self._samples)[:-MOST_SAMPLES]
        return [self._samples.pop(key) for key in oldest]

    def give_up_sample(self, key: SampleKey) -> None:
        """Answer queries from rows: their sample cannot be read."""
        self._unreadable_samples.add(key)

    def with_axes(
        self, facts: RunFacts, statistics: set[str], cursor: duckdb.DuckDBPyConnection
    ) -> RunFacts:
        """The facts with the axes of some statistics. An axis is found once."""
        missing = sorted(name for name in statistics if (facts.run_id, name) not in self._axes)
        if missing:
            find_ends = self._ends_in_rollups if facts.has_rollups else self._ends_in_rows
            ends = find_ends(facts, missing, cursor)
            ranges = {
                row["name"]: (_finite(row["range_low"]), _finite(row["range_high"]))
                for row in self._statistics
            }
            # Two threads may both find an axis: it is the same one.
            for name in missing:
                declared = ranges.get(name, (None, None))
                self._axes[facts.run_id, name] = axis_of(declared, *ends[name])
        axes = {name: self._axes[facts.run_id, name] for name in statistics}
        return replace(facts, axes=axes)

    def hold_bins(
        self,
        facts: RunFacts,
        intervention: str,
        statistics: Iterable[str],
        cursor: duckdb.DuckDBPyConnection,
    ) -> None:
        """Have the histograms of a large run's roll-ups in memory."""
        if self._bins is not None and facts.keeps_sample:
            self._bins.hold(facts.run_id, intervention, statistics, cursor)

    def first_query(self) -> Heatmap:
        """The heatmap that a page shows first."""
        facts = next(iter(self._facts.values()))
        scope = Scope(run_id=facts.run_id, intervention=facts.interventions[0])
        return Heatmap(kind="heatmap", scope=scope, statistic=_first_statistics(facts)[0])

    def first_axes(self) -> tuple[RunFacts, set[str]]:
        """The run that a page shows first, and the statistics of its histograms."""
        facts = next(iter(self._facts.values()))
        return facts, set(_first_statistics(facts))

    def overview(self) -> Header:
        """Everything that the page lists: runs, statistics, subsets, and what is damaged."""
        runs: list[Header] = []
        for record in self._records:
            facts = self._facts[record["run_id"]]
            runs.append(
                {
                    **{name: record[name] for name in _SHOWN_OF_RUN},
                    "subsets": self._subsets.get(facts.run_id, []),
                    "first_statistics": _first_statistics(facts),
                    "every": facts.every,
                    "has_rollups": facts.has_rollups,
                    "waits_for_sample": self._missing_samples(facts),
                    "has_curves": bool(facts.profiles or facts.kept_curves),
                }
            )
        return {
            "runs": runs,
            "statistics": self._statistics,
            "damage": self.database.damage(),
        }

    def _missing_samples(self, facts: RunFacts) -> list[str]:
        """The interventions whose sample is not in memory yet."""
        if not facts.keeps_sample:
            return []
        keys = {*self._samples, *self._unreadable_samples}
        return [name for name in facts.interventions if (facts.run_id, name) not in keys]

    def _facts_of(self, record: Record) -> RunFacts:
        # Of one intervention: a query reads no more.
        rows = record["rows"] // max(1, len(record["interventions"]))
        run = self._run_by_id[record["run_id"]]
        profiles = _profiles(run, "profiles")
        kept_curves = _profiles(run, "curves")
        # Only if all rows are in roll-ups: otherwise means are as quick from the rows.
        has_rollups = bool(run.files(ROLLUPS.name)) and not run.files(HEADS.name, unrolled=True)
        is_large = rows > LARGE_RUN_ROWS
        sample_rows = SAMPLE_ROWS
        if has_rollups and is_large:
            sample_rows = rows_in_memory(self.database.connection, len(record["statistics"]))
        return RunFacts(
            run_id=record["run_id"],
            layers=record["n_layers"],
            heads=record["n_heads"],
            interventions=tuple(record["interventions"]),
            statistics=tuple(record["statistics"]),
            uniform_baseline=frozenset(
                name for name in record["statistics"] if f"uniform_{name}" in self._sequence_columns
            ),
            # Rounded up: the sample has no more rows than there is memory for.
            every=-(-rows // sample_rows) if is_large else 1,
            has_rollups=has_rollups,
            # A run that grows has rows without roll-ups: its sample would be old at once.
            keeps_sample=has_rollups and is_large,
            profiles=profiles,
            kept_curves={
                name: facts for name, facts in kept_curves.items() if name not in profiles
            },
        )

    def _ends_in_rollups(
        self, facts: RunFacts, statistics: list[str], cursor: duckdb.DuckDBPyConnection
    ) -> dict[str, Ends]:
        """Ends from the histograms of all values: rows would mean the footers of all files."""
        self.hold_bins(facts, facts.interventions[0], statistics, cursor)
        bins = BINS_IN_MEMORY if facts.keeps_sample else "internal.head_bins"
        rows = cursor.execute(
            f"""
            WITH bins AS (
                SELECT
                    statistic,
                    -- The outermost bins of an open axis have no end, but their values do.
                    greatest(low, min(minimum)) AS low,
                    least(high, max(maximum)) AS high,
                    sum(count) AS count
                FROM {bins}{_of_statistics(facts.run_id, facts.interventions[0], statistics)}
                GROUP BY statistic, bin, low, high
            ),
            ranks AS (
                SELECT
                    *,
                    -- Of all values, those in this bin and in lower ones.
                    sum(count) OVER (PARTITION BY statistic ORDER BY low)
                    / sum(count) OVER (PARTITION BY statistic) AS share
                FROM bins
            )
            SELECT
                statistic,
                min(low) FILTER (share >= {TAIL}),
                coalesce(min(high) FILTER (share >= {1 - TAIL}), max(high))
            FROM ranks
            GROUP BY statistic"""
        ).fetchall()
        ends: dict[str, Ends] = dict.fromkeys(statistics, (None, None))
        return ends | {name: (smallest, largest) for name, smallest, largest in rows}

    def _ends_in_rows(
        self, facts: RunFacts, statistics: list[str], cursor: duckdb.DuckDBPyConnection
    ) -> dict[str, Ends]:
        """Ends from the rows of the first sequences: these are few pages of every file."""
        run = f"run_id = {text_literal(facts.run_id)}"
        sequences = max(1, AXIS_ROWS // (facts.layers * facts.heads))
        smallest = f"SELECT min(sequence) FROM sequences WHERE {run}"
        [(first_sequence,)] = cursor.execute(smallest).fetchall()
        # An axis is the same for every intervention, so that pictures can be compared.
        conditions = [
            run,
            f"intervention = {text_literal(facts.interventions[0])}",
            f"sequence < {(first_sequence or 0) + sequences}",
        ]
        quantiles = ", ".join(
            f"quantile_cont({name}::DOUBLE, {share})"
            for name in map(quoted_name, statistics)
            for share in (TAIL, 1 - TAIL)
        )
        [values] = cursor.execute(f"SELECT {quantiles} FROM heads{where(conditions)}").fetchall()
        # Low and high end of each statistic stand in turn.
        return dict(zip(statistics, zip(values[::2], values[1::2], strict=True), strict=True))


_ROLLED_UP_VIEWS = ("head_summaries", "subset_summaries")
"""The views over roll-ups that queries read."""

_SHOWN_OF_RUN = (
    *("run_id", "name", "model", "input_family", "n_ctx", "n_layers", "n_heads", "interventions"),
    *("statistics", "measured_heads", "shards", "shards_done", "sequences", "sequences_done"),
    *("complete", "rows", "tokens"),
)
"""Columns of `runs` that the page shows."""


def rows_in_memory(connection: duckdb.DuckDBPyConnection, statistics: int) -> int:
    """How many rows a sample may have."""
    sql = "SELECT parse_formatted_bytes(current_setting('memory_limit'))"
    ((memory_bytes,),) = connection.execute(sql).fetchall()
    bytes_of_row = BYTES_OF_KEYS + 4 * statistics
    return max(1, min(SAMPLE_ROWS, int(MEMORY_SHARE * memory_bytes / bytes_of_row)))


def _first_statistics(facts: RunFacts) -> list[str]:
    """The statistics that a page shows first."""
    preferred = [name for name in FIRST_STATISTICS if name in facts.statistics]
    names = dict.fromkeys([*preferred, *facts.statistics])
    return list(names)[: len(FIRST_STATISTICS)]


def _runs_of(database: RunDatabase) -> list[Run]:
    """The runs that a database reads. The list is another one after damage was found."""
    return OPENED[database.connection].runs


def _profiles(run: Run, field: str) -> dict[str, ProfileFacts]:
    """The profiles in a field of a run's scan that a page can draw as lines."""
    return {
        name: ProfileFacts(record["axis"], record["meaning"], record["unit"])
        for name, record in run.manifest.kinds.get(field, {}).items()
        if record["axis"] in AXES
    }


def _finite(value: Any) -> float | None:  # noqa: ANN401  # whatever a column holds
    """A declared end, or None if it is open."""
    return None if value is None or abs(value) == float("inf") else float(value)


class BinsInMemory:
    """A table of the histograms that were asked for."""

    columns = (
        "run_id, intervention, statistic, layer, head, bin, low, high, count, minimum, maximum"
    )

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        # Without rows: the select gives the columns their types.
        select = f"SELECT {self.columns} FROM internal.head_bins LIMIT 0"
        connection.execute(f"CREATE TABLE {BINS_IN_MEMORY} AS {select}")
        self._bins_held: set[tuple[str, str, str]] = set()
        """Run, intervention and statistic."""
        self._lock = Lock()

    def hold(
        self,
        run_id: str,
        intervention: str,
        statistics: Iterable[str],
        cursor: duckdb.DuckDBPyConnection,
    ) -> None:
        """Read the histograms of some statistics, unless they are there."""
        # Two queries must not read the same ones: they would count twice.
        with self._lock:
            keys = {(run_id, intervention, name) for name in statistics} - self._bins_held
            if keys:
                conditions = _of_statistics(run_id, intervention, [name for _, _, name in keys])
                cursor.execute(
                    f"INSERT INTO {BINS_IN_MEMORY} "
                    f"SELECT {self.columns} FROM internal.head_bins{conditions}"
                )
                self._bins_held |= keys


def _of_statistics(run_id: str, intervention: str, statistics: Iterable[str]) -> str:
    """The condition on the bins of some statistics."""
    names = ", ".join(map(text_literal, sorted(statistics)))
    return where(
        [
            f"run_id = {text_literal(run_id)}",
            f"intervention = {text_literal(intervention)}",
            f"statistic IN ({names})",
        ]
    )
