"""The product: a pattern that never builds its matrix.

q, k, v are `[batch head pos d_head]`; S = scale · q·k is the pre-softmax score.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from workers.engine.dense_pattern import MASKED
from workers.engine.number_formats import HALVES, rounded
from workers.engine.sweep_kernel import Sweep
from workers.engine.token_pairs import Members, TokenPairs

LN2 = math.log(2)

FIRST_KEYS = 8
"""Scores of the first keys, which are asked for again and again, come from one product."""

TILE_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
"""Size of one tile of scores: about what a CPU core's caches hold, and enough to fill a GPU."""

TILE_QUERIES = {"cpu": 64, "cuda": 1024}
"""Queries in one tile: a CPU gains from skipping the future, a GPU from large products."""


class FusedPattern:
    """The product: what needs single keys comes from q·k and the log-sum-exp, what needs all keys
    from one sweep.

    A sweep goes once through the scores, a tile of queries at a time, so memory grows with T and
    not with T². It also computes `z`, so a replica takes z from here and attention is computed
    once. `asked` names the questions that a sweep answers on the way; a question that was not
    foreseen is answered by another sweep and remembered in `asked`, which the caller shares between
    layers and batches.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        matches: Mapping[str, TokenPairs],
        asked: set[str] | None = None,
        factors: str = "float32",
        sweep: Sweep | None = None,
    ) -> None:
        """`factors` is the format in which q, k, v and A are multiplied with each other
        (`schemas.precision`), and `sweep` a GPU's kernel that answers in the place of tiles.
        """
        self.q, self.k, self.v = (rounded(x, factors) for x in (q, k, v))
        self.scale, self.matches, self.factors = scale, matches, factors
        self.n_ctx = q.shape[2]
        self.asked = set() if asked is None else asked
        self.sweep = sweep
        self._answers: dict[str, Tensor] = {}
        self._sweep(self.asked)

    def only(self, heads: Sequence[int]) -> FusedPattern:
        """The same pattern of some heads alone; what has been answered is not asked again."""
        some = torch.tensor(heads, device=self.q.device)
        other = copy.copy(self)
        other.q, other.k, other.v = (x.index_select(1, some) for x in (self.q, self.k, self.v))
        answers = self._answers.items()
        other._answers = {question: x.index_select(1, some) for question, x in answers}
        return other

    @property
    def z(self) -> Tensor:
        """`Σ_k A[q,k] v[k]`: `[batch head pos d_head]`."""
        return self._answers["z"]

    @property
    def lse(self) -> Tensor:
        """`ln Σ_k exp S[q,k]`: `[batch head query]`."""
        return self._answers["lse"]

    def key(self, k: int) -> Tensor:
        return self._once(f"key {k}", lambda: _from(k, _attention(self.score(k), self.lse)))

    def lag(self, d: int) -> Tensor:
        scores = torch.linalg.vecdot(self.q[:, :, d:], self.k[:, :, : self.n_ctx - d]) * self.scale
        return _attention(scores, self.lse[..., d:])

    def mass(self, pairs: TokenPairs) -> Tensor:
        return self._swept(pairs.name)

    def distance(self) -> Tensor:
        return self._swept("distance")

    def entropy(self) -> Tensor:
        return self._swept("entropy")

    def score(self, k: int) -> Tensor:
        if k >= FIRST_KEYS:
            return self._once(
                f"score {k}", lambda: (self.q @ self.k[:, :, k, :, None]).squeeze(-1) * self.scale
            )
        first = self._once(
            "first scores", lambda: self.q @ self.k[:, :, :FIRST_KEYS].mT * self.scale
        )
        return first[..., k]

    def earlier_score(self) -> Tensor:
        sums = self.k[:, :, 1:].cumsum(2)
        mean = torch.full_like(self.lse, torch.nan)
        lead = torch.linalg.vecdot(self.q[:, :, 2:], sums[:, :, :-1]) * self.scale
        mean[..., 2:] = lead / self.positions()[1:-1]
        return mean

    def without(self, b_Q: Tensor) -> FusedPattern:
        return FusedPattern(
            self.q - b_Q[:, None], self.k, self.v, self.scale, self.matches,
            factors=self.factors, sweep=self.sweep,
        )  # fmt: skip

    def received(self) -> Tensor:
        batch, heads, n_ctx, _ = self.q.shape
        received = self.lse.new_zeros(batch, heads, n_ctx)
        rows = min(TILE_QUERIES[self.q.device.type], n_ctx)
        group = max(1, TILE_BYTES[self.q.device.type] // (4 * heads * rows * n_ctx))
        for b in range(0, batch, group):
            some = slice(b, b + group)
            for start in range(0, n_ctx, rows):
                stop = min(start + rows, n_ctx)
                scores = self.q[some, :, start:stop] @ self.k[some, :, :stop].mT * self.scale
                tile = _attention(scores, self.lse[some, :, start:stop, None])
                # Above the diagonal a score can exceed the log-sum-exp by any amount, so it is
                # replaced, not multiplied.
                received[some, :, :stop] += tile.tril_(start).sum(-2)
        return received / (n_ctx - self.positions())

    def by_lag(self) -> Tensor:
        return torch.stack([self.lag(d).mean(-1) for d in range(self.n_ctx)], dim=-1)

    def row(self, q: int) -> Tensor:
        row = _attention(self.row_scores(q), self.lse[..., q, None])
        row[..., q + 1 :] = 0
        return row

    def rows(self, first: int) -> Tensor:
        scores = self.q[:, :, first:] @ self.k.mT * self.scale
        return _attention(scores, self.lse[..., first:, None]).tril(first)

    def row_scores(self, q: int) -> Tensor:
        return (self.k @ self.q[:, :, q, :, None]).squeeze(-1) * self.scale

    def dense(self) -> Tensor:
        return _attention(self.dense_scores(), self.lse[..., None]).tril()

    def dense_scores(self) -> Tensor:
        return self.q @ self.k.mT * self.scale

    def positions(self) -> Tensor:
        return torch.arange(self.n_ctx, dtype=self.q.dtype, device=self.q.device)

    def _once(self, question: str, answer: Callable[[], Tensor]) -> Tensor:
        if question not in self._answers:
            self._answers[question] = answer()
        return self._answers[question]

    def _swept(self, question: str) -> Tensor:
        if question not in self._answers:
            self.asked.add(question)
            self._sweep({question})
        return self._answers[question]

    def _sweep(self, asked: set[str]) -> None:
        """Answer `asked`, `z` and `lse` in one pass over the scores."""
        if self.sweep is None:
            self._sweep_in_tiles(asked)
        else:
            self._sweep_in_kernel(self.sweep, asked)

    def _sweep_in_kernel(self, sweep: Sweep, asked: set[str]) -> None:
        half = HALVES.get(self.factors, torch.float32)
        q, k, v = (x.to(half) for x in (self.q, self.k, self.v))
        pairs = [p for name, p in self.matches.items() if name in asked]
        labels = [(p.query_label, p.key_label, p.lag) for p in pairs]
        swept = sweep(q, k, v, self.scale, labels, entropy="entropy" in asked, scores=self.factors)
        self._answers |= {"z": swept.z, "lse": swept.lse, "distance": swept.distance}
        self._answers |= {p.name: mass for p, mass in zip(pairs, swept.masses, strict=True)}
        if swept.entropy is not None:
            self._answers["entropy"] = swept.entropy

    def _sweep_in_tiles(self, asked: set[str]) -> None:
        """Tiles are `[batch head query key]`, cut from the queries."""
        batch, heads, n_ctx, d_head = self.v.shape
        device = self.q.device.type
        new = self.q.new_empty
        lse, entropy, position = (new(batch, heads, n_ctx) for _ in range(3))
        # The axes of z lie in memory as the output projection wants them.
        z = new(batch, n_ctx, heads, d_head).transpose(1, 2)
        masses = {name: new(batch, n_ctx, heads).zero_() for name in self.matches if name in asked}
        # Two more value columns carry the sum of the weights and the mean position through the same
        # product as z.
        extra = torch.stack([torch.ones_like(self.positions()), self.positions()], dim=-1)
        values = torch.cat([self.v, extra.expand(batch, heads, n_ctx, 2)], dim=-1)
        # Scores are kept in base 2, as flash kernels do: exp2 is a third of exp, and exp is ten
        # times slower on underflow.
        q, k = self.q * (self.scale / LN2), self.k.mT
        rows = min(TILE_QUERIES[device], n_ctx)
        future = torch.full((rows, rows), MASKED, device=self.q.device).triu(1)
        group = max(1, TILE_BYTES[device] // (4 * heads * rows * n_ctx))
        for b in range(0, batch, group):
            some = slice(b, min(b + group, batch))
            for start in range(0, n_ctx, rows):
                stop = min(start + rows, n_ctx)
                tile = slice(start, stop)
                scores = q[some, :, tile] @ k[some, :, :, :stop]
                scores[..., start:] += future[: stop - start, : stop - start]
                top = scores.amax(-1, keepdim=True)
                weights = scores.sub_(top).exp2()
                sums = weights @ values[some, :, :stop]
                if (shares := rounded(weights, self.factors)) is not weights:
                    sums[..., :d_head] = shares @ values[some, :, :stop, :d_head]
                total = sums[..., d_head]
                torch.div(sums[..., :d_head], total[..., None], out=z[some, :, tile])
                log_total = total.log2()
                torch.add(top[..., 0], log_total, out=lse[some, :, tile])
                torch.div(sums[..., d_head + 1], total, out=position[some, :, tile])
                if "entropy" in asked:
                    mean_score = scores.mul_(weights).sum(-1) / total
                    torch.sub(log_total, mean_score, out=entropy[some, :, tile])
                for name, mass in masses.items():
                    members = self.matches[name].members(some, start, stop)
                    mass[some, tile].index_put_(
                        members[:2], _picked(weights, total, members), accumulate=True
                    )
        self._answers |= {"z": z, "lse": lse.mul_(LN2), "distance": self.positions() - position}
        if "entropy" in asked:
            self._answers["entropy"] = entropy.mul_(LN2).clamp_(min=0)
        self._answers |= {name: mass.transpose(1, 2) for name, mass in masses.items()}


def uniform_pattern(matches: Mapping[str, TokenPairs], tokens: Tensor) -> FusedPattern:
    """The pattern that attends to all keys alike, `A[q,k] = 1/(q+1)`: one head whose scores are all
    zero.
    """
    zeros = torch.zeros(*tokens.shape[:1], 1, tokens.shape[1], 1, device=tokens.device)
    return FusedPattern(zeros, zeros, zeros, 1.0, matches, {"entropy", *matches})


def _attention(scores: Tensor, lse: Tensor) -> Tensor:
    """`A = exp(S - lse)`; 1 where another product's rounding would make it more."""
    return (scores - lse).exp_().clamp_(max=1)


def _from(first: int, mass: Tensor) -> Tensor:
    """Attention to key `first` is zero for the queries before it."""
    mass[..., :first] = 0
    return mass


def _picked(weights: Tensor, total: Tensor, members: Members) -> Tensor:
    """Attention on single keys, from one tile of weights: `[pair head]`."""
    batch, query, key = members
    return weights[batch, :, query, key] / total[batch, :, query]
