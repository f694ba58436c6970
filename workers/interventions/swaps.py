"""Keys and values of position 0 exchanged with another position's."""

from torch import Tensor

from headcount.schemas.values import Count
from headcount.workers.engine.changes import replaced
from headcount.workers.interventions.intervention_registry import intervention


@intervention
def swap_first_key(k: Tensor, *, position: Count) -> Tensor:
    """Position 0 and another exchange their keys, before any rotation: does the sink follow the
    key?
    """
    return _swapped(k, position)


@intervention
def swap_first_value(v: Tensor, *, position: Count) -> Tensor:
    """Position 0 and another exchange their values."""
    return _swapped(v, position)


def _swapped(activation: Tensor, position: int) -> Tensor:
    """`[batch pos …]`, with position 0 and another exchanged."""
    positions = [0, position]
    return replaced(activation, (slice(None), positions), activation[:, positions[::-1]])
