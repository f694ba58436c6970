"""Write docs/systems.md from the files in reproduce/systems/.

Run it with `python -m headcount.reproduce.systems_page`, or by `make docs`.
"""

from __future__ import annotations

from headcount.reproduce.system import System, systems
from headcount.schemas.house import PACKAGE

DOCS = PACKAGE.parent / "docs"

INTRODUCTION = """\
# Systems

What `headcount reproduce NAME` measures again ([reproduce.md](reproduce.md)). Figures are compared
if the model has the sizes of the one they were published for. Phenomena must hold in any model.
This page is generated from the files in `reproduce/systems/` by `make docs`.

| system | what is measured | published figures | phenomena | published for |
|---|---|---|---|---|
"""


def systems_page() -> str:
    """The page of the systems, as Markdown."""
    rows = [_row(name, system) for name, system in systems().items()]
    return INTRODUCTION + "".join(rows)


def _row(name: str, system: System) -> str:
    """A row of the table, as Markdown."""
    figure_count = sum(len(check.values) for check in system.check)
    cells = [
        f"`{name}`",
        f"**{system.title}** ({system.source}). {system.measured}.",
        str(figure_count),
        str(len(system.phenomenon)),
        system.published_model,
    ]
    return f"| {' | '.join(cells)} |\n"


PAGES = {"systems.md": systems_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
