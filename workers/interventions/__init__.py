"""Interventions by the names that a scan gives them. Importing the package registers them."""

from headcount.workers.interventions import heads, inactive, positions, sinks, streaming, swaps
from headcount.workers.interventions.intervention_registry import (
    INTERVENTIONS,
    BoundIntervention,
    bind,
    intervention,
    needs_partners,
)
from headcount.workers.interventions.weight_changes import (
    changed_weights,
    check_targets,
    needs_bridge,
)

__all__ = [
    "INTERVENTIONS", "BoundIntervention", "bind", "changed_weights", "check_targets",
    "intervention", "needs_bridge", "needs_partners",
    "heads", "inactive", "positions", "sinks", "streaming", "swaps",
]  # fmt: skip
