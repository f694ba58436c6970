"""The reference: a pattern that holds its matrix.

q, k, v are `[batch head pos d_head]`; S = scale · q·k is the pre-softmax score.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.token_pairs import TokenPairs
from workers.model.attention_layers import causal_softmax

MASKED = -1e30
"""Score of a key in the future: finite, so that 0 · MASKED is 0 and not NaN."""


class DensePattern:
    """The reference: every answer is read off the matrix, in the words of its definition."""

    def __init__(
        self,
        pattern: Tensor,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        scale: float,
        hidden: Tensor | None = None,
    ) -> None:
        """`pattern` and `scores` are `[batch head query key]`, as edits leave them; scores of
        future keys may be anything.

        q and k are what the layer multiplies, and `hidden` says which keys an edit hides.
        """
        self.pattern, self.q, self.k, self.scale = pattern, q, k, scale
        self.hidden = hidden
        self.n_ctx = pattern.shape[-1]
        self.was_asked_for_scores = False
        self._scores = scores if hidden is None else scores.masked_fill(hidden, torch.nan)

    @property
    def scores(self) -> Tensor:
        """`S`, NaN where an edit hides the key."""
        self.was_asked_for_scores = True
        return self._scores

    def only(self, heads: Sequence[int]) -> DensePattern:
        """The same pattern of some heads alone."""
        some = torch.tensor(heads, device=self.pattern.device)
        other = copy.copy(self)
        other.pattern, other._scores, other.q, other.k = (
            x.index_select(1, some) for x in (self.pattern, self._scores, self.q, self.k)
        )
        other.hidden = None if self.hidden is None else self.hidden.index_select(1, some)
        return other

    def watched(self) -> DensePattern:
        """The same pattern, which has not been asked for scores yet."""
        other = copy.copy(self)
        other.was_asked_for_scores = False
        return other

    def revealed(self) -> DensePattern:
        """The same pattern with scores as if nothing were hidden."""
        if self.hidden is None:
            return self
        other = copy.copy(self)
        other.hidden = None
        other._scores = self._scores.where(~self.hidden, self.q @ self.k.mT * self.scale)
        return other

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float) -> DensePattern:
        """The causal softmax of scaled products, with no edit of scores or pattern."""
        scores = q @ k.mT * scale
        return cls(causal_softmax(scores), scores, q, k, scale)

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

    def without(self, b_Q: Tensor) -> DensePattern:
        return DensePattern.of(self.q - b_Q[:, None], self.k, self.scale)

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
