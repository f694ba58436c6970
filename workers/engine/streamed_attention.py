"""The output of attention where some heads see only the first keys and the last ones.

It is made of two pieces, a window and the first keys, so no matrix of scores is needed. It answers
nothing but z: where somebody asks about the pattern, the pattern is built.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headcount.workers.engine.attention_scores import (
    distances,
    facts_of_heads,
    products_of,
    scored,
    weighted_values,
    window_of,
)
from headcount.workers.engine.changes import Streaming
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.kernel.sweep_kernel import Sweep
from headcount.workers.model.attention_facts import AttentionFacts


def streamed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    streaming: Streaming,
    layer: int,
    number_format: str = "float32",
    sweep: Sweep | None = None,
) -> Tensor:
    """z `[batch head pos d_v]` of a layer whose heads stream, as `streaming` says it.

    q is `[batch head pos d_qk]`, k and v have one head for each group of query heads that share it.
    """
    n_heads = q.shape[1]
    streaming_heads = streaming.heads[layer]
    whole_heads = [head for head in range(n_heads) if head not in streaming_heads]
    z = q.new_empty(*q.shape[:3], v.shape[3])
    for heads, sees_all in ((list(streaming_heads), False), (whole_heads, True)):
        if not heads:
            continue
        index = torch.tensor(heads, device=q.device)
        # The heads of one group can differ, so each of them gets its own keys and values.
        kv_index = index // (n_heads // k.shape[1])
        some = (q[:, index], k[:, kv_index], v[:, kv_index])
        some_facts = facts_of_heads(facts, index)
        if sees_all:
            z[:, index] = FusedPattern(
                *some, some_facts, {}, number_format=number_format, sweep=sweep
            ).z
        else:
            z[:, index] = _of_two_pieces(*some, some_facts, streaming, number_format, sweep)
    return z


def _of_two_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    streaming: Streaming,
    number_format: str,
    sweep: Sweep | None,
) -> Tensor:
    """z of heads that see a window and the first keys; all heads have their own keys."""
    n_ctx = q.shape[2]
    seen = window_of(facts, n_ctx)
    # A layer with a window of its own sees no further, whatever the change leaves it.
    recent = min(streaming.recent, seen)
    window_facts = replace(facts, window=recent)
    window = FusedPattern(q, k, v, window_facts, {}, number_format=number_format, sweep=sweep)
    sink = streaming.sink
    first_keys, first_values = window.k[:, :, :sink], window.v[:, :, :sink]
    positions = torch.arange(n_ctx, device=q.device)
    behind = distances(positions, positions[:sink])  # [query key]
    scores = scored(products_of(window.q, first_keys), behind, replace(facts, window=None))
    # A first key that is in the window is counted there.
    scores = scores.masked_fill((behind < recent) | (behind >= seen), -torch.inf)
    # A softmax over both pieces: the log-sum-exp of the whole row says what share each has.
    window_lse = window.lse[..., None]  # [batch head query 1]
    lse = torch.cat([scores, window_lse], dim=-1).logsumexp(-1, keepdim=True)
    share_of_window = (window_lse - lse).exp()
    # Each piece is a softmax of its own; its share of the whole row weighs it.
    return window.z * share_of_window + weighted_values((scores - lse).exp(), first_values)
