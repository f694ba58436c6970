"""The runs as they are committed now: what the page lists of them, and what queries need."""

import json
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Annotated, Any, TypeAlias

import duckdb
import pyarrow as pa
from pydantic import Field

from headcount.queries.answers import run_facts
from headcount.queries.answers.axes import Axis, axis_of
from headcount.queries.answers.examples import Extremes, Texts
from headcount.queries.answers.loss_effects import effects_among, shown_runs
from headcount.queries.answers.page_queries import (
    Answer,
    Cube,
    Curves,
    Effects,
    Header,
    Heatmap,
    Histograms,
    Query,
    Scope,
    Statement,
    Subsets,
    sample_condition,
    where,
)
from headcount.queries.answers.run_details import (
    DORMANT,
    Details,
    Dormant,
    rankings,
    without_folder,
)
from headcount.queries.answers.run_facts import (
    STATISTIC_FACTS,
    RunFacts,
    facts_of_runs,
    first_statistics,
)
from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.open.run import ReadRun, read_runs
from headcount.queries.open.sql_text import quoted_name
from headcount.schemas.errors import QueryError, unknown
from headcount.schemas.filled_tables import OF_MERGED
from headcount.schemas.places import place
from headcount.schemas.tables import CURVES, HEADS, PROFILES, SEQUENCES

TAIL = 0.0005  # share of the values that lie beyond each end of an axis

Ends: TypeAlias = tuple[float | None, float | None]  # of an axis: low, high; None without values

PageQuery: TypeAlias = Annotated[
    Heatmap | Histograms | Cube | Subsets | Curves | Effects | Extremes | Texts | Details | Dormant,
    Field(discriminator="kind"),
]
"""What a page asks of a run. Its answer is the same for a report, the explorer and a card."""


class PageRuns:
    """Runs opened once. They do not change; a newer state of them is opened anew.

    `is_whole`: of a large run too, every row counts. Only histograms may read its sample.
    """

    def __init__(self, database: RunDatabase, revision: int = 0, *, is_whole: bool = False) -> None:
        self.database = database
        self.is_whole = is_whole
        self.revision = revision  # differs between two states, also after a restart
        self._runs = database.runs
        self._records = database.records("FROM runs ORDER BY run_id")
        self._shown = shown_runs(self._records)
        self._rankings = rankings(database)
        self.statistics = database.records(
            f"SELECT {STATISTIC_FACTS} FROM statistics ORDER BY name"
        )
        self._subsets: dict[str, list[str]] = {}  # of the Pile, that each run has sequences of
        subsets = database.rows(
            "SELECT DISTINCT run_id, pile_set_name FROM sequences "
            "WHERE pile_set_name IS NOT NULL ORDER BY ALL"
        )
        for run_id, subset in subsets:
            self._subsets.setdefault(run_id, []).append(subset)
        self._facts = facts_of_runs(database, self._records, is_whole=is_whole)
        families = {record["input_family"] for record in self._records}
        if {"repeated_random", "uniform_random"} <= families:
            has_dormant = DORMANT not in database.unmeasured_views(DORMANT)
            for run_id, facts in self._facts.items():
                self._facts[run_id] = replace(facts, has_dormant=has_dormant)
        self._samples: dict[tuple[str, str], str] = {}  # tables, by run and intervention
        self._lock = Lock()  # held while a sample is read: two queries must not read the same one
        # Queries are asked on cursors of the connection, which make nothing.
        database.make_tables()
        if any(facts.has_rollups for facts in self._facts.values()):
            database.make_views(" ".join(_ROLLED_UP_VIEWS))
        if any(facts.profiles or facts.has_parts for facts in self._facts.values()):
            database.make_views("profile_means")
        if any(effects_among(facts.statistics) for facts in self._facts.values()):
            database.make_views("effect_calibration calibrated_effects")
        self._axes: dict[tuple[str, str], Axis] = {}
        self.is_verified = False  # whether what repeats rows was compared with its commits
        self.has_verified_rows = False  # whether the rows were compared too

    def is_current(self, path: str, code: str | None, read: ReadRun) -> bool:
        """Whether nothing was committed and no damage was found since it was opened."""
        if self.database.runs is not self._runs:
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

        Roll-ups and samples are compared always, and rows if they are asked for or were compared
        before: the rows of 10^9 tokens are 12 GB, and what repeats them 0.7 GB.
        """
        rows = rows or self.has_verified_rows
        tables = [*OF_MERGED, SEQUENCES.name, PROFILES.name]
        tables += [HEADS.name, CURVES.name] if rows else []
        self.database.hold_to_commits(" ".join(tables))
        # Not before: meanwhile another query may ask.
        self.is_verified, self.has_verified_rows = True, rows

    def verified(self, rows: bool) -> "PageRuns":
        """The same runs, compared with their commits before anything is noted of them."""
        self.verify(rows)
        if self.database.runs is self._runs:
            return self
        runs = PageRuns(self.database, self.revision, is_whole=self.is_whole)
        runs.verify(rows)
        return runs

    def subsets(self, run_id: str) -> list[str]:
        """The subsets of the Pile that a run has sequences of."""
        return self._subsets.get(run_id, [])

    def facts(self, run_id: str) -> RunFacts:
        """What queries need to know of a run, without axes."""
        if run_id not in self._facts:
            raise QueryError(unknown("run", run_id, self._facts))
        return self._facts[run_id]

    def answer(self, query: Query, cursor: duckdb.DuckDBPyConnection | None = None) -> Answer:
        """The answer to a query, with the axes it uses, its SQL, and whether it is of a sample.

        A cursor can be interrupted. Without one, files that are merged meanwhile are read again.
        """
        facts = self.facts_for(query, cursor or self.database.connection)
        read = _reader(cursor) if cursor else lambda one: self.database.table(one.sql)
        answer = query.answer(facts, [read(one) for one in query.statements(facts)])
        # The user reads the same rows from the files: a table in memory is not theirs.
        statements = query.statements(replace(facts, sample=None))
        header = {
            "axes": {name: [axis.low, axis.high] for name, axis in facts.axes.items()},
            "sql": [one.sql for one in statements if not one.temporary_tables],
            "every": facts.every,
        }
        return replace(answer, header=header | answer.header)

    def facts_for(self, query: Query, cursor: duckdb.DuckDBPyConnection) -> RunFacts:
        """What a query needs to know of its run, with its axes and its sample."""
        facts = self.facts(query.scope.run_id)
        query.check(facts)
        if self.is_whole and not query.reads_sample:
            facts = replace(facts, every=1)
        if query.reads_sample and facts.is_sampled:
            facts = self._with_sample(facts, query.scope.intervention, cursor)
        return self._with_axes(facts, query.binned_statistics, cursor)

    def _with_sample(
        self, facts: RunFacts, intervention: str, cursor: duckdb.DuckDBPyConnection
    ) -> RunFacts:
        """The facts with a table of the sample, in which the rows of a head lie side by side.

        The files of 10^9 tokens would take 40 ms a query, the table takes 7. Where there are many,
        DuckDB puts what does not fit into memory into its temporary directory.
        """
        key = facts.run_id, intervention
        with self._lock:
            if key not in self._samples:
                table = f"internal.sample_{len(self._samples)}"
                columns = ", ".join(map(quoted_name, facts.statistics))
                scope = Scope(run_id=facts.run_id, intervention=intervention)
                conditions = [*scope.conditions_on_run, sample_condition(facts.every)]
                cursor.execute(
                    f"CREATE TABLE {table} AS SELECT layer, head, sequence, {columns} "
                    f"FROM samples{where(conditions)} ORDER BY layer, head, sequence"
                )
                self._samples[key] = table
            return replace(facts, sample=self._samples[key])

    def _with_axes(
        self, facts: RunFacts, statistics: set[str], cursor: duckdb.DuckDBPyConnection
    ) -> RunFacts:
        """The facts with the axes of some statistics. An axis is found once."""
        missing = sorted(name for name in statistics if (facts.run_id, name) not in self._axes)
        if missing:
            ends = self._ends(facts, missing, cursor)
            ranges = {
                row["name"]: (_finite(row["range_low"]), _finite(row["range_high"]))
                for row in self.statistics
            }
            # Two threads may both find an axis: it is the same one.
            for name in missing:
                declared = ranges.get(name, (None, None))
                self._axes[facts.run_id, name] = axis_of(declared, *ends[name])
        axes = {name: self._axes[facts.run_id, name] for name in statistics}
        return replace(facts, axes=axes)

    def first_query(self) -> Heatmap:
        """The heatmap that a page shows first."""
        facts = self._facts[self._shown[0]["run_id"]]
        scope = Scope(run_id=facts.run_id, intervention=facts.interventions[0])
        return Heatmap(kind="heatmap", scope=scope, statistic=first_statistics(facts.statistics)[0])

    def first_histograms(self) -> Histograms:
        """The histograms that a page shows first."""
        heatmap = self.first_query()
        statistics = first_statistics(self.facts(heatmap.scope.run_id).statistics)
        return Histograms(kind="histograms", scope=heatmap.scope, statistics=tuple(statistics))

    def overview(self) -> Header:
        """Everything that the page lists: runs, statistics, subsets, and what is damaged."""
        runs: list[Header] = []
        for record in self._shown:
            facts = self._facts[record["run_id"]]
            runs.append(
                {
                    **{name: record[name] for name in _SHOWN_OF_RUN},
                    "model": without_folder(record["model"]),
                    "options": _input_words(record),
                    # A manifest may not say the sizes of its model.
                    "n_layers": facts.layers,
                    "n_heads": facts.heads,
                    "subsets": self.subsets(facts.run_id),
                    "first_statistics": first_statistics(facts.statistics),
                    "rankings": self._rankings.get(facts.run_id, {}),
                    "every": facts.every,
                    "has_rollups": facts.has_rollups,
                    "has_curves": bool(facts.profiles or facts.kept_curves),
                    "has_effects": facts.has_parts or bool(effects_among(facts.statistics)),
                }
            )
        return {
            "runs": runs,
            "statistics": self.statistics,
            "damage": self.database.damage(),
        }

    def _ends(
        self, facts: RunFacts, statistics: list[str], cursor: duckdb.DuckDBPyConnection
    ) -> dict[str, Ends]:
        """The ends of axes, from a sample if it is large enough, else from the first sequences:
        these are few pages of every file that was not merged.
        """
        # An axis is the same for every intervention, so that pictures can be compared.
        scope = Scope(run_id=facts.run_id, intervention=facts.interventions[0])
        table, conditions = "samples", scope.conditions_on_run
        if not facts.has_large_sample:
            smallest = f"SELECT min(sequence) FROM sequences{where(conditions)}"
            [(first_sequence,)] = cursor.execute(smallest).fetchall()
            stop = (first_sequence or 0) + max(
                1, run_facts.AXIS_ROWS // (facts.layers * facts.heads)
            )
            table, conditions = "heads", [*conditions, f"sequence < {stop}"]
        quantiles = ", ".join(
            f"quantile_cont({name}::DOUBLE, {share})"
            for name in map(quoted_name, statistics)
            for share in (TAIL, 1 - TAIL)
        )
        [values] = cursor.execute(f"SELECT {quantiles} FROM {table}{where(conditions)}").fetchall()
        # Low and high end of each statistic stand in turn.
        return dict(zip(statistics, zip(values[::2], values[1::2], strict=True), strict=True))


def _reader(cursor: duckdb.DuckDBPyConnection) -> Callable[[Statement], pa.Table]:
    """What reads the table of a statement with a cursor."""

    def read(statement: Statement) -> pa.Table:
        # Of this cursor alone: two queries may call a table by the same name.
        for name, sql in statement.temporary_tables.items():
            cursor.execute(f"CREATE TEMP TABLE {name} AS {sql}")
        return cursor.sql(statement.sql).to_arrow_table()

    return read


def _input_words(run: Record) -> str:
    options: Record = json.loads(run["input_options"])
    words = [
        f"{name} {_option_words(value)}" for name, value in options.items() if value is not None
    ]
    if run["documents"] is not None:
        words.append(run["documents"])
    if run["bos"] is not None:
        evidence = f" ({run['bos_evidence']})" if run["bos_evidence"] else ""
        words.append(f"{'with' if run['bos'] else 'without'} BOS{evidence}")
    return ", ".join(words)


def _option_words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_option_words, value))
    return without_folder(str(value))


_ROLLED_UP_VIEWS = ("head_summaries", "subset_summaries")  # views over roll-ups

_SHOWN_OF_RUN = (
    *("run_id", "name", "input_family", "n_ctx", "n_layers", "n_heads", "interventions"),
    *("statistics", "measured_heads", "shards", "shards_done", "sequences", "sequences_done"),
    *("complete", "rows", "tokens", "weight_processing", "precision", "engine", "created", "step"),
)
"""Columns of `runs` that the page shows."""


def _finite(value: Any) -> float | None:  # noqa: ANN401  # whatever a column holds
    """A declared end, or None if it is open."""
    return None if value is None or abs(value) == float("inf") else float(value)
