"""Which heads a calibration measures."""

from collections import Counter
from itertools import pairwise

import pytest

from headcount.jobs.plan.calibration import drawn_heads
from headcount.schemas.measured_heads import Head

LAYERS, HEADS = 30, 9


def draw(count: int, seed: int = 0) -> list[Head]:
    return drawn_heads(dict.fromkeys(range(LAYERS), range(HEADS)), count, seed)


@pytest.mark.parametrize("count", [2, 3, 7, 20, 29, 30, 31, 45, 60, 100, 269, 270])
def test_heads_are_drawn_over_the_whole_depth(count: int):
    heads = draw(count)
    assert len({*heads}) == count
    layers = sorted(Counter(head.layer for head in heads).items())
    assert (layers[0][0], layers[-1][0]) == (0, LAYERS - 1)
    # No layer gives two heads more than another.
    of_layers = dict.fromkeys(range(LAYERS), 0) | dict(layers)
    assert max(of_layers.values()) - min(of_layers.values()) <= 1
    # Those that give one more are as far apart as they can be.
    more = [layer for layer, heads in of_layers.items() if heads == max(of_layers.values())]
    gaps = {after - before for before, after in pairwise(more)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_a_seed_draws_the_same_heads_and_another_one_draws_others():
    assert draw(20) == draw(20)
    assert [head.layer for head in draw(20)] == [head.layer for head in draw(20, seed=1)]
    assert draw(20) != draw(20, seed=1)
    assert draw(1000) == [Head(layer, head) for layer in range(30) for head in range(9)]


def test_layers_that_have_given_all_their_heads_give_no_more():
    drawn = drawn_heads({0: (0, 1, 2), 1: (5,), 4: (0, 1)}, 5, 0)
    assert Counter(head.layer for head in drawn) == {0: 2, 1: 1, 4: 2}
