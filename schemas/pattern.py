"""The questions that an attention pattern answers without ever being built.

`A[q, k]` is the softmax pattern of one head. `S[q, k]` is its score just before the softmax:
scaled, capped where the layer caps scores, and with ALiBi's bias where it has one. T = `n_ctx`.
Both include all changes. Answers have the axes `[batch head query]` unless a docstring gives
others. Statistics and profiles see a pattern only through this protocol.

* Query q sees the keys `max(0, q - window + 1) .. q`. To a key of the future it gives no attention:
  0. Of a key behind its window there is neither `S[q, k]` nor `A[q, k]`: answers about it are NaN.
  So statistics of key k are means over the queries that see it, `k .. k + window - 1`.
* A layer may have a learned sink, one more entry of the softmax that has no key. `A[q, k]` is the
  key's share of the whole row, so the keys of a row sum to `1 - gate`.
* If a change hides a key from a query, `S[q, k]` is not defined: answers about it are NaN, and so
  is everything computed from them. `A[q, k]` is 0 there.
"""

# A question of a protocol has a docstring and no body.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
else:
    # What formulas get and return; who reads what data means need not install torch.
    Tensor = Any

TIE = 1e-5  # share of the largest value within which others tie: their order is rounding


def first_of_largest(values: Tensor) -> Tensor:
    """The first place along the last axis whose value ties with the largest, which is positive."""
    ties = values >= values.amax(-1, keepdim=True) * (1 - TIE)
    # Of equal values, the first is the largest one's place.
    return ties.float().argmax(-1)


def count_above(values: Tensor, first: int) -> Tensor:
    """How many values along the last axis are larger than each of the first ones, with no tie."""
    largest = values[..., :first].amax(-1)
    above = (values > largest[..., None] / (1 - TIE)).sum(-1)
    # What is compared with NaN is not larger, and broken weights must not look like a number.
    return above + 0 * largest


Labels: TypeAlias = Mapping[str, Tensor]  # marked positions `[batch pos]` by label


class Pairs(Protocol):
    """A set of keys for every query, which depends only on the tokens: the same in all heads."""

    @property
    def count(self) -> Tensor:
        """Number of keys of each query, `[batch query]`."""


class Pattern(Protocol):
    """What every pattern answers. `workers.engine` has two: the fused and the dense pattern."""

    @property
    def n_ctx(self) -> int:
        """T, the number of queries and of keys."""

    @property
    def window(self) -> int:
        """How many keys the last query sees, its own among them: T if there is no window."""

    @property
    def is_partial(self) -> bool:
        """Whether some query does not see all keys before it: `window < n_ctx`."""

    def is_finite(self) -> Tensor:
        """Whether every row is made of numbers: one bool. NaN answers then mean "undefined"."""

    def key(self, k: int) -> Tensor:
        """`A[q, k]` for one key, 0 if `q < k`, NaN if the key is behind the window."""

    def lag(self, d: int) -> Tensor:
        """`A[q, q-d]` for the queries `q >= d`, NaN if `d >= window`: `[batch head query-d]`."""

    def mass(self, pairs: Pairs) -> Tensor:
        """`Σ_{k in pairs[q]} A[q, k]`."""

    def distance(self) -> Tensor:
        """`Σ_k A[q, k] (q-k)`."""

    def entropy(self) -> Tensor:
        """`-Σ_k A[q, k] ln A[q, k]` over the keys, of which a learned sink is none, in nats."""

    def distant(self, sink: int, recent: int) -> Tensor:
        """`Σ A[q, k]` over the keys `k >= sink` with `q - k >= recent`; NaN if it sees none."""

    def labelled_mass(self, keys: Tensor, queries: Tensor) -> Tensor:
        """`Σ A[q, k]` over the keys of a mask `[batch pos]`, for the queries of another, else 0."""

    def labelled_seen(self, keys: Tensor) -> Tensor:
        """How many of the keys of a mask `[batch pos]` query q sees: `[batch query]`."""

    def strongest_key(self, queries: Tensor) -> Tensor:
        """The key with the largest `A[q, k]`, as an integer, for the queries of a mask
        `[batch pos]`, else 0; of keys that tie (`first_of_largest`), the first.
        """

    def above(self, first: int) -> Tensor:
        """How many keys have a larger `A[q, k]` than each of the first keys, so many of them, and
        do not tie with the largest of these (`count_above`); NaN if key 0 is behind the window.
        """

    def gate(self) -> Tensor:
        """`1 - Σ_k A[q, k]`, the share that a learned sink takes; NaN if the layer has none."""

    def seen(self, pairs: Pairs) -> Tensor:
        """How many of the keys `pairs[q]` query q sees: `[batch query]`."""

    @property
    def scale(self) -> float:
        """The factor of `q·k` in `S`, before cap and bias: 1/√d_head in most models."""

    def score(self, k: int) -> Tensor:
        """`S[q, k]` for one key, meaningless if `q < k`, NaN if the key is behind the window."""

    def largest_score(self) -> Tensor:
        """The largest `S[q, k]` of the keys that a query sees, hidden ones left out."""

    def earlier_score(self) -> Tensor:
        """Mean of `S[q, k]` over the keys `1 <= k < q`, NaN if one of these is hidden or behind the
        window, meaningless if `q < 2`.
        """

    def without(self, b_Q: Tensor) -> Pattern:
        """The pattern of queries without their bias `b_Q [head d_head]`.

        It is the softmax of `scale (q[q] - b_Q)·k[k]` over the keys that a query sees. A cap,
        ALiBi's bias, a learned sink, and changes of scores and of the pattern are left out: it asks
        what the products alone would do.
        """

    def received(self) -> Tensor:
        """`1/min(T-k, window) Σ_{k<=q<k+window} A[q, k]`, the mean over the queries that see the
        key: `[batch head key]`.
        """

    def by_lag(self) -> Tensor:
        """`1/(T-d) Σ_{q>=d} A[q, q-d]` by lag d, NaN if `d >= window`: `[batch head lag]`."""

    def row(self, q: int) -> Tensor:
        """`A[q, k]` for one query, 0 if `k > q`, NaN behind the window: `[batch head key]`."""

    def rows(self, first: int) -> Tensor:
        """`A[q, k]` for the queries `q >= first`, 0 where the query does not see the key, in the
        future or behind the window: `[batch head query-first key]`.
        """

    def row_scores(self, q: int) -> Tensor:
        """`S[q, k]` of one query, meaningless if `k > q`, NaN behind the window, as in `row`."""

    def dense(self) -> Tensor:
        """The matrix `A` itself, 0 in the future, NaN behind the window: `[batch head query key]`;
        T² numbers, so only for small T.
        """

    def dense_scores(self) -> Tensor:
        """The matrix `S` itself, meaningless if `k > q`, NaN behind the window:
        `[batch head query key]`.
        """

    def within(self, sink: int, recent: int, v: Tensor) -> Tensor:
        """`Σ_k A'[q, k] v[k]`, where `A'` is `A` on the keys that a query sees and that are among
        the first `sink` or the last `recent`, scaled so that these and the gate sum to 1; NaN if
        that leaves no key out. Values and answer are `[batch pos head d_head]`.
        """

    def with_keys(self, k: Tensor, v: Tensor) -> Tensor:
        """`Σ_k A'[q, k] v[k]`, where `A'` is the pattern that other keys make, with all changes.
        Keys, values and answer are `[batch pos head d_head]`.
        """

    def weighted(self, v: Tensor) -> Tensor:
        """`Σ_k A[q, k] v[k]`. Values and answer are `[batch pos head d_head]`."""

    def shared(self, x: Tensor) -> Tensor:
        """The sum of `x [batch head]` over the query heads that share a head's keys."""

    def positions(self) -> Tensor:
        """`0 .. T-1` as float32 on the pattern's device: `[query]`."""
