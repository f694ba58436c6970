"""How much of the residual stream at position 0 lies in a few dimensions."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Tensor
from headcount.schemas.units import Dimensions, ShareOfSquaredNorm


@statistic("Sun et al. 2024, arXiv 2402.17762", marks="first key")
def sink_resid_post_massive(resid_post: Tensor) -> Dimensions:
    """Number of massive dimensions of the residual stream after the layer at position 0; the same
    for all heads.

    #{d : |resid_post[0,d]| > 100 and |resid_post[0,d]| > 1000 m}, m = median over d and k of
    |resid_post[16 k,d]|, the lower of the two in the middle

    Every sixteenth position gives the same numbers as the whole stream, in less time.

    >>> sink_resid_post_massive(stream([500, -101, 99, 0, 0, 0])).item()
    2.0
    """
    sizes = resid_post[:, ::16].abs().flatten(1)
    # The first d_model sizes are those of position 0.
    first = sizes[:, : resid_post.shape[-1]]
    median = sizes.median(-1, keepdim=True).values
    return ((first > 100) & (first > 1000 * median)).sum(-1).float()


@statistic("Ran-Milo et al. 2026, arXiv 2604.14722", of_directions=True, marks="first key")
def sink_resid_post_top3(resid_post: Tensor) -> ShareOfSquaredNorm:
    """Share of the three largest dimensions of the residual stream after the layer at position 0;
    the same for all heads.

    Σ_{d∈D} resid_post[0,d]² / ‖resid_post[0]‖₂², D = the three dimensions with the largest
    |resid_post[0,d]|

    >>> sink_resid_post_top3(stream([3, 3, 3, 3])).item()
    0.75
    """
    energy = resid_post[:, 0].square()
    top = energy.topk(min(3, energy.shape[-1])).values
    return top.sum(-1) / energy.sum(-1)
