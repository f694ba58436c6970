"""Every number that has a value must be finite; if one is not, the scan stops and says where.

NaN means undefined. A value that is not finite for another reason is infinite
(`workers.measurements.undefined`). These are all the checks there are: of numbers and lists of
every layer, of means over a batch, and of predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from headcount.schemas.errors import MeasureError
from headcount.schemas.formulas import Formula
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.workers.measurements.profile_means import Aggregate, places_on_axes

ADVICE = "expected a finite number: look at the model's weights and precision"


def check_numbers(
    values: Mapping[str, np.ndarray],
    defined: Mapping[str, np.ndarray],
    heads: MeasuredHeads,
    first: int,
) -> None:
    """Raise `MeasureError` for the earliest layer in which a value is not finite.

    Values are `[sequence layer head]` or `[sequence layer]`. One that is not `defined` for its
    `[sequence]` may be anything. `first` is the position of the first sequence in the shard.
    """
    infinite: dict[str, np.ndarray] = {}
    for name, numbers in values.items():
        infinite[name] = np.isinf(numbers)
        # Where it is undefined, a formula may divide by zero.
        infinite[name][~defined[name]] = False
    earliest = _earliest({name: where.swapaxes(0, 1) for name, where in infinite.items()})
    if earliest is not None:
        layer, sequence, *head = earliest.place
        raise MeasureError(
            f"{_layer_and_head(heads, layer, head)}: {earliest.name} is not finite for sequence "
            f"{first + sequence} of the shard; {ADVICE}"
        )


def check_lists(
    values: Mapping[str, np.ndarray],
    formulas: Mapping[str, Formula],
    heads: MeasuredHeads,
    first: int,
) -> None:
    """Raise `MeasureError` for the earliest layer in which an entry of a list is not finite.

    Lists are `[sequence layer head entry]` or `[sequence layer entry]`.
    """
    earliest = _earliest({name: np.isinf(lists).swapaxes(0, 1) for name, lists in values.items()})
    if earliest is not None:
        layer, sequence, *head, entry = earliest.place
        raise MeasureError(
            f"{_layer_and_head(heads, layer, head)}: {earliest.name} is not finite at "
            f"{formulas[earliest.name].axis} {entry} for sequence {first + sequence} of the shard; "
            f"{ADVICE}"
        )


def check_means(
    means: Mapping[str, Aggregate],
    formulas: Mapping[str, Formula],
    heads: MeasuredHeads,
    first: int,
    sequences: int,
) -> None:
    """Raise `MeasureError` for the earliest layer in which a mean over a batch is not finite."""
    # A mean over no sequence is NaN and undefined.
    earliest = _earliest(
        {name: (mean.count > 0) & ~np.isfinite(mean.mean) for name, mean in means.items()}
    )
    if earliest is not None:
        layer, *head, entry = earliest.place
        entries = means[earliest.name].mean.shape[-1]
        axes = places_on_axes(formulas[earliest.name], entries)
        place = ", ".join(f"{axis} {places[entry]}" for axis, places in axes.items())
        raise MeasureError(
            f"{_layer_and_head(heads, layer, head)}: profile {earliest.name} is not finite at "
            f"{place} for one of the sequences {first} to {first + sequences - 1} of the shard; "
            "expected finite numbers: look at the model's weights and precision"
        )


def check_predictions(
    values: Mapping[str, np.ndarray], defined: Mapping[str, np.ndarray], first: int
) -> None:
    """Raise `MeasureError` for a prediction that is not finite where it is `defined`.

    Predictions are `[sequence]` or `[sequence pos]`.
    """
    for name, numbers in values.items():
        infinite = np.argwhere(np.isinf(numbers) & defined[name])
        if len(infinite):
            sequence, *positions = infinite[0].tolist()
            at_position = "".join(f", position {position}" for position in positions)
            raise MeasureError(
                f"{name} is not finite for sequence {first + sequence} of the "
                f"shard{at_position}; {ADVICE}"
            )


class _Entry(NamedTuple):
    """Where a formula is not finite."""

    name: str
    place: list[int]
    """The place of its layer, then its place on the other axes."""


def _earliest(not_finite: Mapping[str, np.ndarray]) -> _Entry | None:
    """The first place in the earliest layer, of masks whose first axis is the layer.

    What is not finite in one layer spoils all later ones, so the earliest names the cause.
    """
    places = [
        _Entry(name, np.argwhere(where)[0].tolist())
        for name, where in not_finite.items()
        if where.any()
    ]
    return min(places, key=lambda place: place.place[0], default=None)


def _layer_and_head(heads: MeasuredHeads, layer: int, head: list[int]) -> str:
    """The layer and the head of the model at a place among those that are measured."""
    head_numbers = heads.numbers[layer]
    text = f"layer {heads.layers[layer]}"
    return text + "".join(f", head {head_numbers[place]}" for place in head)
