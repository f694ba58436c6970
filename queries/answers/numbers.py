"""Numbers of statistics by head: the SQL that gives them, and arrays of them."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from headcount.queries.answers.head_curves import Array, places
from headcount.queries.open.sql_text import quoted_name

MEANS = ("mean", "standard_error", "minimum", "maximum", "degrees_of_freedom")
COUNTS = ("count", "documents", "undefined")
SUMMARY = (*MEANS, *COUNTS)  # of a statistic of a head; standard_error is over documents
NUMBERS = (*SUMMARY, "percentile")

Numbers: TypeAlias = dict[str, Array]
"""By column, [statistic layer head]: NaN where undefined; COUNTS are uint32."""


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
