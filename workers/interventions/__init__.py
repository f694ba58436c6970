"""Edits of the model, by the names that a scan gives them. Importing the package registers them."""

from headcount.workers.interventions import heads, inactive, positions, sinks, streaming, swaps
from headcount.workers.interventions.intervention_registry import (
    INTERVENTIONS,
    BoundIntervention,
    bind,
    intervention,
    needs_partners,
)
from headcount.workers.interventions.weight_edits import check_targets, edited_weights, needs_bridge

__all__ = [
    "INTERVENTIONS", "BoundIntervention", "bind", "check_targets", "edited_weights", "intervention",
    "needs_bridge", "needs_partners",
    "heads", "inactive", "positions", "sinks", "streaming", "swaps",
]  # fmt: skip
