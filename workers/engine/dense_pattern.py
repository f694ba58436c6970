"""The reference: a pattern that holds its matrix."""

# Each question is described in `schemas.pattern`.
# ruff: noqa: D102

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from headcount.schemas.errors import ScanError
from headcount.schemas.pattern import count_above, first_of_largest
from headcount.workers.engine.token_pairs import TokenPairs, count_seen
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    all_scores,
    distances,
    facts_of_heads,
    pattern_of,
    summed_over_group,
    unseen_keys,
    weighted_values,
    window_of,
    without_bias,
)


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
        self.with_other_keys = partial(DensePattern.of, q, facts=facts)
        """Makes the pattern of other keys `[batch kv_head pos d_qk]`, with all changes."""
        self.hidden = hidden
        self.n_ctx = pattern.shape[-1]
        self.window = window_of(facts, self.n_ctx)
        self.was_asked_for_scores = False
        # NaN spreads to everything that is computed from a hidden score, so all of it is undefined.
        # A mean over the remaining scores would be another formula.
        defined = scores if hidden is None else scores.masked_fill(hidden, torch.nan)
        self._scores = self._without_window(defined)

    @property
    def scores(self) -> Tensor:
        """`S`, NaN where a change hides the key."""
        self.was_asked_for_scores = True
        return self._scores

    def only(self, heads: Sequence[int]) -> "DensePattern":
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

    def not_yet_asked(self) -> "DensePattern":
        """A copy that has not been asked for scores, and will tell if it was."""
        duplicate = copy.copy(self)
        duplicate.was_asked_for_scores = False
        return duplicate

    def revealed(self) -> "DensePattern":
        """The same pattern with scores as if nothing were hidden."""
        if self.hidden is None:
            return self
        duplicate = copy.copy(self)
        duplicate.hidden = None
        duplicate._scores = self._scores.where(~self.hidden, all_scores(self.q, self.k, self.facts))
        return duplicate

    @classmethod
    def of(cls, q: Tensor, k: Tensor, facts: AttentionFacts) -> "DensePattern":
        """The pattern that q, k and the facts make, with no change of scores or pattern."""
        scores = all_scores(q, k, facts)
        return cls(pattern_of(scores, facts), scores, q, k, facts)

    @property
    def scale(self) -> float:
        return self.facts.scale

    @property
    def is_partial(self) -> bool:
        return self.window < self.n_ctx

    def is_finite(self) -> Tensor:
        return self.pattern.isfinite().all()

    def _without_window(self, matrix: Tensor) -> Tensor:
        if not self.is_partial:
            return matrix
        return matrix.masked_fill(self._lags() >= self.window, torch.nan)

    def _lags(self) -> Tensor:  # q - k, as integers: [query key]
        positions = torch.arange(self.n_ctx, device=self.pattern.device)
        return distances(positions, positions)

    def key(self, k: int) -> Tensor:
        return self.dense()[..., k]

    def lag(self, d: int) -> Tensor:
        return self.dense().diagonal(-d, dim1=-2, dim2=-1)  # Diagonal -d holds (q, q-d).

    def mass(self, pairs: TokenPairs) -> Tensor:
        is_pair = pairs.matrix(slice(0, len(self.pattern)), 0, self.n_ctx)  # [batch query key]
        return (self.pattern * is_pair[:, None]).sum(-1)

    def distance(self) -> Tensor:
        return (self.pattern * self._lags().to(self.pattern)).sum(-1)

    def entropy(self) -> Tensor:
        return -torch.xlogy(self.pattern, self.pattern).sum(-1)  # xlogy(0, 0) = 0

    def distant(self, sink: int, recent: int) -> Tensor:
        behind = self._lags()
        is_distant = (behind >= recent) & (behind < self.window)  # [query key]
        is_distant[:, :sink] = False
        mass = (self.pattern * is_distant).sum(-1)
        return mass.masked_fill(~is_distant.any(-1), torch.nan)

    def labelled_mass(self, keys: Tensor, queries: Tensor) -> Tensor:
        mass = (self.pattern * keys[:, None, None]).sum(-1)  # [batch 1 1 key] beside the pattern
        return mass.masked_fill(~queries[:, None], 0)

    def labelled_seen(self, keys: Tensor) -> Tensor:
        return count_seen(keys, self.window)

    def strongest_key(self, queries: Tensor) -> Tensor:
        return first_of_largest(self.pattern).masked_fill(~queries[:, None], 0)

    def above(self, first: int) -> Tensor:
        above = count_above(self.pattern, first)
        return above.masked_fill(self.positions() >= self.window, torch.nan)

    def gate(self) -> Tensor:
        # A row sums to 1 less what the sink has.
        shares = self.pattern.sum(-1)
        return torch.full_like(shares, torch.nan) if self.facts.sink is None else 1 - shares

    def seen(self, pairs: TokenPairs) -> Tensor:
        return pairs.count_within(self.window)

    def score(self, k: int) -> Tensor:
        return self.scores[..., k]

    def largest_score(self) -> Tensor:
        unseen = unseen_keys(self.n_ctx, self.facts, self.pattern.device)
        if self.hidden is not None:
            unseen = unseen | self.hidden
        return self.scores.masked_fill(unseen, -torch.inf).amax(-1)

    def earlier_score(self) -> Tensor:
        is_earlier = self._lags() > 0
        is_earlier[:, 0] = False  # Key 0 is the sink, which the mean is held against.
        return self.scores.masked_fill(~is_earlier, 0).sum(-1) / is_earlier.sum(-1)

    def without(self, b_Q: Tensor) -> "DensePattern":
        return DensePattern.of(self.q - b_Q[:, None], self.k, without_bias(self.facts))

    def received(self) -> Tensor:
        # Key k is seen by the queries k to T-1, or by as many as the window is long.
        return self.pattern.sum(-2) / (self.n_ctx - self.positions()).clamp(max=self.window)

    def by_lag(self) -> Tensor:
        return torch.stack([self.lag(d).mean(-1) for d in range(self.n_ctx)], dim=-1)

    def row(self, q: int) -> Tensor:
        return self.dense()[..., q, :]

    def rows(self, first: int) -> Tensor:
        return self.pattern[..., first:, :]

    def row_scores(self, q: int) -> Tensor:
        return self.scores[..., q, :]

    def dense(self) -> Tensor:
        return self._without_window(self.pattern)

    def dense_scores(self) -> Tensor:
        return self.scores

    def within(self, sink: int, recent: int, v: Tensor) -> Tensor:
        if recent >= self.window:
            return torch.full_like(v, torch.nan)
        position = torch.arange(self.n_ctx, device=self.pattern.device)
        is_kept = (position < sink) | (distances(position, position) < recent)  # [query key]
        attention = self.pattern * is_kept
        total = attention.sum(-1, keepdim=True)
        if self.facts.sink is not None:
            total = total + self.gate()[..., None]
        # A changed pattern may leave a query nothing of what is kept.
        attention = attention / total.clamp(min=torch.finfo(total.dtype).tiny)
        return weighted_values(attention, v.transpose(1, 2)).transpose(1, 2)

    def with_keys(self, k: Tensor, v: Tensor) -> Tensor:
        group = self.q.shape[1] // self.k.shape[1]
        return self.with_other_keys(k.transpose(1, 2)[:, ::group]).weighted(v)

    def weighted(self, v: Tensor) -> Tensor:
        return weighted_values(self.pattern, v.transpose(1, 2)).transpose(1, 2)

    def shared(self, x: Tensor) -> Tensor:
        return summed_over_group(x, self.k.shape[1])

    def positions(self) -> Tensor:
        return torch.arange(self.n_ctx, dtype=self.pattern.dtype, device=self.pattern.device)


def check_unseen(pattern: Tensor, facts: AttentionFacts, layer: int) -> None:
    """Refuse a changed pattern that gives attention to keys behind the window of a layer."""
    n_ctx = pattern.shape[-1]
    if facts.window is None or facts.window >= n_ctx:
        return
    if pattern.masked_select(unseen_keys(n_ctx, facts, pattern.device)).any():
        raise ScanError(
            f"interventions: an intervention gives attention to keys that queries of layer {layer} "
            f"do not see: they see {facts.window} keys; leave the layer out or lower n_ctx"
        )
