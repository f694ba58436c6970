"""Two attention patterns that answer the questions of `schemas.pattern`: one holds the matrix, one never builds it.

Inside this file q, k, v are `[batch head pos d_head]`; S = scale · q·k is the pre-softmax score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LN2 = math.log(2)

MASKED = -1e30
"""Score of a key in the future: finite, so that 0 · MASKED is 0 and not NaN."""

TILE_BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
"""Size of one tile of scores: about what a CPU core's caches hold, and enough to fill a GPU."""

TILE_QUERIES = {"cpu": 64, "cuda": 1024}
"""Queries in one tile: a CPU gains from skipping the future, a GPU from large products."""


@dataclass(frozen=True)
class TokenPairs:
    """(query, key) pairs chosen by the tokens, in order of batch, query and key."""

    name: str
    batch: Tensor
    query: Tensor
    key: Tensor
    count: Tensor

    @cached_property
    def ends(self) -> list[int]:
        """Number of pairs up to and including each (batch, query), on the host."""
        return self.count.flatten().cumsum(0).tolist()

    def between(self, start: int, stop: int) -> slice:
        """The pairs of the flat (batch, query) positions `start .. stop-1`."""
        return slice(self.ends[start - 1] if start else 0, self.ends[stop - 1])


def find_matches(tokens: Tensor) -> dict[str, TokenPairs]:
    """The `copies` and `successors` of each query: earlier equal tokens, and the keys that follow them.

    tokens `[batch pos]`; copies[q] = {j < q : t[j] = t[q]}, successors[q] = {j+1 : j in copies[q]}.
    """
    equal = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    count = equal.sum(-1)
    batch, query, earlier = equal.nonzero(as_tuple=True)
    return {
        "copies": TokenPairs("copies", batch, query, earlier, count),
        "successors": TokenPairs("successors", batch, query, earlier + 1, count),
    }


class DensePattern:
    """The reference: every answer is read off the matrix, in the words of its definition."""

    def __init__(self, pattern: Tensor, scores: Tensor) -> None:
        """`pattern` and `scores` are `[batch head query key]`; scores of future keys may be anything."""
        self.pattern, self.scores = pattern, scores
        self.n_ctx = pattern.shape[-1]

    def key(self, k: int) -> Tensor:
        return self.pattern[..., k]

    def lag(self, d: int) -> Tensor:
        return self.pattern.diagonal(-d, dim1=-2, dim2=-1)

    def mass(self, pairs: TokenPairs) -> Tensor:
        members = torch.zeros(len(pairs.count), self.n_ctx, self.n_ctx, device=self.pattern.device)
        members[pairs.batch, pairs.query, pairs.key] = 1
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

    def positions(self) -> Tensor:
        return torch.arange(self.n_ctx, dtype=torch.float32, device=self.pattern.device)


class FusedPattern:
    """The product: what needs single keys comes from q·k and the log-sum-exp, what needs all keys from one sweep.

    A sweep goes once through the scores, a tile of queries at a time, so memory grows with T and not with T². It also
    computes `z`, so a replica takes z from here and attention is computed once. `asked` names the questions that a sweep
    answers on the way; a question that was not foreseen is answered by another sweep and remembered in `asked`, which the
    caller shares between layers and batches.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        matches: Mapping[str, TokenPairs],
        asked: set[str] | None = None,
    ) -> None:
        self.q, self.k, self.v, self.scale, self.matches = q, k, v, scale, matches
        self.n_ctx = q.shape[2]
        self.asked = set() if asked is None else asked
        self._answers: dict[str, Tensor] = {}
        self._sweep(self.asked)

    @property
    def z(self) -> Tensor:
        """`Σ_k A[q,k] v[k]`: `[batch head pos d_head]`."""
        return self._answers["z"]

    @property
    def lse(self) -> Tensor:
        """`ln Σ_k exp S[q,k]`: `[batch head query]`."""
        return self._answers["lse"]

    def key(self, k: int) -> Tensor:
        mass = (self.score(k) - self.lse).exp()
        mass[..., :k] = 0
        return mass

    def lag(self, d: int) -> Tensor:
        scores = torch.linalg.vecdot(self.q[:, :, d:], self.k[:, :, : self.n_ctx - d]) * self.scale
        return (scores - self.lse[..., d:]).exp()

    def mass(self, pairs: TokenPairs) -> Tensor:
        return self._answer(pairs.name)

    def distance(self) -> Tensor:
        return self.positions() - self._answer("position")

    def entropy(self) -> Tensor:
        return self._answer("entropy")

    def score(self, k: int) -> Tensor:
        return (self.q @ self.k[:, :, k, :, None]).squeeze(-1) * self.scale

    def earlier_score(self) -> Tensor:
        sums = self.k[:, :, 1:].cumsum(2)
        mean = torch.full_like(self.lse, torch.nan)
        lead = torch.linalg.vecdot(self.q[:, :, 2:], sums[:, :, :-1]) * self.scale
        mean[..., 2:] = lead / self.positions()[1:-1]
        return mean

    def positions(self) -> Tensor:
        return torch.arange(self.n_ctx, dtype=torch.float32, device=self.q.device)

    def _answer(self, question: str) -> Tensor:
        if question not in self._answers:
            self.asked.add(question)
            self._sweep({question})
        return self._answers[question]

    def _sweep(self, asked: set[str]) -> None:
        """Answer `asked`, `z` and `lse` in one pass over tiles of `[batch head query key]`."""
        batch, heads, n_ctx, d_head = self.v.shape
        device = self.q.device.type
        new = self.q.new_empty
        z, lse, entropy, position = (new(batch, heads, n_ctx, d_head), *(new(batch, heads, n_ctx) for _ in range(3)))
        masses = {name: self.q.new_zeros(batch * n_ctx, heads) for name in self.matches if name in asked}
        # Two more value columns carry the sum of the weights and the mean position through the same product as z.
        extra = torch.stack([torch.ones(n_ctx, device=self.q.device), self.positions()], dim=-1)
        values = torch.cat([self.v, extra.expand(batch, heads, n_ctx, 2)], dim=-1)
        # Scores are kept in base 2, as flash kernels do: exp2 is a third of exp, and exp is ten times slower on underflow.
        q, k = self.q * (self.scale / LN2), self.k.mT
        rows = min(TILE_QUERIES[device], n_ctx)
        future = torch.full((rows, rows), MASKED, device=self.q.device).triu(1)
        group = max(1, TILE_BYTES[device] // (4 * heads * rows * n_ctx))
        for b in range(0, batch, group):
            some = slice(b, b + group)
            for start in range(0, n_ctx, rows):
                stop = min(start + rows, n_ctx)
                tile = slice(start, stop)
                scores = q[some, :, tile] @ k[some, :, :, :stop]
                scores[..., start:] += future[: stop - start, : stop - start]
                top = scores.amax(-1, keepdim=True)
                weights = scores.sub_(top).exp2()
                sums = weights @ values[some, :, :stop]
                total = sums[..., d_head]
                torch.div(sums[..., :d_head], total[..., None], out=z[some, :, tile])
                log_total = total.log2()
                torch.add(top[..., 0], log_total, out=lse[some, :, tile])
                torch.div(sums[..., d_head + 1], total, out=position[some, :, tile])
                if "entropy" in asked:
                    mean_score = scores.mul_(weights).sum(-1) / total
                    torch.sub(log_total, mean_score, out=entropy[some, :, tile])
                for name, mass in masses.items():
                    self._add_mass(mass, self.matches[name], weights, total, b, start)
        self._answers |= {"z": z, "lse": lse.mul_(LN2), "position": position}
        if "entropy" in asked:
            self._answers["entropy"] = entropy.mul_(LN2).clamp_(min=0)
        self._answers |= {name: m.view(batch, n_ctx, heads).transpose(1, 2) for name, m in masses.items()}

    def _add_mass(
        self, mass: Tensor, pairs: TokenPairs, weights: Tensor, total: Tensor, first: int, start: int
    ) -> None:
        """Add one tile's attention on `pairs` to `mass [batch·query head]`."""
        for b in range(len(weights)):
            flat = (first + b) * self.n_ctx + start
            own = pairs.between(flat, flat + weights.shape[2])
            query, key = pairs.query[own], pairs.key[own]
            share = weights[b, :, query - start, key] / total[b, :, query - start]
            mass.index_add_(0, query + (first + b) * self.n_ctx, share.T)


def uniform_pattern(matches: Mapping[str, TokenPairs], tokens: Tensor) -> FusedPattern:
    """The pattern that attends to all keys alike, `A[q,k] = 1/(q+1)`: one head whose scores are all zero."""
    zeros = torch.zeros(*tokens.shape[:1], 1, tokens.shape[1], 1, device=tokens.device)
    return FusedPattern(zeros, zeros, zeros, 1.0, matches, {"entropy", *matches})
