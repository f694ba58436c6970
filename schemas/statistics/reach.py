"""How much attention reaches keys that a cache of the first and the most recent keys would drop.

Such a cache keeps the first `sink` keys and the last `recent` ones, a query's own key among them.
"""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern
from headcount.schemas.units import Probability
from headcount.schemas.values import Count, Index


def has_distant_keys(pattern: Pattern, *, sink: Index = 4, recent: Count = 64) -> bool:
    """the sequence has more than sink + recent tokens."""
    return pattern.n_ctx > sink + recent


@statistic(
    "after Xiao et al. 2024, arXiv 2410.10819", uniform_baseline=True, defined=has_distant_keys
)
def distant_mass(pattern: Pattern, *, sink: Index = 4, recent: Count = 64) -> Probability:
    """Mean attention to the keys that are neither among the first `sink` nor among the last
    `recent`, over the queries that see such keys.

    1/(T-sink-recent) Σ_{q≥sink+recent} Σ_{k≥sink, q-k≥recent} A[q,k]

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.5, 0.25, 0.25]]
    >>> distant_mass(pattern(rows), sink=1, recent=1).item()
    0.5
    """
    return pattern.distant(sink, recent)[..., sink + recent :].mean(-1)


@statistic(
    "after Xiao et al. 2024, arXiv 2410.10819", uniform_baseline=True, defined=has_distant_keys
)
def distant_mass_last(pattern: Pattern, *, sink: Index = 4, recent: Count = 64) -> Probability:
    """Attention of the last query to the keys that are neither among the first `sink` nor among the
    last `recent`.

    Σ_{k≥sink, T-1-k≥recent} A[T-1,k]

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0, 0.5, 0.25, 0.25]]
    >>> distant_mass_last(pattern(rows), sink=1, recent=2).item()
    0.5
    """
    return pattern.distant(sink, recent)[..., -1]
