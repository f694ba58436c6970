"""Write docs/statistics.md from the registry: `python -m schemas.statistics.page`."""

from __future__ import annotations

import math
from itertools import groupby
from pathlib import Path
from sys import modules

from schemas.statistics import STATISTICS, Statistic

PAGE = Path(__file__).parent.parent.parent / "docs" / "statistics.md"

INTRODUCTION = """\
# Statistics

One float32 column each in the table `heads`, which has one row per sequence × layer × head. This page is generated from
the functions in `schemas/statistics/` by `make docs`; the same words ride in the Parquet field metadata, the SQL comments
and the report.

`A[q,k]` is the attention pattern (causal, k ≤ q), `S[q,k]` the score before the softmax, after scaling. T = `n_ctx`, q and k
count from 0, `t[q]` is a token. Everything is measured in float32; what is not defined is NULL, never 0. Where a statistic
has a *chance level*, the table `sequences` holds what uniform attention (`A[q,k] = 1/(q+1)`) would have scored on the same
sequence, as `chance_NAME`.
"""


def page() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION]
    for module, family in groupby(STATISTICS.values(), key=lambda s: s.compute.__module__):
        parts.append(f"## {module.rpartition('.')[2].capitalize()}\n\n{modules[module].__doc__}\n")
        parts += [_entry(s) for s in family]
    return "\n".join(parts)


def _entry(statistic: Statistic) -> str:
    low, high = (f"{bound:g}" if math.isfinite(bound) else ("∞" if bound > 0 else "-∞") for bound in statistic.range)
    facts = [f"unit: {statistic.unit}", f"range: {low} to {high}"]
    facts += [f"chance level: `chance_{statistic.name}`"] if statistic.chance else []
    facts += [] if statistic.standard else ["not standard: a scan asks for it by name, or for all"]
    facts += [statistic.undefined_when] if statistic.undefined_when else []
    facts += [f"reads: {', '.join(f'`{p}`' for p in statistic.parameters)}", f"source: {statistic.source}"]
    lines = [
        f"### {statistic.name}\n",
        f"{statistic.meaning}\n",
        f"    {statistic.formula}\n",
        f"{'; '.join(facts)}.\n",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
