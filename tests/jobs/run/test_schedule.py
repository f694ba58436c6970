"""The policy of a driver, without a cluster and on a clock that tests turn."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from headcount.jobs.run.schedule import (
    LEAST_PATIENCE,
    MOST_FAILED_STARTS,
    MOST_LOST_NODES,
    SLOW,
    Call,
    Repetition,
    Schedule,
)
from headcount.jobs.run.shards import ATTEMPTS, Attempts
from headcount.schemas.errors import RunError
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.run_directory import RunDirectory
from tests.toys.refusals import refused

COMMIT = Commit(
    run_id="run", shard=0, start=0, stop=1, attempt=1, seconds=1.0, compute_seconds=1.0,
    idle_seconds=0.0, rows=1, tokens=1, finished=datetime.fromtimestamp(0, UTC), host="node",
    replica="node-0", code="code", device="none", versions=[], methods=[], files=[], bad_rows=[],
)  # fmt: skip


class Driven(Schedule):
    """A schedule whose replicas are all loaded, with a clock that a test turns."""

    def __init__(self, run: Path, shards: int, replicas: int, **options: set[int]) -> None:
        self.now = 0.0
        self.repeated: list[Repetition] = []
        attempts = Attempts(RunDirectory(run))
        clock, note = (lambda: self.now), self.repeated.append
        super().__init__(np.arange(shards), replicas, attempts, clock, repeats=note, **options)
        for replica in range(replicas):
            self.loaded(replica)

    def given(self) -> list[tuple[int, int]]:
        """The replica and the shard of each new call."""
        self.calls = [*self.new_calls()]
        return [call[:2] for call in self.calls]

    def in_hand(self, replica: int) -> list[Call]:
        return [*self.replicas[replica].calls]

    def commit(self, call: Call) -> Commit | Failure | None:
        return self.ended(call, COMMIT.model_copy(update={"shard": call.shard}))

    def die(self, replica: int, with_node: bool = False) -> list[Commit | Failure | None]:
        """What becomes of all calls of a replica that dies."""
        self.died(replica, with_node)
        calls = self.in_hand(replica)
        return [self.ended(c, Failure(c.shard, "died"), with_replica=True) for c in calls]


def test_a_replica_has_three_neighbouring_shards_and_an_idle_one_steals_half_of_a_span(
    tmp_path: Path,
) -> None:
    schedule = Driven(tmp_path, 12, 2)
    assert schedule.given() == [(0, 0), (0, 1), (0, 2), (1, 7), (1, 8), (1, 9)]
    # Its own last ones, and then half of what the first one has left.
    for shard in (10, 11, 5, 6):
        schedule.commit(schedule.in_hand(1)[0])
        assert schedule.given() == [(1, shard)]
    assert schedule.running_count == 6


def test_a_shard_that_others_have_done_meanwhile_is_not_given_out(tmp_path: Path) -> None:
    schedule = Driven(tmp_path, 4, 1, done_elsewhere={0, 2})
    assert schedule.given() == [(0, 1), (0, 3)]
    assert schedule.open_count == 2


def test_a_shard_that_fails_is_tried_again_after_the_new_ones_and_reported_at_last(
    tmp_path: Path,
) -> None:
    schedule = Driven(tmp_path, 4, 1)
    assert schedule.given() == [(0, 0), (0, 1), (0, 2)]
    bad = schedule.calls[0]
    reports = [schedule.ended(bad, Failure(0, "bad"))]
    assert schedule.given() == [(0, 3)]
    for call in schedule.in_hand(0):
        schedule.commit(call)
    for attempt in range(2, ATTEMPTS + 1):
        assert schedule.given() == [(0, 0)]
        assert schedule.calls[0].attempt == attempt
        reports.append(schedule.ended(schedule.calls[0], Failure(0, "bad")))
    assert reports == [Failure(0, "bad", is_last=i == ATTEMPTS) for i in range(1, ATTEMPTS + 1)]
    assert (schedule.open_count, schedule.failures) == (0, 1)
    assert schedule.repeated == ["failed"] * (ATTEMPTS - 1)


def test_shards_of_a_replica_that_died_are_tried_alone_and_last(tmp_path: Path) -> None:
    schedule = Driven(tmp_path, 5, 1)
    assert schedule.given() == [(0, 0), (0, 1), (0, 2)]
    assert schedule.die(0) == [Failure(shard, "died", is_last=False) for shard in (0, 1, 2)]
    # Nothing is given to one that is not loaded.
    assert schedule.given() == []
    schedule.loaded(0)
    assert schedule.given() == [(0, 3), (0, 4)]
    schedule.commit(schedule.in_hand(0)[0])
    assert schedule.given() == []
    schedule.commit(schedule.in_hand(0)[0])
    for shard in (0, 1, 2):
        assert schedule.given() == [(0, shard)]
        schedule.commit(schedule.in_hand(0)[0])
    assert schedule.open_count == 0


def test_no_try_counts_where_a_replica_leaves_and_what_was_alone_stays_alone(
    tmp_path: Path,
) -> None:
    schedule = Driven(tmp_path, 2, 1)
    schedule.given()
    schedule.die(0)
    schedule.loaded(0)
    assert schedule.given() == [(0, 0)]
    schedule.leaves(0)
    assert schedule.ended(schedule.in_hand(0)[0], None) is None
    assert schedule.given() == []
    schedule.loaded(0)
    # The other suspect first, and neither beside the other.
    assert [(call.shard, call.attempt) for call in schedule.new_calls()] == [(1, 2)]
    schedule.leaves(0)
    # It took too long, and was ended.
    assert schedule.die(0) == [None]
    schedule.loaded(0)
    assert [(call.shard, call.attempt) for call in schedule.new_calls()] == [(0, 2)]
    assert schedule.repeated == ["died", "died", "preempted", "preempted"]


def test_nodes_that_vanish_are_no_fault_of_a_shard_but_for_the_tenth_time(tmp_path: Path) -> None:
    schedule = Driven(tmp_path, 1, 1)
    for _ in range(MOST_LOST_NODES - 1):
        assert schedule.given() == [(0, 0)]
        assert schedule.die(0, with_node=True) == [None]
        schedule.loaded(0)
    assert schedule.given() == [(0, 0)]
    assert schedule.die(0, with_node=True) == [Failure(0, "died", is_last=False)]
    assert schedule.repeated == ["node_lost"] * (MOST_LOST_NODES - 1) + ["died"]


def test_an_idle_replica_measures_a_straggler_too_and_the_first_outcome_counts(
    tmp_path: Path,
) -> None:
    schedule = Driven(tmp_path, 2, 3)
    assert schedule.given() == [(0, 0), (0, 1)]
    slow, quick = schedule.calls
    schedule.now = 10.0
    assert schedule.given() == []  # Nobody knows yet what is slow.
    schedule.commit(quick)
    schedule.now = SLOW * 10.0
    assert schedule.given() == []
    schedule.now += 1
    # One of the two that are idle.
    assert schedule.given() == [(1, 0)]
    second = schedule.calls[0]
    schedule.now += SLOW * 10.0
    assert schedule.given() == []
    schedule.now += 1
    assert schedule.given() == [(2, 0)]
    assert isinstance(schedule.commit(second), Commit)
    assert schedule.open_count == 0
    assert schedule.commit(slow) is None
    assert schedule.ended(schedule.calls[0], Failure(0, "late")) is None
    assert schedule.repeated == ["straggler", "straggler"]
    assert not schedule.is_at_work


def test_no_shard_is_a_straggler_at_once(tmp_path: Path) -> None:
    schedule = Driven(tmp_path, 2, 2)
    schedule.given()
    schedule.commit(schedule.in_hand(0)[0])
    schedule.now = LEAST_PATIENCE
    assert schedule.given() == []
    schedule.now += 0.1
    assert schedule.given() == [(1, 1)]


def test_starts_that_fail_in_a_row_end_the_run_and_an_error_of_a_constructor_at_once(
    tmp_path: Path,
) -> None:
    schedule = Driven(tmp_path, 1, 1)
    for _ in range(2):
        for _ in range(MOST_FAILED_STARTS):
            schedule.not_loaded("no room", is_for_ever=False)
        schedule.loaded(0)
    for _ in range(MOST_FAILED_STARTS):
        schedule.not_loaded("no room", is_for_ever=False)
    with pytest.raises(RunError, match=r"^no replica can be made: no room$"):
        schedule.not_loaded("no room", is_for_ever=False)
    line = refused(RunError, Driven(tmp_path, 1, 1).not_loaded, "other weights", True)
    assert line == "no replica can be made: other weights"
