"""A pattern that answers questions about attention without ever building its matrix.

S is the score before the softmax, made of q·k by the layer's `AttentionFacts`, and A is the
pattern. Two identities make the matrix unnecessary:

* `A[q, k] = exp(S[q, k] - lse[q])` with `lse[q] = ln Σ_k exp S[q, k]`, where a learned sink adds a
  term. If the log-sum-exp of each query is known, the attention to single keys costs one product of
  q and k.
* Everything that needs all keys (z, entropy, mean distance, mass on pairs) is a sum over keys.
  One sweep adds it up, a tile of scores at a time, and forgets the tile. Keys behind the window of
  all queries of a tile are not even read.

Query heads can share keys and values. Then these have fewer heads, and are not repeated.
"""

# Each question is described in `schemas.pattern`.
# ruff: noqa: D102

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headcount.schemas.pattern import first_of_largest
from headcount.workers.engine.number_formats import HALVES, rounded
from headcount.workers.engine.tile_sweep import (
    ENTROPY,
    LARGEST_SCORE,
    RECEIVED,
    Above,
    Distant,
    Question,
    Sweep,
    Tile,
    TileSums,
    TileSweep,
    tiles_of,
)
from headcount.workers.engine.token_pairs import TokenPairs, count_seen
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    all_scores,
    distances,
    facts_of_heads,
    products_of,
    scored,
    summed_over_group,
    weighted_values,
    window_of,
    without_bias,
)

FIRST_KEYS = 8  # their scores are asked for again and again, so they come from one product


class FusedPattern:
    """The product: answers from q, k and the log-sum-exp, or from one sweep over tiles of scores.

    Memory grows with T and not with T². The sweep also computes `z`, so attention is computed once.
    `questions` names what the sweep answers besides. A question that was not foreseen is answered
    by another sweep and added to `questions`. The caller shares this set between layers and
    batches, so only the first layer of the first batch pays for the second sweep.
    """

    hidden = None
    """Nothing hides a key here: changes of scores need the matrix."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        facts: AttentionFacts,
        matches: Mapping[str, TokenPairs],
        questions: set[Question] | None = None,
        number_format: str = "float32",
        sweep: Sweep | None = None,
    ) -> None:
        """q is `[batch head pos d_qk]`, k `[batch kv_head pos d_qk]`, v `[batch kv_head pos d_v]`.

        `number_format` is the format in which q, k, v and A are multiplied with each other
        (`schemas.scans.scan`). `sweep` is a GPU's kernel that answers instead of the tiles.
        """
        self.q = rounded(q, number_format)
        self.k = rounded(k, number_format)
        self.v = rounded(v, number_format)
        self.facts = facts
        self.matches = matches
        self.number_format = number_format
        self.n_ctx = q.shape[2]
        self.window = window_of(facts, self.n_ctx)
        self.questions: set[Question] = set() if questions is None else questions
        self.sweep = sweep
        self._answers: dict[Question, Tensor] = {}
        self._sweep(self.questions)

    def only(self, heads: Sequence[int]) -> "FusedPattern":
        """The same pattern of some heads alone; what has been answered is not computed again."""
        index = torch.tensor(heads, device=self.q.device)
        selected = copy.copy(self)
        # Each of the selected heads gets its own keys: there are few of them.
        kv_index = index // (self.q.shape[1] // self.k.shape[1])
        selected.q = self.q.index_select(1, index)
        selected.k = self.k.index_select(1, kv_index)
        selected.v = self.v.index_select(1, kv_index)
        selected.facts = facts_of_heads(self.facts, index)
        selected._answers = {
            question: answer.index_select(1, index) for question, answer in self._answers.items()
        }
        return selected

    @property
    def z(self) -> Tensor:
        """`Σ_k A[q,k] v[k]`: `[batch head pos d_head]`."""
        return self._answers["z"]

    @property
    def lse(self) -> Tensor:
        """`ln Σ_k exp S[q,k]`: `[batch head query]`."""
        return self._answers["lse"]

    @property
    def scale(self) -> float:
        return self.facts.scale

    @property
    def is_partial(self) -> bool:
        return self.window < self.n_ctx

    def is_finite(self) -> Tensor:
        return self.lse.isfinite().all()

    def key(self, k: int) -> Tensor:
        question = f"key {k}"
        if question not in self._answers:
            attention = _attention(self.score(k), self.lse)
            attention[..., :k] = 0  # Earlier queries do not see the key.
            self._answers[question] = attention
        return self._answers[question]

    def lag(self, d: int) -> Tensor:
        lse = self.lse[..., d:]
        if d >= self.window:
            return torch.full_like(lse, torch.nan)
        # Query q stands beside key q-d: two slices of one length.
        products = _dot(self.q[:, :, d:], self.k[:, :, : self.n_ctx - d])
        behind = torch.full_like(products[0, 0], d)
        return _attention(scored(products, behind, self.facts), lse)

    def mass(self, pairs: TokenPairs) -> Tensor:
        if self.matches.get(pairs.name) is pairs:
            return self._swept(pairs.name)
        # Pairs of the statistic's own, which no sweep knows.
        mass = torch.zeros_like(self.lse)
        for tile, attention in self._attention_of(pairs.count > 0):
            sequences, queries, keys = tile
            is_pair = pairs.matrix(sequences, queries.start, queries.stop)[..., keys]
            mass[sequences, :, queries] = (attention * is_pair[:, None]).sum(-1)
        return mass

    def distance(self) -> Tensor:
        return self._swept("distance")

    def entropy(self) -> Tensor:
        return self._swept(ENTROPY)

    def distant(self, sink: int, recent: int) -> Tensor:
        mass = self._swept(Distant(sink, recent))
        # The nearest distant key is q - recent, which must be `sink` or later.
        sees_none = self._positions() < sink + recent
        if recent >= self.window:
            sees_none = torch.ones_like(sees_none)
        return mass.masked_fill(sees_none, torch.nan)

    def labelled_mass(self, keys: Tensor, queries: Tensor) -> Tensor:
        mass = torch.zeros_like(self.lse)
        for tile, attention in self._attention_of(queries):
            of_keys = keys[tile.sequences, None, tile.keys, None].to(attention)  # [batch 1 key 1]
            mass[tile.sequences, :, tile.queries] = (attention @ of_keys)[..., 0]
        return mass.masked_fill(~queries[:, None], 0)

    def labelled_seen(self, keys: Tensor) -> Tensor:
        return count_seen(keys, self.window)

    def strongest_key(self, queries: Tensor) -> Tensor:
        strongest = torch.zeros_like(self.lse, dtype=torch.int64)
        for tile, attention in self._attention_of(queries):
            key = first_of_largest(attention) + tile.keys.start  # [batch head query]
            strongest[tile.sequences, :, tile.queries] = key
        return strongest.masked_fill(~queries[:, None], 0)

    def above(self, first: int) -> Tensor:
        above = self._swept(Above(first))
        return above.masked_fill(self._positions() >= self.window, torch.nan)

    def _attention_of(self, chosen: Tensor) -> Iterator[tuple[Tile, Tensor]]:
        """The tiles in which queries are chosen, `[batch query]`, and the attention in each."""
        # On the host at once, because every tile asks.
        is_chosen = chosen.cpu()
        for sequences, queries, keys in tiles_of(self.q, self.window):
            # The tile shrinks to the span of queries that any of its sequences asks about.
            rows = is_chosen[sequences, queries].any(0).nonzero()[:, 0].tolist()
            if not rows:
                continue
            first, last = queries.start + rows[0], queries.start + rows[-1]
            first_key = max(keys.start, first - self.window + 1)
            tile = Tile(sequences, slice(first, last + 1), slice(first_key, last + 1))
            yield tile, self._tile_attention(tile)

    def _tile_attention(self, tile: Tile) -> Tensor:
        """`A` of a tile, 0 where the query does not see the key: `[batch head query key]`."""
        lse = self.lse[tile.sequences, :, tile.queries, None]
        attention = _attention(self._tile_scores(tile), lse)
        # Above the diagonal a score can exceed the log-sum-exp by any amount, so the future is
        # replaced by zeros: infinity times zero would be NaN.
        offset = tile.queries.start - tile.keys.start
        attention.tril_(offset)
        if tile.keys.start > 0 or self.is_partial:
            attention.triu_(offset - self.window + 1)
        return attention

    def gate(self) -> Tensor:
        if self.facts.sink is None:
            return torch.full_like(self.lse, torch.nan)
        return _attention(self.facts.sink.to(self.lse)[:, None], self.lse)

    def seen(self, pairs: TokenPairs) -> Tensor:
        return pairs.count_within(self.window)

    def score(self, k: int) -> Tensor:
        first, stop = (0, FIRST_KEYS) if k < FIRST_KEYS else (k, k + 1)
        question = f"scores from key {first}"
        if question not in self._answers:
            products = products_of(self.q, self.k[:, :, first:stop])  # [batch head query key]
            behind = distances(self._positions(), self._positions()[first:stop])
            self._answers[question] = scored(products, behind, self.facts)
        return self._answers[question][..., k - first]

    def largest_score(self) -> Tensor:
        return self._swept(LARGEST_SCORE)

    def earlier_score(self) -> Tensor:
        position = self.positions()
        # Σ S[q, k] over these keys; meaningless for the first two queries.
        sums = torch.zeros_like(self.lse)
        if self.facts.soft_cap is None:
            # The sum of products is the product with the summed keys, so running sums suffice.
            key_sums = self.k[:, :, 1:].cumsum(2)  # [batch kv_head pos-1 d_qk]
            sums[..., 2:] = _dot(self.q[:, :, 2:], key_sums[:, :, :-1]) * self.scale
            if self.facts.slopes is not None:
                # Σ (k - q) over these keys is -q (q-1)/2.
                slopes = self.facts.slopes.to(sums)[:, None]  # [head 1]
                sums -= slopes * (position * (position - 1) / 2)
        else:
            # A capped sum is not the sum of capped scores, so every score is made.
            for tile in tiles_of(self.q, self.window):
                is_earlier = (self._lags(tile) > 0) & (self._positions()[tile.keys] > 0)
                scores = self._tile_scores(tile).masked_fill_(~is_earlier, 0)
                sums[tile.sequences, :, tile.queries] = scores.sum(-1)
        mean_score = torch.full_like(self.lse, torch.nan)
        mean_score[..., 2:] = sums[..., 2:] / position[1:-1]  # Query q has q - 1 such keys.
        mean_score[..., self.window + 1 :] = torch.nan
        return mean_score

    def without(self, b_Q: Tensor) -> "FusedPattern":
        return FusedPattern(
            self.q - b_Q[:, None],
            self.k,
            self.v,
            without_bias(self.facts),
            self.matches,
            number_format=self.number_format,
            sweep=self.sweep,
        )

    def received(self) -> Tensor:
        return self._swept(RECEIVED) / (self.n_ctx - self.positions()).clamp(max=self.window)

    def by_lag(self) -> Tensor:
        means = torch.full_like(self.lse, torch.nan)
        for d in range(self.window):
            means[..., d] = self.lag(d).mean(-1)
        return means

    def row(self, q: int) -> Tensor:
        attention = _attention(self.row_scores(q), self.lse[..., q, None])
        attention[..., q + 1 :] = 0
        return attention

    def rows(self, first: int) -> Tensor:
        behind = distances(self._positions()[first:], self._positions())
        scores = scored(products_of(self.q[:, :, first:], self.k), behind, self.facts)
        attention = _attention(scores, self.lse[..., first:, None]).tril(first)
        return attention.masked_fill_(behind >= self.window, 0) if self.is_partial else attention

    def row_scores(self, q: int) -> Tensor:
        kv_heads = self.k.shape[1]
        queries = self.q[:, :, q].unflatten(1, (kv_heads, -1))  # [batch kv_head head-of-group d_qk]
        products = (self.k @ queries.mT).mT.flatten(1, 2)  # [batch head key]
        return scored(products, q - self._positions(), self.facts)

    def dense(self) -> Tensor:
        return _attention(self.dense_scores(), self.lse[..., None]).tril()

    def dense_scores(self) -> Tensor:
        return all_scores(self.q, self.k, self.facts)

    def within(self, sink: int, recent: int, v: Tensor) -> Tensor:
        if recent >= self.window:
            return torch.full_like(v, torch.nan)
        factors = (self.q, self.k, self._by_kv_head(v), self.facts)
        return z_within(*factors, sink, recent, self.number_format, self.sweep).transpose(1, 2)

    def with_keys(self, k: Tensor, v: Tensor) -> Tensor:
        factors = (self.q, self._by_kv_head(k), self._by_kv_head(v), self.facts)
        other = FusedPattern(*factors, {}, None, self.number_format, self.sweep)
        return other.z.transpose(1, 2)

    def weighted(self, v: Tensor) -> Tensor:
        return self.with_keys(self.k.transpose(1, 2), v)

    def _by_kv_head(self, x: Tensor) -> Tensor:
        """Keys or values `[batch pos head d]` that query heads share, once each, heads first."""
        return x.transpose(1, 2)[:, :: x.shape[2] // self.k.shape[1]]

    def shared(self, x: Tensor) -> Tensor:
        return summed_over_group(x, self.k.shape[1])

    def positions(self) -> Tensor:
        return torch.arange(self.n_ctx, dtype=self.q.dtype, device=self.q.device)

    def _positions(self) -> Tensor:
        return torch.arange(self.n_ctx, device=self.q.device)

    def _lags(self, tile: Tile) -> Tensor:
        return distances(self._positions()[tile.queries], self._positions()[tile.keys])

    def _tile_scores(self, tile: Tile) -> Tensor:
        """The scores of a tile; those of the future may be anything: `[batch head query key]`."""
        sequences, queries, keys = tile
        products = products_of(self.q[sequences, :, queries], self.k[sequences, :, keys])
        return scored(products, self._lags(tile), self.facts)

    def _swept(self, question: Question) -> Tensor:
        if question not in self._answers:
            self.questions.add(question)  # The next layer's sweep answers it on its way.
            self._sweep({question})
        return self._answers[question]

    def _sweep(self, questions: Collection[Question]) -> None:
        if self.sweep is None:
            factors = (self.q, self.k, self.v, self.facts)
            sweep = TileSweep(*factors, self.matches, questions, self.number_format)
            self._answers |= sweep.answers()
            return
        dtype = HALVES.get(self.number_format, torch.float32)
        pairs = [pairs for name, pairs in self.matches.items() if name in questions]
        swept = self.sweep(
            *(factor.to(dtype) for factor in (self.q, self.k, self.v)),
            self.facts,
            pairs,
            entropy=ENTROPY in questions,
            number_format=self.number_format,
        )
        self._answers |= {"z": swept.z, "lse": swept.lse, "distance": swept.distance}
        if swept.entropy is not None:
            self._answers[ENTROPY] = swept.entropy
        for pair, mass in zip(pairs, swept.masses, strict=True):
            self._answers[pair.name] = mass
        # No kernel knows the answers of `TileSums`: they come from another look at the scores,
        # whose `lse` it knows.
        sums = TileSums(self.q, questions)
        for tile in tiles_of(self.q, self.window) if sums.answers else ():
            attention = self._tile_attention(tile)
            if LARGEST_SCORE in sums.answers:
                behind = self._lags(tile)
                unseen = (behind < 0) | (behind >= self.window)
                largest = self._tile_scores(tile).masked_fill_(unseen, -torch.inf).amax(-1)
                sums.answers[LARGEST_SCORE][tile.sequences, :, tile.queries] = largest
            # These weights are A itself and no longer need to be divided: the total is 1.
            sums.add(tile, slice(0, self.q.shape[1]), attention, torch.ones_like(attention[..., 0]))
        self._answers |= sums.answers


def z_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    sink: int,
    recent: int,
    number_format: str = "float32",
    sweep: Sweep | None = None,
) -> Tensor:
    """z `[batch head pos d_v]` of queries that see the first `sink` keys and the last `recent`, of
    those that the layer's facts let them see. It takes no more time than a window does.
    """
    n_ctx = q.shape[2]
    recent = min(recent, window_of(facts, n_ctx))
    in_window = replace(facts, window=recent)
    window = FusedPattern(q, k, v, in_window, {}, number_format=number_format, sweep=sweep)
    first_keys, first_values = window.k[:, :, :sink], window.v[:, :, :sink]
    positions = torch.arange(n_ctx, device=q.device)
    behind = distances(positions, positions[:sink])  # [query key]
    scores = scored(products_of(window.q, first_keys), behind, replace(facts, window=None))
    # A first key in the window is counted there. One behind the layer's own is not seen.
    is_left_out = (behind < recent) | (behind >= window_of(facts, n_ctx))
    scores = scores.masked_fill(is_left_out, -torch.inf)
    # A softmax over both pieces: the log-sum-exp of the whole row says what share each has. A
    # learned sink is counted with the window.
    window_lse = window.lse[..., None]  # [batch head query 1]
    lse = torch.cat([scores, window_lse], dim=-1).logsumexp(-1, keepdim=True)
    of_window = window.z * (window_lse - lse).exp()
    return of_window + weighted_values((scores - lse).exp(), first_values)


def _dot(queries: Tensor, keys: Tensor) -> Tensor:
    """Each query `[batch head pos d]` times the key `[batch kv_head pos d]` at its place."""
    if queries.shape[1] == keys.shape[1]:
        return torch.linalg.vecdot(queries, keys)
    # [batch kv_head head-of-group pos d_qk]
    by_group = queries.unflatten(1, (keys.shape[1], -1))
    # One query head of each group at a time, so that keys are not repeated.
    products = [torch.linalg.vecdot(heads, keys) for heads in by_group.unbind(2)]
    return torch.stack(products, dim=2).flatten(1, 2)


def uniform_pattern(
    matches: Mapping[str, TokenPairs], tokens: Tensor, window: int | None = None
) -> FusedPattern:
    """The pattern of one head that attends to all keys alike: its scores are all zero."""
    batch, n_ctx = tokens.shape
    zeros = torch.zeros(batch, 1, n_ctx, 1, device=tokens.device)
    facts = AttentionFacts(1.0, window=window)
    return FusedPattern(zeros, zeros, zeros, facts, matches, {ENTROPY, *matches})


def _attention(scores: Tensor, lse: Tensor) -> Tensor:
    """`A = exp(S - lse)`, at most 1: the rounding of another product could give a little more."""
    return (scores - lse).exp_().clamp_(max=1)
