"""What a page shows of one run under one intervention: for every statistic, numbers by head.

Of a run with roll-ups, all of it comes from views of sums (`head_summaries`, `subset_summaries`,
`distributions`). Else each question is one pass over its rows: a view of all statistics would read
each of them alone. The sequences behind a number are in `examples.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.open.connection import OPENED
from headcount.queries.open.rollup_views import BIN_ENDS, bin_of, measured_statistics
from headcount.queries.report.head_curves import (
    AXES,
    Array,
    Curve,
    curve_of,
    curves_of_profiles,
    kept_curve_sql,
    places,
    profile_curves_sql,
)
from headcount.queries.sql_text import quoted_name, text_literal
from headcount.schemas.files.run_directory import pc
from headcount.schemas.measured_heads import Head
from headcount.schemas.tables import ROLLUPS

MEANS = ("mean", "standard_error", "minimum", "maximum", "degrees_of_freedom")
COUNTS = ("count", "documents", "undefined")
SUMMARY = (*MEANS, *COUNTS)  # of a statistic of a head; standard_error is over documents
NUMBERS = (*SUMMARY, "percentile")

Numbers: TypeAlias = dict[str, Array]
"""By column, [statistic layer head]: NaN where undefined; COUNTS are uint32."""

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

    run: Record  # its row of the view `runs`
    intervention: str
    n_layers: int
    n_heads: int
    statistics: list[str]  # those that were measured, in the order of all arrays
    numbers: Numbers
    uniform_baseline: dict[str, float | None]  # of uniform attention, on the same sequences
    histograms: dict[str, Histograms] = field(default_factory=dict[str, Histograms])  # by statistic
    subsets: dict[str, Numbers] = field(default_factory=dict[str, Numbers])  # by subset of the Pile
    changes: Numbers | None = None  # what the intervention changes, over pairs of one sequence
    curves: list[Curve] = field(default_factory=list[Curve])

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.n_layers, self.n_heads

    @property
    def condition(self) -> str:
        """The rows of this section in a view, as SQL."""
        return section_condition(self.run["run_id"], self.intervention)


def section_condition(run_id: str, intervention: str) -> str:
    """A WHERE clause for the rows of a run under an intervention."""
    return f"WHERE run_id = {text_literal(run_id)} AND intervention = {text_literal(intervention)}"


def read_section(
    database: RunDatabase,
    run: Record,
    intervention: str,
    *,
    head: Head | None = None,
    with_details: bool = True,
) -> Section:
    """Read what a page shows; `head` limits all but the means, which percentiles need, to it."""
    rows = _Rows(database, run, intervention)
    summaries = database.table(rows.summaries())
    measured = set(summaries["statistic"].to_pylist())
    # In the order of the registry, and not in that of the rows.
    names = [
        name for name in dict.fromkeys([*run["statistics"], *sorted(measured)]) if name in measured
    ]
    # A manifest may not say the sizes of its model. Then the last measured head is the last one.
    shape = (
        run["n_layers"] or 1 + int(max(summaries["layer"].to_numpy(), default=0)),
        run["n_heads"] or 1 + int(max(summaries["head"].to_numpy(), default=0)),
    )
    numbers = numbers_by_head(summaries, names, shape)
    baselines = uniform_baselines(database, run["run_id"])
    baseline = {name: baselines.get(f"uniform_{name}") for name in names}
    section = Section(run, intervention, *shape, names, numbers, baseline)
    if not names:
        return section
    of_head = f" AND layer = {head.layer} AND head = {head.head}" if head else ""
    if with_details:
        bins = database.table(rows.distributions(of_head))
        for name, of_statistic in _split(bins, "statistic"):
            section.histograms[name] = _histograms(of_statistic, shape)
        if sql := rows.subsets(of_head):
            for subset, of_subset in _split(database.table(sql), "pile_set_name"):
                section.subsets[subset] = numbers_by_head(of_subset, names, shape)
    # An intervention has changes if the same run also measured the untouched model.
    if intervention != "none" and "none" in run["interventions"]:
        changes = database.table(rows.changes(of_head))
        section.changes = numbers_by_head(changes, names, shape)
    section.curves = list(_curves(database, section, of_head))
    return section


def numbers_by_head(
    table: pa.Table,
    statistics: Sequence[str],
    shape: tuple[int, ...],
    first: tuple[int, int] = (0, 0),
) -> Numbers:
    """Rows of `summaries_sql` as arrays. `first` is the layer and head of the first cell."""
    index = {name: place for place, name in enumerate(statistics)}
    layers, heads = places(table)
    statistic = np.array([index.get(name, -1) for name in table["statistic"].to_pylist()], np.int64)
    is_known = statistic >= 0
    # One row a head and statistic, so no cell is written twice.
    place = (statistic[is_known], layers[is_known] - first[0], heads[is_known] - first[1])
    numbers: Numbers = {}
    for name in SUMMARY:
        # NULL becomes NaN.
        values = table[name].cast(pa.float64()).to_numpy()
        numbers[name] = np.full((len(statistics), *shape), np.nan if name in MEANS else 0)
        numbers[name][place] = values[is_known]
        if name in COUNTS:
            numbers[name] = numbers[name].astype(np.uint32)
    return numbers | {"percentile": percentiles(numbers["mean"])}


def percentiles(means: Array) -> Array:
    """Percent of the other heads with a smaller mean, as the view head_card has it.

    NaN for an undefined mean and for the only one. `means` are [statistic layer head].
    """
    places = np.full(means.shape, np.nan)
    for of_heads, own in zip(means.astype(np.float32), places, strict=True):
        has_mean = ~np.isnan(of_heads)
        defined = of_heads[has_mean]
        if len(defined) > 1:
            smaller = np.searchsorted(np.sort(defined), defined)
            own[has_mean] = 100 * smaller / (len(defined) - 1)
    return places


def summaries_sql(rows: str, keys: Sequence[str], statistics: Sequence[str]) -> str:
    """Every statistic by some keys, from rows that have a document: count, mean, error, extremes.

    One pass: all statistics of a row become rows of their own.
    """
    names = ", ".join(map(quoted_name, statistics))
    by = ", ".join([*keys, "statistic"])
    # INCLUDE NULLS: a statistic that is undefined on every sequence has a row too.
    return f"""
        SELECT
            {by},
            sum(sums.number)::BIGINT AS count,
            sum(undefined)::BIGINT AS undefined,
            document_mean(sums) AS mean,
            document_error(sums) AS standard_error,
            sum(sums.documents)::BIGINT AS documents,
            document_freedom(sums) AS degrees_of_freedom,
            min(minimum) AS minimum,
            max(maximum) AS maximum
        FROM (
            SELECT
                {by}, document, document_sums(value, document) AS sums,
                count(*) - count(value) AS undefined, min(value) AS minimum, max(value) AS maximum
            FROM ({rows}) UNPIVOT INCLUDE NULLS (value FOR statistic IN ({names}))
            GROUP BY {by}, document
        )
        GROUP BY {by}
    """


def changes_sql(intervened: str, untouched: str, keys: str, statistics: Sequence[str]) -> str:
    """Rows of what an intervention changes, by sequence. Two WHERE clauses choose the pairs."""
    # The stored float32 would lose digits when differences are added up.
    differences = ", ".join(
        f"intervened.{name}::DOUBLE - untouched.{name} AS {name}"
        for name in map(quoted_name, statistics)
    )
    return f"""
        SELECT {keys}, document, {differences}
        FROM (FROM heads{intervened}) AS intervened
        JOIN internal.documents USING (run_id, intervention, sequence)
        JOIN (FROM heads{untouched}) AS untouched USING (run_id, sequence, layer, head)
    """


class _Rows:
    """SQL over the rows of a section, or over what they were rolled up to."""

    def __init__(self, database: RunDatabase, run: Record, intervention: str) -> None:
        self.database = database
        self.run_id = run["run_id"]
        self.condition = section_condition(self.run_id, intervention)
        opened = OPENED[database.connection].runs
        (own,) = [one for one in opened if one.directory.run_id == self.run_id]
        self.has_rollups = bool(own.files(ROLLUPS.name))
        measured = database.columns("heads")
        self.statistics = [one for one in measured_statistics([own]) if one.name in measured]

    def summaries(self, of_head: str = "", by_subset: bool = False) -> str:
        """Means by head, or by head and subset of the Pile."""
        keys = ["layer", "head", *(["pile_set_name"] if by_subset else [])]
        known = " AND pile_set_name IS NOT NULL" if by_subset else ""
        if self.has_rollups:
            view = "subset_summaries" if by_subset else "head_summaries"
            return f"FROM {view} {self.condition}{known}{of_head}"
        names = [one.name for one in self.statistics]
        columns = ", ".join([*keys, "document", *map(quoted_name, names)])
        rows = f"""
            SELECT {columns} FROM heads JOIN internal.documents
            USING (run_id, intervention, sequence) {self.condition}{known}{of_head}
        """
        return summaries_sql(rows, keys, names)

    def subsets(self, of_head: str) -> str | None:
        """Means by head and subset of the Pile, if documents say of which they are."""
        known = f"FROM sequences {self.condition} AND pile_set_name IS NOT NULL LIMIT 1"
        has_subsets = bool(self.database.records(known))
        return self.summaries(of_head, by_subset=True) if has_subsets else None

    def changes(self, of_head: str) -> str:
        """Mean changes by head."""
        names = [one.name for one in self.statistics]
        untouched = f" {section_condition(self.run_id, 'none')}{of_head}"
        rows = changes_sql(f" {self.condition}{of_head}", untouched, "layer, head", names)
        return summaries_sql(rows, ["layer", "head"], names)

    def distributions(self, of_head: str) -> str:
        """How many sequences have a value in each bin, by head."""
        if self.has_rollups:
            # Not `distributions`, which has as many rows for each subset of the Pile.
            return f"""
                SELECT statistic, layer, head, bin, low, high, count
                FROM internal.head_bins {self.condition}{of_head} ORDER BY statistic, bin
            """
        bins = ", ".join(f"{bin_of(one.value, one.axis)} AS {one.value}" for one in self.statistics)
        ends = ", ".join(
            f"({text_literal(one.name)}, '{one.axis.low}'::DOUBLE, '{one.axis.high}'::DOUBLE)"
            for one in self.statistics
        )
        names = ", ".join(one.value for one in self.statistics)
        return f"""
            SELECT statistic, layer, head, bin, {BIN_ENDS}, count
            FROM (
                SELECT statistic, layer, head, bin, count(*) AS count
                FROM (SELECT layer, head, {bins} FROM heads {self.condition}{of_head})
                UNPIVOT (bin FOR statistic IN ({names}))
                GROUP BY ALL
            )
            JOIN (VALUES {ends}) AS ends (statistic, range_low, range_high) USING (statistic)
            ORDER BY statistic, bin
        """


def uniform_baselines(database: RunDatabase, run_id: str) -> Record:
    """What uniform attention would score, by name of the column in `sequences`."""
    # DuckDB refuses a COLUMNS that matches nothing.
    if not any(column.startswith("uniform_") for column in database.columns("sequences")):
        return {}
    sql = f"""
        SELECT avg(COLUMNS('^uniform_.*')) FROM sequences WHERE run_id = {text_literal(run_id)}
    """
    (levels,) = database.records(sql)
    return levels


def _split(table: pa.Table, column: str) -> Iterator[tuple[str, pa.Table]]:
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


def _curves(database: RunDatabase, section: Section, of_head: str) -> Iterator[Curve]:
    """Means by lag, key or query: of what was profiled, and of curves that were not."""
    if not database.columns("profile_means") >= {"profile", *AXES}:
        return
    condition = section.condition + of_head
    table = database.table(profile_curves_sql(condition))
    profiles = list(curves_of_profiles(table, section.shape))
    yield from profiles
    names = {curve.profile for curve in profiles}
    sql = "SELECT name, axis FROM formulas WHERE field = 'curves'"
    for record in database.records(sql):
        profile, axis = record["name"], record["axis"]
        # What a run averaged is not read sequence by sequence again.
        if profile in names or axis not in AXES:
            continue
        rows = database.table(kept_curve_sql(profile, axis, condition))
        if len(rows):
            yield curve_of(profile, axis, False, rows, section.shape)


def runs_by_id(database: RunDatabase) -> dict[str, Record]:
    """The rows of the view `runs`, in its order."""
    return {row["run_id"]: row for row in database.records("FROM runs")}
