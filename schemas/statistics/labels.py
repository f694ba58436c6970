"""Attention of the queries that an input family labels "trigger", and of all other queries.

With a window, those are left out that do not see the key.
"""

import math

from schemas.pattern import Labels, Pattern, Tensor
from schemas.statistics.statistic_registry import statistic


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
    triggers = labels["trigger"][:, None, 1 : 1 + mass.shape[-1]]
    selected = ~triggers if others else triggers
    return (mass * selected).sum(-1) / selected.sum(-1)


@statistic(
    unit="probability",
    range=(0, 1),
    source="Guo et al. 2024, arXiv 2410.13835",
    chance=True,
    defined=has_triggers,
    standard=False,
)
def sink_mass_triggers(pattern: Pattern, labels: Labels) -> Tensor:
    """Mean attention to key 0 of the queries that are labelled "trigger".

    1/|Q| Σ_{q∈Q} A[q,0], Q = triggers from query 1 on

    >>> a = pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    >>> sink_mass_triggers(a, triggers([0, 0, 1])).item()
    0.25
    """
    return mean_at_triggers(pattern.key(0)[..., 1 : pattern.window], labels)


@statistic(
    unit="probability",
    range=(0, 1),
    source="Guo et al. 2024, arXiv 2410.13835",
    chance=True,
    defined=has_triggers,
    standard=False,
)
def sink_mass_others(pattern: Pattern, labels: Labels) -> Tensor:
    """Mean attention to key 0 of the queries that are not labelled "trigger".

    1/|Q| Σ_{q∈Q} A[q,0], Q = queries from 1 on that are not triggers

    >>> a = pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    >>> sink_mass_others(a, triggers([0, 0, 1])).item()
    0.75
    """
    return mean_at_triggers(pattern.key(0)[..., 1 : pattern.window], labels, others=True)


@statistic(
    unit="probability",
    range=(0, 1),
    source="Guo et al. 2024, arXiv 2410.13835",
    chance=True,
    defined=has_triggers,
    standard=False,
)
def previous_token_triggers(pattern: Pattern, labels: Labels) -> Tensor:
    """Mean attention of the queries that are labelled "trigger" to the token just before them.

    1/|Q| Σ_{q∈Q} A[q,q-1], Q = triggers from query 1 on

    >>> a = pattern([[1, 0, 0], [0.75, 0.25, 0], [0.25, 0.5, 0.25]])
    >>> previous_token_triggers(a, triggers([0, 0, 1])).item()
    0.5
    """
    return mean_at_triggers(pattern.lag(1), labels)
