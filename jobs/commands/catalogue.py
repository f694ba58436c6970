"""What a scan can name: statistics, interventions, inputs and models."""

import re

from headcount.schemas.packages import entered

SENTENCE_END = re.compile(r"(?<![. ])\. ")  # a point and a space, but not that of `low .. high`

REGISTRIES = {
    "statistics": "schemas.statistics.STATISTICS",
    "interventions": "workers.interventions.INTERVENTIONS",
    "inputs": "workers.inputs.INPUTS",
    "models": "workers.model.info.bundled_models.BUNDLED",
}
"""What a scan can name, each by its place; the module is imported when it is asked for."""


def known_names(registry: str) -> list[tuple[str, str]]:
    """Every name of a registry, with the first sentence about it."""
    entries = entered(REGISTRIES[registry])
    if registry == "models":
        from headcount.workers.model.info.bundled_models import first_paragraph_of_card

        meanings = {f"bundled:{name}": first_paragraph_of_card(entries[name]) for name in entries}
    else:
        meanings = {name: entry.meaning for name, entry in entries.items()}
    return [
        (name, f"{SENTENCE_END.split(' '.join(meaning.split()))[0].rstrip('.')}.")
        for name, meaning in meanings.items()
    ]
