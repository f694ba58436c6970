"""What a scan can name: `headcount list statistics`, `interventions`, `inputs` or `models`."""

from __future__ import annotations

import re

SENTENCE_END = re.compile(r"(?<![. ])\. ")
"""A point and a space, which are no part of a range such as `low .. high`."""

REGISTRIES = ("statistics", "interventions", "inputs", "models")


def known_names(registry: str) -> list[tuple[str, str]]:
    """Every name of a registry, with the first sentence about it."""
    # Only interventions need torch, which takes seconds to import.
    if registry == "statistics":
        from headcount.schemas.statistics import STATISTICS

        meanings = {name: formula.meaning for name, formula in STATISTICS.items()}
    elif registry == "interventions":
        from headcount.workers.interventions import INTERVENTIONS

        meanings = {name: intervention.meaning for name, intervention in INTERVENTIONS.items()}
    elif registry == "inputs":
        from headcount.workers.inputs import INPUTS

        meanings = {name: family.meaning for name, family in INPUTS.items()}
    else:
        from headcount.workers.model.files.bundled_models import BUNDLED, first_paragraph_of_card

        cards = {name: first_paragraph_of_card(path) for name, path in BUNDLED.items()}
        meanings = {f"bundled:{name}": paragraph for name, paragraph in cards.items()}
    return [
        (name, f"{SENTENCE_END.split(' '.join(meaning.split()))[0].rstrip('.')}.")
        for name, meaning in meanings.items()
    ]
