"""How different positions are from one another: heads that mix tokens make them alike.

Over-mixing is the loss of these differences (Barbero et al. 2025). A sink slows it down, because a
head that rests on it moves little.
"""

import math

from schemas.pattern import Tensor
from schemas.statistics.matching import has_three_positions
from schemas.statistics.statistic_registry import statistic

BARBERO = "Barbero et al. 2025, arXiv 2504.02732"


def deviations(vectors: Tensor) -> Tensor:
    """Vectors `[batch pos …]` less their mean over the positions."""
    return vectors - vectors.mean(1, keepdim=True)


@statistic(unit="euclidean norm", range=(0, math.inf), source=BARBERO, standard=False)
def resid_post_spread(resid_post: Tensor) -> Tensor:
    """Length of what distinguishes positions in the residual stream after the layer: the
    over-mixing measure μ; the same for all heads of a layer.

    ‖R - (1/T) 11ᵀR‖_F = √(Σ_k ‖R[k] - m‖₂²), R = resid_post, m = 1/T Σ_k R[k]

    >>> resid_post_spread(stream([4, 1], [-4, 1], [0, 1])).square().round().item()
    32.0
    """
    return deviations(resid_post).flatten(1).norm(dim=-1)


@statistic(
    unit="share of the squared length",
    range=(0, 1),
    source="after " + BARBERO,
    defined=has_three_positions,
    of_directions=True,
    standard=False,
)
def resid_post_spread_share(resid_post: Tensor) -> Tensor:
    """Share of the residual stream after the layer that distinguishes positions, without position
    0: 0 if all are alike; the same for all heads of a layer.

    Σ_{k≥1} ‖R[k] - m‖₂² / Σ_{k≥1} ‖R[k]‖₂², R = resid_post, m = 1/(T-1) Σ_{k≥1} R[k]

    Position 0 is left out, because its length alone would decide the sum. A share can be compared
    over layers and models, a length cannot.

    >>> resid_post_spread_share(stream([9, 9], [1, 1], [-1, 1])).item()
    0.5
    """
    others = resid_post[:, 1:]
    spread = deviations(others).square().flatten(1).sum(-1)
    return spread / others.square().flatten(1).sum(-1)


@statistic(unit="euclidean norm", range=(0, math.inf), source=BARBERO, standard=False)
def value_spread(v: Tensor) -> Tensor:
    """Length of what distinguishes positions in the values.

    ‖V - (1/T) 11ᵀV‖_F = √(Σ_k ‖v[k] - m‖₂²), m = 1/T Σ_k v[k]

    >>> value_spread(vectors([4, 1], [-4, 1], [0, 1])).square().round().item()
    32.0
    """
    return deviations(v).transpose(1, 2).flatten(2).norm(dim=-1)
