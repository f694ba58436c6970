"""Means and second moments of a head's queries, from which covariances and main directions follow.

Expected Attention is made of those before rotation, Q-Filters of those after it.
"""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Component, SquaredComponent

FIRST_TOKENS = 4  # that Expected Attention leaves out, being unlike others

EXPECTED_ATTENTION = "Devoto et al. 2025, arXiv 2510.00636; kvpress"
Q_FILTERS = "Godey et al. 2025, arXiv 2503.02812; make_filters"


@profile(EXPECTED_ATTENTION, axis="component")
def query_mean(unrotated_q: Tensor) -> Component:
    """Mean of the queries before any rotation and after any norm, without the first 4 if there are
    more.

    1/(T-4) Σ_{q≥4} u[q], u[q] the query before its rotation

    >>> query_mean(vectors([9, 9], [9, 9], [9, 9], [9, 9], [1, 2], [3, 6])).tolist()
    [[[2.0, 4.0]]]
    """
    return _by_head(_later(unrotated_q)).mean(-2)


@profile(EXPECTED_ATTENTION, axis="pair of components")
def query_second_moment(unrotated_q: Tensor) -> SquaredComponent:
    """Mean product of two components of the queries, those that `query_mean` reads.

    1/(T-4) Σ_{q≥4} u[q,i] u[q,j], i ≤ j

    The covariance is this less the product of the two means.

    >>> query_second_moment(vectors([1, 2], [3, 4])).tolist()
    [[[[5.0, 7.0], [7.0, 10.0]]]]
    """
    return _second_moment(_by_head(_later(unrotated_q)))


@profile(Q_FILTERS, axis="component")
def rotated_query_mean(q: Tensor) -> Component:
    """Mean of the queries after any rotation.

    1/T Σ_q q[q]

    >>> rotated_query_mean(vectors([1, 2], [3, 6])).tolist()
    [[[2.0, 4.0]]]
    """
    return _by_head(q).mean(-2)


@profile(Q_FILTERS, axis="pair of components")
def rotated_query_second_moment(q: Tensor) -> SquaredComponent:
    """Mean product of two components of the queries after any rotation.

    1/T Σ_q q[q,i] q[q,j], i ≤ j

    Its first eigenvector is the first right singular vector of the matrix of all queries.

    >>> rotated_query_second_moment(vectors([1, 2], [3, 4])).tolist()
    [[[[5.0, 7.0], [7.0, 10.0]]]]
    """
    return _second_moment(_by_head(q))


def _later(q: Tensor) -> Tensor:
    """The queries after the first tokens; all of them if there are no others."""
    return q[:, FIRST_TOKENS:] if q.shape[1] > FIRST_TOKENS else q


def _by_head(q: Tensor) -> Tensor:
    """From `[batch pos head d_head]` to `[batch head pos d_head]`."""
    return q.swapaxes(1, 2)


def _second_moment(q: Tensor) -> Tensor:
    """Mean outer product over the queries `[batch head pos d_head]`: `[batch head i j]`."""
    # One product for all queries: (QᵀQ)[i,j] = Σ_q q[q,i] q[q,j].
    return q.mT @ q / q.shape[-2]
