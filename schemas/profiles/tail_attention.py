"""Where the last queries look, as one distribution over the keys."""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Pattern
from headcount.schemas.units import Probability


@profile("Scheuer, attention-sink-profiler", axis="key")
def tail_attention_by_key(pattern: Pattern) -> Probability:
    """Mean attention of the last 64 queries, or of all if there are fewer.

    1/n Σ_{q≥T-n} A[q,k], n = min(64, T)

    >>> tail_attention_by_key(pattern([[1, 0], [0.5, 0.5]])).tolist()
    [[[0.75, 0.25]]]
    """
    return pattern.rows(max(pattern.n_ctx - 64, 0)).mean(-2)
