"""Edits of what may make a sink: query biases, keys, values, and who may look where."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schemas.values import Count, Factor, Index, Seed
from workers.engine.edits import hide, replaced
from workers.interventions.intervention_registry import LargestValue, intervention
from workers.model.circuit import Circuit

N_CTX_LESS_1 = LargestValue("n_ctx - 1", lambda info, n_ctx: n_ctx - 1)
"""The keys that the last query can see besides itself."""

# `max`: with n_ctx = 1 the upper half would begin at key 0, which must stay visible.
UPPER_HALF = LargestValue("the upper half of n_ctx", lambda info, n_ctx: n_ctx - max(n_ctx // 2, 1))
HALF = LargestValue("half of n_ctx", lambda info, n_ctx: n_ctx // 2)
D_MODEL = LargestValue("d_model", lambda info, n_ctx: info.d_model)
HALF_D_MODEL = LargestValue("half of d_model", lambda info, n_ctx: info.d_model // 2)


def _whole_window(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why a window hides everything, or nothing; None if it hides a part."""
    visible_keys = options["sinks"] + options["window"]
    if visible_keys == 0:
        return "keeps no key; expected sinks or window of 1 or more"
    if visible_keys >= n_ctx:
        return f"hides nothing; expected sinks + window below n_ctx = {n_ctx}, got {visible_keys}"
    return None


@intervention
def none() -> None:
    """The untouched model."""


@intervention
def zero_query_bias(b_Q: Tensor) -> Tensor:
    """The query bias is set to zero (Ran-Milo et al. 2026, intervention b)."""
    return torch.zeros_like(b_Q)


@intervention
def scale_query_bias(b_Q: Tensor, *, alpha: Factor) -> Tensor:
    """The query bias is multiplied by alpha."""
    return b_Q * alpha


@intervention
def random_query_bias(b_Q: Tensor, *, draw: Seed = 0, alpha: Factor = 0.0) -> Tensor:
    """The control of zero_query_bias and scale_query_bias: the bias moves as far, in a random
    direction for each head, the same in all layers.
    """
    # Scaling by alpha moves the bias by (1 - alpha) times its norm.
    return b_Q + (1 - alpha) * b_Q.norm(dim=-1, keepdim=True) * random_directions(b_Q, draw)


def random_directions(like: Tensor, draw: int) -> Tensor:
    """Random vectors of length 1 in the shape of `like`, along its last axis.

    They depend on the shape and the draw alone.
    """
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(draw)).to(like)
    return drawn / drawn.norm(dim=-1, keepdim=True)


@intervention(most={"count": D_MODEL})
def scale_massive_keys(
    W_K: Tensor, circuit: Circuit, *, alpha: Factor = 0.0, count: Count = 3
) -> Tensor:
    """Keys read some coordinates alpha times: those in which the first effective position of the
    unedited model is largest in size (Ran-Milo et al. 2026, intervention i).
    """
    return _scaled(W_K, circuit.massive_coordinates(count), alpha)


@intervention(most={"count": HALF_D_MODEL})
def scale_random_keys(
    W_K: Tensor,
    circuit: Circuit,
    layer: int,
    *,
    draw: Seed = 0,
    alpha: Factor = 0.0,
    count: Count = 3,
) -> Tensor:
    """The control of scale_massive_keys: as many coordinates, drawn from the others in each layer
    (Ran-Milo et al. 2026, j).
    """
    massive = circuit.massive_coordinates(count)
    return _scaled(W_K, random_coordinates(W_K.shape[1], count, massive, layer, draw), alpha)


def random_coordinates(
    size: int, count: int, without: Sequence[int], layer: int, draw: int
) -> list[int]:
    """`count` different coordinates below `size` for a layer, none of them in `without`.

    One generator draws for all layers in order, as the authors' does. So the layers before are
    drawn and thrown away. With draw 42 and three coordinates these are the authors' for GPT-2.

    >>> [random_coordinates(768, 3, [138, 378, 447], layer, draw=42) for layer in (0, 1)]
    [[654, 114, 25], [759, 281, 250]]
    """
    generator = random.Random(draw)
    # Where few coordinates are left, asking for more would never end.
    available = min(count, size - len(without))
    coordinates: list[int] = []
    for _ in range(layer + 1):
        coordinates = []
        while len(coordinates) < available:
            coordinate = generator.randint(0, size - 1)
            if coordinate not in without and coordinate not in coordinates:
                coordinates.append(coordinate)
    return coordinates


def _scaled(W_K: Tensor, coordinates: list[int], alpha: float) -> Tensor:
    """`W_K [head d_model d_head]`, with the rows of some coordinates multiplied by alpha."""
    edited = W_K.clone()
    edited[:, coordinates] *= alpha
    return edited


@intervention
def zero_first_value(v: Tensor) -> Tensor:
    """The value vector at position 0 is set to zero, so attention to the sink moves nothing."""
    return replaced(v, (slice(None), 0), 0)


@intervention
def zero_first_mlp_out(mlp_out: Tensor, *, layer: Index = 0) -> Tensor:
    """One layer's MLP adds nothing to position 0."""
    return replaced(mlp_out, (slice(None), 0), 0)


@intervention(most={"count": N_CTX_LESS_1})
def mask_first_keys(attn_scores: Tensor, *, count: Count = 1) -> Tensor:
    """The first keys cannot be attended to; the queries among them keep themselves (Xiao et al.
    2023).
    """
    queries = torch.arange(attn_scores.shape[-2], device=attn_scores.device)
    return hide(attn_scores, (queries[None] < count) & (queries[None] != queries[:, None]))


@intervention(most={"count": N_CTX_LESS_1})
def mask_recent_keys(attn_scores: Tensor, *, count: Count = 4) -> Tensor:
    """The keys just before a query cannot be attended to; the query keeps itself."""
    queries = torch.arange(attn_scores.shape[-2], device=attn_scores.device)
    distance = queries[:, None] - queries[None]
    return hide(attn_scores, (distance >= 1) & (distance <= count))


@intervention(refuse=_whole_window)
def keep_window(attn_scores: Tensor, *, sinks: Index, window: Index) -> Tensor:
    """A query sees only the last `window` keys and the first `sinks` keys (Xiao et al. 2023)."""
    queries = torch.arange(attn_scores.shape[-2], device=attn_scores.device)
    distance = queries[:, None] - queries[None]
    return hide(attn_scores, (distance >= window) & (queries[None] >= sinks))


@intervention(most={"count": N_CTX_LESS_1})
def mask_last_keys(attn_scores: Tensor, *, count: Count = 4) -> Tensor:
    """The last keys of the sequence cannot be attended to, not even by their own queries; key 0
    always can (Scheuer, attention-sink-profiler).
    """
    n_ctx = attn_scores.shape[-1]
    return _without_keys(attn_scores, range(max(n_ctx - count, 1), n_ctx))


@intervention(most={"count": UPPER_HALF})
def mask_middle_keys(attn_scores: Tensor, *, count: Count = 4) -> Tensor:
    """A control of mask_first_keys: as many keys from the middle of the sequence on (Scheuer,
    attention-sink-profiler).
    """
    n_ctx = attn_scores.shape[-1]
    return _without_keys(attn_scores, range(max(n_ctx // 2, 1), min(n_ctx // 2 + count, n_ctx)))


@intervention(most={"count": HALF})
def mask_random_keys(attn_scores: Tensor, *, count: Count = 4, draw: Seed = 0) -> Tensor:
    """A control of mask_first_keys: as many random keys, none of the first, the same in every head
    and layer (Scheuer).
    """
    generator = torch.Generator().manual_seed(draw)
    keys_in_random_order = torch.randperm(attn_scores.shape[-1], generator=generator).tolist()
    later_keys = [key for key in keys_in_random_order if key >= max(count, 1)]
    return _without_keys(attn_scores, later_keys[:count])


def _without_keys(scores: Tensor, keys: Iterable[int]) -> Tensor:
    """Hide keys from every query. Key 0 must not be among them: query 0 has no other key."""
    hidden = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    hidden[list(keys)] = True
    return hide(scores, hidden)
