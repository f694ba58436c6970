"""How different positions are from one another: heads that mix tokens make them alike.

Over-mixing is the loss of these differences (Barbero et al. 2025). Their measure
μ(X) = ‖X - (1/T) 11ᵀX‖_F is √T times the spread here, which does not grow with the text.
"""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Tensor
from headcount.schemas.statistics.matching import has_three_positions
from headcount.schemas.units import Norm, ShareOfSquaredNorm

BARBERO = "Barbero et al. 2025, arXiv 2504.02732"


def squared_deviations(vectors: Tensor) -> Tensor:
    """Squared distance of each of the vectors `[batch pos …]` from their mean: `[batch pos …]`."""
    # Less the first one before the mean is taken: what all positions share then leaves no rounding.
    from_first = vectors - vectors[:, :1]
    return (from_first - from_first.mean(1, keepdim=True)).square().sum(-1)


@statistic(BARBERO)
def resid_post_spread(resid_post: Tensor) -> Norm:
    """Root mean square distance of positions from their mean in the residual stream after the
    layer; the same for all heads.

    √(1/T Σ_k ‖R[k] - m‖₂²), R = resid_post, m = 1/T Σ_k R[k]

    >>> resid_post_spread(stream([3, 1], [-3, 1], [3, 1], [-3, 1])).item()
    3.0
    """
    return squared_deviations(resid_post).mean(-1).sqrt()


@statistic("after " + BARBERO, defined=has_three_positions, of_directions=True)
def resid_post_spread_share(resid_post: Tensor) -> ShareOfSquaredNorm:
    """Share of the residual stream after the layer that distinguishes positions, without position
    0: 0 if all are alike; the same for all heads.

    Σ_{k≥1} ‖R[k] - m‖₂² / Σ_{k≥1} ‖R[k]‖₂², R = resid_post, m = 1/(T-1) Σ_{k≥1} R[k]

    The norm of position 0 alone would decide the sum.

    >>> resid_post_spread_share(stream([9, 9], [1, 1], [-1, 1])).item()
    0.5
    """
    others = resid_post[:, 1:]
    return squared_deviations(others).sum(-1) / others.square().sum(-1).sum(-1)


@statistic(BARBERO)
def value_spread(v: Tensor) -> Norm:
    """Root mean square distance of the values from their mean.

    √(1/T Σ_k ‖v[k] - m‖₂²), m = 1/T Σ_k v[k]

    >>> value_spread(vectors([3, 1], [-3, 1], [3, 1], [-3, 1])).item()
    3.0
    """
    return squared_deviations(v).mean(1).sqrt()
