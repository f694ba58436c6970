"""What a sweep over keys answers, from the whole matrix in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

# Names of types alone: the reference runs nothing that it checks.
if TYPE_CHECKING:
    from headcount.workers.engine.token_pairs import TokenPairs
    from headcount.workers.model.attention_facts import AttentionFacts


def defined_answers(
    q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, labels: Sequence[TokenPairs]
) -> dict[str, Tensor]:
    """z, log-sum-exp, distance, entropy and each mass from its definition, in float64."""
    n_ctx, group = q.shape[2], q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(group, 1),
        v.double().repeat_interleave(group, 1),
    )
    position = torch.arange(n_ctx, device=q.device)
    behind = position[:, None] - position
    scores = facts.scale * q @ k.mT
    if facts.soft_cap is not None:
        scores = facts.soft_cap * (scores / facts.soft_cap).tanh()
    if facts.slopes is not None:
        scores = scores - facts.slopes.double()[:, None, None] * behind
    window = n_ctx if facts.window is None else facts.window
    scores = torch.where((behind >= 0) & (behind < window), scores, -torch.inf)
    row = scores
    if facts.sink is not None:
        sink = facts.sink.double()[:, None, None].expand(len(q), -1, n_ctx, 1)
        row = torch.cat([scores, sink], -1)
    pattern = row.softmax(-1)[..., :n_ctx]
    answers = {
        "z": pattern @ v,
        "lse": row.logsumexp(-1),
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
