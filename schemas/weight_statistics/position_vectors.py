"""Embeddings of positions, and what the first MLP makes of them."""

from headcount.schemas.formula_kinds import weight
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Coordinate, Norm


@weight("Farrell 2023", axis="position")
def position_norm(W_pos: Tensor) -> Norm:
    """Norm of a position's embedding.

    ‖W_pos[j]‖₂

    >>> position_norm(stream([3, 4], [0, 1])[0]).tolist()
    [5.0, 1.0]
    """
    return W_pos.norm(dim=-1)


@weight("Ran-Milo et al. 2026, arXiv 2604.14722", axis="position")
def effective_position_norm(effective: Tensor) -> Norm:
    """Norm of an effective position.

    ‖EPE[j]‖₂, EPE[j] = W_pos[j] + MLP_0(W_pos[j])

    >>> effective_position_norm(stream([3, 4], [0, 1])[0]).tolist()
    [5.0, 1.0]
    """
    return effective.norm(dim=-1)


@weight("Ran-Milo et al. 2026, arXiv 2604.14722, figure 7", axis="dimension")
def first_effective_position(effective: Tensor) -> Coordinate:
    """Coordinates of the first effective position, of which a few are massive.

    EPE[0,d], EPE[j] = W_pos[j] + MLP_0(W_pos[j])

    >>> first_effective_position(stream([3, 4], [0, 1])[0]).tolist()
    [3.0, 4.0]
    """
    return effective[0]
