"""Every fault, in a few runs on a disk and in a store: in the end each row is there once, as in an
undisturbed run.

Replicas compute nothing here, so that they start at once. `make chaos` draws faults at random, of
replicas with a model.
"""

from collections.abc import Iterator

import pytest

from headcount.schemas.object_stores import REQUEST_SECONDS
from tests.tools.chaos import (
    FAULTS_BY_NAME,
    Life,
    PlannedFault,
    World,
    open_world,
    run_schedule,
)
from tests.tools.committed_rows import Rows
from tests.toys.toy_replica import ToyReplica


def lives(*texts: str) -> list[Life]:
    """The lives of drivers, from the faults of each and after how many shards each comes."""
    planned = [[fault.split() for fault in text.split(", ")] for text in texts]
    return [[PlannedFault(int(shards), kind) for kind, shards in life] for life in planned]


# In a store or on a disk, and with how many replicas. Each start of a driver or of a replica takes
# seconds. So a few runs meet all faults, one after the other, and a driver dies last.
SCHEDULES: dict[str, tuple[bool, int, list[Life]]] = {
    "replicas and drivers, on a disk": (
        False,
        1,
        lives(
            "left_behind 1, replica_killed 1, replica_terminated 3, disk_full_for_data 5, "
            "replica_killed_while_writing 7, replica_killed_before_its_commit 9, "
            "disk_full_for_a_commit 11, driver_killed 13",
            "driver_interrupted 16",
            "driver_terminated 18",
        ),
    ),
    # The second driver is refused, because the first one holds the lock.
    "nodes and a second driver, on a disk": (
        False,
        2,
        lives("second_driver 1, replica_slow 3, node_lost 4"),
    ),
    # A store has no locks, so here two drivers measure the same run.
    "replicas, two drivers and the head, in a store": (
        True,
        1,
        lives(
            "second_driver 1, replica_killed_while_writing 4, replica_killed_before_its_commit 6, "
            "disk_full_for_data 8, disk_full_for_a_commit 10, store_answers_503 12, "
            "store_stands_still 14, head_lost 16"
        ),
    ),
}


@pytest.fixture(scope="module")
def chaos() -> Iterator[tuple[World, Rows]]:
    """A cluster of a head and two nodes that all of these tests maltreat."""
    with open_world(4, ToyReplica) as (world, expected):
        # Clients of a store wait longer after every refusal: a few are enough here.
        world.bad_requests = 4
        # Longer than requests wait for their answers.
        world.still_seconds = REQUEST_SECONDS + 5
        yield world, expected


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_comes_to_its_end(chaos: tuple[World, Rows], name: str) -> None:
    world, expected = chaos
    world.in_store, world.n_replicas, lives = SCHEDULES[name]
    result = run_schedule(world, expected, lives)
    assert result.faults == [planned.kind for life in lives for planned in life], world.errors
    assert result.good, result
    assert "Traceback" not in world.errors


def test_every_fault_is_tried() -> None:
    planned = [each for *_, lives in SCHEDULES.values() for life in lives for each in life]
    assert {each.kind for each in planned} == set(FAULTS_BY_NAME)
