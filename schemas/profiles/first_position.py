"""The residual stream at position 0, coordinate by coordinate."""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Coordinate


@profile("Ran-Milo et al. 2026, arXiv 2604.14722", axis="dimension")
def sink_resid_post_by_dimension(resid_post: Tensor) -> Coordinate:
    """The residual stream after the layer at position 0; the same for all heads.

    resid_post[0,d]

    The spread over sequences says how much of the vector depends on the token.

    >>> sink_resid_post_by_dimension(stream([3, -4], [0, 1])).tolist()
    [[3.0, -4.0]]
    """
    return resid_post[:, 0]
