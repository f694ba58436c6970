"""Every fault alone, and a few at random: in the end each row is there once, as in an undisturbed run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from rich.console import Console

from tests.chaos import FAULT, World, draw, run_schedule, world

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def chaos() -> Iterator[tuple[World, pa.Table]]:
    """A cluster of a head and two nodes that all of these tests maltreat."""
    before = dict(os.environ)
    with world(seed=4) as (made, rows):
        yield made, rows
    os.environ.clear()
    os.environ |= before


@pytest.mark.parametrize("kind", FAULT)
def test_one_fault(chaos: tuple[World, pa.Table], kind: str) -> None:
    made, expected = chaos
    made.n_replicas = 2 if kind in ("replica_slow", "second_driver") else 1
    result = run_schedule(made, expected, [[(6, kind)]])
    assert result.faults == [kind]
    assert result.good, result
    assert "Traceback" not in made.said()


def test_the_driver_killed_twice_in_a_row(chaos: tuple[World, pa.Table]) -> None:
    made, expected = chaos
    result = run_schedule(made, expected, [[(2, "driver_killed")], [(5, "driver_killed")]])
    assert result.good, result
    assert result.faults == ["driver_killed"] * 2


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random(chaos: tuple[World, pa.Table], seed: int) -> None:
    made, expected = chaos
    made.n_replicas = 2
    result = run_schedule(made, expected, draw(random.Random(seed)))
    assert result.good, result
