"""Write a page for each registry of formulas: statistics, profiles, predictions, weight statistics.

`python -m headcount.schemas.formula_pages`
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import groupby
from sys import modules
from typing import Any

from headcount.schemas.formulas import Along, Formula, Ranged, notes_of, options_of
from headcount.schemas.packages import PACKAGE
from headcount.schemas.predictions import Prediction
from headcount.schemas.scans.kind import Kind
from headcount.schemas.scans.kinds import KINDS
from headcount.schemas.scans.values import range_of
from headcount.schemas.statistics import Statistic

DOCS = PACKAGE.parent / "docs" / "reference"

PAGES: dict[str, Kind[Any]] = {kind.page: kind for kind in KINDS}
"""The kind that each page describes. Kinds with the same registry share a page."""


def page(name: str) -> str:
    """A page, as Markdown; if its registry has several files, each file is a section."""
    kind = PAGES[name]
    formulas: Iterable[Formula] = kind.registry.values()
    # A registry is filled file by file, so the formulas of a file are neighbours.
    files = [
        (module, list(formulas_of_file))
        for module, formulas_of_file in groupby(formulas, lambda f: f.compute.__module__)
    ]
    parts = [kind.introduction]
    for module, formulas_of_file in files:
        if len(files) > 1:
            parts.append(f"## {module.rpartition('.')[2].replace('_', ' ').capitalize()}\n")
            # One formula says itself what it is.
            if len(formulas_of_file) > 1:
                parts.append((modules[module].__doc__ or "").strip() + "\n")
        parts += [_entry(formula) for formula in formulas_of_file]
    return "\n".join(parts)


def _entry(formula: Formula) -> str:
    """A formula: its meaning, its definition, and its facts in one line."""
    # The unit stands beside what the values run over: their range, or an axis.
    unit = formula.unit
    if isinstance(formula, Ranged):
        low, high = map(_bound, formula.range)
        unit += f", {low} to {high}"
    elif isinstance(formula, Along) and formula.axis != "none":
        unit += f", along {formula.axis}"
    facts = [unit]
    if isinstance(formula, Prediction) and formula.per_token:
        facts.append("one for each token")
    if isinstance(formula, Statistic):
        if formula.standard:
            facts.append("standard")
        if formula.uniform_baseline:
            facts.append("baseline")
    if formula.options:
        parameters = options_of(formula.compute)
        texts: list[str] = []
        for name, default in formula.options:
            allowed = range_of(parameters[name].annotation)
            texts.append(f"`{name}` = {default}" + (f" ({allowed})" if allowed else ""))
        facts.append(f"options {', '.join(texts)}: column `{formula.name}`")
    if formula.undefined_when:
        facts.append(formula.undefined_when)
    lines = [
        f"### {formula.function}\n",
        f"{formula.meaning}\n",
        f"    {' '.join(formula.formula.split())}\n",
        *(f"{note}\n" for note in notes_of(formula.compute)),
        f"{'; '.join(facts)} ({PAPER.sub(LINK, formula.source)}).\n",
    ]
    return "\n".join(lines)


PAPER = re.compile(r"^(.+?), arXiv (\d+\.\d+)")
"""A source that begins with a paper."""

LINK = r"[\1](https://arxiv.org/abs/\2)"


def _bound(value: float) -> str:
    if math.isfinite(value):
        return f"{value:g}"
    return "∞" if value > 0 else "-∞"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name), encoding="utf-8")
