"""What the query bias adds to the scores: Δ[k] = b_Q·(k[k] - b_K), before the division by √d_head.

With the contents q[q] - b_Q of a query and k[k] - b_K of a key, q·k = T1 + T2 + T3 + T4. T1 is the
product of the contents. T3 = Δ[k] is the same for every query. T2 and T4 do not depend on the key,
so the softmax cancels them. Folded weights move a part of T1 into b_Q. Caps of scores, ALiBi's bias
and learned sinks are left out. Effective positions are known if the model adds positions and any
first MLP is a module of its own; MLP_0 takes W_pos[j] without the norm before it.
"""

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Pattern, Tensor
from headcount.schemas.statistics.sink import has_two_positions
from headcount.schemas.units import Cosine, Probability, ScaledLogitLead, ScaledLogits

MAHMOOD = "Mahmood's reproduction of Ran-Milo et al. 2026"


def has_fixed_positions(rotary: bool) -> bool:
    """queries and keys are not rotated."""
    return not rotary


def has_fixed_positions_and_two(rotary: bool, pattern: Pattern) -> bool:
    """queries and keys are not rotated and the sequence has at least two tokens."""
    return not rotary and has_two_positions(pattern)


def shifts(b_Q: Tensor, k: Tensor, b_K: Tensor) -> Tensor:
    """Δ of every key, `[batch key head]`."""
    # b_Q·(k - b_K) without a copy of k: b_K is taken away after the product.
    return (k * b_Q).sum(-1) - (b_Q * b_K).sum(-1)


@statistic("Ran-Milo et al. 2026, arXiv 2604.14722", defined=has_fixed_positions)
def score_shift(b_Q: Tensor, k: Tensor, b_K: Tensor) -> ScaledLogits:
    """Mean over the keys of what the query bias adds to the score of a key.

    1/T Σ_k Δ[k], Δ[k] = b_Q·(k[k] - b_K)

    >>> score_shift(head([2, 0]), vectors([3, 9], [1, 9]), head([1, 4])).item()
    2.0
    """
    return shifts(b_Q, k.mean(1, keepdim=True), b_K)[:, 0]


@statistic("Ran-Milo et al. 2026, arXiv 2604.14722", defined=has_fixed_positions, marks="first key")
def sink_score_shift(b_Q: Tensor, k: Tensor, b_K: Tensor) -> ScaledLogits:
    """What the query bias adds to the score of key 0.

    Δ[0], Δ[k] = b_Q·(k[k] - b_K)

    >>> sink_score_shift(head([2, 0]), vectors([3, 9], [1, 9]), head([1, 4])).item()
    4.0
    """
    return shifts(b_Q, k[:, :1], b_K)[:, 0]


@statistic("Ran-Milo et al. 2026, arXiv 2604.14722", defined=has_fixed_positions, marks="first key")
def sink_score_shift_lead(b_Q: Tensor, k: Tensor, b_K: Tensor) -> ScaledLogitLead:
    """How much more the query bias adds to the score of key 0 than to the lowest of all keys.

    Δ[0] - min_k Δ[k], Δ[k] = b_Q·(k[k] - b_K)

    >>> sink_score_shift_lead(head([2, 0]), vectors([3, 9], [1, 9], [2, 9]), head([1, 4])).item()
    4.0
    """
    shift = shifts(b_Q, k, b_K)
    return shift[:, 0] - shift.amin(1)


@statistic(
    "after Ran-Milo et al. 2026, arXiv 2604.14722", defined=has_fixed_positions, marks="first key"
)
def sink_shift_advantage(pattern: Pattern, b_Q: Tensor, k: Tensor, b_K: Tensor) -> ScaledLogits:
    """How much more the query bias adds to the score of key 0 than to the mean key, over the second
    half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} (Δ[0] - 1/(q+1) Σ_{k≤q} Δ[k]), Δ[k] = b_Q·(k[k] - b_K)

    Divided by `sink_score_advantage`, it is the part of the advantage that the query bias makes.

    >>> a = pattern([[1, 0], [0.5, 0.5]])
    >>> sink_shift_advantage(a, head([2, 0]), vectors([3, 9], [1, 9]), head([1, 4])).item()
    2.0
    """
    shift = shifts(b_Q, k, b_K)
    # The cumulative sum of ones is q+1.
    lead = shift[:, :1] - shift.cumsum(1) / (shift * 0 + 1).cumsum(1)
    return lead[:, pattern.n_ctx // 2 : pattern.window].mean(1)


@statistic(
    "after Ran-Milo et al. 2026, arXiv 2604.14722", defined=has_fixed_positions, marks="first key"
)
def sink_score_advantage(pattern: Pattern, q: Tensor, k: Tensor) -> ScaledLogits:
    """How much q·k of key 0 exceeds that of the mean key, over the second half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} q[q]·(k[0] - 1/(q+1) Σ_{k≤q} k[k])

    >>> sink_score_advantage(scores([[0, 0], [0, 0]]), vectors([7], [2]), vectors([3], [1])).item()
    2.0
    """
    # Σ_{k≤q} q·k[k] = q·Σ_{k≤q} k[k]: cumulative sums of keys replace the matrix of scores.
    half, stop = pattern.n_ctx // 2, pattern.window
    q, k = q.transpose(1, 2)[:, :, half:stop], k.transpose(1, 2)
    # Late queries have all keys of the first half before them: these are added up once.
    sums = k[:, :, half:stop].cumsum(2) + k[:, :, :half].sum(2, keepdim=True)
    mean = sums / (pattern.positions()[half:stop, None] + 1)
    return (q * (k[:, :, :1] - mean)).sum(-1).mean(-1)


@statistic(
    "after Ran-Milo et al. 2026, arXiv 2604.14722",
    defined=has_fixed_positions_and_two,
    marks="first key",
)
def sink_mass_shift_only(pattern: Pattern, b_Q: Tensor, k: Tensor, b_K: Tensor) -> Probability:
    """Mean attention to key 0 over the second half of the queries, if scores were only what the
    query bias adds.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} exp(sΔ[0]) / Σ_{k≤q} exp(sΔ[k]), Δ[k] = b_Q·(k[k] - b_K), s = 1/√d_head,
    or the model's own scale

    >>> q, k = vectors([1], [1]), vectors([1], [0])
    >>> round(sink_mass_shift_only(products(q, k), head([math.log(3)]), k, head([0])).item(), 6)
    0.75
    """
    scores = shifts(b_Q, k, b_K) * pattern.scale
    # Scores are the same for every query, so query q's softmax sums the first q+1 of them.
    mass = (scores[:, :1] - scores.logcumsumexp(1)).exp()
    return mass[:, pattern.n_ctx // 2 : pattern.window].mean(1)


@statistic(
    "after Ran-Milo et al. 2026, arXiv 2604.14722",
    defined=has_fixed_positions_and_two,
    marks="first key",
)
def sink_mass_content_only(pattern: Pattern, b_Q: Tensor) -> Probability:
    """Mean attention to key 0 over the second half of the queries, if queries had no bias.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} exp(c[q,0]) / Σ_{k≤q} exp(c[q,k]), c[q,k] = s (q[q] - b_Q)·k[k], s =
    1/√d_head, or the model's own scale

    This is the softmax of T1: T2 is the same for all keys.

    >>> whole = products(vectors([math.log(9)], [math.log(9)]), vectors([1], [0]))
    >>> round(sink_mass_content_only(whole, head([math.log(3)])).item(), 6)
    0.75
    """
    late = slice(pattern.n_ctx // 2, pattern.window)
    return pattern.without(b_Q).key(0)[..., late].mean(-1)


def has_effective_positions(effective: Tensor) -> Tensor:
    """effective positions are known."""
    return ~effective.isnan().any()


def has_two_effective_positions(effective: Tensor) -> Tensor:
    """effective positions are known and the sequence has at least two tokens."""
    return has_effective_positions(effective) & (len(effective) > 1)


@statistic(MAHMOOD, defined=has_effective_positions, of_directions=True, marks="first key")
def sink_position_cosine(q: Tensor, b_Q: Tensor, W_K: Tensor, effective: Tensor) -> Cosine:
    """Mean cosine of queries without their bias and the key of effective position 0, over the
    second half of the queries.

    1/(T-⌊T/2⌋) Σ_{q≥⌊T/2⌋} cos(q[q] - b_Q, EPE[0] W_K), EPE[j] = W_pos[j] + MLP_0(W_pos[j])

    >>> positions, W_K = stream([2, 0], [0, 5])[0], head([[1, 0], [0, 1]])
    >>> sink_position_cosine(vectors([9, 9], [4, 1]), head([1, 1]), W_K, positions).item()
    1.0
    """
    return content_cosine(q, b_Q, effective[:1] @ W_K)


@statistic(MAHMOOD, defined=has_two_effective_positions, of_directions=True)
def other_position_cosine(q: Tensor, b_Q: Tensor, W_K: Tensor, effective: Tensor) -> Cosine:
    """Mean cosine of queries without their bias and the keys of the other effective positions, over
    the second half of the queries.

    1/((T-⌊T/2⌋)(T-1)) Σ_{q≥⌊T/2⌋} Σ_{j≥1} cos(q[q] - b_Q, EPE[j] W_K), EPE[j] = W_pos[j] +
    MLP_0(W_pos[j])

    >>> positions, W_K = stream([2, 0], [0, 5])[0], head([[1, 0], [0, 1]])
    >>> other_position_cosine(vectors([9, 9], [4, 1]), head([1, 1]), W_K, positions).item()
    0.0
    """
    return content_cosine(q, b_Q, effective[1:] @ W_K)


def content_cosine(q: Tensor, b_Q: Tensor, keys: Tensor) -> Tensor:
    """Mean cosine of the late queries, without their bias, and keys `[head key d_head]`."""
    # The mean over all pairs of u·v is (mean u)·(mean v).
    content = q[:, q.shape[1] // 2 :] - b_Q
    return (directions(content).mean(1) * directions(keys).mean(1)).sum(-1)


def directions(x: Tensor) -> Tensor:
    """Vectors scaled to length 1; a vector of zeros has no direction and becomes NaN (0/0)."""
    return x / x.norm(dim=-1, keepdim=True)
