"""Edits of what may make a sink: query biases, keys, values, and who may look where."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from schemas.values import Count, Factor, Index, Seed
from workers.engine.edits import hide, replaced
from workers.interventions.intervention_registry import Largest, intervention
from workers.model.circuit import Circuit

N_CTX_LESS_1 = Largest("n_ctx - 1", lambda info, n_ctx: n_ctx - 1)
"""The keys that a query can see besides itself."""

UPPER_HALF = Largest("the upper half of n_ctx", lambda info, n_ctx: n_ctx - max(n_ctx // 2, 1))
HALF = Largest("half of n_ctx", lambda info, n_ctx: n_ctx // 2)
D_MODEL = Largest("d_model", lambda info, n_ctx: info.d_model)
HALF_D_MODEL = Largest("half of d_model", lambda info, n_ctx: info.d_model // 2)


def _whole_window(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why a window hides everything, or nothing."""
    kept = options["sinks"] + options["window"]
    if kept == 0:
        return "keeps no key; expected sinks or window of 1 or more"
    if kept >= n_ctx:
        return f"hides nothing; expected sinks + window below n_ctx = {n_ctx}, got {kept}"
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
    return b_Q + (1 - alpha) * b_Q.norm(dim=-1, keepdim=True) * random_directions(b_Q, draw)


def random_directions(like: Tensor, draw: int) -> Tensor:
    """Random vectors of length 1, as many and as wide as the rows of `like`; the same for the same
    draw.
    """
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(draw)).to(like)
    return drawn / drawn.norm(dim=-1, keepdim=True)


@intervention(most={"count": D_MODEL})
def scale_massive_keys(
    W_K: Tensor, circuit: Circuit, *, alpha: Factor = 0.0, count: Count = 3
) -> Tensor:
    """Keys read the coordinates in which the untouched first effective position is largest in size
    alpha times (Ran-Milo et al. 2026, intervention i).
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
    """The coordinates below `size` of a layer: for one layer after the other, `count` different
    ones that are none of `without`.

    Draw 42 with three is what the authors drew for GPT-2.

    >>> [random_coordinates(768, 3, [138, 378, 447], layer, draw=42) for layer in (0, 1)]
    [[654, 114, 25], [759, 281, 250]]
    """
    generator = random.Random(draw)
    for _ in range(layer + 1):
        found: list[int] = []
        while len(found) < min(count, size - len(without)):
            coordinate = generator.randint(0, size - 1)
            if coordinate not in without and coordinate not in found:
                found.append(coordinate)
    return found


def _scaled(W_K: Tensor, coordinates: list[int], alpha: float) -> Tensor:
    edited = W_K.clone()
    edited[:, coordinates] *= alpha
    return edited


@intervention
def zero_first_value(v: Tensor) -> Tensor:
    """The value vector at position 0 is set to zero, so that attention to the sink moves nothing."""
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
    """A query sees the last `window` keys and the first `sinks` alone (Xiao et al. 2023)."""
    queries = torch.arange(attn_scores.shape[-2], device=attn_scores.device)
    distance = queries[:, None] - queries[None]
    return hide(attn_scores, (distance >= window) & (queries[None] >= sinks))


@intervention(most={"count": N_CTX_LESS_1})
def mask_last_keys(attn_scores: Tensor, *, count: Count = 4) -> Tensor:
    """The last keys of the sequence cannot be attended to, not even by themselves; key 0 always can
    (Scheuer, attention-sink-profiler).
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
    order = torch.randperm(
        attn_scores.shape[-1], generator=torch.Generator().manual_seed(draw)
    ).tolist()
    return _without_keys(attn_scores, [k for k in order if k >= max(count, 1)][:count])


def _without_keys(scores: Tensor, keys: Iterable[int]) -> Tensor:
    """Hide keys from every query; key 0 must not be among them, because query 0 has no other."""
    hidden = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    hidden[list(keys)] = True
    return hide(scores, hidden)
