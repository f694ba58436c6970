"""Which columns and diagonals of the pattern hold the attention of the last queries.

MInference computes only some columns and diagonals of a long pattern, and chooses them so.
"""

import math

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import TIE, Pattern, Tensor
from headcount.schemas.units import Probability

MINFERENCE = "Jiang et al. 2024, MInference, arXiv 2407.02490"

LAST_QUERIES = 64  # queries by which MInference chooses columns and diagonals

CANDIDATES = ((30, 2048), (100, 1800), (500, 1500), (3000, 200))
"""Numbers of columns and diagonals among which MInference's search chooses for each head; all cost
about the same.
"""

SEARCH_LENGTH = 30_000  # tokens of the sequence for which these numbers were published

FIRST_COLUMNS, NEAREST_DIAGONALS = 30, 100
"""Columns and diagonals that MInference always computes, and counts among those that it chooses."""


@profile(MINFERENCE, axis="lag")
def tail_attention_by_lag(pattern: Pattern) -> Probability:
    """Mean attention of the last 64 queries (of all, if there are fewer) to the key d positions
    back; 0 for a query without such a key.

    1/n Σ_{q≥T-n} A[q,q-d], n = min(64, T)

    >>> tail_attention_by_lag(pattern([[1, 0], [0.75, 0.25]])).tolist()
    [[[0.625, 0.375]]]
    """
    rows = _last_rows(pattern)
    return _sums_of_diagonals(rows) / rows.shape[-2]


@profile(MINFERENCE, axis="candidate")
def column_diagonal_attention_by_candidate(pattern: Pattern) -> Probability:
    """Attention of the last 64 queries to the heaviest columns and diagonals: 30 and 2,048, 100 and
    1,800, 500 and 1,500, 3,000 and 200, scaled to n_ctx.

    1/n Σ_{q≥T-n} Σ_{k: k∈C or q-k∈D} A[q,k], n = min(64, T)

    C are the columns with the largest Σ_{q≥T-n} A[q,k], D the lags with the largest Σ_{q≥T-n}
    A[q,q-d]. MInference's numbers are multiplied by n_ctx / 30,000, rounded (halves up), and 1 to
    n_ctx. The first 30 columns and the nearest 100 diagonals, scaled too, are always among them.
    Columns or diagonals that tie with the last one to 1e-5 all count.

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0], [0.25, 0.25, 0.25, 0.25]]
    >>> column_diagonal_attention_by_candidate(pattern(rows))[0, 0, 0].item()
    0.75
    """
    rows = _last_rows(pattern)
    n_queries = rows.shape[-2]
    columns = rows.sum(-2)
    diagonals = _sums_of_diagonals(rows)
    shares = columns.new_zeros(*columns.shape[:-1], len(CANDIDATES))
    for candidate, (n_columns, n_diagonals) in enumerate(CANDIDATES):
        chosen_columns = _heaviest(columns, n_columns, FIRST_COLUMNS)
        chosen_diagonals = _heaviest(diagonals, n_diagonals, NEAREST_DIAGONALS)
        # What lies on a chosen column and on a chosen diagonal counts once.
        on_columns = _sums_of_diagonals(rows * chosen_columns[..., None, :])
        of_columns = (columns * chosen_columns).sum(-1)
        of_diagonals = ((diagonals - on_columns) * chosen_diagonals).sum(-1)
        shares[..., candidate] = (of_columns + of_diagonals) / n_queries
    return shares


def scaled(count: int, n_ctx: int) -> int:
    """A number of columns or diagonals for sequences of another length.

    >>> scaled(2048, 30_000), scaled(2048, 1024), scaled(30, 1024)
    (2048, 70, 1)
    """
    # Halves go up. `round` would take them to the even number.
    return min(n_ctx, max(1, math.floor(count * n_ctx / SEARCH_LENGTH + 0.5)))


def _last_rows(pattern: Pattern) -> Tensor:
    """The pattern of the last queries, `[batch head query key]`."""
    return pattern.rows(max(pattern.n_ctx - LAST_QUERIES, 0))


def _sums_of_diagonals(rows: Tensor) -> Tensor:
    """The sum over the last queries of `A[q, q-d]`: `[batch head lag]`."""
    n_queries, n_ctx = rows.shape[-2:]
    # In a row that is longer by one, each row begins one place later than the one before. So the
    # entries of a diagonal come to lie in one column, the longest lag in the first.
    width = n_ctx + n_queries - 1
    padded = rows.new_zeros(*rows.shape[:-2], n_queries + 1, width)
    padded[..., :n_queries, n_queries - 1 :] = rows
    flat = padded.flatten(-2)[..., : n_queries * (width + 1)]
    sheared = flat.unflatten(-1, (n_queries, width + 1))[..., :n_ctx]
    return sheared.sum(-2).flip(-1)


def _heaviest(masses: Tensor, count: int, always: int) -> Tensor:
    """1 for the columns or diagonals that a candidate computes, 0 for the others.

    `count` and `always`, how many of the first ones are in any case among them, are not scaled yet.
    """
    n_ctx = masses.shape[-1]
    first = scaled(always, n_ctx)
    # A copy, to write into.
    weights = masses + 0.0
    weights[..., :first] = math.inf
    heaviest = weights.topk(max(first, scaled(count, n_ctx))).values
    smallest = heaviest[..., -1:]
    # Equal sums differ by their rounding.
    return (weights >= smallest * (1 - TIE)).float()
