"""A few cells of a large matrix in which every pair of values meets.

`make test` runs those few, others every day, and `make long` all the rest.
"""

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Cell = tuple[Any, ...]

SEED = int(os.environ["HEADCOUNT_SEED"])
"""Chooses the cells: a number of the day, unless the caller of pytest says which."""


def pairs(cell: Cell) -> Iterable[Hashable]:
    """Every two values of a cell, with their places."""
    return combinations(enumerate(cell), 2)


def sampled(cells: Sequence[Cell], facets: Callable[..., Iterable[Hashable]] = pairs) -> list[Any]:
    """The cells for `parametrize`. Those are long without which the others have every facet of all;
    the name of one that is not tells the seed.
    """
    remaining = {cell: set(facets(cell)) for cell in random.Random(SEED).sample(cells, len(cells))}
    chosen: set[Cell] = set()
    while any(remaining.values()):
        # The next one is that with the most new facets.
        best = max(remaining, key=lambda cell: len(remaining[cell]))
        chosen.add(best)
        found = remaining.pop(best)
        remaining = {cell: missing - found for cell, missing in remaining.items()}
    return [
        pytest.param(*cell, id="-".join(map(str, (*cell, f"HEADCOUNT_SEED={SEED}"))))
        if cell in chosen
        else pytest.param(*cell, id="-".join(map(str, cell)), marks=pytest.mark.long)
        for cell in cells
    ]
