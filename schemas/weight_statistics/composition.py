"""How much of what an earlier head writes a head reads: by its keys, its queries or its values.

An earlier head writes with X = read_V W_O. A head reads with W_QK = read_Q read_Kᵀ and moves with
W_OV = read_V W_O. *read* is a projection with the norm before it folded in. A composition is 0 if
the head reads nothing of X, and about 1/√d_model for random matrices.
"""

from headcount.schemas.formula_kinds import weight
from headcount.schemas.pattern import Tensor
from headcount.schemas.statistics.decomposition import has_fixed_positions
from headcount.schemas.units import FrobeniusNorm, ShareOfNorm

ELHAGE = "Elhage et al. 2021"


@weight(ELHAGE, axis="none", defined=has_fixed_positions)
def query_key_norm(read_Q: Tensor, read_K: Tensor) -> FrobeniusNorm:
    """Norm of the matrix that makes a head's scores.

    ‖read_Q read_Kᵀ‖_F

    >>> query_key_norm(head([[1], [0]]), head([[3], [4]])).tolist()
    [5.0]
    """
    return product_norm(columns_squared(read_Q), columns_squared(read_K))


@weight(ELHAGE, axis="none")
def value_output_norm(read_V: Tensor, W_O: Tensor) -> FrobeniusNorm:
    """Norm of the matrix by which a head moves what it attends to.

    ‖read_V W_O‖_F

    >>> value_output_norm(head([[1], [0]]), head([[3, 4]])).tolist()
    [5.0]
    """
    return product_norm(columns_squared(read_V), columns_squared(W_O.mT))


@weight(ELHAGE, axis="earlier head", defined=has_fixed_positions, of_directions=True)
def key_composition(
    read_Q: Tensor, read_K: Tensor, earlier_read_V: Tensor, earlier_W_O: Tensor
) -> ShareOfNorm:
    """How much a head's keys read of what an earlier head writes.

    ‖W_QK Xᵀ‖_F / (‖W_QK‖_F ‖X‖_F), X = read_V W_O of the earlier head

    >>> reads, writes = head([[1], [0]]), head([[3, 4]])
    >>> round(key_composition(reads, reads, reads, writes).item(), 6)
    0.6
    """
    read_by_keys = earlier_W_O @ read_K[:, None]
    return composition(earlier_read_V, earlier_W_O, read_by_keys, read_Q, read_K)


@weight(ELHAGE, axis="earlier head", defined=has_fixed_positions, of_directions=True)
def query_composition(
    read_Q: Tensor, read_K: Tensor, earlier_read_V: Tensor, earlier_W_O: Tensor
) -> ShareOfNorm:
    """How much a head's queries read of what an earlier head writes.

    ‖X W_QK‖_F / (‖X‖_F ‖W_QK‖_F), X = read_V W_O of the earlier head

    >>> reads, writes = head([[1], [0]]), head([[3, 4]])
    >>> round(query_composition(reads, reads, reads, writes).item(), 6)
    0.6
    """
    read_by_queries = earlier_W_O @ read_Q[:, None]
    return composition(earlier_read_V, earlier_W_O, read_by_queries, read_K, read_Q)


@weight(ELHAGE, axis="earlier head", of_directions=True)
def value_composition(
    read_V: Tensor, W_O: Tensor, earlier_read_V: Tensor, earlier_W_O: Tensor
) -> ShareOfNorm:
    """How much a head's values read of what an earlier head writes.

    ‖X W_OV‖_F / (‖X‖_F ‖W_OV‖_F), X = read_V W_O of the earlier head

    >>> reads, writes = head([[1], [0]]), head([[3, 4]])
    >>> round(value_composition(reads, writes, reads, writes).item(), 6)
    0.6
    """
    read_by_values = earlier_W_O @ read_V[:, None]
    return composition(earlier_read_V, earlier_W_O, read_by_values, W_O.mT, read_V)


def composition(
    earlier_read_V: Tensor, earlier_W_O: Tensor, inner: Tensor, rest: Tensor, reads: Tensor
) -> Tensor:
    """The length of `earlier_read_V inner restᵀ` over those of X and of `reads restᵀ`:
    `[head earlier_head]`.

    `inner` is `earlier_W_O reads` `[head earlier_head d_head d_head]`. A product of three matrices
    of d_model × d_head has the length of one of d_head × d_head.
    """
    # With A = earlier_read_V, B = inner and C = rest: ‖A B Cᵀ‖² = tr(AᵀA B CᵀC Bᵀ), which is the
    # sum of the entries of (AᵀA B) ∘ (B CᵀC).
    written = columns_squared(earlier_read_V)
    rest_squared = columns_squared(rest)
    squared_length = ((written @ inner) * (inner @ rest_squared[:, None])).sum(-1).sum(-1)
    earlier_length = product_norm(written, columns_squared(earlier_W_O.mT))
    own_length = product_norm(columns_squared(reads), rest_squared)
    # Rounding can leave a tiny negative number where nothing is read.
    return squared_length.clamp(min=0).sqrt() / (own_length[:, None] * earlier_length)


def columns_squared(matrix: Tensor) -> Tensor:
    """`MᵀM` `[head d_head d_head]`."""
    return matrix.mT @ matrix


def product_norm(left_squared: Tensor, right_squared: Tensor) -> Tensor:
    """`‖A Bᵀ‖_F` from `AᵀA` and `BᵀB`, because its square is the trace of their product."""
    return (left_squared * right_squared).sum(-1).sum(-1).sqrt()
