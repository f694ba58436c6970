"""Edits of the model, by the names that a scan gives them."""

from workers.interventions import heads, inactive, positions, sinks, swaps
from workers.interventions.intervention_registry import (
    INTERVENTIONS,
    Intervention,
    find_intervention,
    intervention,
)
from workers.interventions.weight_edits import check_targets, edited_weights, needs_bridge

__all__ = [
    "INTERVENTIONS", "Intervention", "check_targets", "edited_weights", "find_intervention", "heads", "inactive", "intervention",
    "needs_bridge", "positions", "sinks", "swaps",
]  # fmt: skip
