"""A pattern that answers questions about attention without ever building its matrix.

q, k, v are `[batch head pos d_head]`, S = scale · q·k is the score before the softmax, and A is the
pattern. Two facts make the matrix unnecessary:

* `A[q, k] = exp(S[q, k] - lse[q])` with `lse[q] = ln Σ_k exp S[q, k]`. If the log-sum-exp of each
  query is known, the attention to single keys costs one product of q and k.
* Everything that needs all keys (z, entropy, mean distance, mass on pairs) is a sum over keys.
  One sweep adds it up, a tile of scores at a time, and forgets the tile.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from workers.engine.dense_pattern import MASKED
from workers.engine.number_formats import HALVES, rounded
from workers.engine.sweep_kernel import PairLabels, Sweep
from workers.engine.token_pairs import TokenPairs

LN2 = math.log(2)

FIRST_KEYS = 8
"""Scores of the first keys are asked for again and again, so they come from one product."""

TILE_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
"""Size of one tile of scores: about what a CPU core's caches hold, and enough to fill a GPU."""

TILE_QUERIES = {"cpu": 64, "cuda": 1024}
"""Queries in one tile: a CPU gains from skipping the future, a GPU from large products."""


class FusedPattern:
    """The product: answers from q, k and the log-sum-exp, or from one sweep over tiles of scores.

    Memory grows with T and not with T². The sweep also computes `z`, so attention is computed once.
    `questions` names what the sweep answers besides. A question that was not foreseen is answered
    by another sweep and added to `questions`. The caller shares this set between layers and
    batches, so only the first layer of the first batch pays for the second sweep.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        matches: Mapping[str, TokenPairs],
        questions: set[str] | None = None,
        number_format: str = "float32",
        sweep: Sweep | None = None,
    ) -> None:
        """`number_format` is the format in which q, k, v and A are multiplied with each other
        (`schemas.precision`). `sweep` is a GPU's kernel that answers instead of the tiles.
        """
        self.q = rounded(q, number_format)
        self.k = rounded(k, number_format)
        self.v = rounded(v, number_format)
        self.scale = scale
        self.matches = matches
        self.number_format = number_format
        self.n_ctx = q.shape[2]
        self.questions = set() if questions is None else questions
        self.sweep = sweep
        self._answers: dict[str, Tensor] = {}
        self._sweep(self.questions)

    def only(self, heads: Sequence[int]) -> FusedPattern:
        """The same pattern of some heads alone; what has been answered is not computed again."""
        index = torch.tensor(heads, device=self.q.device)
        selected = copy.copy(self)
        selected.q = self.q.index_select(1, index)
        selected.k = self.k.index_select(1, index)
        selected.v = self.v.index_select(1, index)
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

    def key(self, k: int) -> Tensor:
        """`A[q, k]` for one key, 0 where `q < k`: `[batch head query]`."""
        return self._remembered(f"key {k}", lambda: self._attention_to(k))

    def _attention_to(self, key: int) -> Tensor:
        attention = _attention(self.score(key), self.lse)
        attention[..., :key] = 0  # Earlier queries do not see the key.
        return attention

    def lag(self, d: int) -> Tensor:
        """`A[q, q-d]` for the queries `q >= d`: `[batch head query-d]`."""
        queries = self.q[:, :, d:]
        keys = self.k[:, :, : self.n_ctx - d]
        scores = torch.linalg.vecdot(queries, keys) * self.scale
        return _attention(scores, self.lse[..., d:])

    def mass(self, pairs: TokenPairs) -> Tensor:
        """`Σ_{k in pairs[q]} A[q, k]`: `[batch head query]`."""
        return self._swept(pairs.name)

    def distance(self) -> Tensor:
        """`Σ_k A[q, k] (q-k)`: `[batch head query]`."""
        return self._swept("distance")

    def entropy(self) -> Tensor:
        """`-Σ_k A[q, k] ln A[q, k]` in nats: `[batch head query]`."""
        return self._swept("entropy")

    def score(self, k: int) -> Tensor:
        """`S[q, k]` for one key; only queries `q >= k` mean anything: `[batch head query]`."""
        if k >= FIRST_KEYS:
            return self._remembered(
                f"score {k}", lambda: (self.q @ self.k[:, :, k, :, None]).squeeze(-1) * self.scale
            )
        first_scores = self._remembered(
            "first scores", lambda: self.q @ self.k[:, :, :FIRST_KEYS].mT * self.scale
        )
        return first_scores[..., k]

    def earlier_score(self) -> Tensor:
        """Mean of `S[q, k]` over the keys `1 <= k < q`; NaN for the first two queries, which have
        no such key: `[batch head query]`.
        """
        # The mean of products is the product with the mean key, so running sums of keys suffice.
        key_sums = self.k[:, :, 1:].cumsum(2)  # [batch head pos-1 d_head]
        mean_score = torch.full_like(self.lse, torch.nan)
        score_sums = torch.linalg.vecdot(self.q[:, :, 2:], key_sums[:, :, :-1]) * self.scale
        mean_score[..., 2:] = score_sums / self.positions()[1:-1]  # Query q has q - 1 such keys.
        return mean_score

    def without(self, b_Q: Tensor) -> FusedPattern:
        """The pattern of queries less `b_Q [head d_head]`."""
        return FusedPattern(
            self.q - b_Q[:, None],
            self.k,
            self.v,
            self.scale,
            self.matches,
            number_format=self.number_format,
            sweep=self.sweep,
        )

    def received(self) -> Tensor:
        """`1/(T-k) Σ_{q>=k} A[q, k]`: `[batch head key]`."""
        batch, heads, n_ctx, _ = self.q.shape
        attention_sums = self.lse.new_zeros(batch, heads, n_ctx)
        for sequences, queries in _tiles(self.q):
            first, stop = queries.start, queries.stop
            products = self.q[sequences, :, queries] @ self.k[sequences, :, :stop].mT
            attention = _attention(products * self.scale, self.lse[sequences, :, queries, None])
            # Above the diagonal a score can exceed the log-sum-exp by any amount, so the future is
            # replaced by zeros: infinity times zero would be NaN.
            attention_sums[sequences, :, :stop] += attention.tril_(first).sum(-2)
        return attention_sums / (n_ctx - self.positions())

    def by_lag(self) -> Tensor:
        """`1/(T-d) Σ_{q>=d} A[q, q-d]` for every lag d: `[batch head lag]`."""
        return torch.stack([self.lag(d).mean(-1) for d in range(self.n_ctx)], dim=-1)

    def row(self, q: int) -> Tensor:
        """`A[q, k]` for one query, 0 where `k > q`: `[batch head key]`."""
        attention = _attention(self.row_scores(q), self.lse[..., q, None])
        attention[..., q + 1 :] = 0
        return attention

    def rows(self, first: int) -> Tensor:
        """`A[q, k]` for the queries `q >= first`, 0 where `k > q`: `[batch head query key]`."""
        scores = self.q[:, :, first:] @ self.k.mT * self.scale
        return _attention(scores, self.lse[..., first:, None]).tril(first)

    def row_scores(self, q: int) -> Tensor:
        """`S[q, k]` for one query; only keys `k <= q` mean anything: `[batch head key]`."""
        return (self.k @ self.q[:, :, q, :, None]).squeeze(-1) * self.scale

    def dense(self) -> Tensor:
        """The matrix `A` itself, of T² numbers: `[batch head query key]`."""
        return _attention(self.dense_scores(), self.lse[..., None]).tril()

    def dense_scores(self) -> Tensor:
        """The matrix `S`; only `k <= q` means anything: `[batch head query key]`."""
        return self.q @ self.k.mT * self.scale

    def positions(self) -> Tensor:
        """`0 .. T-1` in the pattern's dtype and on its device: `[query]`."""
        return torch.arange(self.n_ctx, dtype=self.q.dtype, device=self.q.device)

    def _remembered(self, question: str, compute: Callable[[], Tensor]) -> Tensor:
        """An answer that is computed when it is first asked for."""
        if question not in self._answers:
            self._answers[question] = compute()
        return self._answers[question]

    def _swept(self, question: str) -> Tensor:
        """The answer of a sweep, of another one if the first was not asked this."""
        if question not in self._answers:
            self.questions.add(question)  # The next layer's sweep answers it on its way.
            self._sweep({question})
        return self._answers[question]

    def _sweep(self, questions: set[str]) -> None:
        """Answer `questions`, `z`, `lse` and `distance` in one pass over the scores."""
        if self.sweep is None:
            self._answers |= _TileSweep(self, questions).answers()
        else:
            self._answers |= self._kernel_answers(self.sweep, questions)

    def _kernel_answers(self, sweep: Sweep, questions: set[str]) -> dict[str, Tensor]:
        """What a GPU's kernel answers, under the names that the tiles give."""
        dtype = HALVES.get(self.number_format, torch.float32)
        pairs = [pairs for name, pairs in self.matches.items() if name in questions]
        swept = sweep(
            self.q.to(dtype),
            self.k.to(dtype),
            self.v.to(dtype),
            self.scale,
            [PairLabels(pair.query_label, pair.key_label, pair.lag) for pair in pairs],
            entropy="entropy" in questions,
            number_format=self.number_format,
        )
        answers = {"z": swept.z, "lse": swept.lse, "distance": swept.distance}
        if swept.entropy is not None:
            answers["entropy"] = swept.entropy
        for pair, mass in zip(pairs, swept.masses, strict=True):
            answers[pair.name] = mass
        return answers


class _TileSweep:
    """One sweep over the scores of a pattern: the answers, and how each tile fills its part.

    A tile is `[batch head query key]`: some sequences, all heads, some queries, and the keys up to
    the last of these queries.

    Scores are kept in base 2, as in flash kernels: if s = S / ln 2, then 2^s = e^S, so the weights
    are the same. exp2 takes a third of the time of exp. If the result underflows, exp takes ten
    times as long, and with the scores of trained models it underflows all the time.
    """

    def __init__(self, pattern: FusedPattern, questions: set[str]) -> None:
        batch, heads, n_ctx, d_head = pattern.v.shape
        new = pattern.q.new_empty
        self.d_head = d_head
        self.number_format = pattern.number_format
        self.positions = pattern.positions()
        self.pairs = {name: pairs for name, pairs in pattern.matches.items() if name in questions}

        # Factors. The change of base costs nothing: it is part of the scale.
        self.q = pattern.q * (pattern.scale / LN2)  # [batch head query d_head]
        self.k_transposed = pattern.k.mT  # [batch head d_head key]
        # Two more value columns carry Σ_k weight and Σ_k weight · k through the product that makes
        # z, so the tile of weights is read once for all three.
        ones_and_positions = torch.stack([torch.ones_like(self.positions), self.positions], dim=-1)
        self.values = torch.cat(  # [batch head key d_head+2]
            [pattern.v, ones_and_positions.expand(batch, heads, n_ctx, 2)], dim=-1
        )
        most_queries = _queries_in_tile(pattern.q)
        # Finite, because the entropy multiplies masked scores by a weight of 0.
        self.future = torch.full(
            (most_queries, most_queries), MASKED, device=pattern.q.device
        ).triu(1)

        # Answers. The axes of z lie in memory as the output projection wants them.
        self.z = new(batch, n_ctx, heads, d_head).transpose(1, 2)
        self.log2_sums = new(batch, heads, n_ctx)
        self.mean_position = new(batch, heads, n_ctx)
        self.entropy = new(batch, heads, n_ctx) if "entropy" in questions else None
        # Heads last, because every head of a pair (query, key) is picked at once.
        self.masses = {name: new(batch, n_ctx, heads).zero_() for name in self.pairs}

    def answers(self) -> dict[str, Tensor]:
        """Sweep once over all tiles; answers by question, in natural units."""
        for sequences, queries in _tiles(self.q):
            self._sweep_tile(sequences, queries)
        answers = {
            "z": self.z,
            "lse": self.log2_sums.mul_(LN2),  # ln x = ln 2 · log2 x
            "distance": self.positions - self.mean_position,  # Σ A (q-k) = q - Σ A k
        }
        if self.entropy is not None:
            # Rounding can leave a tiny negative number where one key has all the attention.
            answers["entropy"] = self.entropy.mul_(LN2).clamp_(min=0)
        for name, mass in self.masses.items():
            answers[name] = mass.transpose(1, 2)
        return answers

    def _sweep_tile(self, sequences: slice, queries: slice) -> None:
        """Write the answers of some queries of some sequences."""
        tile = (sequences, slice(None), queries)
        scores = self._scores(sequences, queries)  # [batch head query key]

        # 2^s overflows from s = 128 on. Less the row's maximum, the largest weight is 1. The
        # softmax does not change, because the factor 2^-maximum cancels in weights / total.
        maximum = scores.amax(-1, keepdim=True)  # [batch head query 1]
        relative_scores = scores.sub_(maximum)
        weights = relative_scores.exp2()

        sums = self._weighted_sums(weights, sequences, queries)  # [batch head query d_head+2]
        total = sums[..., self.d_head]  # [batch head query]
        position_sum = sums[..., self.d_head + 1]
        log2_total = total.log2()
        torch.div(sums[..., : self.d_head], total[..., None], out=self.z[tile])
        torch.div(position_sum, total, out=self.mean_position[tile])
        # log2 Σ 2^s = maximum + log2 Σ 2^(s - maximum)
        torch.add(maximum[..., 0], log2_total, out=self.log2_sums[tile])

        if self.entropy is not None:
            # A = weight / total, so log2 A = relative_score - log2 total. Because Σ A = 1,
            # -Σ A log2 A = log2 total - Σ weight · relative_score / total.
            # `mul_` overwrites the scores, which nothing below reads.
            mean_score = relative_scores.mul_(weights).sum(-1) / total
            torch.sub(log2_total, mean_score, out=self.entropy[tile])
        for name, mass in self.masses.items():
            batch, query, key = self.pairs[name].members(sequences, queries.start, queries.stop)
            attention = weights[batch, :, query, key] / total[batch, :, query]  # [pair head]
            # A query with several keys occurs several times: accumulate, do not overwrite.
            mass[sequences, queries].index_put_((batch, query), attention, accumulate=True)

    def _scores(self, sequences: slice, queries: slice) -> Tensor:
        """A tile of scores in base 2, masked where the key is in the future."""
        first, stop = queries.start, queries.stop
        scores = self.q[sequences, :, queries] @ self.k_transposed[sequences, :, :, :stop]
        # Keys before the first query are in the past of all queries of the tile. So only the square
        # at the end of the tile, which the diagonal crosses, needs a mask.
        scores[..., first:] += self.future[: stop - first, : stop - first]
        return scores

    def _weighted_sums(self, weights: Tensor, sequences: slice, queries: slice) -> Tensor:
        """`Σ_k weight · [v | 1 | k]`: `[batch head query d_head+2]`."""
        values = self.values[sequences, :, : queries.stop]
        sums = weights @ values
        # In a narrower format, weights are rounded before they meet v, as tensor cores do it. Their
        # sums stay float32. `rounded` returns the same tensor if there is nothing to round.
        rounded_weights = rounded(weights, self.number_format)
        if rounded_weights is not weights:
            sums[..., : self.d_head] = rounded_weights @ values[..., : self.d_head]
        return sums


def _tiles(q: Tensor) -> Iterator[tuple[slice, slice]]:
    """The sequences and the queries of each tile.

    A tile of one sequence is small if T is small, so a tile takes as many sequences as
    `TILE_BYTES` allow, counted in float32 scores.
    """
    batch, heads, n_ctx, _ = q.shape
    most_queries = _queries_in_tile(q)
    bytes_of_sequence = 4 * heads * most_queries * n_ctx
    most_sequences = max(1, TILE_BYTES[q.device.type] // bytes_of_sequence)
    for first_sequence in range(0, batch, most_sequences):
        sequences = slice(first_sequence, min(first_sequence + most_sequences, batch))
        for first_query in range(0, n_ctx, most_queries):
            yield sequences, slice(first_query, min(first_query + most_queries, n_ctx))


def _queries_in_tile(q: Tensor) -> int:
    return min(TILE_QUERIES[q.device.type], q.shape[2])


def uniform_pattern(matches: Mapping[str, TokenPairs], tokens: Tensor) -> FusedPattern:
    """The pattern that attends to all keys alike, `A[q,k] = 1/(q+1)`.

    It is one head of width 1 whose scores are all zero.
    """
    batch, n_ctx = tokens.shape
    zeros = torch.zeros(batch, 1, n_ctx, 1, device=tokens.device)
    return FusedPattern(zeros, zeros, zeros, 1.0, matches, {"entropy", *matches})


def _attention(scores: Tensor, lse: Tensor) -> Tensor:
    """`A = exp(S - lse)`, at most 1.

    These scores come from another product than those in `lse`, whose rounding could give a little
    more than 1.
    """
    return (scores - lse).exp_().clamp_(max=1)
