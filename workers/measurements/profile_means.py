"""Means over the sequences of a shard.

Every batch is reduced where it was measured, then batches are merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from headcount.schemas.files.parquet import table_of
from headcount.schemas.formula_kinds import PAIRED_AXES
from headcount.schemas.formulas import Formula, Kind
from headcount.schemas.scans.kinds import schema_of_rows
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.workers.measurements.head_numbers import numbered


@dataclass(frozen=True)
class Aggregate:
    """Count, mean and sum of squared deviations, over sequences, of every entry of a profile."""

    count: np.ndarray
    """Sequences in which the entry has a value."""
    mean: np.ndarray
    """`[layer head entry]`, float64; `[layer entry]` for what the heads of a layer share. NaN if no
    sequence has a value.
    """
    m2: np.ndarray

    def merged(self, other: Aggregate) -> Aggregate:
        """The aggregate of the sequences of both.

        n = n_a + n_b, δ = mean_b - mean_a, mean = mean_a + δ n_b/n, M2 = M2_a + M2_b + δ² n_a n_b/n
        (Chan et al. 1979)
        """
        count = self.count + other.count
        delta = other.mean - self.mean
        share_of_other = other.count / np.maximum(count, 1)  # 0 where no sequence has a value
        mean = self.mean + delta * share_of_other
        m2 = self.m2 + other.m2 + delta**2 * (self.count * share_of_other)
        # If one of them has no sequence, its mean is NaN and the other's stands.
        is_empty = [self.count == 0, other.count == 0]
        return Aggregate(
            count,
            np.select(is_empty, [other.mean, self.mean], mean),
            np.select(is_empty, [other.m2, self.m2], m2),
        )


Aggregates = dict[str, Aggregate]
"""By formula."""


def count_mean_m2(profile: Formula, values: Tensor) -> Tensor:
    """Count, mean and M2 over the sequences of a batch that have a value, in float64:
    `[3 head entry]`, or `[3 entry]`.
    """
    values_of_entries = entries_of(profile, values).double()
    undefined = values_of_entries.isnan()
    count = (~undefined).sum(0)  # [head entry]
    # Of no sequences the mean is 0/0, which is NaN.
    mean = values_of_entries.masked_fill(undefined, 0).sum(0) / count
    # Two passes, because the mean of squares less the square of the mean would lose all digits of a
    # small spread.
    squared_deviations = (values_of_entries - mean).square().masked_fill(undefined, 0)
    m2 = squared_deviations.sum(0).masked_fill(count == 0, math.nan)
    return torch.stack([count, mean, m2])


def entries_of(profile: Formula, values: Tensor) -> Tensor:
    """The entries of a profile that are stored: one triangle of a matrix, all of another."""
    if profile.axis not in PAIRED_AXES:
        return values
    rows, columns = places_in_matrix(profile, values.shape[-1])
    return values[..., rows, columns]


def aggregates(means: Mapping[str, Tensor]) -> Aggregates:
    """The aggregates of a batch, from count, mean and M2 `[3 layer …]` on the host."""
    by_formula: Aggregates = {}
    for name, values in means.items():
        # Pinned memory is scarce, so what is kept is copied out of it.
        count, mean, m2 = values.numpy().copy()
        by_formula[name] = Aggregate(count.astype(np.int64), mean, m2)
    return by_formula


def merge(batches: Sequence[Aggregates]) -> Aggregates:
    """The aggregates of all batches of a shard."""
    merged = batches[0]
    for batch in batches[1:]:
        merged = {name: aggregate.merged(batch[name]) for name, aggregate in merged.items()}
    return merged


def means_table(kind: Kind, shard: int, means: Aggregates, heads: MeasuredHeads) -> pa.Table:
    """One row per layer × head × formula × entry, in the order formula, layer, head, entry."""
    schema = schema_of_rows(kind, [kind[name] for name in means])
    rows = [_rows(kind, shard, name, means[name], heads, schema) for name in means]
    return pa.concat_tables(rows).combine_chunks()


def _rows(
    kind: Kind,
    shard: int,
    name: str,
    aggregate: Aggregate,
    heads: MeasuredHeads,
    schema: pa.Schema,
) -> pa.Table:
    """The rows of one formula."""
    assert kind.named_by is not None
    shape = aggregate.mean.shape
    axes = ["layer", "head", "entry"] if len(shape) == 3 else ["layer", "entry"]
    indices, existing = numbered(axes, shape, heads)
    entry = indices.pop("entry")
    places = places_on_axes(kind[name], shape[-1])
    columns: dict[str, Any] = {
        "shard": np.full(len(entry), shard),
        **indices,
        kind.named_by: pa.repeat(name, len(entry)),
        **{axis: place[entry] for axis, place in places.items()},
        "count": aggregate.count.ravel()[existing],
        "mean": aggregate.mean.ravel()[existing],
        "m2": aggregate.m2.ravel()[existing],
    }
    return table_of(columns, schema)


def places_on_axes(profile: Formula, entries: int) -> dict[str, np.ndarray]:
    """For every entry, where it lies on the axes of its profile."""
    if profile.axis not in PAIRED_AXES:
        return {profile.axis: np.arange(entries)}
    size = math.isqrt(2 * entries)  # There are size · (size + 1) / 2 pairs.
    names = ("query", "key") if profile.axis == "pair" else ("component", "other_component")
    places = places_in_matrix(profile, size)
    return {name: place.numpy() for name, place in zip(names, places, strict=True)}


def places_in_matrix(profile: Formula, size: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the entries that are stored of a profile's matrix.

    No query sees a later key, so those are the lower triangle. Moments are symmetric: the upper
    triangle has each once, in the order of reading.
    """
    triangle = torch.tril_indices if profile.axis == "pair" else torch.triu_indices
    rows, columns = triangle(size, size)
    return rows, columns
