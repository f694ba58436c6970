"""Pairs of a query and a key that tokens choose: earlier copies, and what follows these."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

STORED_PER_QUERY = 64
"""Lists of pairs are stored between layers if they have at most this many pairs a query, so memory
stays linear in T.
"""

QUERIES_COUNTED = 64  # queries whose pairs are counted at a time, so without a matrix of T²
NO_QUERY = -1  # label of a key that belongs to no pair


class Members(NamedTuple):
    """Batch, query and key of some pairs, each counted from the start of its slice."""

    batch: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """The pairs with `query_label[q] = key_label[k]` and `k <= q - lag`: T²/2 from 2 T labels."""

    name: str
    query_label: Tensor  # `[batch query]`, int32, never negative
    key_label: Tensor  # `[batch key]`, int32
    lag: int
    _stored_members: dict[tuple[int, ...], Members] = field(
        default_factory=dict[tuple[int, ...], Members], repr=False
    )
    _counts: dict[int, Tensor] = field(default_factory=dict[int, Tensor], repr=False)
    """What `count_within` has counted: tokens are the same in every layer."""

    @property
    def count(self) -> Tensor:
        """Number of pairs of each query: `[batch query]`."""
        return self.count_within(self.query_label.shape[1])

    def count_within(self, window: int) -> Tensor:
        """Number of pairs of each query with a key less than `window` behind: `[batch query]`."""
        if window not in self._counts:
            batch, n_ctx = self.query_label.shape
            counts: list[Tensor] = []
            for start in range(0, n_ctx, QUERIES_COUNTED):
                pairs = self.matrix(slice(0, batch), start, min(start + QUERIES_COUNTED, n_ctx))
                # Row 0 is query `start`, whose window begins at key start - window + 1.
                counts.append(pairs.triu_(start - window + 1).sum(-1))
            self._counts[window] = torch.cat(counts, dim=1)
        return self._counts[window]

    @cached_property
    def _are_few(self) -> bool:
        return int(self.count.sum()) <= STORED_PER_QUERY * self.count.numel()

    def matrix(self, batch: slice, start: int, stop: int) -> Tensor:
        """Which (q, k) are pairs, `start <= q < stop` and `k < stop`: `[batch query key]`."""
        equal = self.query_label[batch, start:stop, None] == self.key_label[batch, None, :stop]
        # Row 0 of the matrix is query `start`, whose last possible key is `start - lag`.
        return equal.tril_(start - self.lag)

    def members(self, batch: slice, start: int, stop: int) -> Members:
        """The pairs of the queries `start .. stop-1`, in order of batch, query and key."""
        tile = (batch.start, batch.stop, start, stop)
        if tile in self._stored_members:
            return self._stored_members[tile]
        members = Members(*self.matrix(batch, start, stop).nonzero(as_tuple=True))
        # Tokens are the same in every layer, so the next layer asks for the same tiles.
        if self._are_few:
            self._stored_members[tile] = members
        return members

    def members_seen(self, batch: slice, queries: slice, keys: slice, window: int) -> Members:
        """The pairs with a key less than `window` behind, counted from the start of `keys`."""
        members = self.members(batch, queries.start, queries.stop)
        # All keys from 0 on are in sight, and `keys` begins at 0.
        if queries.stop <= window:
            return members
        is_seen = members.query + queries.start - members.key < window
        return Members(
            members.batch[is_seen], members.query[is_seen], members.key[is_seen] - keys.start
        )


def count_seen(keys: Tensor, window: int) -> Tensor:
    """How many keys of a mask `[batch pos]` each query sees: `[batch query]`.

    >>> count_seen(torch.tensor([[True, True, False, True]]), 2).tolist()
    [[1, 2, 1, 1]]
    """
    counts = keys.cumsum(-1)  # [batch query], of the keys up to the query
    # A copy, because reading and writing overlap.
    counts[:, window:] -= counts[:, :-window].clone()
    return counts


def find_matches(tokens: Tensor) -> dict[str, TokenPairs]:
    """copies[q] = {j < q : t[j] = t[q]} and successors[q] = {j+1 : j in copies[q]}."""
    token = tokens.int()
    # Key j+1 is a successor if token j is the query's, so its label is the token before it.
    token_before = torch.cat([torch.full_like(token[:, :1], NO_QUERY), token[:, :-1]], dim=1)
    return {
        "copies": TokenPairs("copies", token, token, lag=1),
        "successors": TokenPairs("successors", token, token_before, lag=0),
    }
