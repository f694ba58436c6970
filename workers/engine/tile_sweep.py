"""One sweep over the scores of attention, a tile at a time, for everything that needs all keys.

A tile of scores is made, asked, and forgotten, so memory grows with T and not with T². Keys behind
the window of all queries of a tile are not even read. Query heads can share keys and values. Then
these have fewer heads, and are not repeated.

Scores are kept in base 2, as in flash kernels: if s = S / ln 2, then 2^s = e^S, so the weights are
the same. exp2 takes a third of the time of exp. If the result underflows, exp takes ten times as
long, and with the scores of trained models it underflows all the time.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headcount.schemas.pattern import count_above
from headcount.workers.engine.number_formats import rounded
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.model.attention_facts import (
    MASKED,
    AttentionFacts,
    by_shared_head,
    distances,
    weighted_values,
    window_of,
)

LN2 = math.log(2)

TILE_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
"""Size of one tile of scores: about what a CPU core's caches hold, and enough to fill a GPU."""

TILE_QUERIES = {"cpu": 64, "cuda": 1024}
"""Queries in one tile: a CPU gains from skipping the future, a GPU from large products. A sweep
takes more of a long sequence (`TileScores`).
"""

ENTROPY, LARGEST_SCORE, RECEIVED = "entropy", "largest score", "received"


@dataclass(frozen=True)
class Distant:
    """Asks for the attention to keys from `sink` on, at least `recent` behind their query."""

    sink: int
    recent: int


@dataclass(frozen=True)
class Above:
    """Asks how many keys have more attention than the first `first`."""

    first: int


Question = str | Distant | Above
"""What a sweep may be asked: `ENTROPY`, `LARGEST_SCORE`, `RECEIVED`, the name of pairs of tokens
for the attention to them, or a question with numbers of its own.
"""


@dataclass(frozen=True)
class Swept:
    """What one sweep answers, in float32; all but z are `[batch head query]`."""

    z: Tensor  # `Σ_k A[q,k] v[k]`: `[batch head pos d_head]`, in memory `[batch pos head d_head]`
    lse: Tensor  # `ln Σ_k exp S[q,k]`
    distance: Tensor  # `Σ_k A[q,k] (q-k)`
    entropy: Tensor | None  # `-Σ_k A[q,k] ln A[q,k]` in nats, if it was asked for
    masses: tuple[Tensor, ...]  # `Σ_{k in pairs[q]} A[q,k]` for each of the pairs


Sweep = Callable[..., Swept]  # a GPU's kernel that answers instead of the tiles


class Tile(NamedTuple):
    """Some sequences and queries, and the keys that any of these queries sees."""

    sequences: slice
    queries: slice
    keys: slice


def tiles_of(q: Tensor, window: int, most_queries: int = 0) -> Iterator[Tile]:
    """Tiles of the sequences and queries, each with the keys that any of its queries sees.

    A tile has `TILE_QUERIES` queries, or at most as many as are given.
    """
    batch, heads, n_ctx, _ = q.shape
    most_queries = min(most_queries or TILE_QUERIES[q.device.type], n_ctx)
    most_keys = min(n_ctx, window + most_queries - 1)
    # One sequence is little if T is small, so a tile takes as many as the bytes of float32 allow.
    bytes_of_sequence = 4 * heads * most_queries * most_keys
    most_sequences = max(1, TILE_BYTES[q.device.type] // bytes_of_sequence)
    for first_sequence in range(0, batch, most_sequences):
        sequences = slice(first_sequence, min(first_sequence + most_sequences, batch))
        for first_query in range(0, n_ctx, most_queries):
            queries = slice(first_query, min(first_query + most_queries, n_ctx))
            yield Tile(sequences, queries, slice(max(0, first_query - window + 1), queries.stop))


class TileScores:
    """The scores of a layer in base 2, made of its q, k and facts a tile at a time."""

    def __init__(self, q: Tensor, k: Tensor, facts: AttentionFacts) -> None:
        """q is `[batch head pos d_qk]`, k `[batch kv_head pos d_qk]`."""
        self.q, self.k = q, k
        self.n_ctx = q.shape[2]
        self.window = window_of(facts, self.n_ctx)
        self.positions = torch.arange(self.n_ctx, dtype=q.dtype, device=q.device)
        # The change of base costs nothing: it is part of the scale.
        self.scale = facts.scale / (LN2 if facts.soft_cap is None else facts.soft_cap)
        self.cap = None if facts.soft_cap is None else facts.soft_cap / LN2
        # Of each head in base 2, beside a tile of scores: [head 1 1].
        self.slopes, self.sink = (
            None if fact is None else fact.to(q)[:, None, None] / LN2
            for fact in (facts.slopes, facts.sink)
        )
        self.kv_heads = k.shape[1]
        self.group = q.shape[1] // self.kv_heads
        self.most_queries = self._queries_in_tile()
        size = (self.most_queries, self.most_queries)
        # Finite, because the entropy multiplies masked scores by a weight of 0.
        self.future = torch.full(size, MASKED, device=q.device).triu(1)
        # A tile takes as many heads of keys as `TILE_BYTES` allow, counted in float32 scores.
        most_keys = min(self.n_ctx, self.window + self.most_queries - 1)
        of_kv_head = self.group * self.most_queries * most_keys
        self.kv_heads_at_once = max(1, TILE_BYTES[q.device.type] // (4 * of_kv_head))
        # Every tile writes its scores over those of the tile before. New memory for each would take
        # as long as exp2, because the system has to make its pages.
        most_kv_heads = min(self.kv_heads_at_once, len(q) * self.kv_heads)
        self.memory = q.new_empty(most_kv_heads * of_kv_head)

    def _queries_in_tile(self) -> int:
        """The most queries of a tile: up to an eighth of the keys, while one head of keys fits.

        Products with many rows are faster, and an eighth more keys are masked at most.
        """
        device = self.q.device.type
        queries = TILE_QUERIES[device]
        bytes_of_query = 4 * self.group * self.window
        while 16 * queries <= self.window and 2 * queries * bytes_of_query <= TILE_BYTES[device]:
            queries *= 2
        return min(queries, self.n_ctx)

    def parts(self) -> Iterator[tuple[Tile, slice, slice]]:
        """Every tile with some query heads and the heads of keys that these share."""
        for tile in tiles_of(self.q, self.window, self.most_queries):
            for first in range(0, self.kv_heads, self.kv_heads_at_once):
                stop = min(first + self.kv_heads_at_once, self.kv_heads)
                yield tile, slice(first * self.group, stop * self.group), slice(first, stop)

    def scores(self, tile: Tile, heads: slice, kv_heads: slice) -> Tensor:
        """A tile of scores in base 2, masked where unseen: `[batch head query key]`.

        They last until the next tile is asked for.
        """
        sequences, queries, keys = tile
        count = queries.stop - queries.start
        scaled = self.q[sequences, heads, queries] * self.scale
        by_kv_head = by_shared_head(scaled, kv_heads.stop - kv_heads.start)
        numbers = scaled.shape[:3].numel() * (keys.stop - keys.start)
        products = self.memory[:numbers].view(*by_kv_head.shape[:3], -1)
        torch.matmul(by_kv_head, self.k[sequences, kv_heads, keys].mT, out=products)
        scores = products.view(*scaled.shape[:3], -1)
        if self.cap is not None:
            scores.tanh_().mul_(self.cap)
        if self.slopes is not None:
            # Of the distance and not of the key, because a small number has a small rounding.
            behind = distances(self.positions[queries], self.positions[keys])
            scores.addcmul_(self.slopes[heads], behind, value=-1)
        # Masked behind the cap, which would lift a masked score.
        # Keys before the first query are in the past of all queries of the tile. So only the square
        # at the end of the tile, which the diagonal crosses, needs a mask of the future.
        scores[..., queries.start - keys.start :] += self.future[:count, :count]
        behind_last = queries.stop - self.window
        if behind_last > keys.start:
            # The last query does not see the keys before this one, and others do not see a part.
            some_keys = torch.arange(keys.start, behind_last, device=scores.device)
            some_queries = torch.arange(queries.start, queries.stop, device=scores.device)
            is_unseen = distances(some_queries, some_keys) >= self.window
            scores[..., : len(some_keys)].masked_fill_(is_unseen, MASKED)
        return scores


class TileSums:
    """Answers that few scans ask for, added up a tile at a time: all but the largest score."""

    def __init__(self, q: Tensor, questions: Collection[Question]) -> None:
        asked = [question for question in questions if not isinstance(question, str)]
        asked += [name for name in (LARGEST_SCORE, RECEIVED) if name in questions]
        # Zeros, because received attention is added up over tiles; [batch head pos].
        self.answers: dict[Question, Tensor] = {name: q.new_zeros(q.shape[:3]) for name in asked}

    def add(self, tile: Tile, heads: slice, weights: Tensor, total: Tensor) -> None:
        """Add a tile of weights `[batch head query key]`: `A` times the `total` of a row."""
        for question, answer in self.answers.items():
            of_queries = answer[tile.sequences, heads, tile.queries]
            if isinstance(question, Distant):
                torch.div(_distant_sum(weights, tile, question), total, out=of_queries)
            # A tile that begins behind key 0 has no query that sees it.
            elif isinstance(question, Above) and tile.keys.start == 0:
                of_queries.copy_(count_above(weights, question.first))
            elif question == RECEIVED:
                # Σ_q weight / total is a product, which reads the tile once.
                attention_sums = total.reciprocal()[..., None, :] @ weights  # [batch head 1 key]
                answer[tile.sequences, heads, tile.keys] += attention_sums[..., 0, :]


def _distant_sum(weights: Tensor, tile: Tile, distant: Distant) -> Tensor:
    """The sum of the weights of a tile `[… query key]` on the distant keys: `[… query]`.

    Added up and not what the other keys leave of the whole, which would round away a small sum.
    """
    _, queries, keys = tile
    first = min(max(distant.sink, keys.start), keys.stop)
    # Keys before `common_stop` are distant from every query of the tile, keys before `stop` from
    # the last one.
    common_stop = min(max(queries.start - distant.recent + 1, first), keys.stop)
    stop = min(max(queries.stop - distant.recent, common_stop), keys.stop)
    common = weights[..., first - keys.start : common_stop - keys.start].sum(-1)
    if stop == common_stop:
        return common
    of_some = weights[..., common_stop - keys.start : stop - keys.start]
    return common + of_some.tril(queries.start - distant.recent - common_stop).sum(-1)


class TileSweep:
    """One sweep over the scores of a layer: the answers, and how each tile fills its part.

    A tile is `[batch head query key]`: some sequences, the heads that share some keys, some
    queries, and the keys that any of these queries sees.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        facts: AttentionFacts,
        matches: Mapping[str, TokenPairs],
        questions: Collection[Question],
        number_format: str = "float32",
    ) -> None:
        """q, k and v as in `FusedPattern`, in `number_format` already."""
        batch, heads, n_ctx, _ = q.shape
        self.v = v
        self.number_format = number_format
        self.pairs = {name: pairs for name, pairs in matches.items() if name in questions}
        self.tile_scores = TileScores(q, k, facts)
        self.memory = torch.empty_like(self.tile_scores.memory)  # for the weights of a tile

        # The axes of z lie in memory as the output projection wants them.
        self.z = q.new_empty(batch, n_ctx, heads, v.shape[3]).transpose(1, 2)
        # Sums of each row, of which `answers` makes the others at once: [batch head query].
        self.maximum, self.key_total, self.distance_sum = q.new_empty(3, batch, heads, n_ctx)
        self.score_sum = q.new_empty(batch, heads, n_ctx) if ENTROPY in questions else None
        # Heads last, because every head of a pair (query, key) is picked at once.
        self.masses = {name: q.new_zeros(batch, n_ctx, heads) for name in self.pairs}
        self.sums = TileSums(q, questions)

    def answers(self) -> dict[Question, Tensor]:
        """Sweep once over all tiles; answers by question, in natural units."""
        for tile, heads, kv_heads in self.tile_scores.parts():
            self._sweep_tile(tile, heads, kv_heads)
        total = self._total(self.maximum, self.key_total, slice(None))
        log2_total = total.log2()
        answers: dict[Question, Tensor] = {
            "z": self.z,
            # log2 Σ 2^s = maximum + log2 Σ 2^(s - maximum), and ln x = ln 2 · log2 x
            "lse": (self.maximum + log2_total).mul_(LN2),
            "distance": self.distance_sum.div_(total),
        }
        if self.score_sum is not None:
            # A = weight / total, so log2 A = relative_score - log2 total, and
            # -Σ A log2 A = (log2 total · Σ weight - Σ weight · relative_score) / total.
            if self.tile_scores.sink is not None:
                log2_total *= self.key_total / total
            entropy = log2_total.sub_(self.score_sum.div_(total))
            # Rounding can leave a tiny negative number where one key has all the attention.
            answers[ENTROPY] = entropy.mul_(LN2).clamp_(min=0)
        for name, mass in self.masses.items():
            answers[name] = mass.transpose(1, 2)
        return answers | self.sums.answers

    def _total(self, maximum: Tensor, key_total: Tensor, heads: slice) -> Tensor:
        """`Σ 2^(s - maximum)` of all entries of a row, of some heads: `[batch head query]`."""
        sink = self.tile_scores.sink
        if sink is None:
            return key_total
        # The sink is one more entry of the row, which has no key and no value.
        return key_total + (sink[heads, :, 0] - maximum).exp2_()

    def _sweep_tile(self, tile: Tile, heads: slice, kv_heads: slice) -> None:
        """Write the answers of a tile, some query heads, and the heads of keys that they share."""
        sequences, queries, keys = tile
        at = (sequences, heads, queries)
        window, positions = self.tile_scores.window, self.tile_scores.positions
        scores = self.tile_scores.scores(tile, heads, kv_heads)  # [batch head query key]

        # 2^s overflows from s = 128 on. Less the row's maximum, the largest weight is 1. The
        # softmax does not change, because the factor 2^-maximum cancels in weights / total.
        maximum = scores.amax(-1)  # [batch head query]
        if LARGEST_SCORE in self.sums.answers:
            torch.mul(maximum, LN2, out=self.sums.answers[LARGEST_SCORE][at])
        if self.tile_scores.sink is not None:
            maximum = maximum.maximum(self.tile_scores.sink[heads, :, 0])
        self.maximum[at] = maximum
        relative_scores = scores.sub_(maximum[..., None])
        weights = self.memory[: scores.numel()].view_as(scores)
        torch.exp2(relative_scores, out=weights)  # [batch head query key], at most 1

        key_total = weights.sum(-1)
        self.key_total[at] = key_total
        # Σ weight (q-k) = q Σ weight - Σ weight · k. Counted from the tile's first query, because
        # a difference of two large numbers would have their rounding.
        places = positions[: queries.stop - queries.start]
        key_places = positions[keys] - queries.start
        torch.sub(places * key_total, weights @ key_places, out=self.distance_sum[at])
        total = self._total(maximum, key_total, heads)
        # In a narrower format, weights are rounded before they meet v, as tensor cores do it. Their
        # sums stay those of exact weights.
        factors = rounded(weights, self.number_format)
        sums = weighted_values(factors, self.v[sequences, kv_heads, keys])
        torch.div(sums, total[..., None], out=self.z[at])
        self.sums.add(tile, heads, weights, total)

        if self.score_sum is not None:
            # `mul_` overwrites the scores, which nothing below reads.
            torch.sum(relative_scores.mul_(weights), -1, out=self.score_sum[at])
        for name, mass in self.masses.items():
            batch, query, key = self.pairs[name].members_seen(sequences, queries, keys, window)
            attention = weights[batch, :, query, key] / total[batch, :, query]  # [pair head]
            # A query with several keys occurs several times: accumulate, do not overwrite.
            masses = mass[sequences, queries, heads]
            masses.index_put_((batch, query), attention, accumulate=True)
