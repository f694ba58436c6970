"""Pre-softmax scores, and the angles behind them."""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.statistics.decomposition import directions, has_fixed_positions
from headcount.schemas.statistics.matching import has_three_positions
from headcount.schemas.statistics.sink import has_two_positions
from headcount.schemas.units import Cosine, Logits, LogitSpread


@statistic(
    "Guo et al. 2024, arXiv 2410.13835",
    defined=has_three_positions,
    standard=True,
    marks="first key",
)
def sink_logit_margin(pattern: Pattern) -> Logits:
    """How much the score of key 0 exceeds the mean score of the other earlier keys, on average.

    1/(T-2) Σ_{q≥2} (S[q,0] - 1/(q-1) Σ_{1≤k<q} S[q,k])

    >>> sink_logit_margin(scores([[0, 0, 0], [0, 0, 0], [5, 3, 9]])).item()
    2.0
    """
    # Queries 0 and 1 have no other earlier key.
    return (pattern.score(0) - pattern.earlier_score())[..., 2 : pattern.window].mean(-1)


@statistic("Guo et al. 2024, arXiv 2410.13835", defined=has_two_positions, marks="first key")
def sink_logit_spread(pattern: Pattern) -> LogitSpread:
    """Standard deviation over the queries of the score of key 0.

    √(1/(T-1) Σ_{q≥1} (S[q,0] - m)²), m = 1/(T-1) Σ_{q≥1} S[q,0]

    >>> sink_logit_spread(scores([[9, 0, 0], [1, 0, 0], [5, 3, 9]])).item()
    2.0
    """
    scores = pattern.score(0)[..., 1 : pattern.window]
    return (scores - scores.mean(-1, keepdim=True)).square().mean(-1).sqrt()


@statistic("after Zhai et al. 2023, arXiv 2303.06296")
def score_max(pattern: Pattern) -> Logits:
    """Largest score of a query and a key that it sees.

    max_q max_{k≤q} S[q,k]

    A learned sink is no key, and a query does not see a key that an intervention hides.

    >>> score_max(scores([[1, 9, 9], [-2, 3, 9], [0, 2, -5]])).item()
    3.0
    """
    return pattern.largest_score().amax(-1)


def has_fixed_positions_and_three(rotary: bool, pattern: Pattern) -> bool:
    """queries and keys are not rotated and the sequence has at least three tokens."""
    return not rotary and has_three_positions(pattern)


@statistic(
    "Gu et al. 2024, arXiv 2410.10781",
    defined=has_fixed_positions,
    of_directions=True,
    marks="first key",
)
def sink_key_cosine(pattern: Pattern, q: Tensor, k: Tensor) -> Cosine:
    """Mean cosine of the angle between the queries and key 0.

    1/T Σ_q q[q]·k[0] / (‖q[q]‖₂ ‖k[0]‖₂)

    >>> q, k = vectors([1, 0], [0, 2]), vectors([0, 5], [1, 0])
    >>> sink_key_cosine(pattern([[1, 0]] * 2), q, k).item()
    0.5
    """
    return (directions(q[:, : pattern.window]) * directions(k[:, :1])).sum(-1).mean(1)


@statistic(
    "Gu et al. 2024, arXiv 2410.10781", defined=has_fixed_positions_and_three, of_directions=True
)
def earlier_key_cosine(pattern: Pattern, q: Tensor, k: Tensor) -> Cosine:
    """Mean cosine of the angle between the queries and the earlier keys other than key 0.

    1/(T-2) Σ_{q≥2} 1/(q-1) Σ_{1≤k<q} q[q]·k[k] / (‖q[q]‖₂ ‖k[k]‖₂)

    >>> q, k = vectors([9], [9], [2]), vectors([1], [-3], [1])
    >>> earlier_key_cosine(pattern([[1, 0, 0]] * 3), q, k).item()
    -1.0
    """
    # The sum of cosines with many keys is the product with the sum of their directions. Query q has
    # q-1 such keys, which is the number of the position before it.
    stop = pattern.window
    late_q, earlier_k = q.transpose(1, 2)[:, :, 2:stop], k.transpose(1, 2)[:, :, 1 : stop - 1]
    sums = directions(earlier_k).cumsum(2)
    return ((directions(late_q) * sums).sum(-1) / pattern.positions()[1 : stop - 1]).mean(-1)
