"""A thousand replicas in one process: the dispatcher works with actors on a clock that jumps.

Everything of `headcount.jobs.run.dispatch` is real but the processes and the time. A replica
measures one shard after the other. Some nodes vanish together without a notice, and their replicas
start again on new ones.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from ray import exceptions

from headcount.jobs.cluster.ray_cluster import PROBE_SECONDS
from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run import dispatch
from headcount.jobs.run.replica_actor import ReplicaPlace
from headcount.schemas.files.commit import Commit

LOAD_SECONDS = 30.0
"""From the start of an actor until its replica is loaded."""

AWAY_SECONDS = 60.0
"""From the end of a node until Ray starts its actor again."""


REFERENCE_SECONDS = 1e-6
"""What a turn of the driver takes for each reference that it waits for: as long as `ray.wait` and
the dispatcher take for four thousand (measured: 1.4 to 2.4 ms and 0.6 ms)."""


class Simulated(NamedTuple):
    """What came of a simulation, all but the last in simulated seconds."""

    shards: int
    seconds: float
    """Until the last commit."""
    ideal_seconds: float
    """The same if no replica ever waited, and nothing were measured twice."""
    longest_silence: float
    """Between two commits, from the first one on."""
    driver_seconds: float
    """Processor time of the dispatcher, without what stands for Ray here."""


class Reference:
    """A result that is there or will be."""

    __slots__ = ("is_there", "value")

    def __init__(self, value: object = None, is_there: bool = False) -> None:
        self.value = value
        self.is_there = is_there

    def fulfil(self, value: object) -> None:
        self.value, self.is_there = value, True


def of_ray(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the cluster or of an actor; its processor time is not the dispatcher's."""

    @wraps(function)
    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        cluster: SimulatedCluster = getattr(self, "cluster", self)
        began = time.process_time()
        try:
            return function(self, *arguments, **options)
        finally:
            cluster.ray_seconds += time.process_time() - began

    return timed


class Actor:
    """A replica's actor, which outlives its processes."""

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.lives = 0
        self.back_at = 0.0
        """Until then its process is being started again."""
        self.free_at = cluster.now + LOAD_SECONDS
        """When it has done what it was given."""
        self.pending: set[Reference] = set()
        for name in ("ready", "told_to_leave", "leave", "how_far", "measure"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    @property
    def node_id(self) -> str:
        return f"{self.number}-{self.lives}"

    @of_ray
    def _ready(self) -> Reference:
        if self.cluster.now < self.back_at:
            return Reference(exceptions.ActorUnavailableError("starts", None), is_there=True)
        return self._answer_at(self.free_at, ReplicaPlace(self.node_id, self.node_id))

    @of_ray
    def _told_to_leave(self) -> Reference:
        reference = Reference()
        self.pending.add(reference)
        return reference

    @of_ray
    def _how_far(self) -> Reference:
        return Reference(None, is_there=True)

    def _leave(self, reason: str) -> None:
        raise AssertionError(reason)

    @of_ray
    def _measure(self, shard: int, attempt: int) -> Reference:
        self.free_at = max(self.cluster.now, self.free_at) + self.cluster.seconds[shard]
        return self._answer_at(self.free_at, (shard, attempt))

    def _answer_at(self, moment: float, value: object) -> Reference:
        reference = Reference()
        self.pending.add(reference)

        def answer() -> None:
            # Its process may have ended meanwhile.
            if reference in self.pending:
                self.pending.remove(reference)
                reference.fulfil(value)

        self.cluster.at(moment, answer)
        return reference

    def vanish(self) -> None:
        """Lose the node; everything that was under way fails."""
        self.cluster.gone.add(self.node_id)
        self.lives += 1
        self.back_at = self.cluster.now + AWAY_SECONDS
        self.free_at = self.back_at + LOAD_SECONDS
        for reference in self.pending:
            reference.fulfil(exceptions.ActorDiedError())
        self.pending.clear()


class SimulatedCluster:
    """What the dispatcher knows as `ray` and as `time`."""

    exceptions = exceptions
    ObjectRef = Reference

    def __init__(self, seconds: np.ndarray, commit: Commit) -> None:
        self.seconds: list[float] = seconds.tolist()
        """How long each shard takes."""
        self.commit = commit
        self.now = 0.0
        self.ray_seconds = 0.0
        self.actors: list[Actor] = []
        self.gone: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Let something happen at a moment; of one moment, in the order of these calls."""
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, event))

    def monotonic(self) -> float:
        return self.now

    @of_ray
    def sleep(self, seconds: float) -> None:
        self._pass_until(self.now + seconds, lambda: False)

    def _pass_until(self, deadline: float, is_enough: Callable[[], bool]) -> None:
        while True:
            # What has happened meanwhile is there; then the clock jumps to the next event.
            if not self._events or self._events[0][0] > self.now:
                if is_enough() or self.now >= deadline:
                    return
                next_event = self._events[0][0] if self._events else deadline
                self.now = min(next_event, deadline)
            else:
                heapq.heappop(self._events)[2]()

    def put(self, value: object) -> str:
        return "work"

    def is_initialized(self) -> bool:
        return True

    def kill(self, actor: Actor) -> None:
        actor.pending.clear()

    @of_ray
    def wait(
        self, references: list[Reference], num_returns: int, timeout: float
    ) -> tuple[list[Reference], None]:
        there: list[Reference] = []

        def are_there() -> bool:
            there[:] = [reference for reference in references if reference.is_there][:num_returns]
            return bool(there)

        self.now += REFERENCE_SECONDS * len(references)
        self._pass_until(self.now + timeout, are_there)
        return there, None

    @of_ray
    def get(self, reference: Reference) -> object:
        if isinstance(reference.value, exceptions.RayError):
            raise reference.value
        if isinstance(reference.value, tuple) and not isinstance(reference.value, ReplicaPlace):
            shard, attempt = reference.value
            return self.commit.model_copy(update={"shard": shard, "attempt": attempt})
        return reference.value

    def options(self, **_: object) -> SimpleNamespace:
        """What `ReplicaActor.options` is to the dispatcher."""
        return SimpleNamespace(remote=self._start_actor)

    def _start_actor(self, *_: object) -> Actor:
        self.actors.append(Actor(self, len(self.actors)))
        return self.actors[-1]

    @of_ray
    def gone_nodes(self, node_ids: Iterable[str]) -> set[str]:
        """A probe of a node that is there takes no time, one of a node that is gone the most."""
        gone = self.gone.intersection(node_ids)
        if gone:
            self.sleep(PROBE_SECONDS)
        return gone


def simulate(
    plan: Plan, replicas: int, vanishing: int, shard_seconds: float, vanish_at: float
) -> Simulated:
    """Measure all shards of a run, while nodes of `vanishing` replicas vanish at one moment.

    A shard takes `shard_seconds`, or up to a fifth more or less.
    """
    shards = plan.manifest.shards
    generator = np.random.default_rng(0)
    seconds = generator.uniform(0.8, 1.2, shards) * shard_seconds
    facts = {"seconds": 1.0, "compute_seconds": 1.0, "idle_seconds": 0.0, "rows": 1, "tokens": 1}
    facts |= {"run_id": plan.run.run_id, "shard": 0, "start": 0, "stop": 1, "attempt": 1}
    facts |= {"finished": datetime.fromtimestamp(0, UTC), "host": "node", "replica": "node-0"}
    facts |= {"code": plan.code, "device": "none", "versions": [], "methods": [], "files": []}
    facts |= {"bad_rows": []}
    cluster = SimulatedCluster(seconds, Commit.model_validate(facts))

    def vanish() -> None:
        for actor in cluster.actors[:vanishing]:
            actor.vanish()

    cluster.at(vanish_at, vanish)
    times: list[float] = []
    is_done = np.zeros(shards, bool)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ray", "time", "ReplicaActor"):
            patch.setattr(dispatch, name, cluster)
        patch.setattr(dispatch, "gone_nodes", cluster.gone_nodes)
        patch.setattr(dispatch, "draining_nodes", set)
        patch.setattr(dispatch, "lack_of_room", lambda resources: None)
        patch.setattr(dispatch, "ray_in_words", nullcontext)
        began = time.process_time()
        for outcome in _outcomes(plan, replicas):
            assert isinstance(outcome, Commit)
            assert not is_done[outcome.shard]
            is_done[outcome.shard] = True
            times.append(cluster.now)
        driver_seconds = time.process_time() - began - cluster.ray_seconds
    assert is_done.all()
    ideal_seconds = LOAD_SECONDS + float(seconds.sum()) / replicas
    silence = float(np.diff(times).max())
    return Simulated(shards, times[-1], ideal_seconds, silence, driver_seconds)


def _outcomes(plan: Plan, replicas: int) -> Iterator[object]:
    shards = np.arange(plan.manifest.shards)
    return dispatch.dispatch(plan, shards, Resources(replicas, 1, "cpu"), lambda line: None)
