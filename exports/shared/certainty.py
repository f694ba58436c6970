"""How sure a list of heads is: each of its heads passes a test, and halves of the documents are
asked for the same list.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from headcount.schemas.significance import q_of

MARGIN = 0.05
"""The share of its attention by which some head must be above the uniform baseline, so that there
is a list: those of random weights are a little above or below it, and enough documents would tell.
"""

LARGEST_Q = 0.05  # share of false heads that a list may have, on average
SPLITS = 20  # random splits of the documents into halves
STABLE = 0.9  # median Jaccard index from which on a list is stable

FEWEST_PARTS = 8
"""Documents from which on halves say something of others: of 4 there are only three splits."""


@dataclass(frozen=True)
class DocumentSums:
    """A number of every head in some documents, which are independent of each other."""

    totals: np.ndarray
    """Sum over the sequences of each document: `[document layer head]`. NaN in a layer that does
    not attend.
    """
    numbers: np.ndarray  # sequences of each document: `[document]`

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self.numbers)

    @property
    def means(self) -> np.ndarray:
        """The mean over all sequences: `[layer head]`."""
        return self.totals.sum(0) / self.numbers.sum()

    @property
    def errors(self) -> np.ndarray:
        """Standard errors of the means, `[layer head]`; NaN for one document.

        s² = Σ_d (S_d - n_d x̄)² / (N² - Σ_d n_d²), as in queries/open/internal/macros.sql
        """
        residuals = self.totals - self.numbers[:, None, None] * self.means
        divisor = float(self.numbers.sum() ** 2 - (self.numbers**2).sum())
        return np.sqrt((residuals**2).sum(0) / (divisor or np.nan))

    @property
    def degrees_of_freedom(self) -> float:
        """Those of Student's t, 1 at least: (1 - Σ_d n_d² / N²) (Σ_d n_d²)² / Σ_d n_d⁴."""
        squares = float((self.numbers**2).sum())
        freedom = (1 - squares / self.numbers.sum() ** 2) * squares**2 / (self.numbers**4).sum()
        return max(1.0, float(freedom))

    def grouped(self, size: int) -> "DocumentSums":
        """The sums of groups of so many neighbouring heads."""
        groups = self.totals.reshape(*self.totals.shape[:2], -1, size)
        return DocumentSums(groups.sum(-1), self.numbers)

    def of(self, documents: np.ndarray) -> "DocumentSums":
        """The same of some of the documents."""
        return DocumentSums(self.totals[documents], self.numbers[documents])


def cost(changes: np.ndarray, documents: np.ndarray) -> dict[str, float]:
    """The mean of changes of the loss `[sequence]`, and its standard error over documents.

    >>> cost(np.array([1.0, 3.0, 2.0, 2.0]), np.array([5, 5, 8, 9]))
    {'delta_nll': 2.0, 'standard_error': 0.0, 'documents': 3}
    """
    _, of_document = np.unique(documents, return_inverse=True)
    # One layer of one head.
    totals = np.bincount(of_document, changes)[:, None, None]
    sums = DocumentSums(totals, np.bincount(of_document))
    return {
        "delta_nll": sums.means.item(),
        "standard_error": sums.errors.item(),
        "documents": sums.documents,
    }


@dataclass(frozen=True)
class Scores:
    """A score of every head, and how surely it is above a baseline: `[layer head]` each."""

    means: np.ndarray
    excess: np.ndarray  # less the baseline
    errors: np.ndarray  # standard errors of the excess
    degrees_of_freedom: float
    p: np.ndarray  # one-sided, of an excess this large if the true one is no larger than a margin

    @property
    def q(self) -> np.ndarray:
        """The same over all heads, as Benjamini and Hochberg have it."""
        return q_of(self.p)


def sure_heads(heads: Iterable[tuple[int, int]], q: np.ndarray) -> dict[tuple[int, int], float]:
    """Those of some heads whose q is small enough, in their order, each with its q."""
    return {head: float(q[head]) for head in heads if q[head] <= LARGEST_Q}


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
    parts: int  # how many were split into halves
    of: str = "documents"  # what they are

    @property
    def verdict(self) -> str:
        """`stable` or `unstable`, or `unknown` if there are too few."""
        if self.parts < FEWEST_PARTS:
            return "unknown"
        return "stable" if self.median >= STABLE else "unstable"

    @property
    def facts(self) -> dict[str, object]:
        """The same for a file."""
        return {"verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        if self.parts < FEWEST_PARTS:
            return (
                f"unknown: {self.parts:,} {self.of} are too few to say how far lists of their "
                f"halves agree; expected {FEWEST_PARTS} or more"
            )
        return (
            f"{self.verdict}: lists of two halves of its {self.parts:,} {self.of} agree by a "
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


def stability_of(
    choose: Callable[[int, int], Collection[object]], parts: int, of: str = "documents"
) -> Stability:
    """How far the lists agree that `choose` makes of the two halves of a split.

    `choose(split, half)` gives what it finds in the parts that are in `half_of(parts, split,
    half)`. There are two parts at least.
    """
    found: list[float] = []
    for split in range(SPLITS):
        one, other = ({*choose(split, half)} for half in (0, 1))
        found.append(len(one & other) / max(len(one | other), 1))
    return Stability(float(np.median(found)), min(found), max(found), SPLITS, parts, of)


@dataclass(frozen=True)
class Choice:
    """Heads that were chosen, and how sure that is."""

    items: Mapping[tuple[int, int], float]  # the chosen `(layer, head)`, each with its q
    stability: Stability

    @property
    def facts(self) -> dict[str, object]:
        """The same for a file."""
        q = {"-".join(map(str, item)): float(f"{q:.2g}") for item, q in self.items.items()}
        return {"stability": self.stability.facts, "q": q}
