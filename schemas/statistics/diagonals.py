"""Attention along fixed diagonals, on a repeated block of ⌊T/2⌋ tokens.

A single token may stand before the block.
"""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.units import Probability


def has_repeated_half(tokens: Tensor) -> Tensor:
    """the last ⌊T/2⌋ tokens repeat the ⌊T/2⌋ tokens before them, and these are at least two."""
    n_ctx = tokens.shape[1]
    period = n_ctx // 2
    second_copy = tokens[:, n_ctx - period :]
    first_copy = tokens[:, n_ctx - 2 * period : n_ctx - period]
    return (second_copy == first_copy).all(-1) & (period >= 2)


def after_copy(pattern: Pattern) -> Tensor:
    """A[q,q-N+1], N = ⌊T/2⌋, for the queries `q >= N-1`."""
    # A sequence of one token has no such lag. Its value is not stored (`has_repeated_half`).
    return pattern.lag(max(pattern.n_ctx // 2 - 1, 0))


@statistic(
    "TransformerLens demos", uniform_baseline=True, defined=has_repeated_half, marks="successors"
)
def induction_diagonal(pattern: Pattern) -> Probability:
    """Mean attention along the whole induction diagonal of a repeated block.

    1/(T-N+1) Σ_{q≥N-1} A[q,q-N+1], N = ⌊T/2⌋

    It counts the last one or two queries of the first copy, too.

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 1, 0]]
    >>> induction_diagonal(pattern(rows)).item()
    0.75
    """
    return after_copy(pattern).mean(-1)


@statistic(
    "Olsson et al. 2022", uniform_baseline=True, defined=has_repeated_half, marks="successors"
)
def induction_diagonal_strict(pattern: Pattern) -> Probability:
    """Mean attention of the second copy of a block to the token after the same place in the first
    copy.

    1/N Σ_{q≥T-N} A[q,q-N+1], N = ⌊T/2⌋

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0.75, 0.25, 0], [0, 0, 1, 0]]
    >>> induction_diagonal_strict(pattern(rows)).item()
    0.875
    """
    return after_copy(pattern)[..., -(pattern.n_ctx // 2) :].mean(-1)


@statistic(
    "TransformerLens demos", uniform_baseline=True, defined=has_repeated_half, marks="copies"
)
def duplicate_diagonal(pattern: Pattern) -> Probability:
    """Mean attention of the second copy of a block to the same place in the first copy.

    1/N Σ_{q≥T-N} A[q,q-N], N = ⌊T/2⌋

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0], [0, 0.75, 0.25, 0]]
    >>> duplicate_diagonal(pattern(rows)).item()
    0.5
    """
    period = pattern.n_ctx // 2
    return pattern.lag(period)[..., -period:].mean(-1)
