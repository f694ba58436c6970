"""The reference: a pattern that holds its matrix.

q and k are `[batch head pos d_qk]`. S is the score before the softmax, made of q·k by the layer's
`AttentionFacts`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from headcount.schemas.errors import ScanError
from headcount.schemas.pattern import first_of_largest
from headcount.workers.engine.attention_scores import (
    all_scores,
    distances,
    facts_of_heads,
    softmax_of,
    unseen_keys,
    window_of,
    without_bias,
)
from headcount.workers.engine.token_pairs import TokenPairs, count_seen
from headcount.workers.model.attention_facts import AttentionFacts


class DensePattern:
    """The reference: every answer is read off the matrix, in the words of its definition."""

    def __init__(
        self,
        pattern: Tensor,
        scores: Tensor,
        q: Tensor,
        k: Tensor,
        facts: AttentionFacts,
        hidden: Tensor | None = None,
    ) -> None:
        """`pattern` and `scores` are `[batch head query key]`, as changes leave them; scores of
        keys that a query does not see may be anything, and the pattern is 0 there.

        q and k are what the layer multiplies; k may have fewer heads, which query heads share.
        `hidden` is true where a change hides a key.
        """
        self.pattern = pattern
        self.q = q
        self.k = k
        self.facts = facts
        self.hidden = hidden
        self.n_ctx = pattern.shape[-1]
        self.window = window_of(facts, self.n_ctx)
        self.was_asked_for_scores = False
        # NaN spreads to everything that is computed from a hidden score, so all of it is undefined.
        # A mean over the remaining scores would be another formula.
        self._scores = scores if hidden is None else scores.masked_fill(hidden, torch.nan)
        if self.is_partial:
            self._scores = self._scores.masked_fill(self._is_behind_window(), torch.nan)

    @property
    def scores(self) -> Tensor:
        """`S`, NaN where a change hides the key."""
        self.was_asked_for_scores = True
        return self._scores

    def only(self, heads: Sequence[int]) -> DensePattern:
        """The same pattern of some heads alone."""
        index = torch.tensor(heads, device=self.pattern.device)  # [some head]
        selected = copy.copy(self)
        selected.pattern = self.pattern.index_select(1, index)
        selected._scores = self._scores.index_select(1, index)
        selected.q = self.q.index_select(1, index)
        # Query heads share a head of keys in order: group 0 the first, group 1 the second.
        kv_index = index // (self.q.shape[1] // self.k.shape[1])
        selected.k = self.k.index_select(1, kv_index)
        selected.facts = facts_of_heads(self.facts, index)
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
        duplicate._scores = self._scores.where(~self.hidden, all_scores(self.q, self.k, self.facts))
        return duplicate

    @classmethod
    def of(cls, q: Tensor, k: Tensor, facts: AttentionFacts) -> DensePattern:
        """The pattern that q, k and the facts make, with no change of scores or pattern."""
        scores = all_scores(q, k, facts)
        masked = scores.masked_fill(unseen_keys(q.shape[2], facts, q.device), -torch.inf)
        return cls(softmax_of(masked, facts), scores, q, k, facts)

    @property
    def scale(self) -> float:
        """The factor of q·k."""
        return self.facts.scale

    @property
    def is_partial(self) -> bool:
        """Whether some query does not see all keys before it."""
        return self.window < self.n_ctx

    def is_finite(self) -> Tensor:
        """Whether every row of the pattern is made of numbers, as a tensor of one bool."""
        return self.pattern.isfinite().all()

    def _is_behind_window(self) -> Tensor:
        """Which keys lie behind the window of a query: `[query key]`."""
        positions = torch.arange(self.n_ctx, device=self.pattern.device)
        return distances(positions, positions) >= self.window

    @property
    def _attention(self) -> Tensor:
        """`A`, NaN behind the window."""
        if not self.is_partial:
            return self.pattern
        return self.pattern.masked_fill(self._is_behind_window(), torch.nan)

    def key(self, k: int) -> Tensor:
        """`A[q, k]` for one key, NaN behind the window: `[batch head query]`."""
        return self._attention[..., k]

    def lag(self, d: int) -> Tensor:
        """`A[q, q-d]` for the queries `q >= d`: `[batch head query-d]`."""
        return self._attention.diagonal(-d, dim1=-2, dim2=-1)  # Diagonal -d holds (q, q-d).

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

    def distant(self, sink: int, recent: int) -> Tensor:
        """`Σ A[q, k]` over the keys `k >= sink` with `q - k >= recent`, NaN if the query sees none:
        `[batch head query]`.
        """
        positions = torch.arange(self.n_ctx, device=self.pattern.device)
        behind = distances(positions, positions)  # [query key]
        is_distant = (behind >= recent) & (positions >= sink) & (behind < self.window)
        mass = (self.pattern * is_distant).sum(-1)
        return mass.masked_fill(~is_distant.any(-1), torch.nan)

    def labelled_mass(self, keys: Tensor, queries: Tensor) -> Tensor:
        """`Σ A[q, k]` over the keys of a mask `[batch pos]`, 0 for queries outside of the other:
        `[batch head query]`.
        """
        mass = (self.pattern * keys[:, None, None]).sum(-1)  # [batch 1 1 key] beside the pattern
        return mass.masked_fill(~queries[:, None], 0)

    def labelled_seen(self, keys: Tensor) -> Tensor:
        """How many of the keys of a mask `[batch pos]` a query sees: `[batch query]`."""
        return count_seen(keys, self.window)

    def strongest_key(self, queries: Tensor) -> Tensor:
        """The key with the largest `A[q, k]`, 0 for queries outside of the mask `[batch pos]`:
        `[batch head query]`.
        """
        return first_of_largest(self.pattern).masked_fill(~queries[:, None], 0)

    def gate(self) -> Tensor:
        """Share of each row that no key has; NaN if there is no learned sink:
        `[batch head query]`.
        """
        # A row sums to 1 less what the sink has.
        shares = self.pattern.sum(-1)
        return torch.full_like(shares, torch.nan) if self.facts.sink is None else 1 - shares

    def seen(self, pairs: TokenPairs) -> Tensor:
        """Number of keys in pairs[q] that a query sees: `[batch query]`."""
        return pairs.count_within(self.window)

    def score(self, k: int) -> Tensor:
        """`S[q, k]` for one key, NaN behind the window; only queries `q >= k` mean anything:
        `[batch head query]`.
        """
        return self.scores[..., k]

    def largest_score(self) -> Tensor:
        """The largest `S[q, k]` of the keys that a query sees, hidden ones left out:
        `[batch head query]`.
        """
        unseen = unseen_keys(self.n_ctx, self.facts, self.pattern.device)
        if self.hidden is not None:
            unseen = unseen | self.hidden
        return self.scores.masked_fill(unseen, -torch.inf).amax(-1)

    def earlier_score(self) -> Tensor:
        """Mean of `S[q, k]` over the keys `1 <= k < q`: `[batch head query]`.

        NaN where one of them is hidden or behind the window, and for the first two queries, which
        have no such key.
        """
        ones = torch.ones(self.n_ctx, self.n_ctx, dtype=torch.bool, device=self.scores.device)
        is_earlier = ones.tril(-1)
        is_earlier[:, 0] = False  # Key 0 is the sink, which the mean is held against.
        return self.scores.masked_fill(~is_earlier, 0).sum(-1) / is_earlier.sum(-1)

    def without(self, b_Q: Tensor) -> DensePattern:
        """The pattern of queries less `b_Q [head d_qk]`, without cap, slopes and learned sink, and
        with no change of scores or pattern.
        """
        return DensePattern.of(self.q - b_Q[:, None], self.k, without_bias(self.facts))

    def received(self) -> Tensor:
        """Mean of `A[q, k]` over the queries that see the key: `[batch head key]`."""
        # Key k is seen by the queries k to T-1, or by as many as the window is long.
        return self.pattern.sum(-2) / (self.n_ctx - self.positions()).clamp(max=self.window)

    def by_lag(self) -> Tensor:
        """`1/(T-d) Σ_{q>=d} A[q, q-d]` for every lag d, NaN from the window on:
        `[batch head lag]`.
        """
        return torch.stack([self.lag(d).mean(-1) for d in range(self.n_ctx)], dim=-1)

    def row(self, q: int) -> Tensor:
        """`A[q, k]` for one query, NaN behind the window: `[batch head key]`."""
        return self._attention[..., q, :]

    def rows(self, first: int) -> Tensor:
        """`A[q, k]` for the queries `q >= first`: `[batch head query key]`."""
        return self.pattern[..., first:, :]

    def row_scores(self, q: int) -> Tensor:
        """`S[q, k]` for one query, NaN behind the window; only keys `k <= q` mean anything:
        `[batch head key]`.
        """
        return self.scores[..., q, :]

    def dense(self) -> Tensor:
        """The matrix `A`, NaN behind the window: `[batch head query key]`."""
        return self._attention

    def dense_scores(self) -> Tensor:
        """The matrix `S`, NaN behind the window; only `k <= q` means anything:
        `[batch head query key]`.
        """
        return self.scores

    def positions(self) -> Tensor:
        """`0 .. T-1` in the pattern's dtype and on its device: `[query]`."""
        return torch.arange(self.n_ctx, dtype=self.pattern.dtype, device=self.pattern.device)


def check_unseen(pattern: Tensor, unseen: Tensor, facts: AttentionFacts, layer: int) -> None:
    """Refuse a changed pattern that gives attention to keys behind the window of a layer.

    `unseen [query key]` are the keys that a query does not see.
    """
    window = facts.window
    if window is None or window >= pattern.shape[-1]:
        return
    if pattern.masked_select(unseen).any():
        raise ScanError(
            f"interventions: an intervention gives attention to keys that queries of layer {layer} "
            "do not "
            f"see: they see {window} keys; leave the layer out or lower n_ctx"
        )
