"""A sample of a matrix has every pair of it, whatever the seed."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.tools.pairwise import cover, sampled

WHOLE = [cell for cell in product("abcde", range(6), (True, False)) if cell[:2] != ("a", 0)]


@pytest.mark.parametrize("seed", range(5))
def test_a_few_cells_have_every_pair_of_all(seed: int) -> None:
    few = cover(WHOLE, seed=seed)
    assert few == cover(WHOLE, seed=seed)
    assert len(few) <= 35 < len(WHOLE)
    for i, j in combinations(range(3), 2):
        assert {(c[i], c[j]) for c in few} == {(c[i], c[j]) for c in WHOLE}


def test_seeds_choose_other_cells_and_the_rest_is_long() -> None:
    assert len({frozenset(cover(WHOLE, seed=seed)) for seed in range(5)}) > 1
    first_values = sampled(WHOLE, lambda cell: cell[:1])
    assert [tuple(cell.values) for cell in first_values] == WHOLE
    in_test = [cell for cell in first_values if not cell.marks]
    assert {cell.values[0] for cell in in_test} == set("abcde")
    assert len(in_test) == 5
    assert all("HEADCOUNT_SEED=" in str(cell.id) for cell in in_test)
