"""What a pattern is given of its layer, and the scores, the pattern and the z that this makes.

Engines ask here, for single answers and for whole matrices, and so does the check of a loaded model
(`workers.model.attention_check`), which holds all of it against the model's own attention. The
sweeps over tiles and on a GPU say it once more, in base 2 and a tile at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headcount.workers.model.rotations import Rotation

MASKED = -1e30  # score of a key that a query does not see: finite, so that 0 · MASKED is no NaN


@dataclass(frozen=True, eq=False)
class AttentionFacts:
    """How one layer turns q·k into a pattern.

    `S[q, k] = cap(scale q·k) + slopes[h] (k - q)` for the visible keys `q - window < k <= q`, where
    `cap(s) = soft_cap tanh(s / soft_cap)`. The pattern is the softmax of `S` over the visible keys
    and, if there is a sink, one more entry `sink[h]` that has no value.
    """

    scale: float  # the factor of q·k: 1/√d_head in most models
    soft_cap: float | None = None  # the height at which scores are capped; None if they are not
    window: int | None = None  # how many keys a query sees with its own; None if all before it
    slopes: Tensor | None = None  # ALiBi's slope of each head, `[head]`; None if there are none
    sink: Tensor | None = None  # score of each head's learned sink, `[head]`; None if there is none
    rotation: Rotation | None = None  # how its queries were rotated; None if not, or not noted


class AttentionSizes(NamedTuple):
    """The sizes of the q, k and v that one layer attends with."""

    heads: int
    kv_heads: int  # heads of k and v; each is shared by `heads // kv_heads` heads of q
    d_qk: int
    d_v: int


Attend = Callable[[Tensor, Tensor, Tensor, AttentionFacts], Tensor]
"""Computes attention from q `[batch head pos d_qk]`, k `[batch kv_head pos d_qk]`,
v `[batch kv_head pos d_v]` and the layer's facts. Returns z `[batch pos head d_v]`.
"""


def window_of(facts: AttentionFacts, n_ctx: int) -> int:
    """How many keys the last query sees."""
    return n_ctx if facts.window is None else min(facts.window, n_ctx)


def without_bias(facts: AttentionFacts) -> AttentionFacts:
    """The facts of `Pattern.without`: the scale and the window, and nothing else."""
    return AttentionFacts(facts.scale, window=facts.window)


def facts_of_heads(facts: AttentionFacts, heads: Tensor) -> AttentionFacts:
    """The facts of some heads alone."""
    slopes, sink = (
        None if of_all is None else of_all[heads] for of_all in (facts.slopes, facts.sink)
    )
    return replace(facts, slopes=slopes, sink=sink, rotation=None)


def by_shared_head(x: Tensor, kv_heads: int) -> Tensor:
    """`[batch head query …]` as `[batch kv_head head-of-group·query …]`: no key is repeated."""
    if x.shape[1] == kv_heads:
        return x
    # [batch kv_head head-of-group query …] before the last step
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def products_of(q: Tensor, k: Tensor) -> Tensor:
    """q·k `[batch head query key]` of q `[batch head query d]` and k `[batch kv_head key d]`."""
    return (by_shared_head(q, k.shape[1]) @ k.mT).view(*q.shape[:3], k.shape[2])


def weighted_values(pattern: Tensor, v: Tensor) -> Tensor:
    """`Σ_k A[q,k] v[k]` `[batch head pos d_v]`, of v `[batch kv_head pos d_v]`."""
    return (by_shared_head(pattern, v.shape[1]) @ v).view(*pattern.shape[:3], v.shape[3])


def summed_over_group(x: Tensor, kv_heads: int) -> Tensor:
    """The sum of `x [batch head]` over the heads that share keys and values, for each of them."""
    by_group = x.unflatten(1, (kv_heads, -1))
    return by_group.sum(-1, keepdim=True).expand_as(by_group).flatten(1)


def distances(queries: Tensor, keys: Tensor) -> Tensor:
    """`q - k`: `[query key]`."""
    return queries[:, None] - keys


def scored(products: Tensor, behind: Tensor, facts: AttentionFacts) -> Tensor:
    """S of q·k `[batch head …]`, whose keys lie `behind […]`; NaN behind the window."""
    # A new tensor, so what follows may write over it.
    scores = products * facts.scale
    if facts.soft_cap is not None:
        # Not in place at the end: the gradient of tanh is made of its result.
        scores = scores.div_(facts.soft_cap).tanh_() * facts.soft_cap
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


def unseen_keys(n_ctx: int, facts: AttentionFacts, device: torch.device) -> Tensor:
    """Which keys a query does not see, in the future or behind the window: `[query key]`."""
    position = torch.arange(n_ctx, device=device)
    behind = distances(position, position)
    return (behind < 0) | (behind >= window_of(facts, n_ctx))


def pattern_of(scores: Tensor, facts: AttentionFacts) -> Tensor:
    """The pattern of scores `[batch head query key]`; those of unseen keys may be anything."""
    n_ctx = scores.shape[-1]
    scores = scores.masked_fill(unseen_keys(n_ctx, facts, scores.device), -torch.inf)
    if facts.sink is None:
        return scores.softmax(-1)
    sink = facts.sink.to(scores)[:, None, None].expand(len(scores), -1, n_ctx, 1)
    # The sink is one more key, whose column is cut off after the softmax.
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
