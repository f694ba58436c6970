"""Edits of the model, by the names that a scan gives them."""

from workers.interventions import heads, positions, sinks
from workers.interventions.registry import INTERVENTIONS, Intervention, find_intervention, intervention
from workers.interventions.weights import edited_weights, needs_bridge

__all__ = [
    "INTERVENTIONS", "Intervention", "edited_weights", "find_intervention", "heads", "intervention", "needs_bridge",
    "positions", "sinks",
]  # fmt: skip
