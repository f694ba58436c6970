"""What became of the documents of a corpus: how many were used, and why the others were not.

The counts have a file of their own beside the index of the corpus, so that `headcount status` and
queries do not have to read the index.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headcount.schemas.errors import counted

FATES = ("used", "too short", "empty", "bad", "skipped", "not needed")
"""What becomes of a document that the scan's `where` selects."""

OTHER = "not asked for"  # what becomes of a document that `where` does not select

SHOWN_PARTS = 50  # with a count of their own; smaller ones are counted together


@dataclass(frozen=True)
class Fates:
    """How many documents of a corpus were used, and what became of the others."""

    parts: dict[str, dict[str, int]]
    """Documents by part and fate, the largest part first; part "" has documents without a part."""

    @classmethod
    def of_parts(cls, parts: Mapping[str, Mapping[str, int]]) -> "Fates":
        """The fates of a corpus, from counts by part and fate."""
        largest_first = sorted(parts, key=lambda name: (-sum(parts[name].values()), name))
        # A corpus may name a part per document. Its counts must stay a small file.
        shown = {name: dict(parts[name]) for name in largest_first[:SHOWN_PARTS]}
        if small := largest_first[SHOWN_PARTS:]:
            shown[f"{len(small):,} other parts"] = _added_up(parts[name] for name in small)
        return cls(shown)

    @property
    def all(self) -> dict[str, int]:
        """Documents by fate."""
        total = _added_up(self.parts.values())
        return {fate: total[fate] for fate in (*FATES, OTHER) if fate in total}

    @property
    def record(self) -> dict[str, Any]:
        """The content of the file beside the index, as JSON."""
        return {"documents": self.all, "parts": self.parts}

    @property
    def line(self) -> str:
        """The documents and their fates as a phrase.

        >>> Fates({"": {"used": 1200, "empty": 3}}).line
        '1,203 documents: 1,200 used, 3 empty'
        """
        counts = ", ".join(f"{count:,} {fate}" for fate, count in self.all.items())
        total = counted(sum(self.all.values()), "document")
        return f"{total}: {counts}" if counts else total


def _added_up(counts_of_parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in counts_of_parts:
        total.update(counts)
    return dict(total)
