"""Attention from whole matrices in float64, as the facts of a layer say, and what a sweep over keys
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

# Names of types alone: the reference runs nothing that it checks.
if TYPE_CHECKING:
    from headcount.workers.engine.token_pairs import TokenPairs
    from headcount.workers.model.attention_facts import AttentionFacts


def defined_scores(q: Tensor, k: Tensor, facts: AttentionFacts) -> Tensor:
    """`[batch head query key]`, -∞ where a query does not see a key."""
    position = torch.arange(q.shape[2], device=q.device)
    behind = position[:, None] - position
    scores = facts.scale * q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    if facts.soft_cap is not None:
        scores = facts.soft_cap * (scores / facts.soft_cap).tanh()
    if facts.slopes is not None:
        scores = scores - facts.slopes.double()[:, None, None] * behind
    window = len(position) if facts.window is None else facts.window
    return torch.where((behind >= 0) & (behind < window), scores, -torch.inf)


def defined_lse(scores: Tensor, facts: AttentionFacts) -> Tensor:
    """The logarithm of what a row is divided by, with that of a learned sink."""
    if facts.sink is not None:
        sink = facts.sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.logsumexp(-1)


def defined_pattern(scores: Tensor, facts: AttentionFacts) -> Tensor:
    """The softmax of each row; a learned sink takes a share of it."""
    return (scores - defined_lse(scores, facts)[..., None]).exp()


def defined_answers(
    q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, labels: Sequence[TokenPairs]
) -> dict[str, Tensor]:
    """z, log-sum-exp, distance, entropy and each mass from its definition."""
    scores = defined_scores(q, k, facts)
    pattern = defined_pattern(scores, facts)
    position = torch.arange(q.shape[2], device=q.device)
    behind = position[:, None] - position
    answers = {
        "z": pattern @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1),
        "lse": defined_lse(scores, facts),
        "distance": (pattern * behind).sum(-1),
        "entropy": -torch.xlogy(pattern, pattern).sum(-1),
    }
    for i, pairs in enumerate(labels):
        member = (
            (pairs.query_label[:, :, None] == pairs.key_label[:, None, :])
            & (pairs.key_label >= 0)[:, None]
            & (behind >= pairs.lag)
        )
        answers[f"mass {i}"] = (pattern * member[:, None]).sum(-1)
    return answers
