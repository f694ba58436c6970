"""Every fault, in a few runs on disks and in stores: in the end each row is there once, as in an
undisturbed run.

Replicas compute nothing here, so that they are there at once; `make chaos` draws faults at random,
of replicas with a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pytest

from tests.chaos import FAULT, World, run_schedule, world
from tests.toy_replica import SteadyReplica


class Schedule(NamedTuple):
    """The faults of each driver's life, and after how many shards each comes."""

    in_store: bool
    n_replicas: int
    lives: list[list[tuple[int, str]]]


OF_REPLICAS = [
    (1, "replica_killed"), (3, "replica_terminated"), (5, "replica_killed_while_writing"),
    (7, "replica_killed_before_its_commit"), (9, "disk_full_for_data"), (11, "disk_full_for_a_commit"),
]  # fmt: skip

SCHEDULES = {
    "replicas, on a disk": Schedule(False, 1, [[(1, "left_behind"), *OF_REPLICAS]]),
    "replicas, in a store": Schedule(True, 1, [[*OF_REPLICAS, (13, "store_answers_503")]]),
    "nodes": Schedule(False, 2, [[(4, "node_lost"), (10, "replica_slow")]]),
    "two drivers on a disk": Schedule(False, 2, [[(4, "second_driver")]]),
    "two drivers in a store": Schedule(True, 2, [[(4, "second_driver")]]),
    "drivers, on a disk": Schedule(
        False, 1, [[(2, "driver_killed")], [(5, "driver_killed")], [(9, "driver_terminated")]]
    ),
    "drivers, in a store": Schedule(True, 1, [[(3, "driver_killed")], [(8, "head_lost")]]),
}


@pytest.fixture(scope="module")
def chaos() -> Iterator[tuple[World, pa.Table]]:
    """A cluster of a head and two nodes that all of these tests maltreat."""
    before = dict(os.environ)
    with world(seed=4, replica=SteadyReplica) as (made, rows):
        yield made, rows
    os.environ.clear()
    os.environ |= before


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_comes_to_its_end(chaos: tuple[World, pa.Table], name: str) -> None:
    made, expected = chaos
    made.in_store, made.n_replicas, lives = SCHEDULES[name]
    result = run_schedule(made, expected, lives)
    assert result.faults == [kind for life in lives for _, kind in life]
    assert result.good, result
    assert "Traceback" not in made.said()


def test_every_fault_is_tried() -> None:
    assert {
        kind for schedule in SCHEDULES.values() for life in schedule.lives for _, kind in life
    } == set(FAULT)
