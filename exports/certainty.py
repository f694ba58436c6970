"""How sure a list is: it is made again of halves of the documents, and the lists are compared."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass

import numpy as np

SPLITS = 20
"""Random splits of the documents into halves."""

STABLE = 0.9
"""Median Jaccard index from which on a list is stable."""


@dataclass(frozen=True)
class Stability:
    """How much of a list is found again in other documents.

    The Jaccard index of two lists is |A ∩ B| / |A ∪ B|: 1 if they hold the same, 0 if they share
    nothing. Two lists that are both empty have 0, because nothing was found again.
    """

    median: float
    lowest: float
    highest: float
    splits: int
    parts: int
    """Documents, or what else was split."""

    @property
    def verdict(self) -> str:
        """`stable` or `unstable`."""
        return "stable" if self.median >= STABLE else "unstable"

    @property
    def facts(self) -> dict[str, object]:
        """The same for a file."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        return (
            f"{self.verdict}: of two halves of its {self.parts:,} documents, lists agree by a "
            f"Jaccard index of {self.median:.2f} ({self.lowest:.2f} to {self.highest:.2f} in "
            f"{self.splits} random splits)"
        )


def half_of(parts: int, split: int, half: int) -> np.ndarray:
    """Which parts are in half 0 or 1 of a random split: `[part]`. Halves are equally large."""
    order = np.random.default_rng(split).permutation(parts)
    size = parts // 2
    is_in = np.zeros(parts, bool)
    is_in[order[half * size : (half + 1) * size]] = True
    return is_in


def stability_of(choose: Callable[[int, int], Collection[object]], parts: int) -> Stability:
    """How far the lists agree that `choose` makes of the two halves of a split.

    `choose(split, half)` gives what it finds in the parts that are in `half_of(parts, split,
    half)`. There are two parts at least.
    """
    found: list[float] = []
    for split in range(SPLITS):
        one, other = ({*choose(split, half)} for half in (0, 1))
        found.append(len(one & other) / max(len(one | other), 1))
    return Stability(float(np.median(found)), min(found), max(found), SPLITS, parts)
