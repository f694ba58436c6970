"""What the query bias adds to the score of each key, before the division by √d_head."""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Tensor
from headcount.schemas.statistics.decomposition import has_fixed_positions, shifts
from headcount.schemas.units import ScaledLogits

RAN_MILO = "Ran-Milo et al. 2026, arXiv 2604.14722"


@profile(RAN_MILO, axis="key", defined=has_fixed_positions)
def score_shift_by_key(b_Q: Tensor, k: Tensor, b_K: Tensor) -> ScaledLogits:
    """What the query bias adds to the score of a key, for every query.

    Δ[k] = b_Q·(k[k] - b_K)

    >>> score_shift_by_key(head([2, 0]), vectors([3, 9], [1, 9]), head([1, 4])).tolist()
    [[[4.0, 0.0]]]
    """
    return shifts(b_Q, k, b_K).swapaxes(1, 2)


@profile(RAN_MILO, axis="key", defined=has_fixed_positions)
def score_shift_lead_by_key(b_Q: Tensor, k: Tensor, b_K: Tensor) -> ScaledLogits:
    """How much more the query bias adds to the score of a key than to the lowest in the sequence.

    Δ[k] - min_j Δ[j], Δ[k] = b_Q·(k[k] - b_K)

    >>> k = vectors([3, 9], [1, 9], [2, 9])
    >>> score_shift_lead_by_key(head([2, 0]), k, head([1, 4])).tolist()
    [[[4.0, 0.0, 2.0]]]
    """
    shift = shifts(b_Q, k, b_K).swapaxes(1, 2)
    return shift - shift.amin(-1)[..., None]
