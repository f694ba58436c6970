"""How spread out attention is, and how far it reaches."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.statistics.sink import has_two_positions
from headcount.schemas.units import Nats, ShareOfMaximum, Tokens


def largest_entropy(pattern: Pattern) -> Tensor:
    """Entropy of uniform attention over the keys that each query sees, ln min(q+1, window)."""
    return (pattern.positions() + 1).clamp(max=pattern.window).log()


@statistic(
    "Sandoval-Segura et al. 2025, arXiv 2504.03889",
    uniform_baseline=True,
    standard=True,
    shown=3,
    example=5,
)
def entropy(pattern: Pattern) -> Nats:
    """Mean entropy of the attention rows.

    1/T Σ_q H[q], H[q] = -Σ_k A[q,k] ln A[q,k]

    A learned sink is no key: its own term is not added.

    >>> round(entropy(pattern([[1, 0], [0.5, 0.5]])).item(), 6)  # ln 2 / 2
    0.346574
    """
    return pattern.entropy().mean(-1)


@statistic(
    "Guo et al. 2024, arXiv 2410.13835",
    uniform_baseline=True,
    defined=has_two_positions,
    standard=True,
)
def entropy_normalised(pattern: Pattern) -> ShareOfMaximum:
    """Mean entropy of the attention rows, each divided by the entropy of uniform attention.

    1/(T-1) Σ_{q≥1} H[q] / ln(q+1); with a window, / ln min(q+1, window)

    >>> entropy_normalised(pattern([[1, 0], [0.5, 0.5]])).item()
    1.0
    """
    # For query 0 the largest entropy is 0.
    return (pattern.entropy() / largest_entropy(pattern))[..., 1:].mean(-1)


@statistic(
    "after Ran-Milo et al. 2026, arXiv 2604.14722", uniform_baseline=True, defined=has_two_positions
)
def entropy_normalised_late(pattern: Pattern) -> ShareOfMaximum:
    """Mean entropy of the rows of the second half of the queries, each divided by the entropy of
    uniform attention.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} H[q] / ln(q+1); with a window, / ln min(q+1, window)

    >>> entropy_normalised_late(pattern([[1, 0], [0.5, 0.5]])).item()
    1.0
    """
    # Two tokens are enough: query 0, whose largest entropy is 0, is in the first half then.
    late = slice(pattern.n_ctx // 2, None)
    return (pattern.entropy() / largest_entropy(pattern))[..., late].mean(-1)


@statistic("common", uniform_baseline=True, standard=True)
def mean_distance(pattern: Pattern) -> Tokens:
    """Mean number of tokens that attention looks back.

    1/T Σ_q Σ_k A[q,k] (q-k)

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0]]
    >>> mean_distance(pattern(rows)).item()
    0.75
    """
    return pattern.distance().mean(-1)
