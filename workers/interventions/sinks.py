"""Changes of what may make a sink: query biases, keys, values, and who may look where."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headcount.schemas.pattern import TIE
from headcount.schemas.values import Count, Factor, Index, Positive, Seed
from headcount.workers.engine.changes import hide, replaced
from headcount.workers.interventions.intervention_registry import LargestValue, intervention
from headcount.workers.model.circuit import Circuit, massive

N_CTX_LESS_1 = LargestValue("n_ctx - 1", lambda info, n_ctx: n_ctx - 1)
"""The keys that the last query can see besides itself."""

D_MODEL_LESS_1 = LargestValue("d_model - 1", lambda info, n_ctx: info.d_model - 1)
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


def _whole_cache(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why a cache evicts nothing; None if it does."""
    kept_keys = options["heavy"] + options["recent"]
    if kept_keys < n_ctx:
        return None
    return f"hides nothing; expected heavy + recent below n_ctx = {n_ctx}, got {kept_keys}"


def _span_of_keys(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why a span of keys is no part of a sequence; None if it is."""
    if n_ctx == 1:
        return "n_ctx = 1 leaves nothing to hide; raise n_ctx"
    first, count = options["first"], options["count"]
    if not -n_ctx <= first < n_ctx:
        return (
            f"first: expected {-n_ctx} to {n_ctx - 1}, the keys of {n_ctx} tokens (negative: from "
            f"the end), got {first}"
        )
    start = first % n_ctx  # Counted from the end if it is negative.
    if start + count > n_ctx:
        return (
            f"hides the keys {start} to {start + count - 1} of {n_ctx} tokens; expected count at "
            f"most {n_ctx - start}, got {count}"
        )
    if count == n_ctx:
        return f"hides every key; expected count at most {n_ctx - 1}, got {count}"
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


@intervention
def mean_query_bias(attn_scores: Tensor, k: Tensor, b_Q: Tensor, scale: float) -> Tensor:
    """The query bias' part of a score, scale·b_Q·k, becomes its mean over the keys that the query
    sees. A softmax does not change by what all keys share, so the pattern is that of
    zero_query_bias; queries keep their bias, and the scores another level. Layers with
    soft caps, windows or learned sinks are refused.
    """
    bias_part = torch.einsum("bkhd,hd->bhk", k, b_Q.to(k.dtype)) * scale  # [batch head key]
    visible_keys = torch.arange(1, bias_part.shape[-1] + 1, device=k.device)
    # Query q sees the keys 0 to q, so its mean is a running one.
    mean_part = bias_part.cumsum(-1) / visible_keys  # [batch head query]
    return attn_scores - bias_part[..., None, :] + mean_part[..., None]


def random_directions(like: Tensor, draw: int) -> Tensor:
    """Random vectors of length 1 in the shape of `like`, along its last axis.

    They depend on the shape and the draw alone.
    """
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(draw)).to(like)
    return drawn / drawn.norm(dim=-1, keepdim=True)


@intervention(most={"count": D_MODEL})
def scale_massive_keys(
    W_K: Tensor, circuit: Circuit, *, alpha: Factor = 0.0, count: Index = 3
) -> Tensor:
    """Keys read some coordinates alpha times: those in which the first effective position of the
    unchanged model is largest in size (Ran-Milo et al. 2026, intervention i). With a count of 0
    those are meant whose size is above mean + 3 standard deviations, and at least three.
    """
    coordinates = circuit.massive_coordinates(count)
    return replaced(W_K, (slice(None), coordinates), alpha * W_K[:, coordinates])


@intervention(most={"count": HALF_D_MODEL})
def scale_random_keys(
    W_K: Tensor,
    circuit: Circuit,
    layer: int,
    *,
    draw: Seed = 0,
    alpha: Factor = 0.0,
    count: Index = 3,
) -> Tensor:
    """The control of scale_massive_keys: as many coordinates, drawn from the others in each layer
    (Ran-Milo et al. 2026, j).
    """
    others = circuit.massive_coordinates(count)
    coordinates = random_coordinates(W_K.shape[1], len(others), others, layer, draw)
    return replaced(W_K, (slice(None), coordinates), alpha * W_K[:, coordinates])


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
    coordinates: list[int] = []
    for _ in range(layer + 1):
        coordinates = []
        while len(coordinates) < min(count, size - len(without)):
            coordinate = generator.randint(0, size - 1)
            if coordinate not in without and coordinate not in coordinates:
                coordinates.append(coordinate)
    return coordinates


@intervention
def scale_first_token_keys(
    key_input: Tensor, tokens: Tensor, W_E: Tensor, *, alpha: Factor = 0.0
) -> Tensor:
    """scale_massive_keys for models that add no positions: keys of a sequence read those
    coordinates alpha times whose size in the embedding of its first token is above mean + 3
    standard deviations, and at least three (Mahmood 2026, in Qwen2.5).
    """
    chosen = massive(W_E[tokens[:, 0]].abs())  # [batch d_model]
    return key_input.where(~chosen[:, None], alpha * key_input)


@intervention
def scale_random_token_keys(
    key_input: Tensor,
    tokens: Tensor,
    W_E: Tensor,
    layer: int,
    *,
    draw: Seed = 0,
    alpha: Factor = 0.0,
) -> Tensor:
    """The control of scale_first_token_keys: as many coordinates, drawn from the others in each
    layer.
    """
    massive_of_each = massive(W_E[tokens[:, 0]].abs())  # [batch d_model]
    chosen = torch.zeros_like(massive_of_each)
    for of_sequence, others in zip(chosen, massive_of_each, strict=True):
        without = others.nonzero().flatten().tolist()
        of_sequence[random_coordinates(len(others), len(without), without, layer, draw)] = True
    return key_input.where(~chosen[:, None], alpha * key_input)


@intervention
def zero_first_value(v: Tensor) -> Tensor:
    """The value vector at position 0 is set to zero, so attention to the sink moves nothing."""
    return replaced(v, (slice(None), 0), 0)


@intervention
def zero_first_mlp_out(mlp_out: Tensor, *, layer: Index = 0) -> Tensor:
    """One layer's MLP adds nothing to position 0."""
    return replaced(mlp_out, (slice(None), 0), 0)


@intervention
def zero_massive_activations(
    resid_post: Tensor, *, layer: Index, size: Positive = 100.0, ratio: Positive = 1000.0
) -> Tensor:
    """Massive activations of the residual stream after a layer are set to zero, at every position:
    those larger than `size`, and than `ratio` times the median size (Sun et al. 2024, as
    `sink_resid_post_massive` counts them).
    """
    sizes = resid_post.abs()
    # The median of every sixteenth position, as the statistic takes it.
    median = sizes[:, ::16].flatten(1).median(-1).values[:, None, None]
    return resid_post.masked_fill((sizes > size) & (sizes > ratio * median), 0)


@intervention(most={"dimension": D_MODEL_LESS_1})
def set_massive_activation(
    resid_post: Tensor, *, layer: Index, dimension: Index, value: Factor, position: Index = 0
) -> Tensor:
    """One dimension of the residual stream after a layer is set to a value at a position: to its
    mean over sequences, which the profile `sink_resid_post_by_dimension` measures, or to any other
    (Sun et al. 2024).
    """
    return replaced(resid_post, (slice(None), position, dimension), value)


@intervention(refuse=_span_of_keys)
def mask_keys(attn_scores: Tensor, *, first: int = 0, count: Count = 1) -> Tensor:
    """The keys `first` to `first + count - 1` cannot be attended to, not even by their own queries.
    A query keeps itself if it has no other key. A negative `first` counts from the end (Xiao et al.
    2023; Scheuer, attention-sink-profiler).
    """
    return _without_span(attn_scores, first % attn_scores.shape[-1], count)


@intervention(most={"count": HALF})
def mask_random_span(attn_scores: Tensor, *, count: Count = 4, draw: Seed = 0) -> Tensor:
    """A control of `mask_keys(0,count)`: as many keys in a row from a random place on, none of the
    first ones, the same in every head, layer and sequence (after Scheuer).
    """
    starts_after_first = range(count, attn_scores.shape[-1] - count + 1)
    return _without_span(attn_scores, random.Random(draw).choice(starts_after_first), count)


def _without_span(scores: Tensor, start: int, count: int) -> Tensor:
    """Hide the keys `start` to `start + count - 1`."""
    positions = torch.arange(scores.shape[-1], device=scores.device)
    hidden = ((positions >= start) & (positions < start + count)).expand(len(positions), -1)
    if start == 0:
        # The queries of the first keys see no other keys, so each keeps its own.
        hidden = hidden & (positions[None] != positions[:, None])
    return hide(scores, hidden)


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


@intervention(refuse=_whole_cache)
def keep_heavy_keys(attn_scores: Tensor, *, heavy: Count, recent: Count) -> Tensor:
    """A query sees only the last `recent` keys and `heavy` earlier ones, as with the cache of H2O
    (Zhang et al. 2023, arXiv 2306.14048): with each query one more key becomes an earlier one, and
    if these are too many, the one that has received the least attention so far is evicted for good.
    Every head evicts for itself. That attention leaves out a learned sink; of keys that tie to
    1e-5, the first goes.
    """
    # What is evicted has no gradient, and what it is chosen by needs none.
    kept_scores = attn_scores.detach().clone()
    # What a key has received so far, and infinity once it is evicted: [batch head key].
    received = torch.zeros_like(attn_scores[..., 0, :])
    for query, scores in enumerate(kept_scores.unbind(-2)):
        n_earlier = query + 1 - recent
        if n_earlier > heavy:
            earlier = received[..., :n_earlier]
            is_lightest = earlier <= earlier.amin(-1, keepdim=True) * (1 + TIE)
            received.scatter_(-1, is_lightest.float().argmax(-1, keepdim=True), torch.inf)
        scores.masked_fill_(received.isposinf(), -torch.inf)
        received[..., : query + 1] += scores[..., : query + 1].softmax(-1)
    return hide(attn_scores, kept_scores.isneginf())
