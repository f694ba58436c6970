"""The output of attention where some heads see only the first keys and the last ones.

It is made of two pieces, a window and the first keys, so no matrix of scores is needed. It answers
nothing but z: where somebody asks about the pattern, the pattern is built.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headcount.workers.engine.changes import Streaming
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.kernel.sweep_kernel import Sweep
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    distances,
    facts_of_heads,
    products_of,
    scored,
    weighted_values,
    window_of,
)


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
    n_heads, n_ctx = q.shape[1:3]
    z = q.new_empty(*q.shape[:3], v.shape[3])
    for streams in (True, False):
        heads = [head for head in range(n_heads) if (head in streaming.heads[layer]) == streams]
        if not heads:
            continue
        index = torch.tensor(heads, device=q.device)
        # The heads of one group can differ, so each of them gets its own keys and values.
        kv_index = index // (n_heads // k.shape[1])
        some_facts = facts_of_heads(facts, index)
        if streams:
            # A layer with a window of its own sees no further, whatever the change leaves it.
            recent = min(streaming.recent, window_of(facts, n_ctx))
            some_facts = replace(some_facts, window=recent)
        factors = (q[:, index], k[:, kv_index], v[:, kv_index])
        seen = FusedPattern(*factors, some_facts, {}, number_format=number_format, sweep=sweep)
        some_z = _with_first_keys(seen, facts, streaming.sink) if streams else seen.z
        z[:, index] = some_z
    return z


def _with_first_keys(window: FusedPattern, facts: AttentionFacts, sink: int) -> Tensor:
    """z of heads that see a window and the first `sink` keys, as far as the layer's facts let them;
    all heads have their own keys.
    """
    first_keys, first_values = window.k[:, :, :sink], window.v[:, :, :sink]
    positions = torch.arange(window.n_ctx, device=window.q.device)
    behind = distances(positions, positions[:sink])  # [query key]
    scores = scored(products_of(window.q, first_keys), behind, replace(window.facts, window=None))
    # A first key that is in the window is counted there. One behind the layer's own is not seen.
    is_left_out = (behind < window.window) | (behind >= window_of(facts, window.n_ctx))
    scores = scores.masked_fill(is_left_out, -torch.inf)
    # A softmax over both pieces: the log-sum-exp of the whole row says what share each has.
    window_lse = window.lse[..., None]  # [batch head query 1]
    lse = torch.cat([scores, window_lse], dim=-1).logsumexp(-1, keepdim=True)
    share_of_window = (window_lse - lse).exp()
    # Each piece is a softmax of its own; its share of the whole row weighs it.
    return window.z * share_of_window + weighted_values((scores - lse).exp(), first_values)
