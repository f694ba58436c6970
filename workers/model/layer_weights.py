"""The weights of the attention layers that a statistic may read."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.engine.dense_engine import wide
from workers.model.circuit import effective_positions
from workers.model.loading import LoadedModel

READABLE_WEIGHTS = ("b_Q", "b_K", "W_K", "W_O")
"""Names of `schemas.statistics.LAYER_VALUES` that are weights."""


def attention_weights(model: LoadedModel, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Some of a layer's weights as they are now, an edit included."""
    attn = model.bridge.blocks[layer].attn
    return {
        name: (_bias if name.startswith("b") else _projection)(model, attn, name) for name in names
    }


def effective_or_nan(model: LoadedModel, n_ctx: int) -> Tensor:
    """The effective positions `[pos d_model]` of the weights as they are now; NaN where a model's
    are not known.
    """
    positions = getattr(model.bridge, "W_pos", None)
    if not isinstance(positions, Tensor) or model.hides("mlp_out"):
        return wide(next(model.bare.parameters())).new_full((n_ctx, model.info.d_model), math.nan)
    return wide(effective_positions(positions[:n_ctx], model.parts["mlp_out"]))


def has_rotary_positions(model: LoadedModel) -> bool:
    """Whether q and k are turned by their positions before they are multiplied."""
    return model.bridge.cfg.positional_embedding_type == "rotary"


def _projection(model: LoadedModel, attn: object, name: str) -> Tensor:
    """A projection `[head …]`, repeated where query heads share it."""
    weight = getattr(attn, name, None)
    if not isinstance(weight, Tensor):
        raise ModelError(
            f"{model.info.name}: the bridge does not show {name}; name the statistics that do not read it"
        )
    return wide(weight).repeat_interleave(model.info.n_heads // len(weight), 0)


def _bias(model: LoadedModel, attn: object, name: str) -> Tensor:
    """A bias `[head d_head]`, repeated where query heads share it; zero where the model has none."""
    info = model.info
    bias = getattr(attn, name, None)
    if not isinstance(bias, Tensor):
        weight = next(model.bare.parameters())
        return wide(torch.zeros(info.n_heads, 1, dtype=weight.dtype, device=weight.device))
    return wide(bias).repeat_interleave(info.n_heads // len(bias), 0)
