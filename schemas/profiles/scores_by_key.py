"""Scores before the softmax, after scaling.

The mean pattern is not the softmax of the mean scores, so both can be stored.
"""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Pattern
from headcount.schemas.units import Logits


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
