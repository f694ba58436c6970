"""Every fault, in a few runs on a disk and in a store: in the end each row is there once, as in an
undisturbed run.

Replicas compute nothing here, so that they start at once. `make chaos` draws faults at random, of
replicas with a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pytest

from tests.tools.chaos import FAULTS_BY_NAME, Life, PlannedFault, World, open_world, run_schedule
from tests.toys.toy_replica import SteadyReplica


class Schedule(NamedTuple):
    """The lives of the drivers of a run."""

    in_store: bool
    n_replicas: int
    lives: list[Life]


def life(**faults: int) -> Life:
    """A driver's life, from its faults and after how many shards each comes."""
    return [PlannedFault(after_shards, kind) for kind, after_shards in faults.items()]


# Each start of a driver or of a replica takes seconds. So a few runs meet all faults, one after
# the other, and a driver dies last.
SCHEDULES = {
    "replicas and drivers, on a disk": Schedule(
        in_store=False,
        n_replicas=1,
        lives=[
            life(
                left_behind=1,
                replica_killed=1,
                replica_terminated=3,
                replica_killed_while_writing=5,
                replica_killed_before_its_commit=7,
                disk_full_for_data=9,
                disk_full_for_a_commit=11,
                driver_killed=13,
            ),
            life(driver_terminated=18),
        ],
    ),
    # The second driver is refused, because the first one holds the lock. The node that is lost has
    # the only replica that still moves, so the run cannot end before it is lost.
    "nodes and a second driver, on a disk": Schedule(
        in_store=False,
        n_replicas=2,
        lives=[life(second_driver=1, replica_slow=3, node_lost=4)],
    ),
    # A store has no locks, so here two drivers measure the same run.
    "replicas, two drivers and the head, in a store": Schedule(
        in_store=True,
        n_replicas=1,
        lives=[
            life(
                second_driver=1,
                replica_killed_while_writing=4,
                replica_killed_before_its_commit=6,
                disk_full_for_data=8,
                disk_full_for_a_commit=10,
                store_answers_503=12,
                head_lost=16,
            )
        ],
    ),
}


@pytest.fixture(scope="module")
def chaos() -> Iterator[tuple[World, pa.Table]]:
    """A cluster of a head and two nodes that all of these tests maltreat."""
    environment = dict(os.environ)
    main = "tests.toys.toy_replica.main"
    with open_world(4, SteadyReplica, main, with_forked_workers=True) as (world, expected):
        # Clients of a store wait longer after every refusal: a few are enough here.
        world.bad_requests = 4
        yield world, expected
    os.environ.clear()
    os.environ |= environment


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_comes_to_its_end(chaos: tuple[World, pa.Table], name: str) -> None:
    world, expected = chaos
    schedule = SCHEDULES[name]
    world.in_store, world.n_replicas = schedule.in_store, schedule.n_replicas
    result = run_schedule(world, expected, schedule.lives)
    assert result.faults == [planned.kind for life in schedule.lives for planned in life]
    assert result.good, result
    assert "Traceback" not in world.errors


def test_every_fault_is_tried() -> None:
    lives = [life for schedule in SCHEDULES.values() for life in schedule.lives]
    assert {planned.kind for life in lives for planned in life} == set(FAULTS_BY_NAME)
