"""Where attention goes, by lag, by key, by query and by pair."""

from headcount.schemas.formula_kinds import profile
from headcount.schemas.pattern import Pattern
from headcount.schemas.units import Probability


@profile("Farrell 2023, look-back-two heads; TransformerLens head_detector", axis="lag")
def attention_by_lag(pattern: Pattern) -> Probability:
    """Attention to the key d positions back, mean over the queries that have one.

    lag[d] = 1/(T-d) Σ_{q≥d} A[q,q-d]

    Σ_d (T-d) lag[d] = T.

    >>> attention_by_lag(pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])).tolist()
    [[[0.5, 0.625, 0.25]]]
    """
    return pattern.by_lag()


@profile("headcount", axis="key")
def attention_received_by_key(pattern: Pattern) -> Probability:
    """Attention that a key receives, mean over the queries that see it.

    1/(T-k) Σ_{q≥k} A[q,k]; with a window, 1/min(T-k, window) Σ_{k≤q<k+window} A[q,k]

    >>> attention_received_by_key(pattern([[1, 0, 0], [0.75, 0.25, 0], [0.5, 0.25, 0.25]])).tolist()
    [[[0.75, 0.25, 0.25]]]
    """
    return pattern.received()


@profile("headcount", axis="query")
def sink_attention_by_query(pattern: Pattern) -> Probability:
    """Attention to key 0.

    A[q,0]

    >>> sink_attention_by_query(pattern([[1, 0], [0.75, 0.25]])).tolist()
    [[[1.0, 0.75]]]
    """
    return pattern.key(0)


@profile("Farrell 2023, recency bias", axis="key")
def last_attention_by_key(pattern: Pattern) -> Probability:
    """Attention of the last query.

    A[T-1,k]

    >>> last_attention_by_key(pattern([[1, 0], [0.75, 0.25]])).tolist()
    [[[0.75, 0.25]]]
    """
    return pattern.row(pattern.n_ctx - 1)


@profile("Farrell 2023, previous-token and look-back-two heads", axis="pair")
def attention_by_pair(pattern: Pattern) -> Probability:
    """The attention pattern itself.

    A[q,k], k ≤ q

    >>> attention_by_pair(pattern([[1, 0], [0.75, 0.25]])).tolist()
    [[[[1.0, 0.0], [0.75, 0.25]]]]
    """
    return pattern.dense()
