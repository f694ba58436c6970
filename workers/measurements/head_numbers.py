"""From places among the measured heads to numbers of layers and heads: what rows say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schemas.measured_heads import ABSENT, MeasuredHeads

Indices = dict[str, np.ndarray]
"""By axis, where each value lies on it."""


def numbered(
    axes: Sequence[str], shape: Sequence[int], heads: MeasuredHeads
) -> tuple[Indices, np.ndarray | slice]:
    """Where values lie whose axes are these, in the numbers of the model, and which of them there
    are: a layer may have fewer measured heads than there are places.
    """
    places = (index.ravel() for index in np.indices(shape))
    indices = dict(zip(axes, places, strict=True))
    kept: np.ndarray | slice = slice(None)
    if "head" in indices:
        indices["head"] = np.array(heads.numbers)[indices["layer"], indices["head"]]
        if heads.count < len(heads.layers) * heads.width:
            kept = indices["head"] != ABSENT
    if "layer" in indices:
        indices["layer"] = np.array(heads.layers)[indices["layer"]]
    return {axis: index[kept] for axis, index in indices.items()}, kept
