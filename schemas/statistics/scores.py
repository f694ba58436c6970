"""Pre-softmax scores."""

import math

from schemas.pattern import Pattern, Tensor
from schemas.statistics.matching import has_three_positions
from schemas.statistics.registry import statistic


@statistic(
    unit="logits", range=(-math.inf, math.inf), source="Guo et al. 2024, arXiv 2410.13835",
    defined=has_three_positions,
)  # fmt: skip
def sink_logit_margin(pattern: Pattern) -> Tensor:
    """Mean lead of the score of key 0 over the mean score of the other earlier keys.

    1/(T-2) Σ_{q≥2} (S[q,0] - 1/(q-1) Σ_{1≤k<q} S[q,k])

    >>> sink_logit_margin(scores([[0, 0, 0], [0, 0, 0], [5, 3, 9]])).item()
    2.0
    """
    return (pattern.score(0) - pattern.earlier_score())[..., 2:].mean(-1)
