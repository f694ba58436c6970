"""Heads that stream: their queries see the first keys and the last ones, as with a short KV cache.

The two changes differ in which heads they name: those that stream, or those that do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from headcount.schemas.scans.measured_heads import Head, MeasuredHeads
from headcount.schemas.scans.values import Count, Index
from headcount.workers.engine.changes import Streaming, hide
from headcount.workers.interventions.intervention_registry import intervention
from headcount.workers.model.files.model_info import ModelInfo


def _refused(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why the options as a whole mean nothing, or are not in their one form; None if they do."""
    heads: tuple[Head, ...] = options["heads"]
    # One change has one text, because the text is the name of its rows.
    in_order = tuple(sorted(set(heads)))
    if heads != in_order:
        return f"heads: expected in order and each once, {','.join(map(str, in_order))}"
    visible_keys = options["sink"] + options["recent"]
    if visible_keys >= n_ctx:
        return f"hides nothing; expected sink + recent below n_ctx = {n_ctx}, got {visible_keys}"
    return None


def _whole_heads_of(options: Mapping[str, Any], info: ModelInfo) -> Streaming:
    """The heads that are chosen."""
    chosen = MeasuredHeads.of(info.n_heads, options["heads"])
    return Streaming(options["sink"], options["recent"], chosen.by_layer)


def _others(options: Mapping[str, Any], info: ModelInfo) -> Streaming:
    """The heads that are not chosen, in all layers that attend."""
    chosen = MeasuredHeads.of(info.n_heads, options["heads"])
    others: dict[int, tuple[int, ...]] = {}
    for layer in info.attention_layers_or_all:
        whole_heads = chosen.by_layer.get(layer, ())
        streaming_heads = tuple(h for h in range(info.n_heads) if h not in whole_heads)
        if streaming_heads:
            others[layer] = streaming_heads
    return Streaming(options["sink"], options["recent"], others)


@intervention(refuse=_refused, streaming=_whole_heads_of)
def stream_heads(
    attn_scores: Tensor, layer: int, *, sink: Index, recent: Count, heads: tuple[Head, ...]
) -> Tensor:
    """The queries of the chosen heads see only the first `sink` keys and the last `recent` keys,
    their own among them. Other heads see all keys (after Xiao et al. 2024, DuoAttention).
    """
    chosen = [head.head for head in heads if head.layer == layer]
    return _streamed(attn_scores, sink, recent, chosen)


@intervention(refuse=_refused, streaming=_others)
def stream_other_heads(
    attn_scores: Tensor, layer: int, *, sink: Index, recent: Count, heads: tuple[Head, ...] = ()
) -> Tensor:
    """All heads but the chosen ones see only the first `sink` keys and the last `recent` keys, as
    if only the chosen heads kept a whole KV cache.
    """
    chosen = {head.head for head in heads if head.layer == layer}
    others = [head for head in range(attn_scores.shape[1]) if head not in chosen]
    return _streamed(attn_scores, sink, recent, others)


def _streamed(scores: Tensor, sink: int, recent: int, heads: Collection[int]) -> Tensor:
    """Hide the keys between the first and the last ones from some heads."""
    n_queries, n_heads = scores.shape[-2], scores.shape[1]
    positions = torch.arange(n_queries, device=scores.device)
    is_between = (positions[:, None] - positions >= recent) & (positions >= sink)  # [query key]
    streams = torch.zeros(n_heads, dtype=torch.bool, device=scores.device)
    streams[list(heads)] = True
    return hide(scores, is_between & streams[:, None, None])
