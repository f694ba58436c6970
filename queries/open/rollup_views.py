"""Moments and histograms of every statistic, by head and by subset of the Pile, as internal views.

They come from the roll-ups that were written, and from the rows of shards that have none.

`internal.subset_moments`, `internal.head_moments`, `internal.subset_bins` and `internal.head_bins`
are what the views subset_summaries, head_summaries, distributions and head_quantiles stand on.

Each statistic has a select of its own. So a query about one of them reads one column of the
rows: DuckDB drops the selects whose constant `statistic` is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import duckdb

from headcount.queries.open.run import Run
from headcount.queries.open.run_tables import bounds
from headcount.queries.sql_text import quoted_name, text_literal
from headcount.schemas.histogram_bins import (
    BINS_PER_OCTAVE,
    LAST_BIN,
    LINEAR_BINS,
    SMALLEST_OCTAVE,
    Axis,
)

HEAD_KEYS = ("run_id", "intervention", "input_family", "layer", "head", "statistic")
SUBSET_KEYS = (*HEAD_KEYS, "pile_set_name")


@dataclass(frozen=True)
class MeasuredStatistic:
    """A statistic that some runs measured."""

    name: str
    axis: Axis
    run_ids: tuple[str, ...] | None
    """The runs that measured it. None if all did."""

    @property
    def value(self) -> str:
        """Its column, in SQL."""
        return quoted_name(self.name)

    @property
    def condition(self) -> str:
        """The rows of runs that measured it, in SQL."""
        if self.run_ids is None:
            return ""
        return f"WHERE run_id IN ({', '.join(map(text_literal, self.run_ids))})"


def measured_statistics(runs: Sequence[Run]) -> list[MeasuredStatistic]:
    """The statistics that some run measured, each with its axis."""
    runs_by_name: dict[str, list[Run]] = {}
    for run in runs:
        for name in run.manifest.kinds.get("statistics", {}):
            runs_by_name.setdefault(name, []).append(run)
    return [
        MeasuredStatistic(
            name,
            Axis(*bounds(measured_by[0].manifest.kinds["statistics"][name].get("range"))),
            None
            if len(measured_by) == len(runs)
            else tuple(run.directory.run_id for run in measured_by),
        )
        for name, measured_by in runs_by_name.items()
    ]


def create_rollup_views(
    connection: duckdb.DuckDBPyConnection, statistics: Sequence[MeasuredStatistic]
) -> None:
    """Create the internal views; no statistic at all gives views without rows."""
    views = {
        "subset_moments": merged_moments(SUBSET_KEYS, statistics),
        "head_moments": merged_moments(HEAD_KEYS, statistics),
        "subset_bins": merged_bins(SUBSET_KEYS, statistics),
        "head_bins": merged_bins(HEAD_KEYS, statistics),
    }
    for name, sql in views.items():
        connection.execute(f"CREATE OR REPLACE VIEW internal.{name} AS {sql}")


def merged_moments(keys: Sequence[str], statistics: Sequence[MeasuredStatistic]) -> str:
    """Count, mean, M2 and extremes by some keys, merged as Chan et al. 1979 do it.

    n = Σ n_u, mean = Σ n_u mean_u / n, M2 = Σ M2_u + Σ n_u (mean_u - mean)², over what is merged.
    document_m2 = Σ_d t_d², where t_d is the sum of document d's deviations from the mean. A row
    without a document is of many, none of which has values in another row: with δ = mean_u - mean,
    Σ (t_d + n_d δ)² = Σ t_d² + 2 δ Σ t_d n_d + δ² Σ n_d².
    """
    by = ", ".join(keys)
    written = f"""
        SELECT
            {by}, document, count, undefined, mean, m2, minimum, maximum,
            documents, document_m2, document_product, document_squares
        FROM internal.rollups
        WHERE {_level(keys)}"""
    from_rows = [_moments_of_rows(keys, statistic) for statistic in statistics]
    return f"""
        WITH with_pooled_mean AS (
            SELECT
                *,
                sum(count * mean) OVER cell / nullif(sum(count) OVER cell, 0) AS pooled_mean
            FROM ({_union([written, *from_rows])})
            WINDOW cell AS (PARTITION BY {by})
        ),
        by_document AS (
            SELECT
                {by}, document,
                sum(count) AS count,
                sum(undefined) AS undefined,
                any_value(pooled_mean) AS mean,
                sum(m2) + sum(count * (mean - pooled_mean) ** 2) AS m2,
                min(minimum) AS minimum,
                max(maximum) AS maximum,
                if(document IS NULL, sum(documents), (sum(count) > 0)::INT) AS documents,
                if(
                    document IS NULL,
                    sum(
                        document_m2
                        + 2 * (mean - pooled_mean) * document_product
                        + (mean - pooled_mean) ** 2 * document_squares
                    ),
                    sum(count * (mean - pooled_mean)) ** 2
                ) AS document_m2
            FROM with_pooled_mean
            GROUP BY {by}, document
        )
        SELECT
            {by},
            sum(count)::BIGINT AS count,
            sum(undefined)::BIGINT AS undefined,
            any_value(mean) AS mean,
            sum(m2) AS m2,
            min(minimum) AS minimum,
            max(maximum) AS maximum,
            sum(documents)::BIGINT AS documents,
            sum(document_m2) AS document_m2
        FROM by_document
        GROUP BY ALL"""


def merged_bins(keys: Sequence[str], statistics: Sequence[MeasuredStatistic]) -> str:
    """How many values lie in each bin by some keys, with the ends of the bin.

    `minimum` and `maximum` are ends that the values of the bin do not exceed either.
    """
    by = ", ".join(keys)
    # A roll-up has a list of bins and one of counts, unnested side by side.
    written = f"""
        SELECT
            {by}, range_low, range_high, minimum, maximum,
            unnest(bins) AS bin, unnest(counts) AS count
        FROM internal.rollups
        WHERE {_level(keys)}"""
    from_rows = [_bins_of_rows(keys, statistic) for statistic in statistics]
    return f"""
        SELECT
            {by}, bin, {BIN_LOW} AS low, {BIN_HIGH} AS high, count, minimum, maximum
        FROM (
            SELECT
                {by}, bin, range_low, range_high,
                sum(count)::BIGINT AS count,
                min(minimum) AS minimum,
                max(maximum) AS maximum
            FROM ({_union([written, *from_rows])})
            GROUP BY ALL
        )"""


NEAR_ZERO = 2.0**SMALLEST_OCTAVE

IS_LINEAR = "isfinite(range_low) AND isfinite(range_high)"


def _edge(steps: str) -> str:
    """The size of a value so many logarithmic bins above the smallest."""
    return f"pow(2, ({steps})::DOUBLE / {BINS_PER_OCTAVE} + {SMALLEST_OCTAVE})"


BIN_LOW = f"""CASE
    WHEN {IS_LINEAR} THEN range_low + bin * (range_high - range_low) / {LINEAR_BINS}
    WHEN bin = {-LAST_BIN} THEN '-inf'::DOUBLE
    WHEN bin < 0 THEN -{_edge("-bin")}
    WHEN bin = 0 THEN greatest(range_low, {-NEAR_ZERO!r})
    ELSE {_edge("bin - 1")}
END"""
"""The low end of a bin, in SQL: what `schemas.histogram_bins` says."""

BIN_HIGH = f"""CASE
    WHEN {IS_LINEAR} THEN range_low + (bin + 1) * (range_high - range_low) / {LINEAR_BINS}
    WHEN bin = {LAST_BIN} THEN 'inf'::DOUBLE
    WHEN bin > 0 THEN {_edge("bin")}
    WHEN bin = 0 THEN least(range_high, {NEAR_ZERO!r})
    ELSE -{_edge("-bin - 1")}
END"""


def _level(keys: Sequence[str]) -> str:
    """The roll-ups to add up: those of subsets of the Pile, or the far fewer of whole heads."""
    return "by_subset" if "pile_set_name" in keys else "NOT by_subset"


def _moments_of_rows(keys: Sequence[str], statistic: MeasuredStatistic) -> str:
    """The moments of one statistic, from rows: by document, or of all with one sequence each."""
    # Of a document, merging finds t_d itself. Of sequences that are a document each, t_d is the
    # deviation: Σ t_d² is M2, Σ t_d n_d is 0.
    value = statistic.value
    return f"""
        SELECT
            {_keys_of_rows(keys, statistic)}, document,
            count({value}) AS count,
            count(*) - count({value}) AS undefined,
            avg({value}) AS mean,
            var_pop({value}) * count({value}) AS m2,
            min({value}) AS minimum,
            max({value}) AS maximum,
            count({value}) AS documents,
            var_pop({value}) * count({value}) AS document_m2,
            0 AS document_product,
            count({value}) AS document_squares
        FROM {_rows_with("document, pile_set_name", "unrolled_documents")} {statistic.condition}
        GROUP BY ALL"""


def _bins_of_rows(keys: Sequence[str], statistic: MeasuredStatistic) -> str:
    """The histogram of one statistic, from rows."""
    value = statistic.value
    # Sequences are read only where the subset of the Pile is among the keys.
    rows = "internal.unrolled_heads"
    if "pile_set_name" in keys:
        rows = _rows_with("pile_set_name", "unrolled_sequences")
    return f"""
        SELECT
            {_keys_of_rows(keys, statistic)},
            {bin_of(value, statistic.axis)} AS bin,
            '{statistic.axis.low}'::DOUBLE AS range_low,
            '{statistic.axis.high}'::DOUBLE AS range_high,
            count(*) AS count,
            min({value}) AS minimum,
            max({value}) AS maximum
        FROM (FROM {rows} {statistic.condition})
        WHERE {value} IS NOT NULL
        GROUP BY ALL"""


def bin_of(value: str, axis: Axis) -> str:
    """The bin of a value, in SQL: what `Axis.bins_of` says."""
    if axis.is_linear:
        bins_per_unit = LINEAR_BINS / (axis.high - axis.low)
        place = f"floor(({value}::DOUBLE - {axis.low!r}) * {bins_per_unit!r})"
        return f"greatest(0, least({LINEAR_BINS - 1}, {place}))::SMALLINT"
    steps = f"(log2(abs({value}::DOUBLE)) - {SMALLEST_OCTAVE}) * {BINS_PER_OCTAVE}"
    return f"""(CASE
        WHEN abs({value}) < {NEAR_ZERO!r} THEN 0
        ELSE sign({value}) * least({LAST_BIN}, floor({steps}) + 1)
    END)::SMALLINT"""


def _keys_of_rows(keys: Sequence[str], statistic: MeasuredStatistic) -> str:
    """The keys of a select over rows, where `statistic` is a constant."""
    constant = f"{text_literal(statistic.name)} AS statistic"
    return ", ".join(constant if key == "statistic" else key for key in keys)


def _rows_with(columns: str, view: str) -> str:
    """The rows of heads, with columns that an internal view has for each sequence."""
    # Not USING: where DuckDB names the tables of a query, it knows no columns of a table.
    return f"""internal.unrolled_heads JOIN (
            SELECT run_id AS _run, intervention AS _intervention, sequence AS _sequence, {columns}
            FROM internal.{view}
        ) ON run_id = _run AND intervention = _intervention AND sequence = _sequence"""


def _union(selects: Iterable[str]) -> str:
    """All rows of some selects."""
    return " UNION ALL BY NAME ".join(selects)
