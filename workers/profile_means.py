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

from schemas.errors import MeasureError
from schemas.parquet import table_of
from schemas.profiles import PROFILES, Profile
from schemas.tables import profiles_schema


@dataclass(frozen=True)
class Aggregate:
    """Count, mean and sum of squared deviations, over sequences, of every entry of a profile."""

    count: np.ndarray
    """Sequences in which the entry has a value."""
    mean: np.ndarray
    """`[layer head entry]`, float64; `[layer entry]` for what the heads of a layer share. NaN where
    no sequence has a value.
    """
    m2: np.ndarray

    def merged(self, other: Aggregate) -> Aggregate:
        """The aggregate of the sequences of both.

        n = n_a + n_b, δ = mean_b - mean_a, mean = mean_a + δ n_b/n, M2 = M2_a + M2_b + δ² n_a n_b/n
        (Chan et al. 1979)
        """
        count = self.count + other.count
        delta = other.mean - self.mean
        share = other.count / np.maximum(count, 1)
        mean = self.mean + delta * share
        m2 = self.m2 + other.m2 + delta**2 * (self.count * share)
        # Where one of them has no sequence, its mean is NaN and the other's stands.
        alone = [self.count == 0, other.count == 0]
        return Aggregate(
            count,
            np.select(alone, [other.mean, self.mean], mean),
            np.select(alone, [other.m2, self.m2], m2),
        )


Profiles = dict[str, Aggregate]


def reduced(profile: Profile, values: Tensor) -> Tensor:
    """Count, mean and M2 over the sequences of a batch that have a value, in float64: `[3 head
    entry]`, or `[3 entry]`.
    """
    if profile.axis == "pair":
        query, key = torch.tril_indices(*values.shape[-2:], device=values.device)
        values = values[..., query, key]
    values = values.double()
    undefined = values.isnan()
    count = (~undefined).sum(0)
    # Of no sequences the mean is 0/0, which is NaN.
    mean = values.masked_fill(undefined, 0).sum(0) / count
    deviations = (values - mean).square().masked_fill(undefined, 0)
    m2 = deviations.sum(0).masked_fill(count == 0, math.nan)
    return torch.stack([count, mean, m2])


def aggregates(fetched: Mapping[str, Tensor], first: int, count: int) -> Profiles:
    """The aggregates `[3 layer …]` of a batch of `count` sequences, once they are here."""
    # Pinned memory is scarce, so what is kept is copied out of it.
    found = {name: _aggregate(values.numpy().copy()) for name, values in fetched.items()}
    bad = {name: np.argwhere((a.count > 0) & ~np.isfinite(a.mean)) for name, a in found.items()}
    bad = {name: where[0].tolist() for name, where in bad.items() if len(where)}
    if bad:
        name = min(bad, key=lambda n: bad[n][0])
        layer, *head, entry = bad[name]
        place = f"layer {layer}" + "".join(f", head {h}" for h in head)
        axes = _axes(PROFILES[name], found[name].mean.shape[-1])
        raise MeasureError(
            f"{place}: profile {name} is not finite at {', '.join(f'{axis} {at[entry]}' for axis, at in axes.items())} for "
            f"one of the sequences {first} to {first + count - 1} of the shard; expected finite numbers: look at the "
            "model's weights and precision"
        )
    return found


def _aggregate(values: np.ndarray) -> Aggregate:
    count, mean, m2 = values
    return Aggregate(count.astype(np.int64), mean, m2)


def check_curves(curves: Mapping[str, np.ndarray], first: int) -> None:
    """Raise `MeasureError` for the earliest layer in which a curve `[sequence layer head entry]` is
    not finite; NaN is undefined (`workers.undefined`).
    """
    bad = {name: np.argwhere(np.isinf(values).swapaxes(0, 1)) for name, values in curves.items()}
    bad = {name: where[0].tolist() for name, where in bad.items() if len(where)}
    if bad:
        name = min(bad, key=lambda n: bad[n][0])
        layer, sequence, head, entry = bad[name]
        raise MeasureError(
            f"layer {layer}, head {head}: {name} is not finite at {PROFILES[name].axis} "
            f"{entry} for sequence {first + sequence} of the shard; expected a finite number: look at the model's weights "
            "and precision"
        )


def merge(parts: Sequence[Profiles]) -> Profiles:
    """The aggregates of all batches of a shard."""
    whole = parts[0]
    for part in parts[1:]:
        whole = {name: aggregate.merged(part[name]) for name, aggregate in whole.items()}
    return whole


def profiles_table(shard: int, profiles: Profiles) -> pa.Table:
    """One row per layer × head × profile × entry, in the order profile, layer, head, entry."""
    return pa.concat_tables(
        [_rows(shard, PROFILES[name], a) for name, a in profiles.items()]
    ).combine_chunks()


def _rows(shard: int, profile: Profile, aggregate: Aggregate) -> pa.Table:
    rows = aggregate.mean.size
    layer, *head, entry = (axis.ravel() for axis in np.indices(aggregate.mean.shape))
    columns: dict[str, Any] = {
        "shard": np.full(rows, shard),
        "layer": layer,
        "profile": [profile.name] * rows,
    }
    columns |= {"head": head[0]} if head else {}
    columns |= {axis: at[entry] for axis, at in _axes(profile, aggregate.mean.shape[-1]).items()}
    columns |= {
        "count": aggregate.count.ravel(),
        "mean": aggregate.mean.ravel(),
        "m2": aggregate.m2.ravel(),
    }
    return table_of(columns, profiles_schema())


def _axes(profile: Profile, entries: int) -> dict[str, np.ndarray]:
    """For every entry, where it lies on the axes of its profile."""
    if profile.axis != "pair":
        return {profile.axis: np.arange(entries)}
    n_ctx = math.isqrt(2 * entries)  # There are n_ctx · (n_ctx + 1) / 2 pairs.
    return dict(zip(("query", "key"), np.tril_indices(n_ctx), strict=True))
