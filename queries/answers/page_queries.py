"""The queries that the explorer's page can ask, as SQL, and their answers, as dense arrays.

Nothing here reads a file or a database: a query becomes SQL, and tables become an answer.
The page never sends SQL, except in `queries.explore.query_engine` as a query of the user's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from headcount.queries.answers.axes import BINS, DRAWN_BINS
from headcount.queries.answers.head_curves import (
    Curve,
    curve_of,
    curves_of_profiles,
    kept_curve_sql,
    places,
    profile_curves_sql,
)
from headcount.queries.answers.loss_effects import effect_queries, effects_among, effects_answer
from headcount.queries.answers.numbers import (
    SUMMARY,
    changes_sql,
    numbers_by_head,
    summaries_sql,
)
from headcount.queries.answers.run_facts import RunFacts
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.errors import QueryError, unknown

MOST_STATISTICS = 12  # histograms that one query asks for at most

Array: TypeAlias = "np.ndarray[Any, Any]"  # an array, as the answer's header describes it

Header: TypeAlias = dict[str, Any]  # what an answer says besides its arrays, as JSON

BinNumber = Annotated[int, Field(ge=0, lt=BINS)]


@dataclass(frozen=True)
class Statement:
    """SQL that answers a query, and tables that it needs while it runs."""

    sql: str
    temporary_tables: dict[str, str] = field(default_factory=dict[str, str])  # SQL by name


@dataclass(frozen=True)
class Answer:
    """What the page gets: a header, and arrays of numbers."""

    header: Header = field(default_factory=dict[str, Any])
    arrays: tuple[Array, ...] = ()


class _Closed(BaseModel):
    """A model that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Scope(_Closed):
    """The rows that a query is about."""

    run_id: str
    intervention: str = "none"
    subset: str | None = None  # Subset of the Pile. None is all of them.
    layers: tuple[NonNegativeInt, NonNegativeInt] | None = None  # first and last; None is all

    def conditions(self, facts: RunFacts, *, sampled: bool) -> list[str]:
        """Conditions on rows of `heads`; `sampled` reads only those of `facts.sampled_rows`."""
        # A sample in memory is of one run and one intervention.
        is_in_memory = sampled and facts.sample is not None
        conditions = [] if is_in_memory else self.conditions_on_run
        if self.subset is not None:
            # Only a chosen subset needs the table of sequences. A join would always read it.
            of_subset = self.conditions_on_run + self.conditions_on_subset
            conditions.append(f"sequence IN (SELECT sequence FROM sequences{where(of_subset)})")
        if sampled and facts.every > 1 and not is_in_memory:
            conditions.append(sample_condition(facts.every))
        return conditions

    @property
    def conditions_on_subset(self) -> list[str]:
        """Conditions on rows of sequences."""
        return [] if self.subset is None else [f"pile_set_name = {text_literal(self.subset)}"]

    @property
    def conditions_on_layers(self) -> list[str]:
        """Conditions on rows that have a layer."""
        if self.layers is None:
            return []
        first, last = self.layers
        return [f"layer BETWEEN {first} AND {last}"]

    @property
    def conditions_on_run(self) -> list[str]:
        """Conditions on rows of any table."""
        return [
            f"run_id = {text_literal(self.run_id)}",
            f"intervention = {text_literal(self.intervention)}",
        ]


class Head(_Closed):
    """One head of the model."""

    layer: NonNegativeInt
    head: NonNegativeInt

    @property
    def conditions(self) -> list[str]:
        """Conditions on rows of `heads`."""
        return [f"layer = {self.layer}", f"head = {self.head}"]


class Brush(_Closed):
    """A range of a statistic: its first and last bin. The bins at the ends have no outer end."""

    statistic: str
    first: BinNumber
    last: BinNumber

    def condition(self, facts: RunFacts) -> str:
        """The condition on a row of `heads`: on the bin, not the value, as in a cube."""
        axis = facts.axes[self.statistic]
        return f"{axis.bin_sql(self.statistic)} BETWEEN {self.first} AND {self.last}"


Statistics = Annotated[tuple[str, ...], Field(min_length=1, max_length=MOST_STATISTICS)]
Brushes = Annotated[tuple[Brush, ...], Field(max_length=MOST_STATISTICS)]


class Query(_Closed):
    """A query about the rows of one run, or of one head of it."""

    reads_sample: ClassVar[bool] = False  # whether it is about the sample of a large run
    rollups_answer: ClassVar[bool] = False  # whether roll-ups answer it, of a run that has them
    bins_of: ClassVar[tuple[str, ...]] = ("brushes",)  # fields that name statistics with axes

    kind: str
    scope: Scope

    @property
    def one_head(self) -> Head | None:
        """The head that it is about. None is all heads of the chosen layers."""
        return getattr(self, "head", None)

    @property
    def binned_statistics(self) -> set[str]:
        """The statistics whose axes the query needs."""
        return self._named_in(self.bins_of)

    def _named_in(self, fields: Iterable[str]) -> set[str]:
        """The statistics that some fields name: one, several, or those of brushes."""
        names: set[str] = set()
        for value in [getattr(self, name, None) for name in fields]:
            if isinstance(value, str):
                names.add(value)
            for one in value if isinstance(value, tuple) else ():
                names.add(one.statistic if isinstance(one, Brush) else one)
        return names

    def reads_rows(self, facts: RunFacts) -> bool:
        """Whether the query reads `heads`. Their files are compared with the commits first."""
        is_sampled = self.reads_sample and facts.is_sampled
        return not is_sampled and not (self.rollups_answer and facts.has_rollups)

    def check(self, facts: RunFacts) -> None:
        """Refuse names and heads that the run does not have."""
        for name in sorted(self._named_in(("statistic", "statistics", "active", "brushes"))):
            if name not in facts.statistics:
                raise QueryError(unknown("statistic", name, facts.statistics))
        if self.scope.intervention not in facts.interventions:
            raise QueryError(unknown("intervention", self.scope.intervention, facts.interventions))
        head = self.one_head
        if head and (head.layer >= facts.layers or head.head >= facts.heads):
            raise QueryError(
                f"head L{head.layer}H{head.head}: run {facts.run_id} has heads L0H0 to "
                f"L{facts.layers - 1}H{facts.heads - 1}"
            )

    @property
    def conditions_on_heads(self) -> list[str]:
        """Which heads the query is about. The chosen layers do not hide a chosen head."""
        return self.one_head.conditions if self.one_head else self.scope.conditions_on_layers

    def conditions(self, facts: RunFacts, *, sampled: bool) -> list[str]:
        """Conditions on the rows that the query is about."""
        return self.scope.conditions(facts, sampled=sampled) + self.conditions_on_heads

    def statements(self, facts: RunFacts) -> list[Statement]:
        """The SQL of the query."""
        raise NotImplementedError

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """The answer, from the table of each statement: one object for each row, or arrays."""
        return Answer({"rows": tables[0].to_pylist()})


class Heatmap(Query):
    """Numbers of a statistic, or of all, for every head or one. Arrays: NUMBERS, each
    [statistic layer head].
    """

    rollups_answer: ClassVar[bool] = True

    kind: Literal["heatmap"]
    head: Head | None = None
    statistic: str | None = None  # None is all of them
    changes: bool = False  # instead: what an intervention changes, over pairs of one sequence

    def reads_rows(self, facts: RunFacts) -> bool:
        """Pairs of rows are in no roll-up."""
        return self.changes or super().reads_rows(facts)

    def _names(self, facts: RunFacts) -> Sequence[str]:
        return [self.statistic] if self.statistic else facts.statistics

    def statements(self, facts: RunFacts) -> list[Statement]:
        """One row for each head and statistic, and one row of uniform baselines."""
        names, keys = self._names(facts), ["layer", "head"]
        if self.changes:
            untouched = self.scope.model_copy(update={"intervention": "none", "subset": None})
            none = untouched.conditions(facts, sampled=True) + self.conditions_on_heads
            conditions = self.conditions(facts, sampled=True)
            rows = changes_sql(where(conditions), where(none), "layer, head", names)
            return [Statement(summaries_sql(rows, keys, names))]
        statements = [summaries(self, facts, names, keys)]
        # A baseline is of a sequence: it is the same for all heads.
        baselines = ", ".join(
            f"avg({quoted_name(f'uniform_{name}')}) AS {quoted_name(name)}"
            for name in names
            if name in facts.uniform_baseline
        )
        if baselines:
            of_sequences = where(self.scope.conditions_on_run + self.scope.conditions_on_subset)
            statements.append(Statement(f"SELECT {baselines} FROM sequences{of_sequences}"))
        return statements

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """Arrays by statistic. A head without a row has numbers NaN and counts 0."""
        table, *baselines = tables
        names = self._names(facts)
        shape = (1, 1) if self.head else facts.shape
        first = (self.head.layer, self.head.head) if self.head else (0, 0)
        numbers = numbers_by_head(table, names, shape, first)
        header = {
            "source": "rollups" if facts.has_rollups and not self.changes else "rows",
            "statistics": names,
            "uniform_baseline": baselines[0].to_pylist()[0] if baselines else {},
        }
        return Answer(header, tuple(numbers.values()))


class Histograms(Query):
    """How some statistics of a head, or of all, are distributed. Arrays: counts [statistic bin], or
    [statistic layer head bin] if each head is counted by itself.
    """

    reads_sample: ClassVar[bool] = True
    bins_of: ClassVar[tuple[str, ...]] = ("statistics", "brushes")

    kind: Literal["histograms"]
    head: Head | None = None
    by_head: bool = False
    statistics: Statistics
    brushes: Brushes = ()

    def statements(self, facts: RunFacts) -> list[Statement]:
        """All statistics in one pass over the rows."""
        keys = ["layer", "head"] if self.by_head else []
        bins = _bins_under_brushes(self.statistics, self.brushes, facts)
        conditions = where(self.conditions(facts, sampled=True))
        rows = f"SELECT {', '.join([*keys, bins])} FROM {facts.sampled_rows}{conditions}"
        return [Statement(_counts_of_bins(rows, self.statistics, *keys))]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """A row of counts for each statistic, or for each head of it."""
        (table,) = tables
        cell = places(table) if self.by_head else ()
        shape = facts.shape if self.by_head else ()
        counts = np.zeros((len(self.statistics), *shape, DRAWN_BINS), np.uint32)
        of_row = _places(table, self.statistics), *cell, column(table, "bin")
        counts[of_row] = column(table, "count")
        return Answer({"statistics": self.statistics}, (counts,))


Meaning = Literal["sequences", "rows"]
"""What a brush picks.

sequences: all rows of the sequences in which the chosen head is in range.
rows: the rows in range, of whichever head.
"""


class Cube(Query):
    """Everything that a brush on one statistic can show, so that moving it asks nothing.

    Arrays: counts [statistic bin_of_active bin], then sums and counts of the heatmap's statistic
    [bin_of_active layer head], then picked sequences or rows [bin_of_active]. `rows` is how many
    there are without any brush.
    """

    reads_sample: ClassVar[bool] = True
    bins_of: ClassVar[tuple[str, ...]] = ("active", "statistics", "brushes")

    kind: Literal["cube"]
    head: Head
    active: str
    statistic: str  # the statistic of the heatmap
    statistics: Statistics  # the statistics of the other histograms
    brushes: Brushes = ()  # the brushes on other statistics
    meaning: Meaning = "sequences"

    @cached_property
    def _other_brushes(self) -> tuple[Brush, ...]:
        return tuple(brush for brush in self.brushes if brush.statistic != self.active)

    def statements(self, facts: RunFacts) -> list[Statement]:
        """One pass over the rows of the head for histograms, one over all rows for the heatmap."""
        active = facts.axes[self.active].bin_sql(self.active)
        bins = _bins_under_brushes(self.statistics, self._other_brushes, facts)
        of_head = self.conditions(facts, sampled=True)
        table = facts.sampled_rows
        rows = f"SELECT {active} AS active, {bins} FROM {table}{where(of_head)}"
        histograms = Statement(_counts_of_bins(rows, self.statistics, "active"))
        in_brushes = [brush.condition(facts) for brush in self._other_brushes]
        of_scope = self.scope.conditions(facts, sampled=True) + self.scope.conditions_on_layers
        value = quoted_name(self.statistic)
        sums = (
            f"layer, head, sum({value}::DOUBLE) AS sum, count({value}) AS count, count(*) AS rows"
        )
        is_of_rows = self.meaning == "rows"
        conditions_of_all = of_scope if is_of_rows else of_head
        all_rows = Statement(f"SELECT count(*) FROM {table}{where(conditions_of_all)}")
        if is_of_rows:
            heatmap = Statement(
                f"SELECT {active} AS active, {sums} FROM {table}{where(of_scope + in_brushes)} "
                "GROUP BY ALL"
            )
        else:
            # As a subquery instead of a table, the same join may take ten times as long.
            conditions = where(of_head + in_brushes)
            picked = f"SELECT sequence, {active} AS active FROM {table}{conditions}"
            heatmap = Statement(
                f"SELECT active, {sums} FROM {table} JOIN picked USING (sequence)"
                f"{where(of_scope)} GROUP BY ALL",
                {"picked": picked},
            )
        return [histograms, heatmap, all_rows]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """The counts of the histograms, sums and counts of the heatmap, and what is picked."""
        histograms, heatmap, all_rows = tables
        counts = np.zeros((len(self.statistics), BINS, DRAWN_BINS), np.uint32)
        bins = column(histograms, "active"), column(histograms, "bin")
        counts[_places(histograms, self.statistics), *bins] = column(histograms, "count")
        # What is undefined lies in no range of the brush.
        heatmap = heatmap.filter(heatmap["active"].is_valid())
        shape = (BINS, facts.layers, facts.heads)
        sums = np.zeros(shape)
        defined = np.zeros(shape, np.uint32)
        place = tuple(column(heatmap, name).astype(int) for name in ("active", "layer", "head"))
        # The sum of no values is NULL.
        sums[place] = np.nan_to_num(column(heatmap, "sum"))
        defined[place] = column(heatmap, "count")
        rows = np.zeros(shape, np.uint32)
        rows[place] = column(heatmap, "rows")
        # Every head that was measured has one row of each sequence.
        picked = rows.sum((1, 2)) if self.meaning == "rows" else rows.max((1, 2))
        return Answer(
            {"rows": all_rows[0][0].as_py()}, (counts, sums, defined, picked.astype(np.uint32))
        )


class Subsets(Query):
    """Statistics of a head, or of each, in each subset of the Pile: by head, largest mean first."""

    rollups_answer: ClassVar[bool] = True

    kind: Literal["subsets"]
    head: Head | None = None
    statistic: str | None = None  # None is all of them

    def statements(self, facts: RunFacts) -> list[Statement]:
        """One row a subset."""
        scope = self.scope.model_copy(update={"subset": None})
        of_all = self.model_copy(update={"scope": scope})
        names = [self.statistic] if self.statistic else facts.statistics
        of_heads = [] if self.head else ["layer", "head"]
        by_subset = summaries(of_all, facts, names, [*of_heads, "pile_set_name"])
        keys = ["statistic"] * (not self.statistic) + of_heads
        columns = "pile_set_name AS subset, count, mean, standard_error, documents"
        return [
            Statement(
                f"SELECT {', '.join([*keys, columns])} FROM ({by_subset.sql}) "
                f"ORDER BY {', '.join([*keys, 'mean DESC NULLS LAST, subset'])}"
            )
        ]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object each, or columns of a table of all heads."""
        return super().answer(facts, tables) if self.head else by_column(tables[0].to_pydict())


class Curves(Query):
    """The profiles of a head, or of each, by lag, key or query: means over all sequences."""

    kind: Literal["curves"]
    head: Head | None = None

    def reads_rows(self, facts: RunFacts) -> bool:
        """Curves that were kept for every sequence are as large as the rows."""
        return bool(facts.kept_curves)

    def statements(self, facts: RunFacts) -> list[Statement]:
        """One statement for all profiles, and one for each curve that was not averaged."""
        # Without the subset: a mean over sequences cannot be taken apart again.
        of_head = self.head.conditions if self.head else []
        condition = where([*self.scope.conditions_on_run, *of_head])
        kept = [kept_curve_sql(name, of.axis, condition) for name, of in facts.kept_curves.items()]
        averaged = [profile_curves_sql(facts.profiles, condition)] if facts.profiles else []
        return [Statement(sql) for sql in (*averaged, *kept)]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object for each profile that has a value for the head, or columns of a table."""
        curves: list[Curve] = []
        if facts.profiles:
            averaged, *tables = tables
            curves += curves_of_profiles(averaged, facts.profiles, facts.shape)
        for (profile, about), table in zip(facts.kept_curves.items(), tables, strict=True):
            if len(table):
                curves.append(curve_of(profile, about, False, table, facts.shape))
        if self.head:
            return Answer({"rows": _curves_of(curves, (self.head.layer, self.head.head))})
        rows = [
            {"layer": cell[0], "head": cell[1]} | row
            for cell in np.ndindex(facts.shape)
            for row in _curves_of(curves, cell)
        ]
        return by_column({name: [row[name] for row in rows] for name in (rows[0] if rows else ())})


def _curves_of(curves: Iterable[Curve], cell: tuple[int, ...]) -> list[Header]:
    """The curves that have a value for a head."""
    of_head = [asdict(curve.of_head(*cell)) for curve in curves]
    return [row for row in of_head if any(value is not None for value in row["values"])]


class Effects(Query):
    """How far effects on the loss can be trusted, and what parts of layers add to logits."""

    kind: Literal["effects"]

    def reads_rows(self, facts: RunFacts) -> bool:
        """Estimates are compared with what was measured sequence by sequence."""
        return bool(effects_among(facts.statistics))

    def _queries(self, facts: RunFacts) -> dict[str, str]:
        run = facts.run_id, self.scope.intervention, facts.statistics
        return effect_queries(*run, has_parts=facts.has_parts)

    def statements(self, facts: RunFacts) -> list[Statement]:
        """One for each part of the answer that the run has."""
        return [Statement(sql) for sql in self._queries(facts).values()]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object for each effect, and one for each part of a layer."""
        rows = [table.to_pylist() for table in tables]
        found = dict(zip(self._queries(facts), rows, strict=True))
        return Answer(effects_answer(facts.run_id, facts.layers, facts.statistics, found))


def where(conditions: Sequence[str]) -> str:
    """A WHERE clause with a space before it. Empty without conditions."""
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def sample_condition(every: int) -> str:
    """The condition on the sequences of a sample."""
    return f"sequence % {every} = 0"


def by_column(columns: Header) -> Answer:
    """A table as the answer about many heads: the page takes the rows of one."""
    return Answer({"table": columns})


def column(table: pa.Table, name: str) -> Array:
    """The values of a column as numpy has them."""
    return table[name].to_numpy()


def summaries(
    query: Query, facts: RunFacts, statistics: Sequence[str], keys: Sequence[str]
) -> Statement:
    """Means by some keys, from roll-ups if the run has them."""
    if not facts.has_rollups:
        columns = ", ".join([*keys, "document", *map(quoted_name, statistics)])
        rows = (
            f"SELECT {columns} FROM heads JOIN internal.documents "
            f"USING (run_id, intervention, sequence){where(query.conditions(facts, sampled=True))}"
        )
        return Statement(summaries_sql(rows, keys, statistics))
    scope = query.scope
    names = ", ".join(map(text_literal, statistics))
    conditions = [
        *scope.conditions_on_run,
        *scope.conditions_on_subset,
        *query.conditions_on_heads,
        f"statistic IN ({names})",
    ]
    by_subset = "pile_set_name" in keys or scope.subset is not None
    view = "subset_summaries" if by_subset else "head_summaries"
    columns = ", ".join([*keys, "statistic", *SUMMARY])
    return Statement(f"SELECT {columns} FROM {view}{where(conditions)}")


def _bins_under_brushes(
    statistics: Sequence[str], brushes: Sequence[Brush], facts: RunFacts
) -> str:
    """The bin of each statistic in rows within all brushes but its own, which can then be moved."""
    columns: list[str] = []
    for statistic in statistics:
        bin_sql = facts.axes[statistic].bin_sql(statistic, DRAWN_BINS)
        others = [brush.condition(facts) for brush in brushes if brush.statistic != statistic]
        if others:
            bin_sql = f"CASE WHEN {' AND '.join(others)} THEN {bin_sql} END"
        columns.append(f"{bin_sql} AS {quoted_name(statistic)}")
    return ", ".join(columns)


def _counts_of_bins(rows: str, statistics: Sequence[str], *keys: str) -> str:
    """Count the rows in each bin of each statistic, in one pass. Without a bin, none counts."""
    by = ", ".join([*keys, "statistic", "bin"])
    names = ", ".join(map(quoted_name, statistics))
    of_keys = where([f"{key} IS NOT NULL" for key in keys])
    return (
        f"SELECT {by}, count(*) AS count FROM (FROM ({rows}){of_keys}) "
        f"UNPIVOT (bin FOR statistic IN ({names})) GROUP BY {by}"
    )


def _places(table: pa.Table, statistics: Sequence[str]) -> Array:
    """The place of each row's statistic among some."""
    place = {name: index for index, name in enumerate(statistics)}
    return np.array([place[name] for name in table["statistic"].to_pylist()], np.int64)
