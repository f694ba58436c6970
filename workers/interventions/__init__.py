"""Interventions by the names that a scan gives them. Importing the package registers them."""

from headcount.schemas.registry import import_files
from headcount.workers.interventions.intervention_registry import (
    INTERVENTIONS,
    BoundIntervention,
    bind,
    intervention,
    needs_partners,
)
from headcount.workers.interventions.weight_changes import changed_weights

__all__ = [
    "INTERVENTIONS", "BoundIntervention", "bind", "changed_weights", "intervention",
    "needs_partners",
]  # fmt: skip

# Behind the names above, which some of the files import from here.
import_files(__name__, __path__)
