"""What a page shows of one run under one intervention: for every statistic, numbers by head.

Of a run with roll-ups, all of it comes from views of sums (`head_summaries`, `subset_summaries`,
`distributions`). Else each question is one pass over its rows: a view of all statistics would read
each of them alone. The sequences behind a number are in `examples.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from headcount.queries.answers.head_curves import Array, Curve, places
from headcount.queries.answers.numbers import NUMBERS, Numbers, numbers_by_head
from headcount.queries.answers.page_queries import (
    Answer,
    Heatmap,
    Query,
    Scope,
    Statement,
    curve_statements,
    curves_in,
    summaries,
    where,
)
from headcount.queries.answers.page_queries import Head as PageHead
from headcount.queries.answers.run_facts import RunFacts
from headcount.queries.ask.asking import RunDatabase
from headcount.queries.open.rollup_views import BIN_ENDS, bin_of, measured_statistics
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.files.run_directory import pc
from headcount.schemas.measured_heads import Head

MOST_BINS = 40  # Bins of a histogram in a page. Finer ones are added up.


@dataclass
class Histograms:
    """How many sequences have a value in each bin, for all heads of a section."""

    edges: list[float]
    is_even: bool  # whether all bins have the same width
    counts: Array  # by bin, layer and head

    def groups_of(self, head: Head) -> tuple[int, int, list[int]]:
        """First bin, bins a group, and sums of a head, which fills a small part of the axis."""
        counts = self.counts[:, *head]
        filled = np.flatnonzero(counts)
        if not len(filled):
            return 0, 1, []
        first, last = int(filled[0]), int(filled[-1])
        # Rounded up: never more than MOST_BINS groups.
        size = -(-(last + 1 - first) // MOST_BINS)
        sums = np.add.reduceat(counts[first : last + 1], np.arange(0, last + 1 - first, size))
        return first, size, sums.tolist()

    def edges_of(self, first: int, size: int, groups: int) -> list[float]:
        """The edges of such groups. The last group may have fewer bins than the others."""
        last = len(self.edges) - 1
        return [self.edges[min(last, first + size * group)] for group in range(groups + 1)]


@dataclass
class Section:
    """One run under one intervention."""

    facts: RunFacts  # of which `statistics` are those that have rows, in the order of all arrays
    intervention: str
    numbers: Numbers
    uniform_baseline: Mapping[str, float | None]  # of uniform attention, on the same sequences
    histograms: dict[str, Histograms] = field(default_factory=dict[str, Histograms])  # by statistic
    subsets: dict[str, Numbers] = field(default_factory=dict[str, Numbers])  # by subset of the Pile
    changes: Numbers | None = None  # what the intervention changes, over pairs of one sequence
    curves: list[Curve] = field(default_factory=list[Curve])

    @property
    def scope(self) -> Scope:
        """The rows of this section, for queries."""
        return Scope(run_id=self.facts.run_id, intervention=self.intervention)

    @property
    def condition(self) -> str:
        """The rows of this section in a view, as SQL."""
        return where(self.scope.conditions_on_run)


def answered(database: RunDatabase, facts: RunFacts, query: Query) -> Answer:
    """The answer to a query that needs no tables beside the views."""
    return query.answer(facts, _tables(database, query.statements(facts)))


def _tables(database: RunDatabase, statements: Iterable[Statement]) -> list[pa.Table]:
    return [database.table(statement.sql) for statement in statements]


def read_section(
    database: RunDatabase,
    facts: RunFacts,
    intervention: str,
    *,
    head: Head | None = None,
    with_details: bool = True,
) -> Section:
    """Read what a page shows; `head` limits all but the means, which percentiles need, to it."""
    # Of a large run too, every row counts.
    facts = replace(facts, every=1)
    scope = Scope(run_id=facts.run_id, intervention=intervention)
    means = answered(database, facts, Heatmap(kind="heatmap", scope=scope))
    numbers: Numbers = dict(zip(NUMBERS, means.arrays, strict=True))
    if not (numbers["count"].any() or numbers["undefined"].any()):
        # Without rows there is no statistic.
        facts = replace(facts, statistics=())
        return Section(facts, intervention, {name: of[:0] for name, of in numbers.items()}, {})
    section = Section(facts, intervention, numbers, means.header["uniform_baseline"])
    if with_details:
        bins = database.table(_distributions_sql(database, section, head))
        for name, of_statistic in _split(bins, "statistic"):
            section.histograms[name] = _histograms(of_statistic, facts.shape)
    own = Heatmap(kind="heatmap", scope=scope, head=head and PageHead(**head._asdict()))
    if with_details and _has_subsets(database, section):
        by = ["layer", "head", "pile_set_name"]
        table = database.table(summaries(own, facts, facts.statistics, by).sql)
        for subset, of_subset in _split(table, "pile_set_name"):
            section.subsets[subset] = numbers_by_head(of_subset, facts.statistics, facts.shape)
    # An intervention has changes if the same run also measured the untouched model.
    if intervention != "none" and "none" in facts.interventions:
        own = own.model_copy(update={"changes": True})
        (table,) = _tables(database, own.statements(facts))
        section.changes = numbers_by_head(table, facts.statistics, facts.shape)
    conditions = [*scope.conditions_on_run, *own.conditions_on_heads]
    section.curves = curves_in(facts, _tables(database, curve_statements(facts, conditions)))
    return section


def _has_subsets(database: RunDatabase, section: Section) -> bool:
    """Whether documents say of which subset of the Pile they are."""
    known = f"FROM sequences{section.condition} AND pile_set_name IS NOT NULL LIMIT 1"
    return bool(database.records(known))


def _distributions_sql(database: RunDatabase, section: Section, head: Head | None) -> str:
    """How many sequences have a value in each bin, by head."""
    of_head = f" AND layer = {head.layer} AND head = {head.head}" if head else ""
    condition = section.condition + of_head
    if section.facts.has_rollups:
        # Not `distributions`, which has as many rows for each subset of the Pile.
        return f"""
            SELECT statistic, layer, head, bin, low, high, count
            FROM internal.head_bins {condition} ORDER BY statistic, bin
        """
    runs = [run for run in database.runs if run.directory.run_id == section.facts.run_id]
    statistics = measured_statistics(runs)
    bins = ", ".join(f"{bin_of(one.value, one.axis)} AS {one.value}" for one in statistics)
    ends = ", ".join(
        f"({text_literal(one.name)}, '{one.axis.low}'::DOUBLE, '{one.axis.high}'::DOUBLE)"
        for one in statistics
    )
    names = ", ".join(one.value for one in statistics)
    return f"""
        SELECT statistic, layer, head, bin, {BIN_ENDS}, count
        FROM (
            SELECT statistic, layer, head, bin, count(*) AS count
            FROM (SELECT layer, head, {bins} FROM heads {condition})
            UNPIVOT (bin FOR statistic IN ({names}))
            GROUP BY ALL
        )
        JOIN (VALUES {ends}) AS ends (statistic, range_low, range_high) USING (statistic)
        ORDER BY statistic, bin
    """


def _split(table: pa.Table, column: str) -> Iterator[tuple[str, pa.Table]]:
    table = table.filter(table[column].is_valid())
    for value in sorted(table[column].unique().to_pylist()):
        yield value, table.filter(pc.equal(table[column], value))


def _histograms(rows: pa.Table, shape: tuple[int, ...]) -> Histograms:
    # Every head has rows of its own, so a bin comes many times. Its ends are the same each time.
    _, first_rows, bin_of_row = np.unique(
        rows["bin"].to_numpy(), return_index=True, return_inverse=True
    )
    lows = rows["low"].to_numpy().astype(float)[first_rows]
    highs = rows["high"].to_numpy().astype(float)[first_rows]
    edges, is_even, index_of_bin = _edges(lows, highs)
    counts = np.zeros((len(edges) - 1, *shape), np.int64)
    # Not `counts[…] += …`, which would add only one of two bins with the same place.
    np.add.at(counts, (index_of_bin[bin_of_row], *places(rows)), rows["count"].to_numpy())
    return Histograms(edges, is_even, counts)


def _edges(lows: Array, highs: Array) -> tuple[list[float], bool, Array]:
    """Edges of an axis that holds all bins, whether they are even, and the place of each bin."""
    widths = highs - lows
    if np.isfinite(widths).all() and np.allclose(widths, widths[0], rtol=1e-3):
        # Bins of one width: an axis without gaps, however many bins in it are empty.
        bins = np.rint((lows - lows[0]) / widths[0]).astype(np.int64)
        count = int(bins[-1]) + 1
        return np.linspace(lows[0], highs[-1], count + 1).tolist(), True, bins
    edges = [float(lows[0])]
    index_of_bin: list[int] = []
    for low, high in zip(lows, highs, strict=True):
        # What no head has between two bins is one empty bin.
        if low > edges[-1] + 1e-9 * abs(low):
            edges.append(float(low))
        index_of_bin.append(len(edges) - 1)
        edges.append(float(high))
    return edges, False, np.array(index_of_bin)
