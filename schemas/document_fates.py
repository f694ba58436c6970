"""What became of the documents of a run's corpus: how many were used, and why the others were not.

It lies beside the index of the corpus, so that whoever tells of a run does not need the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

FATES = ("used", "too short", "empty", "bad", "skipped", "not needed")
"""What becomes of the documents of a corpus that are what `where` asks for."""

OTHER = "not asked for"
"""What becomes of the others."""

SHOWN_PARTS = 50
"""Parts of a corpus that are counted by name; the smaller ones are counted together."""


@dataclass(frozen=True)
class Fates:
    """How many documents of a corpus were used, and what became of the others."""

    parts: dict[str, dict[str, int]]
    """Documents by part and fate, the largest part first; "" where a document does not say its
    part.
    """

    @classmethod
    def of_parts(cls, parts: Mapping[str, Mapping[str, int]]) -> Fates:
        """Counts by part and fate; those of the smallest parts are added up."""
        totals = {name: sum(counts.values()) for name, counts in parts.items()}
        largest = sorted(totals, key=lambda name: (-totals[name], name))
        shown = {name: dict(parts[name]) for name in largest[:SHOWN_PARTS]}
        if rest := largest[SHOWN_PARTS:]:
            shown[f"{len(rest):,} other parts"] = _added_up(parts[name] for name in rest)
        return cls(shown)

    @classmethod
    def read(cls, content: Any) -> Fates:
        """What `record` wrote; anything else raises `ValueError`, `TypeError` or `LookupError`."""
        parts = cast("dict[str, dict[str, int]]", content["parts"])
        return cls({name: dict(counts) for name, counts in parts.items()})

    @property
    def all(self) -> dict[str, int]:
        """Documents by fate."""
        total = _added_up(self.parts.values())
        return {fate: total[fate] for fate in (*FATES, OTHER) if fate in total}

    @property
    def record(self) -> dict[str, Any]:
        """What lies beside the index."""
        return {"documents": self.all, "parts": self.parts}

    @property
    def line(self) -> str:
        """The documents and their fates in words.

        >>> Fates({"": {"used": 1200, "empty": 3}}).line
        '1,203 documents: 1,200 used, 3 empty'
        """
        counts = ", ".join(f"{count:,} {fate}" for fate, count in self.all.items())
        total = sum(self.all.values())
        noun = "document" if total == 1 else "documents"
        return f"{total:,} {noun}{': ' if counts else ''}{counts}"


def _added_up(counts: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for some in counts:
        total.update(some)
    return dict(total)
