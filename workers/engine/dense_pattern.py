"""The reference: a pattern that holds its matrix.

q, k, v are `[batch head pos d_head]`; S = scale · q·k is the score before the softmax.
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

        q and k are what the layer multiplies. `hidden` is true where an edit hides a key.
        """
        self.pattern = pattern
        self.q = q
        self.k = k
        self.scale = scale
        self.hidden = hidden
        self.n_ctx = pattern.shape[-1]
        self.was_asked_for_scores = False
        # NaN spreads to everything that is computed from a hidden score, so all of it is undefined.
        # A mean over the remaining scores would be another formula.
        self._scores = scores if hidden is None else scores.masked_fill(hidden, torch.nan)

    @property
    def scores(self) -> Tensor:
        """`S`, NaN where an edit hides the key."""
        self.was_asked_for_scores = True
        return self._scores

    def only(self, heads: Sequence[int]) -> DensePattern:
        """The same pattern of some heads alone."""
        index = torch.tensor(heads, device=self.pattern.device)
        selected = copy.copy(self)
        selected.pattern = self.pattern.index_select(1, index)
        selected._scores = self._scores.index_select(1, index)
        selected.q = self.q.index_select(1, index)
        selected.k = self.k.index_select(1, index)
        selected.hidden = None if self.hidden is None else self.hidden.index_select(1, index)
        return selected

    def not_yet_asked(self) -> DensePattern:
        """A copy that has not been asked for scores, and will tell if it was."""
        duplicate = copy.copy(self)
        duplicate.was_asked_for_scores = False
        return duplicate

    def revealed(self) -> DensePattern:
        """The same pattern with scores as if nothing were hidden."""
        if self.hidden is None:
            return self
        duplicate = copy.copy(self)
        duplicate.hidden = None
        products = self.q @ self.k.mT * self.scale
        duplicate._scores = self._scores.where(~self.hidden, products)
        return duplicate

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float) -> DensePattern:
        """The causal softmax of scaled products, with no edit of scores or pattern."""
        scores = q @ k.mT * scale
        return cls(causal_softmax(scores), scores, q, k, scale)

    def key(self, k: int) -> Tensor:
        """`A[q, k]` for one key: `[batch head query]`."""
        return self.pattern[..., k]

    def lag(self, d: int) -> Tensor:
        """`A[q, q-d]` for the queries `q >= d`: `[batch head query-d]`."""
        return self.pattern.diagonal(-d, dim1=-2, dim2=-1)

    def mass(self, pairs: TokenPairs) -> Tensor:
        """`Σ_{k in pairs[q]} A[q, k]`: `[batch head query]`."""
        is_pair = pairs.matrix(slice(0, len(self.pattern)), 0, self.n_ctx)  # [batch query key]
        return (self.pattern * is_pair[:, None]).sum(-1)

    def distance(self) -> Tensor:
        """`Σ_k A[q, k] (q-k)`: `[batch head query]`."""
        position = self.positions()
        return (self.pattern * (position[:, None] - position)).sum(-1)

    def entropy(self) -> Tensor:
        """`-Σ_k A[q, k] ln A[q, k]` in nats: `[batch head query]`."""
        return -torch.xlogy(self.pattern, self.pattern).sum(-1)  # xlogy(0, 0) = 0

    def score(self, k: int) -> Tensor:
        """`S[q, k]` for one key; only queries `q >= k` mean anything: `[batch head query]`."""
        return self.scores[..., k]

    def earlier_score(self) -> Tensor:
        """Mean of `S[q, k]` over the keys `1 <= k < q`: `[batch head query]`.

        NaN where one of them is hidden, and for the first two queries, which have no such key.
        """
        ones = torch.ones(self.n_ctx, self.n_ctx, dtype=torch.bool, device=self.scores.device)
        is_earlier = ones.tril(-1)
        is_earlier[:, 0] = False
        return self.scores.masked_fill(~is_earlier, 0).sum(-1) / is_earlier.sum(-1)

    def without(self, b_Q: Tensor) -> DensePattern:
        """The pattern of queries less `b_Q [head d_head]`, with no edit of scores or pattern."""
        return DensePattern.of(self.q - b_Q[:, None], self.k, self.scale)

    def received(self) -> Tensor:
        """`1/(T-k) Σ_{q>=k} A[q, k]`: `[batch head key]`."""
        return self.pattern.sum(-2) / (self.n_ctx - self.positions())

    def by_lag(self) -> Tensor:
        """`1/(T-d) Σ_{q>=d} A[q, q-d]` for every lag d: `[batch head lag]`."""
        return torch.stack([self.lag(d).mean(-1) for d in range(self.n_ctx)], dim=-1)

    def row(self, q: int) -> Tensor:
        """`A[q, k]` for one query: `[batch head key]`."""
        return self.pattern[..., q, :]

    def rows(self, first: int) -> Tensor:
        """`A[q, k]` for the queries `q >= first`: `[batch head query key]`."""
        return self.pattern[..., first:, :]

    def row_scores(self, q: int) -> Tensor:
        """`S[q, k]` for one query; only keys `k <= q` mean anything: `[batch head key]`."""
        return self.scores[..., q, :]

    def dense(self) -> Tensor:
        """The matrix `A`: `[batch head query key]`."""
        return self.pattern

    def dense_scores(self) -> Tensor:
        """The matrix `S`; only `k <= q` means anything: `[batch head query key]`."""
        return self.scores

    def positions(self) -> Tensor:
        """`0 .. T-1` in the pattern's dtype and on its device: `[query]`."""
        return torch.arange(self.n_ctx, dtype=self.pattern.dtype, device=self.pattern.device)
