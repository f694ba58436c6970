"""Scores from q·k and the facts of a layer, and the pattern that a matrix of scores makes.

Both engines ask here, for single answers and for whole matrices. The sweeps over tiles and on a GPU
say it once more, in base 2 and a tile at a time. So does the check of a loaded model
(`workers.model.attention_check`), which judges the facts and stands below the engines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headcount.workers.model.attention_facts import AttentionFacts

MASKED = -1e30
"""Score of a key that a query does not see: finite, so that 0 · MASKED is 0 and not NaN."""


def window_of(facts: AttentionFacts, n_ctx: int) -> int:
    """How many keys the last query sees."""
    return n_ctx if facts.window is None else min(facts.window, n_ctx)


def products_of(q: Tensor, k: Tensor) -> Tensor:
    """q·k `[batch head query key]` of q `[batch head query d_qk]` and k `[batch kv_head key d_qk]`.

    The query heads that share keys are multiplied as if they were more queries, so keys are not
    repeated.
    """
    batch, heads, queries, _ = q.shape
    return (by_shared_head(q, k.shape[1]) @ k.mT).view(batch, heads, queries, k.shape[2])


def by_shared_head(x: Tensor, kv_heads: int) -> Tensor:
    """`[batch head query …]` as `[batch kv_head head-of-group·query …]`."""
    if x.shape[1] == kv_heads:
        return x
    # [batch kv_head head-of-group query …] before the last step
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def scored(products: Tensor, behind: Tensor, facts: AttentionFacts) -> Tensor:
    """S from q·k `[batch head …]`; `behind [… ]` says how many keys a key lies behind its query.

    NaN where the key lies behind the window: there is no such score.
    """
    # A new tensor, so what follows may write over it.
    scores = products * facts.scale
    if facts.soft_cap is not None:
        scores = scores.div_(facts.soft_cap).tanh_().mul_(facts.soft_cap)
    if facts.slopes is not None:
        slopes = facts.slopes.to(scores).view(-1, *[1] * behind.dim())  # [head …]
        scores = scores.addcmul_(slopes, behind.to(scores), value=-1)
    if facts.window is not None:
        scores = scores.masked_fill_(behind >= facts.window, torch.nan)
    return scores


def all_scores(q: Tensor, k: Tensor, facts: AttentionFacts) -> Tensor:
    """`S` of every query and key, NaN behind the window: `[batch head query key]`."""
    positions = torch.arange(q.shape[2], device=q.device)
    return scored(products_of(q, k), distances(positions, positions), facts)


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """`q - k`: `[query key]`."""
    return queries[:, None] - keys


def unseen_keys(n_ctx: int, facts: AttentionFacts, device: torch.device) -> Tensor:
    """Which keys a query does not see, in the future or behind the window: `[query key]`."""
    position = torch.arange(n_ctx, device=device)
    behind = distances(position, position)
    return (behind < 0) | (behind >= window_of(facts, n_ctx))


def softmax_of(scores: Tensor, facts: AttentionFacts) -> Tensor:
    """The pattern of scores `[batch head query key]`, masked where a query does not see the key.

    If there is a learned sink, its share is missing in the sum of a row.
    """
    if facts.sink is None:
        return scores.softmax(-1)
    batch, _, n_ctx, _ = scores.shape
    sink = facts.sink.to(scores)[:, None, None].expand(batch, -1, n_ctx, 1)
    # The sink is one more key, whose column is cut off after the softmax.
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


def without_bias(facts: AttentionFacts) -> AttentionFacts:
    """The facts of `Pattern.without`: the scale and the window, and nothing else."""
    return AttentionFacts(facts.scale, window=facts.window)


def facts_of_heads(facts: AttentionFacts, heads: Tensor) -> AttentionFacts:
    """The facts of some heads alone."""
    return AttentionFacts(
        facts.scale,
        facts.soft_cap,
        facts.window,
        None if facts.slopes is None else facts.slopes[heads],
        None if facts.sink is None else facts.sink[heads],
    )


def weighted_values(pattern: Tensor, v: Tensor) -> Tensor:
    """`Σ_k A[q,k] v[k]` `[batch head pos d_v]`, of v `[batch kv_head pos d_v]`."""
    batch, heads, n_ctx, _ = pattern.shape
    return (by_shared_head(pattern, v.shape[1]) @ v).view(batch, heads, n_ctx, v.shape[3])
