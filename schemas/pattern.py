"""The questions that can be put to an attention pattern without ever building it.

`A[q, k]` is the softmax pattern of one head, `S[q, k]` its pre-softmax score (scaled, causal:
`k <= q`), T = `n_ctx`. Both are as edits leave them. Where an edit hides a key from a query,
`S[q, k]` is not defined: answers are NaN, and so is everything that is computed from them. Answers
have the axes `[batch head query]` if nothing else is said. Statistics and profiles see a pattern
only through this protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

Tensor: TypeAlias = Any
"""An array with the methods that torch and numpy share; `schemas` imports neither."""


Labels: TypeAlias = Mapping[str, Any]
"""Which positions an input family has labelled: a mask `[batch pos]` by label."""


class Pairs(Protocol):
    """For every query a set of keys, shared by all heads: sparse, chosen by the tokens alone."""

    @property
    def count(self) -> Tensor:
        """Number of keys of each query, `[batch query]`."""
        ...


class Pattern(Protocol):
    """What every pattern answers; `workers.engine` has two that do."""

    @property
    def n_ctx(self) -> int:
        """T, the number of queries and of keys."""
        ...

    def key(self, k: int) -> Tensor:
        """`A[q, k]` for one key, 0 where `q < k`: `[batch head query]`."""
        ...

    def lag(self, d: int) -> Tensor:
        """`A[q, q-d]` for the queries `q >= d`: `[batch head query-d]`."""
        ...

    def mass(self, pairs: Pairs) -> Tensor:
        """`Σ_{k in pairs[q]} A[q, k]`: `[batch head query]`."""
        ...

    def distance(self) -> Tensor:
        """`Σ_k A[q, k] (q-k)`: `[batch head query]`."""
        ...

    def entropy(self) -> Tensor:
        """`-Σ_k A[q, k] ln A[q, k]` in nats: `[batch head query]`."""
        ...

    @property
    def scale(self) -> float:
        """What a layer multiplies `q·k` by to make `S`, 1/√d_head in most models."""
        ...

    def score(self, k: int) -> Tensor:
        """`S[q, k]` for one key; only queries `q >= k` mean anything: `[batch head query]`."""
        ...

    def earlier_score(self) -> Tensor:
        """Mean of `S[q, k]` over the keys `1 <= k < q`, NaN where one of them is hidden; only
        queries `q >= 2` mean anything: `[batch head query]`.
        """
        ...

    def without(self, b_Q: Tensor) -> Pattern:
        """The pattern of queries less `b_Q [head d_head]`: the causal softmax of
        `scale (q[q] - b_Q)·k[k]`. Edits of scores and of the pattern do not enter.
        """
        ...

    def received(self) -> Tensor:
        """`1/(T-k) Σ_{q>=k} A[q, k]`: `[batch head key]`."""
        ...

    def by_lag(self) -> Tensor:
        """`1/(T-d) Σ_{q>=d} A[q, q-d]` for every lag d: `[batch head lag]`."""
        ...

    def row(self, q: int) -> Tensor:
        """`A[q, k]` for one query, 0 where `k > q`: `[batch head key]`."""
        ...

    def rows(self, first: int) -> Tensor:
        """`A[q, k]` for the queries `q >= first`, 0 where `k > q`: `[batch head query-first key]`."""
        ...

    def row_scores(self, q: int) -> Tensor:
        """`S[q, k]` for one query; only keys `k <= q` mean anything: `[batch head key]`."""
        ...

    def dense(self) -> Tensor:
        """The matrix `A` itself, of T² numbers: only where T is small: `[batch head query key]`."""
        ...

    def dense_scores(self) -> Tensor:
        """The matrix `S` likewise; only `k <= q` means anything: `[batch head query key]`."""
        ...

    def positions(self) -> Tensor:
        """`0 .. T-1` as float32 on the pattern's device: `[query]`."""
        ...
