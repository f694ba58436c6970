"""Pairs of a query and a key that the tokens choose: which earlier keys hold the same token, which
ones follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

KEPT_PER_QUERY = 64
"""Lists of pairs are kept between layers while they have at most this many pairs a query: memory
stays linear in T.
"""

NO_QUERY = -1
"""Label of a key that belongs to no pair."""

Members = tuple[Tensor, Tensor, Tensor]
"""Batch, query and key of some pairs, each counted from the start of its slice."""


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """The pairs (q, k) with `query_label[q] = key_label[k]` and `k <= q - lag`: 2 T labels stand
    for up to T²/2 pairs.
    """

    name: str
    query_label: Tensor
    """`[batch query]`, int32, never negative."""
    key_label: Tensor
    """`[batch key]`, int32."""
    lag: int
    _kept: dict[tuple[int, ...], Members] = field(
        default_factory=dict[tuple[int, ...], Members], repr=False
    )

    @cached_property
    def count(self) -> Tensor:
        """Number of pairs of each query: `[batch query]`."""
        n_ctx = self.query_label.shape[1]
        everything = slice(0, len(self.query_label))
        tiles = [
            self.matrix(everything, start, min(start + 64, n_ctx)).sum(-1)
            for start in range(0, n_ctx, 64)
        ]
        return torch.cat(tiles, dim=1)

    @cached_property
    def _few(self) -> bool:
        return int(self.count.sum()) <= KEPT_PER_QUERY * self.count.numel()

    def matrix(self, batch: slice, start: int, stop: int) -> Tensor:
        """Whether (q, k) is a pair, for the queries `start .. stop-1` and the keys before `stop`:
        `[batch query key]`.
        """
        equal = self.query_label[batch, start:stop, None] == self.key_label[batch, None, :stop]
        return equal.tril_(start - self.lag)

    def members(self, batch: slice, start: int, stop: int) -> Members:
        """The pairs of the queries `start .. stop-1`, in order of batch, query and key."""
        place = (batch.start, batch.stop, start, stop)
        if place in self._kept:
            return self._kept[place]
        in_batch, query, key = self.matrix(batch, start, stop).nonzero(as_tuple=True)
        found = in_batch, query, key
        if self._few:
            self._kept[place] = found
        return found


def find_matches(tokens: Tensor) -> dict[str, TokenPairs]:
    """The `copies` and `successors` of each query: earlier equal tokens, and the keys that follow
    them.

    tokens `[batch pos]`; copies[q] = {j < q : t[j] = t[q]}, successors[q] = {j+1 : j in copies[q]}.
    """
    token = tokens.int()
    before = torch.cat([torch.full_like(token[:, :1], NO_QUERY), token[:, :-1]], dim=1)
    return {
        "copies": TokenPairs("copies", token, token, 1),
        "successors": TokenPairs("successors", token, before, 0),
    }
