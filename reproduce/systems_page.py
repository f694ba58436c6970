"""Write docs/systems.md from the files in reproduce/systems/: `python -m reproduce.systems_page`."""

from __future__ import annotations

from pathlib import Path

from reproduce.system import System, systems

DOCS = Path(__file__).parent.parent / "docs"

INTRODUCTION = """\
# Systems

What `headcount reproduce NAME` measures again ([reproduce.md](reproduce.md)). Figures are compared where the model has the sizes of
the one they were published for; phenomena must hold in any model. This page is generated from the files in `reproduce/systems/` by
`make docs`.

| system | what is measured | published figures | phenomena | published for |
|---|---|---|---|---|
"""


def systems_page() -> str:
    """The page of the systems, as Markdown."""
    return INTRODUCTION + "".join(_row(name, system) for name, system in systems().items())


def _row(name: str, system: System) -> str:
    figures = sum(len(check.published) for check in system.check)
    what = f"**{system.title}** ({system.source}). {system.measured}."
    return (
        f"| `{name}` | {what} | {figures} | {len(system.phenomenon)} | {system.published_model} |\n"
    )


PAGES = {"systems.md": systems_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
