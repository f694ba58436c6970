"""Curves of heads: means of profiles by lag, key or query, as report and explorer show them.

A run averages a profile over the sequences of a shard (`profiles`), or keeps it for every sequence
(`curves`). Either becomes a `Curve`, at the few places of its axis that a page draws.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.files.run_directory import pc

Array: TypeAlias = "np.ndarray[Any, Any]"
"""Numbers by layer and head, after other axes. NaN is undefined, or was not measured."""

MOST_POINTS = 48  # points of a curve in a page

AXES = ("lag", "key", "query")  # of curves that are lines, unlike pairs and dimensions


@dataclass(frozen=True)
class ProfileFacts:
    """What a manifest says of a profile by lag, key or query."""

    axis: str
    meaning: str
    unit: str


@dataclass(frozen=True)
class HeadCurve:
    """The mean of a profile by lag, key or query, for one head."""

    profile: str
    axis: str
    meaning: str
    unit: str
    profiled: bool  # Whether the run averaged it. Else it kept it for every sequence.
    indices: list[int]
    values: list[float | None]
    standard_errors: list[float | None]


@dataclass
class Curve:
    """The mean of a profile by index, for all heads of a section."""

    profile: str
    about: ProfileFacts
    profiled: bool
    indices: list[int]
    values: Array  # by index, layer and head
    standard_errors: Array

    def of_head(self, layer: int, head: int) -> HeadCurve:
        """The curve of one head."""
        values, errors = (
            [None if np.isnan(value) else value for value in array[:, layer, head].tolist()]
            for array in (self.values, self.standard_errors)
        )
        about = self.about.axis, self.about.meaning, self.about.unit
        return HeadCurve(self.profile, *about, self.profiled, self.indices, values, errors)


def profile_curves_sql(profiles: Iterable[str], condition: str) -> str:
    """The entries of profiles by one axis. `condition` is a WHERE clause."""
    # By name: so the view never merges those by pair, which have a hundred times as many entries.
    names = ", ".join(map(text_literal, profiles))
    return f"""
        SELECT profile, layer, head, {", ".join(AXES)}, mean, standard_error
        FROM profile_means {condition}
            AND head IS NOT NULL AND profile IN ({names})
        ORDER BY profile, lag, key, query
    """


def kept_curve_sql(profile: str, axis: str, condition: str) -> str:
    """The mean over sequences of what `curves` has for each. `condition` is a WHERE clause."""
    values = quoted_name(profile)
    # Lists begin at 1 in SQL, and axes at 0.
    return f"""
        SELECT
            {text_literal(profile)} AS profile, layer, head, {axis}, document_mean(sums) AS mean,
            document_error(sums) AS standard_error
        FROM (
            SELECT layer, head, {axis}, document, document_sums(value, document) AS sums
            FROM (
                SELECT
                    run_id, intervention, sequence, layer, head,
                    generate_subscripts({values}, 1) - 1 AS {axis}, unnest({values}) AS value
                FROM curves {condition}
            )
            JOIN internal.documents USING (run_id, intervention, sequence)
            GROUP BY ALL
        )
        GROUP BY ALL
        ORDER BY {axis}
    """


def curves_of_profiles(
    table: pa.Table, about: Mapping[str, ProfileFacts], shape: tuple[int, ...]
) -> Iterator[Curve]:
    """The curves among the rows of `profile_curves_sql`. `shape` is layers and heads."""
    for profile in table["profile"].unique().to_pylist():
        rows = table.filter(pc.equal(table["profile"], profile))
        yield curve_of(profile, about[profile], True, rows, shape)


def curve_of(
    profile: str, about: ProfileFacts, profiled: bool, rows: pa.Table, shape: tuple[int, ...]
) -> Curve:
    """A curve by head, at the indices that are drawn."""
    positions = rows[about.axis].to_numpy()
    indices = drawn_indices(int(positions.max()) + 1)
    # Where each index of the axis is drawn: -1 where it is not.
    place_of_index = np.full(int(positions.max()) + 1, -1)
    place_of_index[indices] = np.arange(len(indices))
    place_of_row = place_of_index[positions]
    is_drawn = place_of_row >= 0
    layers, heads = places(rows)
    where = (place_of_row[is_drawn], layers[is_drawn], heads[is_drawn])

    def drawn(column: str) -> Array:
        values = np.full((len(indices), *shape), np.nan)
        values[where] = rows[column].cast(pa.float64()).to_numpy()[is_drawn]
        return values

    return Curve(profile, about, profiled, indices, drawn("mean"), drawn("standard_error"))


def drawn_indices(length: int, most: int = MOST_POINTS) -> list[int]:
    """The places of an axis that a page draws: all, or the first ones densely and then fewer.

    >>> drawn_indices(4)
    [0, 1, 2, 3]
    >>> drawn_indices(1000, 12)
    [0, 1, 2, 3, 4, 5, 12, 29, 71, 171, 413, 999]
    """
    if length <= most:
        return list(range(length))
    dense = most // 2
    sparse = np.geomspace(dense - 1, length - 1, most - dense + 1)
    return sorted({*range(dense), *(round(place) for place in sparse.tolist())})


def places(rows: pa.Table) -> tuple[Array, Array]:
    """Layers and heads of rows, as indices of an array."""
    layers = rows["layer"].to_numpy().astype(np.int64)
    return layers, rows["head"].to_numpy().astype(np.int64)
