"""What a scan can name: `headcount list statistics`, `interventions`, `inputs` or `models`."""

from __future__ import annotations

import re
from collections.abc import Mapping

SENTENCE_END = re.compile(r"(?<![. ])\. ")
"""A point and a space, which are no part of a range such as `low .. high`."""

REGISTRIES = ("statistics", "interventions", "inputs", "models")


def known_names(registry: str) -> list[tuple[str, str]]:
    """Every name of a registry, with the first sentence about it."""
    return [
        (name, f"{SENTENCE_END.split(' '.join(meaning.split()))[0].rstrip('.')}.")
        for name, meaning in _meanings(registry).items()
    ]


def _meanings(registry: str) -> Mapping[str, str]:
    # Only interventions need torch, which takes seconds to import.
    if registry == "statistics":
        from headcount.schemas.statistics import KIND

        return {name: formula.meaning for name, formula in KIND.registry.items()}
    if registry == "interventions":
        from headcount.workers.interventions import INTERVENTIONS

        return {name: intervention.meaning for name, intervention in INTERVENTIONS.items()}
    if registry == "inputs":
        from headcount.workers.inputs import INPUTS

        return {name: family.meaning for name, family in INPUTS.items()}
    from headcount.workers.model.files.bundled_models import BUNDLED, first_paragraph_of_card

    return {f"bundled:{name}": first_paragraph_of_card(path) for name, path in BUNDLED.items()}
