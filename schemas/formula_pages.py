"""Write a page for each registry of formulas: statistics, profiles, predictions, weight statistics.

`python -m schemas.formula_pages`
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from sys import modules
from typing import Any

from schemas.formulas import Along, Formula, Ranged
from schemas.kind import Kind
from schemas.kinds import KINDS
from schemas.predictions import Prediction
from schemas.statistics import Statistic

DOCS = Path(__file__).parent.parent / "docs"

PAGES: dict[str, Kind[Any]] = {kind.page: kind for kind in KINDS}
"""The kind that each page describes; kinds of one registry share a page."""


def page(name: str) -> str:
    """A page, as Markdown: a section for each file of its registry, if there are several."""
    kind = PAGES[name]
    formulas: Iterable[Formula] = kind.registry.values()
    files = [
        (module, list(family))
        for module, family in groupby(formulas, lambda f: f.compute.__module__)
    ]
    parts = [kind.introduction]
    for module, family in files:
        if len(files) > 1:
            parts.append(
                f"## {module.rpartition('.')[2].replace('_', ' ').capitalize()}\n\n{(modules[module].__doc__ or '').strip()}\n"
            )
        parts += [_entry(f) for f in family]
    return "\n".join(parts)


def _entry(formula: Formula) -> str:
    facts = [f"unit: {formula.unit}", *_own_facts(formula)]
    facts += [formula.undefined_when] if formula.undefined_when else []
    facts += [
        f"reads: {', '.join(f'`{p}`' for p in formula.parameters)}",
        f"source: {formula.source}",
    ]
    lines = [
        f"### {formula.name}\n",
        f"{formula.meaning}\n",
        f"    {' '.join(formula.formula.split())}\n",
        f"{'; '.join(facts)}.\n",
    ]
    return "\n".join(lines)


def _own_facts(formula: Formula) -> list[str]:
    """What its kind of formula has and others have not."""
    facts: list[str] = []
    if isinstance(formula, Ranged):
        low, high = (
            f"{bound:g}" if math.isfinite(bound) else ("∞" if bound > 0 else "-∞")
            for bound in formula.range
        )
        facts.append(f"range: {low} to {high}")
    if isinstance(formula, Along):
        facts.append("one number" if formula.axis == "none" else f"along: {formula.axis}")
    if isinstance(formula, Prediction) and formula.per_token:
        facts.append("one for each token")
    if isinstance(formula, Statistic):
        facts += [f"chance level: `chance_{formula.name}`"] if formula.chance else []
        facts += (
            [] if formula.standard else ["not standard: a scan asks for it by name, or for all"]
        )
    return facts


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
