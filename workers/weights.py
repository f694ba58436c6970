"""The weights of the attention layers that a statistic may read."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.dense import wide
from workers.loading import LoadedModel

WEIGHTS = ("b_Q", "b_K", "W_O")
"""Names of `schemas.statistics.ACTIVATIONS` that are weights."""


def attention_weights(model: LoadedModel, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Some of a layer's weights as they are now, an edit included."""
    attn = model.bridge.blocks[layer].attn
    return {name: _output(model, attn) if name == "W_O" else _bias(model, attn, name) for name in names}


def has_rotary_positions(model: LoadedModel) -> bool:
    """Whether q and k are turned by their positions before they are multiplied."""
    return model.bridge.cfg.positional_embedding_type == "rotary"


def _output(model: LoadedModel, attn: object) -> Tensor:
    weight = getattr(attn, "W_O", None)
    if not isinstance(weight, Tensor):
        raise ModelError(f"{model.info.name}: the bridge does not show W_O; name the statistics that do not read it")
    return wide(weight)


def _bias(model: LoadedModel, attn: object, name: str) -> Tensor:
    """A bias `[head d_head]`, repeated where query heads share it; zero where the model has none."""
    info = model.info
    bias = getattr(attn, name, None)
    if not isinstance(bias, Tensor):
        weight = next(model.bare.parameters())
        return wide(torch.zeros(info.n_heads, 1, dtype=weight.dtype, device=weight.device))
    return wide(bias).repeat_interleave(info.n_heads // len(bias), 0)
