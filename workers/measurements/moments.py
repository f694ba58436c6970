"""Means over the sequences of a shard, as moments: count, mean and sum of squared deviations.

Every batch is reduced where it was measured, then batches are merged.
"""

import math

import numpy as np
import torch
from torch import Tensor

from headcount.schemas.formula_kinds import PAIRED_AXES
from headcount.schemas.formulas import Formula


def count_mean_m2(values: Tensor) -> Tensor:
    """Count, mean and M2 over the sequences of a batch that have a value, in float64: of values
    `[batch …]` they are `[3 …]`. Without a value, mean and M2 are NaN.
    """
    values = values.double()
    undefined = values.isnan()
    count = (~undefined).sum(0)
    # Of no sequences the mean is 0/0, which is NaN.
    mean = values.masked_fill(undefined, 0).sum(0) / count
    # Two passes, because the mean of squares less the square of the mean would lose all digits of a
    # small spread.
    squared_deviations = (values - mean).square().masked_fill(undefined, 0)
    m2 = squared_deviations.sum(0).masked_fill(count == 0, math.nan)
    return torch.stack([count, mean, m2])


def merged_moments(first: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Count, mean and M2 `[3 …]` of the sequences of both.

    n = n_a + n_b, δ = mean_b - mean_a, mean = mean_a + δ n_b/n, M2 = M2_a + M2_b + δ² n_a n_b/n
    (Chan et al. 1979)
    """
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = first, other
    count = count_a + count_b
    delta = mean_b - mean_a
    share_of_b = count_b / np.maximum(count, 1)  # 0 where no sequence has a value
    mean = mean_a + delta * share_of_b
    m2 = m2_a + m2_b + delta**2 * (count_a * share_of_b)
    # If one of them has no sequence, its mean is NaN and the other's stands.
    is_empty = [count_a == 0, count_b == 0]
    return np.stack(
        [
            count,
            np.select(is_empty, [mean_b, mean_a], mean),
            np.select(is_empty, [m2_b, m2_a], m2),
        ]
    )


def entries_of(profile: Formula, values: Tensor) -> Tensor:
    """The entries of a profile that are stored: one triangle of a matrix, all of another."""
    if profile.axis not in PAIRED_AXES:
        return values
    rows, columns = _places_in_matrix(profile, values.shape[-1])
    return values[..., rows, columns]


def places_on_axes(profile: Formula, entries: int) -> dict[str, np.ndarray]:
    """For every entry, where it lies on the axes of its profile."""
    if profile.axis not in PAIRED_AXES:
        return {profile.axis: np.arange(entries)}
    size = math.isqrt(2 * entries)  # There are size · (size + 1) / 2 pairs.
    names = ("query", "key") if profile.axis == "pair" else ("component", "other_component")
    places = _places_in_matrix(profile, size)
    return {name: place.numpy() for name, place in zip(names, places, strict=True)}


def _places_in_matrix(profile: Formula, size: int) -> tuple[Tensor, Tensor]:
    """Rows and columns of the entries that are stored of a profile's matrix.

    No query sees a later key, so those are the lower triangle. Moments are symmetric: the upper
    triangle has each once, in the order of reading.
    """
    triangle = torch.tril_indices if profile.axis == "pair" else torch.triu_indices
    rows, columns = triangle(size, size)
    return rows, columns
