"""From places among the measured heads to numbers of layers and heads, which rows hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headcount.schemas.scans.measured_heads import ABSENT, MeasuredHeads

Indices = dict[str, np.ndarray]
"""By axis, where each value lies on it."""


def numbered(
    axes: Sequence[str], shape: Sequence[int], heads: MeasuredHeads
) -> tuple[Indices, np.ndarray | slice]:
    """Where values with these axes lie, in numbers of the model; and which of the values exist.

    Values are taken in their order in memory. A layer may have fewer measured heads than there are
    places, and the places left over have no value.
    """
    places_on_axes = [places.ravel() for places in np.indices(shape)]
    indices = dict(zip(axes, places_on_axes, strict=True))
    existing: np.ndarray | slice = slice(None)
    if "head" in indices:
        # By place of the layer, so before layers become numbers of the model.
        indices["head"] = np.array(heads.numbers)[indices["layer"], indices["head"]]
        if heads.count < len(heads.layers) * heads.width:
            existing = indices["head"] != ABSENT
    if "layer" in indices:
        indices["layer"] = np.array(heads.layers)[indices["layer"]]
    return {axis: index[existing] for axis, index in indices.items()}, existing
