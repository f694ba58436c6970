"""The models that come with headcount. Needs neither torch nor any other library."""

from pathlib import Path

from headcount.schemas.packages import PACKAGE

BUNDLED_MODELS = PACKAGE / "models"

BUNDLED = {file.parent.name: file.parent for file in sorted(BUNDLED_MODELS.glob("*/config.json"))}
"""Their directories by name; a scan writes `bundled:NAME`."""


def first_paragraph_of_card(model: Path) -> str:
    """What the card of a model says first, below its title."""
    return (model / "CARD.md").read_text(encoding="utf-8").split("\n\n")[1]
