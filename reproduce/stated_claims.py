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

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from headcount.reproduce.replication import read_toml

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
