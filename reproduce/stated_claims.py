"""What sources claim and measure, and what here shows it; `docs/pages.py` makes a page of it.

A file in reproduce/claims/ holds the claims of one source:

    source = "Name of the source"
    page = "Where it can be read"         # optional

    [[claim]]
    text = "What it says, in our words"
    shown_by = ["REPLICATION: beginning of the name of a published value, a claim or a figure"]

Instead of `shown_by` a claim has `covered_by`, a text that names a column, an intervention, an
input or a view, or `left_out`, which says why nothing shows it, and its `reason` in a few words. A
claim may have `shown_by` and `left_out`, if a part is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from headcount.reproduce.replication import Replication, read_toml, replications

CLAIMS = Path(__file__).parent / "claims"

CATALOGUE = "catalogue_statistics"
"""The file of the quantities that the literature measures, and where each is here."""


class StatedClaim(BaseModel):
    """One thing that a source says."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str
    shown_by: tuple[str, ...] = ()
    """What shows it: `REPLICATION: beginning of a name`."""
    covered_by: str = ""
    """The column, intervention, input or view that measures it, if it is a definition."""
    left_out: str = ""
    """Why it, or a part of it, is not shown."""
    reason: str = ""
    """The same in a few words, which several claims may share."""

    @property
    def answered(self) -> bool:
        """Whether something here shows or measures it, or a part of it."""
        return bool(self.shown_by or self.covered_by)

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if not (self.answered or self.left_out):
            raise ValueError("expected shown_by, covered_by or left_out")
        if bool(self.left_out) != bool(self.reason):
            raise ValueError("expected left_out and its reason, got one of them")
        for place in self.shown_by:
            if ": " not in place:
                raise ValueError(
                    f"shown_by: expected 'REPLICATION: beginning of a name', got {place!r}"
                )
        return self


class Source(BaseModel):
    """One source with its claims."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    """What it is called."""
    page: str = ""
    """Where it can be read."""
    claim: tuple[StatedClaim, ...]


def sources(directory: Path = CLAIMS) -> dict[str, Source]:
    """Every source with its claims, by name of the file."""
    return {file.stem: read_toml(file, Source) for file in sorted(directory.glob("*.toml"))}


def problems(directory: Path = CLAIMS) -> list[str]:
    """What claims name that is not there; one line each."""
    names_by_replication = {name: _names_of(one) for name, one in replications().items()}
    words_of_names = known_words()
    lines: list[str] = []
    for file, source in sources(directory).items():
        for claim in source.claim:
            where = f"{file}.toml: {claim.text[:60]!r}"
            lines += [f"{where}: {line}" for line in _problems_of(claim, names_by_replication)]
            words = set(re.findall(r"\w+", claim.covered_by))
            if claim.covered_by and not words & words_of_names:
                lines.append(f"{where}: covered_by names no column, intervention, input or view")
    return lines


def _problems_of(
    claim: StatedClaim, names_by_replication: Mapping[str, Iterable[str]]
) -> list[str]:
    """What a claim is shown by that is not there."""
    lines: list[str] = []
    for place in claim.shown_by:
        replication, _, beginning = place.partition(": ")
        names = names_by_replication.get(replication)
        if names is None:
            lines.append(f"there is no replication {replication!r}")
        elif not any(name.startswith(beginning) for name in names):
            lines.append(f"nothing in {replication} has a name that begins with {beginning!r}")
    return lines


def _names_of(replication: Replication) -> list[str]:
    """What may show a claim: published values, claims and figures of a replication."""
    names = [value.full_name for value in replication.published_values]
    names += [claim.words for claim in replication.claim]
    return names + [figure.title for figure in replication.figure]


def known_words() -> set[str]:
    """Every name that a scan or SQL may use."""
    # These import torch, which takes seconds, and only this check needs them.
    from headcount.queries.ask.named_queries import QUERIES
    from headcount.schemas.scans.kinds import KINDS, TABLES
    from headcount.workers.inputs import INPUTS
    from headcount.workers.interventions import INTERVENTIONS

    words = {name for kind in KINDS for name in kind}
    words |= {*INPUTS, *INTERVENTIONS, *TABLES}
    words |= {file.stem for file in QUERIES.rglob("*.sql")}
    words |= {column for table in TABLES.values() for column in table.own}
    return words
