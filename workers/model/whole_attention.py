"""Attention as `AttentionFacts` defines it, with whole matrices.

Written out, and not with the engines' code: this is what a model's facts are judged by, and
`workers.model` imports no engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headcount.workers.model.attention_facts import AttentionFacts


def whole_scores(q: Tensor, k: Tensor, facts: AttentionFacts) -> Tensor:
    """The scores of q `[batch head pos d_qk]` and k `[batch kv_head pos d_qk]`, also of keys that
    a query does not see: `[batch head query key]`.
    """
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # [batch head pos d_qk]
    scores = q.float() @ k.float().mT * facts.scale
    if facts.soft_cap is not None:
        scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
    if facts.slopes is not None:
        scores = scores - facts.slopes[:, None, None] * _lags(scores)
    return scores


def whole_pattern(scores: Tensor, facts: AttentionFacts) -> Tensor:
    """The pattern that scores make, whose keys do not sum to 1 if there is a learned sink."""
    lags = _lags(scores)
    hidden = lags < 0
    if facts.window is not None:
        hidden = hidden | (lags >= facts.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if facts.sink is not None:
        sink = facts.sink[:, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)
        scores = torch.cat([scores, sink], dim=-1)
    # Without the sink's column, if there is one.
    return scores.softmax(-1)[..., : len(lags)]


def attend_whole(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """z `[batch pos head d_v]` of v `[batch kv_head pos d_v]`."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    pattern = whole_pattern(whole_scores(q, k, facts), facts)
    return (pattern.to(v.dtype) @ v).transpose(1, 2)


def _lags(scores: Tensor) -> Tensor:
    """How many keys a key lies behind its query: `[query key]`."""
    positions = torch.arange(scores.shape[-1], device=scores.device)
    return positions[:, None] - positions
