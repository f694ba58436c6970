"""Write docs/coverage.md: what each source claims, and what here shows it or why nothing does.

A file in reproduce/claims/ holds the claims of one source:

    seed = "Name of the source"
    page = "Where it can be read"         # optional

    [[claim]]
    text = "What it says, in our words"
    shown_by = ["SYSTEM: beginning of the name of a figure, a phenomenon or a picture"]

Instead of `shown_by` a claim has `covered_by`, a text that names a column, an edit, an input or a
view, or `left_out`, the reason. A claim may have `shown_by` and `left_out`, if a part is left out.

Run it with `python -m headcount.reproduce.coverage`, or by `make docs`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from headcount.reproduce.system import System, systems
from headcount.schemas.errors import ScanError
from headcount.schemas.files.places import reason
from headcount.schemas.house import PACKAGE

CLAIMS = Path(__file__).parent / "claims"

DOCS = PACKAGE.parent / "docs"

INTRODUCTION = """\
# What the sources claim, and what shows it

Every claim of the sources that this project measures again, in our words. Beside it stands the
system of [systems.md](systems.md) with its figure, phenomenon or picture, or the reason why nothing
here shows it. `headcount reproduce SYSTEM` measures it. This page is generated from the files in
`reproduce/claims/` by `make docs`.
"""


class Claim(BaseModel):
    """One thing that a source says."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    text: str
    shown_by: tuple[str, ...] = ()
    """What shows it: `SYSTEM: beginning of a name`."""
    covered_by: str = ""
    """The column, edit, input or view that measures it, if it is a definition and no finding."""
    left_out: str = ""
    """Why it, or a part of it, is not shown."""

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if not (self.shown_by or self.covered_by or self.left_out):
            raise ValueError("expected shown_by, covered_by or left_out")
        for place in self.shown_by:
            if ": " not in place:
                raise ValueError(f"shown_by: expected 'SYSTEM: beginning of a name', got {place!r}")
        return self


class Source(BaseModel):
    """One source with its claims."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seed: str
    """What the source is called."""
    page: str = ""
    """Where it can be read."""
    claim: tuple[Claim, ...]


def sources(directory: Path = CLAIMS) -> dict[str, Source]:
    """Every source with its claims, by name of the file."""
    return {file.stem: read_source(file) for file in sorted(directory.glob("*.toml"))}


def read_source(file: Path) -> Source:
    """Read the claims of one source."""
    try:
        return Source.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScanError(f"{file}: cannot be read ({reason(error)})") from None
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ScanError(f"{file}: {place}: {problem['msg']}") from None


def names_of(system: System) -> list[str]:
    """What a claim may name of a system: its figures, phenomena and pictures."""
    names = [value.full_name for check in system.check for value in check.values]
    names += [phenomenon.words for phenomenon in system.phenomenon]
    return names + [figure.title for figure in system.figure]


def problems(directory: Path = CLAIMS) -> list[str]:
    """What claims name that is not there; one line each."""
    names_by_system = {name: names_of(system) for name, system in systems().items()}
    known_words = _known_words()
    lines: list[str] = []
    for file, source in sources(directory).items():
        for claim in source.claim:
            where = f"{file}.toml: {claim.text[:60]!r}"
            lines += [f"{where}: {problem}" for problem in _problems_of(claim, names_by_system)]
            words = set(re.findall(r"\w+", claim.covered_by))
            if claim.covered_by and not words & known_words:
                lines.append(f"{where}: covered_by names no column, edit, input or view")
    return lines


def _problems_of(claim: Claim, names_by_system: Mapping[str, Iterable[str]]) -> list[str]:
    """What a claim is shown by that is not there."""
    lines: list[str] = []
    for place in claim.shown_by:
        system, _, beginning = place.partition(": ")
        names = names_by_system.get(system)
        if names is None:
            lines.append(f"there is no system {system!r}")
        elif not any(name.startswith(beginning) for name in names):
            lines.append(f"nothing in {system} has a name that begins with {beginning!r}")
    return lines


def _known_words() -> set[str]:
    """Every name that a scan or SQL may use."""
    # These import torch, which takes seconds, and only this check needs them.
    from headcount.queries.open.shipped_views import QUERIES
    from headcount.schemas.scans.kinds import KINDS, TABLES
    from headcount.workers.inputs import INPUTS
    from headcount.workers.interventions import INTERVENTIONS

    words = {name for kind in KINDS for name in kind.registry}
    words |= {*INPUTS, *INTERVENTIONS, *TABLES}
    words |= {file.stem for file in QUERIES.rglob("*.sql")}
    words |= {column for table in TABLES.values() for column in table.own}
    return words


def coverage_page() -> str:
    """The page of all claims, as Markdown."""
    sections = [_section(source) for source in sources().values()]
    return INTRODUCTION + "".join(sections)


def _section(source: Source) -> str:
    """The claims of one source, as Markdown."""
    shown = sum(not claim.left_out for claim in source.claim)
    page = f" ({source.page})" if source.page else ""
    lines = [
        f"\n## {source.seed}\n",
        f"\n{shown} of {len(source.claim)} claims are shown{page}.\n",
        "\n| claim | shown by |\n|---|---|\n",
    ]
    lines += [f"| {_cell(claim.text)} | {_answer(claim)} |\n" for claim in source.claim]
    return "".join(lines)


def _answer(claim: Claim) -> str:
    """What shows a claim, or why nothing does."""
    parts: list[str] = []
    for place in claim.shown_by:
        system, _, beginning = place.partition(": ")
        parts.append(f"`{system}`: {_cell(beginning)}")
    if claim.covered_by:
        parts.append(_cell(claim.covered_by))
    if claim.left_out:
        word = "in part left out" if parts else "left out"
        parts.append(f"*{word}*: {_cell(claim.left_out)}")
    return "<br>".join(parts)


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"coverage.md": coverage_page}


if __name__ == "__main__":
    for problem in problems():
        print(problem)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
