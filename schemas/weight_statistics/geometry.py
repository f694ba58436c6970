"""How the embeddings of positions lie relative to each other.

w[j] is `W_pos[j]` less the mean of its coordinates: what a LayerNorm sees, and what
TransformerLens's default loading leaves.
"""

from headcount.schemas.formula_kinds import weight
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Coordinate, DotProduct, Norm

SOURCE = "Farrell 2023"


def centred(W_pos: Tensor) -> Tensor:
    """w, every row less its mean."""
    return W_pos - W_pos.mean(-1, keepdim=True)


@weight(SOURCE, axis="position")
def centred_position_norm(W_pos: Tensor) -> Norm:
    """Norm of a position's embedding, centred.

    ‖w[j]‖₂, w[j,d] = W_pos[j,d] - 1/D Σ_e W_pos[j,e]

    >>> centred_position_norm(stream([-1, 7], [2, 2])[0]).square().round().tolist()
    [32.0, 0.0]
    """
    return centred(W_pos).norm(dim=-1)


@weight(SOURCE, axis="position")
def position_product_first(W_pos: Tensor) -> DotProduct:
    """Dot product of a position's embedding with that of position 0, both centred.

    w[j]·w[0], w[j,d] = W_pos[j,d] - 1/D Σ_e W_pos[j,e]

    >>> position_product_first(stream([1, 3], [5, 1])[0]).tolist()
    [2.0, -4.0]
    """
    positions = centred(W_pos)
    return positions @ positions[0]


@weight(SOURCE, axis="position")
def position_product_second(W_pos: Tensor) -> DotProduct:
    """Dot product of a position's embedding with that of position 1, both centred.

    w[j]·w[1], w[j,d] = W_pos[j,d] - 1/D Σ_e W_pos[j,e]

    >>> position_product_second(stream([1, 3], [5, 1])[0]).tolist()
    [-4.0, 8.0]
    """
    positions = centred(W_pos)
    return positions @ positions[1]


@weight(SOURCE, axis="position")
def position_component_1(components: Tensor) -> Coordinate:
    """Coordinate of a position's embedding along the first principal component.

    (w[j] - 1/T Σ_i w[i])·u₁, the largest coordinate being positive, w[j,d] = W_pos[j,d] - 1/D Σ_e
    W_pos[j,e]

    >>> position_component_1(stream([3, 4, 5], [0, 1, 2])[0]).tolist()
    [3.0, 0.0]
    """
    return components[:, 0]


@weight(SOURCE, axis="position")
def position_component_2(components: Tensor) -> Coordinate:
    """Coordinate of a position's embedding along the second principal component.

    (w[j] - 1/T Σ_i w[i])·u₂, the largest coordinate being positive, w[j,d] = W_pos[j,d] - 1/D Σ_e
    W_pos[j,e]

    >>> position_component_2(stream([3, 4, 5], [0, 1, 2])[0]).tolist()
    [4.0, 1.0]
    """
    return components[:, 1]


@weight(SOURCE, axis="position")
def position_component_3(components: Tensor) -> Coordinate:
    """Coordinate of a position's embedding along the third principal component.

    (w[j] - 1/T Σ_i w[i])·u₃, the largest coordinate being positive, w[j,d] = W_pos[j,d] - 1/D Σ_e
    W_pos[j,e]

    >>> position_component_3(stream([3, 4, 5], [0, 1, 2])[0]).tolist()
    [5.0, 2.0]
    """
    return components[:, 2]
