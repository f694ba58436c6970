"""Write the pages of statistics, profiles, predictions and weight statistics from their registries.

`python -m schemas.formula_pages`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from sys import modules

from schemas.formulas import Along, Formula, Ranged
from schemas.predictions import PREDICTIONS, Prediction
from schemas.profiles import PROFILES
from schemas.statistics import STATISTICS, Statistic
from schemas.weight_statistics import WEIGHT_STATISTICS

DOCS = Path(__file__).parent.parent / "docs"

STATISTICS_INTRODUCTION = """\
# Statistics

One float32 column each in the table `heads`, which has one row per sequence × layer × head. This page is generated from
the functions in `schemas/statistics/` by `make docs`; the same words ride in the Parquet field metadata, the SQL comments
and the report.

`A[q,k]` is the attention pattern (causal, k ≤ q), `S[q,k]` the score before the softmax, after scaling. T = `n_ctx`, q and k
count from 0, `t[q]` is a token. Everything is measured in float32; what is not defined is NULL, never 0. Where a statistic
has a *chance level*, the table `sequences` holds what uniform attention (`A[q,k] = 1/(q+1)`) would have scored on the same
sequence, as `chance_NAME`.

Quantities of the literature that are no column of their own, and those left out with the reason: [catalogue.md](catalogue.md).
"""

PROFILES_INTRODUCTION = """\
# Profiles

Numbers along an axis, named in a scan's `profiles` and `curves`. The table `profiles` keeps their mean and spread over the
sequences of a shard, one row per layer × head × entry; the view `profile_means` merges shards. The table `curves` keeps them of
every sequence, as lists. Symbols are those of [statistics.md](statistics.md). This page is generated from the functions in
`schemas/profiles/` by `make docs`.
"""

PREDICTIONS_INTRODUCTION = """\
# Predictions

What the model predicts, named in a scan's `predictions`: float32 columns of the table `sequences`, lists parallel to `tokens` where
they say so. Only then is the unembedding computed. `t[i]` is a token, T = `n_ctx`. This page is generated from the functions in
`schemas/predictions.py` by `make docs`.
"""

WEIGHTS_INTRODUCTION = """\
# Weight statistics

What the untouched weights say without any input, named in a scan's `weight_statistics`: rows of the table `weights`, in float64,
written once per run. This page is generated from the functions in `schemas/weight_statistics/` by `make docs`.
"""

PAGES: dict[str, tuple[str, Mapping[str, Formula]]] = {
    "statistics.md": (STATISTICS_INTRODUCTION, STATISTICS),
    "profiles.md": (PROFILES_INTRODUCTION, PROFILES),
    "predictions.md": (PREDICTIONS_INTRODUCTION, PREDICTIONS),
    "weights.md": (WEIGHTS_INTRODUCTION, WEIGHT_STATISTICS),
}


def page(name: str) -> str:
    """A page, as Markdown: a section for each file of its registry, if there are several."""
    introduction, registry = PAGES[name]
    files = [
        (module, list(family))
        for module, family in groupby(registry.values(), lambda f: f.compute.__module__)
    ]
    parts = [introduction]
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
