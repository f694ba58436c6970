"""Every number that has a value must be finite; what is not says where, and the scan stops.

NaN is undefined, and infinite is what is not a number for any other reason (`workers.measurements.undefined`).
These are all the checks there are: of numbers and lists of every layer, of means over a batch, and
of predictions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from schemas.errors import MeasureError
from schemas.formulas import Along
from schemas.measured_heads import MeasuredHeads
from workers.measurements.profile_means import Aggregate, places_on_axes

ADVICE = "expected a finite number: look at the model's weights and precision"


def check_numbers(
    values: Mapping[str, np.ndarray],
    defined: Mapping[str, np.ndarray],
    heads: MeasuredHeads,
    first: int,
) -> None:
    """Raise `MeasureError` for the earliest layer in which a value `[sequence layer head]` or
    `[sequence layer]` is not finite, though it is `defined` for its `[sequence]`.
    """
    bad: dict[str, tuple[int, ...]] = {}
    for name, numbers in values.items():
        where = np.isinf(numbers)
        where[~defined[name]] = False
        if where.any():
            bad[name] = _earliest(where)
    if bad:
        name = min(bad, key=lambda n: bad[n][0])
        layer, sequence, *head = bad[name]
        raise MeasureError(
            f"{_place(heads, layer, head)}: {name} is not finite for sequence "
            f"{first + sequence} of the shard; {ADVICE}"
        )


def check_lists(
    values: Mapping[str, np.ndarray],
    formulas: Mapping[str, Along],
    heads: MeasuredHeads,
    first: int,
) -> None:
    """Raise `MeasureError` for the earliest layer in which a list `[sequence layer head entry]` or
    `[sequence layer entry]` is not finite.
    """
    bad = {name: np.isinf(lists) for name, lists in values.items()}
    earliest = {name: _earliest(where) for name, where in bad.items() if where.any()}
    if earliest:
        name = min(earliest, key=lambda n: earliest[n][0])
        layer, sequence, *head, entry = earliest[name]
        raise MeasureError(
            f"{_place(heads, layer, head)}: {name} is not finite at "
            f"{formulas[name].axis} {entry} for sequence {first + sequence} of the shard; {ADVICE}"
        )


def check_means(
    means: Mapping[str, Aggregate],
    formulas: Mapping[str, Along],
    heads: MeasuredHeads,
    first: int,
    sequences: int,
) -> None:
    """Raise `MeasureError` for the earliest layer in which a mean over a batch is not finite."""
    bad = {n: np.argwhere((a.count > 0) & ~np.isfinite(a.mean)) for n, a in means.items()}
    earliest = {name: where[0].tolist() for name, where in bad.items() if len(where)}
    if earliest:
        name = min(earliest, key=lambda n: earliest[n][0])
        layer, *head, entry = earliest[name]
        axes = places_on_axes(formulas[name], means[name].mean.shape[-1])
        place = ", ".join(f"{axis} {at[entry]}" for axis, at in axes.items())
        raise MeasureError(
            f"{_place(heads, layer, head)}: profile {name} is not finite at {place} for one of the "
            f"sequences {first} to {first + sequences - 1} of the shard; expected finite numbers: "
            "look at the model's weights and precision"
        )


def check_predictions(
    values: Mapping[str, np.ndarray], defined: Mapping[str, np.ndarray], first: int
) -> None:
    """Raise `MeasureError` for a prediction `[sequence]` or `[sequence pos]` that is not finite
    where it is `defined`.
    """
    for name, numbers in values.items():
        bad = np.argwhere(np.isinf(numbers) & defined[name])
        if len(bad):
            sequence, *position = bad[0].tolist()
            where = "".join(f", position {p}" for p in position)
            raise MeasureError(
                f"{name} is not finite for sequence {first + sequence} of the "
                f"shard{where}; {ADVICE}"
            )


def _earliest(where: np.ndarray) -> tuple[int, ...]:
    """The first place of `[sequence layer …]` in the earliest layer: layer, sequence, the rest."""
    return tuple(np.argwhere(where.swapaxes(0, 1))[0].tolist())


def _place(heads: MeasuredHeads, layer: int, head: list[int]) -> str:
    """The layer and the head of the model at a place among those that are measured."""
    numbers = heads.numbers[layer]
    return f"layer {heads.layers[layer]}" + "".join(f", head {numbers[h]}" for h in head)
