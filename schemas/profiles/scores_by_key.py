"""Scores before the softmax, and what the query bias adds to them before the division by √d_head.

The mean pattern is not the softmax of the mean scores, so both can be stored.
"""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.statistics.decomposition import has_fixed_positions, shifts
from headcount.schemas.units import Logits, ScaledLogits

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


@profile("Farrell 2023, recency bias", axis="key")
def last_score_by_key(pattern: Pattern) -> Logits:
    """Score of the last query.

    S[T-1,k]

    >>> last_score_by_key(scores([[0, 0], [3, -1]])).tolist()
    [[[3.0, -1.0]]]
    """
    return pattern.row_scores(pattern.n_ctx - 1)


@profile("Farrell 2023, previous-token and look-back-two heads", axis="pair")
def score_by_pair(pattern: Pattern) -> Logits:
    """The score of every key that a query can see.

    S[q,k], k ≤ q

    >>> score_by_pair(scores([[2, 0], [3, -1]])).tolist()
    [[[[2.0, -inf], [3.0, -1.0]]]]
    """
    return pattern.dense_scores()
