"""Attention to keys at a fixed distance, and to keys chosen by equal tokens."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pairs, Pattern, Tensor
from headcount.schemas.statistics.sink import has_two_positions
from headcount.schemas.units import Keys, Probability, ShareOfQueries


def has_three_positions(pattern: Pattern) -> bool:
    """the sequence has at least three tokens."""
    return pattern.n_ctx >= 3


def has_copies(copies: Pairs) -> Tensor:
    """some token of the sequence occurs twice."""
    return (copies.count > 0).any(-1)


def mean_over_matched(pattern: Pattern, pairs: Pairs) -> Tensor:
    """Mean attention to the keys of pairs over the queries that see at least one of them."""
    matched = pattern.seen(pairs) > 0
    # Without such a query this is 0/0: NaN, which is stored as NULL.
    return (pattern.mass(pairs) * matched[:, None]).sum(-1) / matched.sum(-1)[:, None]


@statistic(
    "Elhage et al. 2021",
    uniform_baseline=True,
    defined=has_two_positions,
    standard=True,
    shown=5,
    example=3,
)
def previous_token_score(pattern: Pattern) -> Probability:
    """Mean attention to the token just before.

    1/(T-1) Σ_{q≥1} A[q,q-1]

    >>> previous_token_score(pattern([[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0]])).item()
    0.75
    """
    return pattern.lag(1).mean(-1)


@statistic("Farrell 2023", uniform_baseline=True, defined=has_three_positions, standard=True)
def lookback_two_score(pattern: Pattern) -> Probability:
    """Mean attention to the token two positions back.

    1/(T-2) Σ_{q≥2} A[q,q-2]

    >>> lookback_two_score(pattern([[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.75, 0]])).item()
    0.25
    """
    return pattern.lag(2).mean(-1)


@statistic("TransformerLens head_detector", uniform_baseline=True, standard=True)
def self_attention(pattern: Pattern) -> Probability:
    """Mean attention of a token to itself.

    1/T Σ_q A[q,q]

    >>> self_attention(pattern([[1, 0], [0.5, 0.5]])).item()
    0.75
    """
    return pattern.lag(0).mean(-1)


@statistic(
    "Olsson et al. 2022",
    uniform_baseline=True,
    defined=has_copies,
    standard=True,
    marks="successors",
    shown=2,
    example=2,
)
def induction_score(pattern: Pattern, successors: Pairs) -> Probability:
    """Mean attention to the keys that follow an earlier copy of the query's token.

    1/|Q| Σ_{q∈Q} Σ_{j<q, t[j]=t[q]} A[q,j+1], Q = queries with an earlier copy

    On a repeated block of distinct tokens it equals `induction_diagonal_strict`. TransformerLens's
    head detector divides by T: its score is this one times `match_coverage`.

    >>> a = pattern([[1, 0, 0], [0.5, 0.5, 0], [0.125, 0.75, 0.125]])
    >>> induction_score(a, successors([7, 8, 7])).item()
    0.75
    """
    return mean_over_matched(pattern, successors)


@statistic(
    "TransformerLens head_detector",
    uniform_baseline=True,
    defined=has_copies,
    standard=True,
    marks="copies",
    example=4,
)
def duplicate_score(pattern: Pattern, copies: Pairs) -> Probability:
    """Mean attention to earlier copies of the query's own token.

    1/|Q| Σ_{q∈Q} Σ_{j<q, t[j]=t[q]} A[q,j], Q = queries with an earlier copy

    >>> a = pattern([[1, 0, 0], [0.5, 0.5, 0], [0.125, 0.75, 0.125]])
    >>> duplicate_score(a, copies([7, 8, 7])).item()
    0.125
    """
    return mean_over_matched(pattern, copies)


@statistic("headcount", standard=True)
def match_coverage(copies: Pairs) -> ShareOfQueries:
    """Share of the queries whose token has an earlier copy.

    |Q|/T, Q = queries with an earlier copy

    >>> match_coverage(copies([7, 8, 7, 8])).item()
    0.5
    """
    return (copies.count > 0).float().mean(-1)


@statistic("headcount")
def match_count(copies: Pairs) -> Keys:
    """Mean number of earlier copies of the query's token.

    1/T Σ_q #{j<q : t[j]=t[q]}

    >>> match_count(copies([7, 8, 7, 7])).item()
    0.75
    """
    return copies.count.float().mean(-1)
