"""The weights of the attention layers that a statistic may read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.model.model import Model, wide

READABLE_WEIGHTS = ("b_Q", "b_K", "W_K", "W_O")
"""Names of `schemas.statistics.LAYER_VALUES` that are weights."""


def attention_weights(model: Model, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Some of a layer's weights as they are now, an edit included."""
    return {
        name: (_bias if name.startswith("b") else _projection)(model, layer, name) for name in names
    }


def effective_or_nan(model: Model, n_ctx: int) -> Tensor:
    """The effective positions `[pos d_model]` of the weights as they are now; NaN where a model's
    are not known.
    """
    effective = model.effective_positions(n_ctx)
    if effective is None:
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        shape = (n_ctx, model.info.d_model)
        return torch.full(shape, math.nan, dtype=dtype, device=model.device)
    return wide(effective)


def _projection(model: Model, layer: int, name: str) -> Tensor:
    """A projection `[head …]`, repeated where query heads share it."""
    weight = model.layer_weight(layer, name)
    if weight is None:
        raise ModelError(
            f"{model.info.name}: the bridge does not show {name}; "
            "name the statistics that do not read it"
        )
    return wide(weight).repeat_interleave(model.info.n_heads // len(weight), 0)


def _bias(model: Model, layer: int, name: str) -> Tensor:
    """A bias `[head d_head]`, repeated where query heads share it; zero where the model has none."""
    bias = model.layer_weight(layer, name)
    if bias is None:
        zeros = torch.zeros(model.info.n_heads, 1, dtype=model.dtype, device=model.device)
        return wide(zeros)
    return wide(bias).repeat_interleave(model.info.n_heads // len(bias), 0)
