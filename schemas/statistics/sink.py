"""How much attention rests on the first keys, or on a learned sink."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor, first_of_largest
from headcount.schemas.units import Position, Probability, Rank, ShareOfQueries
from headcount.schemas.values import Count

RAN_MILO = "Ran-Milo et al. 2026, arXiv 2604.14722"


def has_two_positions(pattern: Pattern) -> bool:
    """the sequence has at least two tokens."""
    return pattern.n_ctx >= 2


@statistic(
    "headcount",
    uniform_baseline=True,
    defined=has_two_positions,
    standard=True,
    marks="first key",
    shown=1,
    example=1,
)
def sink_mass(pattern: Pattern) -> Probability:
    """Mean attention to key 0 over the queries that see other keys.

    1/(T-1) Σ_{q≥1} A[q,0]

    >>> sink_mass(pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])).item()
    0.5
    """
    return pattern.key(0)[..., 1 : pattern.window].mean(-1)


@statistic(
    "Gu et al. 2024, arXiv 2410.10781", uniform_baseline=True, standard=True, marks="first key"
)
def sink_alpha(pattern: Pattern) -> Probability:
    """Mean attention to key 0 over all queries, the first included.

    1/T Σ_{q≥0} A[q,0]

    >>> sink_alpha(pattern([[1, 0], [0.5, 0.5]])).item()
    0.75
    """
    return pattern.key(0)[..., : pattern.window].mean(-1)


@statistic(RAN_MILO, uniform_baseline=True, standard=True, marks="first key")
def sink_mass_late(pattern: Pattern) -> Probability:
    """Mean attention to key 0 over the second half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} A[q,0]

    >>> sink_mass_late(pattern([[1, 0], [0.25, 0.75]])).item()
    0.25
    """
    return pattern.key(0)[..., pattern.n_ctx // 2 : pattern.window].mean(-1)


@statistic(
    "Xiao et al. 2023, arXiv 2309.17453", uniform_baseline=True, standard=True, marks="first key"
)
def sink_mass_first4(pattern: Pattern) -> Probability:
    """Mean attention to the first four keys together, over the second half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} Σ_{k<4} A[q,k]

    >>> sink_mass_first4(pattern([[1, 0], [0.25, 0.75]])).item()
    1.0
    """
    return late_mass(pattern, 0, 3)


def late_mass(pattern: Pattern, first: int, last: int) -> Tensor:
    """Mean attention to the keys `first .. last` together, over the queries of the second half that
    see the first of them, and so all.
    """
    # Query q sees key k while q < k + window. So the first of the keys leaves the window first.
    queries = slice(pattern.n_ctx // 2, first + pattern.window)
    # Zeros of the right shape: the sequence may have no token in that range.
    total = 0 * pattern.distance()[..., queries]
    for k in range(first, min(last + 1, pattern.n_ctx)):
        total = total + pattern.key(k)[..., queries]
    return total.mean(-1)


@statistic("Xiao et al. 2023, arXiv 2309.17453", uniform_baseline=True, marks="first key")
def sink_mass_first8(pattern: Pattern) -> Probability:
    """Mean attention to the first eight keys together, over the second half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} Σ_{k<8} A[q,k]

    >>> sink_mass_first8(pattern([[1, 0], [0.25, 0.75]])).item()
    1.0
    """
    return late_mass(pattern, 0, 7)


@statistic(f"after {RAN_MILO}", uniform_baseline=True, defined=has_two_positions)
def next4_mass_late(pattern: Pattern) -> Probability:
    """Mean attention to the keys 1 to 4 together, over the second half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} Σ_{1≤k≤4} A[q,k]

    >>> next4_mass_late(pattern([[1, 0], [0.25, 0.75]])).item()
    0.75
    """
    return late_mass(pattern, 1, 4)


@statistic(RAN_MILO, uniform_baseline=True, defined=has_two_positions)
def second_key_mass_late(pattern: Pattern) -> Probability:
    """Mean attention to key 1 over the second half of the queries: the sink's place after positions
    0 and 1 are swapped.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} A[q,1]

    >>> second_key_mass_late(pattern([[1, 0], [0.25, 0.75]])).item()
    0.75
    """
    return late_mass(pattern, 1, 1)


@statistic(f"a reproduction of {RAN_MILO}", marks="first key")
def sink_rank_late(pattern: Pattern) -> Rank:
    """Mean rank of key 0 among the keys of a query by their attention, over the second half of the
    queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} (1 + #{k : A[q,k] > A[q,0]})

    Keys that tie to 1e-5 do not count: rank 1 means that no key gets more attention.

    >>> sink_rank_late(pattern([[1, 0, 0], [0.25, 0.75, 0], [0.25, 0.5, 0.25]])).item()
    2.0
    """
    return 1 + pattern.above(1)[..., pattern.n_ctx // 2 : pattern.window].mean(-1)


@statistic("Scheuer, attention-sink-profiler", marks="first key")
def sink_strongest_late(pattern: Pattern, *, keys: Count = 1) -> ShareOfQueries:
    """Share of the queries of the second half whose largest attention goes to one of the first
    keys.

    1/(T-⌊T/2⌋) #{q≥⌊T/2⌋ : argmax_k A[q,k] < keys}

    Of keys that tie to 1e-5, the first is the largest.

    >>> rows = [[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0]]
    >>> sink_strongest_late(pattern(rows)).item()
    0.5
    >>> sink_strongest_late(pattern(rows), keys=2).item()
    1.0
    """
    above = pattern.above(keys)[..., pattern.n_ctx // 2 : pattern.window]
    return 1 - above.clamp(max=1).mean(-1)


@statistic("gpt-oss, arXiv 2508.10925", missing="the layer has no learned sink")
def sink_gate(pattern: Pattern) -> Probability:
    """Mean share of attention that the learned sink of a head takes.

    1/T Σ_q (1 - Σ_k A[q,k])

    >>> sink_gate(gated([[0.5, 0], [0.25, 0.5]])).item()
    0.375
    """
    return pattern.gate().mean(-1)


FEW_QUERIES = 16
"""A key near the end is seen by so few queries that its mean attention says little."""


def received_by_candidates(pattern: Pattern) -> Tensor:
    """Mean attention that keys receive, of the keys that enough queries see: `[batch head key]`."""
    # In a short sequence half of the queries are enough. min(T-k, window) queries see key k.
    half = (pattern.n_ctx + 1) // 2
    enough = min(FEW_QUERIES, half, pattern.window)
    return pattern.received()[..., : pattern.n_ctx - enough + 1]


@statistic("after Gu et al. 2024, arXiv 2410.10781")
def sink_position(pattern: Pattern) -> Position:
    """Position of the key that receives the largest mean attention of the queries that see it.

    argmax_k 1/(T-k) Σ_{q≥k} A[q,k], over the keys that at least min(16, ⌈T/2⌉) queries see

    `sink_position_mass` says whether this key is a sink. A window sums over the queries
    `k .. k+window-1`, and replaces 16 if it is shorter. Of keys that tie to 1e-5, it is the first.

    >>> rows = [[1, 0, 0, 0], [0, 1, 0, 0], [0.25, 0.75, 0, 0], [0, 0.5, 0.25, 0.25]]
    >>> sink_position(pattern(rows)).item()
    1.0
    """
    return first_of_largest(received_by_candidates(pattern)).float()


@statistic("after Gu et al. 2024, arXiv 2410.10781")
def sink_position_mass(pattern: Pattern) -> Probability:
    """Largest mean attention that a key receives of the queries that see it, at `sink_position`.

    max_k 1/(T-k) Σ_{q≥k} A[q,k], over the keys that at least min(16, ⌈T/2⌉) queries see

    >>> rows = [[1, 0, 0, 0], [0, 1, 0, 0], [0.25, 0.75, 0, 0], [0, 0.5, 0.25, 0.25]]
    >>> sink_position_mass(pattern(rows)).item()
    0.75
    """
    return received_by_candidates(pattern).amax(-1)
