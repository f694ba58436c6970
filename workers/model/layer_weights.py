"""The weights of the attention layers that a statistic may read."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from headcount.workers.model.model import Model, at_least_float32

READABLE_WEIGHTS = ("b_Q", "b_K", "W_K", "W_O")  # of `schemas.formula_kinds.LAYER_VALUES`

READ_THROUGH_BRIDGE = (
    *READABLE_WEIGHTS,
    "effective",
    "first_mlp_out",
    "positions_known",
    "position_after_mlp",
    "position_after_layer",
)
"""Names of what formulas read that is made of weights which only the bridge names."""


def attention_weights(model: Model, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
    """A layer's weights of these names that are known, as they are now, changes included."""
    n_heads = model.info.n_heads
    weights: dict[str, Tensor] = {}
    for name in names:
        # `b_Q` belongs to `W_Q`.
        kind, letter = name.split("_")
        projection = model.layer_weight(layer, f"W_{letter}")
        # Where the projection is not known, no bias does not mean that there is none.
        if projection is None:
            continue
        weight = model.layer_weight(layer, name) if kind == "b" else projection
        if weight is None:
            # No bias is a bias of 0. Width 1 is enough: zeros broadcast to any width.
            weight = torch.zeros(n_heads, 1, dtype=model.dtype, device=model.device)
        # `[head …]`, repeated for each query head that shares it.
        weights[name] = at_least_float32(weight).repeat_interleave(n_heads // len(weight), 0)
    return weights


def effective_or_nan(model: Model, n_ctx: int) -> Tensor:
    """The effective positions `[pos d_model]` of the weights as they are now; NaN if not known."""
    return known_or_nan(model, model.effective_positions(n_ctx), n_ctx)


def known_or_nan(model: Model, vectors: Tensor | None, rows: int) -> Tensor:
    """Vectors of the stream `[row d_model]`, which are NaN if there are none."""
    if vectors is None:
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        shape = (rows, model.info.d_model)
        return torch.full(shape, math.nan, dtype=dtype, device=model.device)
    return at_least_float32(vectors)
