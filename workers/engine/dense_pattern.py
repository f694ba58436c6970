"""The reference: a pattern that holds its matrix.

q, k, v are `[batch head pos d_head]`; S = scale · q·k is the pre-softmax score.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.token_pairs import TokenPairs

MASKED = -1e30
"""Score of a key in the future: finite, so that 0 · MASKED is 0 and not NaN."""


class DensePattern:
    """The reference: every answer is read off the matrix, in the words of its definition."""

    def __init__(self, pattern: Tensor, scores: Tensor) -> None:
        """`pattern` and `scores` are `[batch head query key]`; scores of future keys may be
        anything.
        """
        self.pattern, self.scores = pattern, scores
        self.n_ctx = pattern.shape[-1]

    def key(self, k: int) -> Tensor:
        return self.pattern[..., k]

    def lag(self, d: int) -> Tensor:
        return self.pattern.diagonal(-d, dim1=-2, dim2=-1)

    def mass(self, pairs: TokenPairs) -> Tensor:
        members = pairs.matrix(slice(0, len(self.pattern)), 0, self.n_ctx)
        return (self.pattern * members[:, None]).sum(-1)

    def distance(self) -> Tensor:
        q = self.positions()
        return (self.pattern * (q[:, None] - q)).sum(-1)

    def entropy(self) -> Tensor:
        return -torch.xlogy(self.pattern, self.pattern).sum(-1)

    def score(self, k: int) -> Tensor:
        return self.scores[..., k]

    def earlier_score(self) -> Tensor:
        ones = torch.ones(self.n_ctx, self.n_ctx, dtype=torch.bool, device=self.scores.device)
        earlier = ones.tril(-1)
        earlier[:, 0] = False
        return self.scores.masked_fill(~earlier, 0).sum(-1) / earlier.sum(-1)

    def score_scale(self, q: Tensor, k: Tensor) -> Tensor:
        products = (q * k).sum(-1).mT  # The diagonal is what no mask hides.
        return (self.scores.diagonal(dim1=-2, dim2=-1) * products).sum() / products.square().sum()

    def without(self, b_Q: Tensor, q: Tensor, k: Tensor) -> DensePattern:
        shift = (k * b_Q).sum(-1).mT * self.score_scale(q, k)
        future = torch.ones(self.n_ctx, self.n_ctx, dtype=torch.bool, device=k.device).triu(1)
        scores = (self.scores - shift[:, :, None]).masked_fill(future, MASKED)
        return DensePattern(scores.softmax(-1), scores)

    def received(self) -> Tensor:
        return self.pattern.sum(-2) / (self.n_ctx - self.positions())

    def by_lag(self) -> Tensor:
        return torch.stack([self.lag(d).mean(-1) for d in range(self.n_ctx)], dim=-1)

    def row(self, q: int) -> Tensor:
        return self.pattern[..., q, :]

    def rows(self, first: int) -> Tensor:
        return self.pattern[..., first:, :]

    def row_scores(self, q: int) -> Tensor:
        return self.scores[..., q, :]

    def dense(self) -> Tensor:
        return self.pattern

    def dense_scores(self) -> Tensor:
        return self.scores

    def positions(self) -> Tensor:
        return torch.arange(self.n_ctx, dtype=self.pattern.dtype, device=self.pattern.device)
