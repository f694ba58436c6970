"""Attention of the queries, and to the keys, that an input family labels.

"trigger" is a token that the task copies. In a text with a question, "gold" is what holds the
answer, "other" a distractor, "query" the question and "answer" the answer.
"""

import math
from typing import Annotated

from pydantic import Field

from headcount.schemas.formula_kinds import statistic
from headcount.schemas.pattern import Labels, Pattern, Tensor
from headcount.schemas.units import Probability, ShareOfTokens

Label = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
"""A label, in letters that a column's name may have."""


def has_triggers(pattern: Pattern, labels: Labels) -> Tensor | bool:
    """some query from 1 on is labelled "trigger", and some is not."""
    if "trigger" not in labels:
        return False
    queries = labels["trigger"][:, 1:]
    return queries.any(-1) & ~queries.all(-1)


def mean_at_triggers(mass: Tensor, labels: Labels, others: bool = False) -> Tensor:
    """Mean of `mass [batch head query-1]` over the triggers among its queries, which begin with 1.

    With `others`, the mean over the queries that are not triggers.
    """
    if "trigger" not in labels:
        # Undefined, but of the right shape.
        return mass.sum(-1) * math.nan
    # With a window, `mass` ends at the last query that sees the key.
    triggers = labels["trigger"][:, None, 1 : 1 + mass.shape[-1]]
    selected = ~triggers if others else triggers
    return (mass * selected).sum(-1) / selected.sum(-1)


@statistic(
    "Guo et al. 2024, arXiv 2410.13835",
    uniform_baseline=True,
    defined=has_triggers,
    marks="first key",
)
def sink_mass_triggers(pattern: Pattern, labels: Labels) -> Probability:
    """Mean attention to key 0 of the queries that are labelled "trigger".

    1/|Q| Σ_{q∈Q} A[q,0], Q = triggers from query 1 on

    >>> a = pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    >>> sink_mass_triggers(a, triggers([0, 0, 1])).item()
    0.25
    """
    return mean_at_triggers(pattern.key(0)[..., 1 : pattern.window], labels)


@statistic(
    "Guo et al. 2024, arXiv 2410.13835",
    uniform_baseline=True,
    defined=has_triggers,
    marks="first key",
)
def sink_mass_others(pattern: Pattern, labels: Labels) -> Probability:
    """Mean attention to key 0 of the queries that are not labelled "trigger".

    1/|Q| Σ_{q∈Q} A[q,0], Q = queries from 1 on that are not triggers

    >>> a = pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    >>> sink_mass_others(a, triggers([0, 0, 1])).item()
    0.75
    """
    return mean_at_triggers(pattern.key(0)[..., 1 : pattern.window], labels, others=True)


@statistic("Guo et al. 2024, arXiv 2410.13835", uniform_baseline=True, defined=has_triggers)
def previous_token_triggers(pattern: Pattern, labels: Labels) -> Probability:
    """Mean attention of the queries that are labelled "trigger" to the token just before them.

    1/|Q| Σ_{q∈Q} A[q,q-1], Q = triggers from query 1 on

    >>> a = pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    >>> previous_token_triggers(a, triggers([0, 0, 1])).item()
    0.5
    """
    return mean_at_triggers(pattern.lag(1), labels)


def undefined_value(pattern: Pattern) -> Tensor:
    """NaN of every sequence and head: `[batch head]`."""
    return pattern.key(0)[..., 0] * math.nan


def sees_labelled_key(
    pattern: Pattern, labels: Labels, *, keys: Label = "gold", queries: Label = "query"
) -> Tensor | bool:
    """some query with the label `queries` sees a key with the label `keys`."""
    if keys not in labels or queries not in labels:
        return False
    return (labels[queries] & (pattern.labelled_seen(labels[keys]) > 0)).any(-1)


@statistic(
    "after Zhang et al. 2025, arXiv 2506.09944", uniform_baseline=True, defined=sees_labelled_key
)
def labelled_key_mass(
    pattern: Pattern, labels: Labels, *, keys: Label = "gold", queries: Label = "query"
) -> Probability:
    """Mean attention to all keys with the label `keys`, over the queries with the label `queries`
    that see one of them.

    1/|Q| Σ_{q∈Q} Σ_{k∈K, k≤q} A[q,k], K = keys labelled keys, Q = queries labelled queries that see
    one of K

    >>> rows = [[1, 0, 0], [0.5, 0.5, 0], [0.25, 0.5, 0.25]]
    >>> marks = triggers([1, 1, 0]) | {"last": triggers([0, 0, 1])["trigger"]}
    >>> labelled_key_mass(pattern(rows), marks, keys="trigger", queries="last").item()
    0.75
    """
    if keys not in labels or queries not in labels:
        return undefined_value(pattern)
    matched = labels[queries] & (pattern.labelled_seen(labels[keys]) > 0)
    mass = pattern.labelled_mass(labels[keys], matched)
    # Without such a query this is 0/0: NaN, which is stored as NULL.
    return mass.sum(-1) / matched.sum(-1)[:, None]


def has_answers(labels: Labels) -> Tensor | bool:
    """some token from position 1 on is labelled "answer", and some token is labelled "gold"."""
    if "answer" not in labels or "gold" not in labels:
        return False
    return labels["answer"][:, 1:].any(-1) & labels["gold"].any(-1)


@statistic("Wu et al. 2024, arXiv 2404.15574, teacher forced", defined=has_answers)
def retrieval_score(pattern: Pattern, labels: Labels, tokens: Tensor) -> ShareOfTokens:
    """Share of the tokens labelled "answer" that the head copies: the key with the largest
    attention of the query before is labelled "gold" and holds the same token.

    1/|P| #{p∈P : k* labelled gold, t[k*] = t[p]}, k* = argmax_k A[p-1,k], P = answers from position
    1 on

    Of keys that tie to 1e-5, k* is the first.

    >>> rows = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0], [0, 0.5, 0.25, 0.25]]
    >>> gold, answers = triggers([0, 1, 0, 0]), triggers([0, 0, 1, 1])
    >>> marks = {"gold": gold["trigger"], "answer": answers["trigger"]}
    >>> retrieval_score(pattern(rows), marks, copies([5, 7, 8, 7]).query_label).item()
    0.5
    """
    if "answer" not in labels or "gold" not in labels:
        return undefined_value(pattern)
    answers = labels["answer"]
    # The query of token p is p - 1. `roll` also moves position 0 to the end, which is cut off.
    strongest = pattern.strongest_key(answers.roll(-1, -1))[..., :-1]
    is_gold = labels["gold"][:, None].take_along_dim(strongest, -1)
    is_same = tokens[:, None].take_along_dim(strongest, -1) == tokens[:, None, 1:]
    copied = is_gold & is_same & answers[:, None, 1:]
    return copied.sum(-1) / answers[:, 1:].sum(-1)[:, None]
