"""Embeddings of positions, and what the first MLP makes of them."""

# torch gives `norm` no types.
# pyright: basic

from headcount.schemas.pattern import Tensor
from headcount.schemas.weight_statistics.weight_registry import weight


@weight(axis="position", unit="euclidean norm", source="Farrell 2023")
def position_norm(W_pos: Tensor) -> Tensor:
    """Norm of a position's embedding.

    ‖W_pos[j]‖₂

    >>> position_norm(stream([3, 4], [0, 1])[0]).tolist()
    [5.0, 1.0]
    """
    return W_pos.norm(dim=-1)


@weight(axis="position", unit="euclidean norm", source="Ran-Milo et al. 2026, arXiv 2604.14722")
def effective_position_norm(effective: Tensor) -> Tensor:
    """Norm of an effective position.

    ‖EPE[j]‖₂, EPE[j] = W_pos[j] + MLP_0(W_pos[j])

    >>> effective_position_norm(stream([3, 4], [0, 1])[0]).tolist()
    [5.0, 1.0]
    """
    return effective.norm(dim=-1)


@weight(
    axis="dimension", unit="coordinate", source="Ran-Milo et al. 2026, arXiv 2604.14722, figure 7"
)
def first_effective_position(effective: Tensor) -> Tensor:
    """Coordinates of the first effective position, of which a few are massive.

    EPE[0,d], EPE[j] = W_pos[j] + MLP_0(W_pos[j])

    >>> first_effective_position(stream([3, 4], [0, 1])[0]).tolist()
    [3.0, 4.0]
    """
    return effective[0]
