"""Means over the sequences of a shard: every batch is reduced where it was measured, then batches
are merged.
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

from schemas.formulas import Along
from schemas.kind import Kind
from schemas.parquet import table_of


@dataclass(frozen=True)
class Aggregate:
    """Count, mean and sum of squared deviations, over sequences, of every entry of a profile."""

    count: int
    mean: np.ndarray
    """`[layer head entry]`, float64; `[layer entry]` for what the heads of a layer share."""
    m2: np.ndarray

    def merged(self, other: Aggregate) -> Aggregate:
        """The aggregate of the sequences of both.

        n = n_a + n_b, δ = mean_b - mean_a, mean = mean_a + δ n_b/n, M2 = M2_a + M2_b + δ² n_a n_b/n
        (Chan et al. 1979)
        """
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        return Aggregate(
            count, mean, self.m2 + other.m2 + delta**2 * (self.count * other.count / count)
        )


Aggregates = dict[str, Aggregate]
"""By formula."""


def mean_and_m2(profile: Along, values: Tensor) -> Tensor:
    """Mean and M2 over the sequences of a batch, in float64: `[2 head entry]`, or `[2 entry]`."""
    if profile.axis == "pair":
        query, key = torch.tril_indices(*values.shape[-2:], device=values.device)
        values = values[..., query, key]
    values = values.double()
    mean = values.mean(0)
    return torch.stack([mean, (values - mean).square().sum(0)])


def aggregates(means: Mapping[str, Tensor], sequences: int) -> Aggregates:
    """The aggregates of a batch, from mean and M2 `[2 layer …]` on the host."""
    # Pinned memory is scarce, so what is kept is copied out of it.
    return {name: Aggregate(sequences, *both.numpy().copy()) for name, both in means.items()}


def merge(parts: Sequence[Aggregates]) -> Aggregates:
    """The aggregates of all batches of a shard."""
    whole = parts[0]
    for part in parts[1:]:
        whole = {name: aggregate.merged(part[name]) for name, aggregate in whole.items()}
    return whole


def means_table(kind: Kind[Any], shard: int, means: Aggregates) -> pa.Table:
    """One row per layer × head × formula × entry, in the order formula, layer, head, entry."""
    rows = [_rows(kind, shard, name, aggregate) for name, aggregate in means.items()]
    return pa.concat_tables(rows).combine_chunks()


def _rows(kind: Kind[Any], shard: int, name: str, aggregate: Aggregate) -> pa.Table:
    assert kind.named_by is not None
    rows = aggregate.mean.size
    layer, *head, entry = (axis.ravel() for axis in np.indices(aggregate.mean.shape))
    columns: dict[str, Any] = {
        "shard": np.full(rows, shard),
        "layer": layer,
        kind.named_by: [name] * rows,
    }
    columns |= {"head": head[0]} if head else {}
    axes = places_on_axes(kind.registry[name], aggregate.mean.shape[-1])
    columns |= {axis: at[entry] for axis, at in axes.items()}
    columns |= {
        "count": np.full(rows, aggregate.count),
        "mean": aggregate.mean.ravel(),
        "m2": aggregate.m2.ravel(),
    }
    return table_of(columns, kind.table.schema())


def places_on_axes(profile: Along, entries: int) -> dict[str, np.ndarray]:
    """For every entry, where it lies on the axes of its profile."""
    if profile.axis != "pair":
        return {profile.axis: np.arange(entries)}
    n_ctx = math.isqrt(2 * entries)  # There are n_ctx · (n_ctx + 1) / 2 pairs.
    return dict(zip(("query", "key"), np.tril_indices(n_ctx), strict=True))
