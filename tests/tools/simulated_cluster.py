"""A thousand replicas in one process, on a clock that jumps.

The driver (`headcount.jobs.run.dispatch`) and its schedule are real, what stands for Ray is not. A
replica measures one shard after the other. Some nodes vanish together without a notice, and their
replicas start again on new ones.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any, NamedTuple

import numpy as np

from headcount.jobs.cluster.ray_cluster import PROBE_SECONDS
from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.dispatch import Driver
from headcount.jobs.run.replicas import Died, Ended, Event, InHand, Loaded, ReplicaPlace
from headcount.jobs.run.schedule import Call
from headcount.schemas.files.commit import Commit, Failure

LOAD_SECONDS = 30.0
"""From the start of an actor until its replica is loaded."""

AWAY_SECONDS = 60.0
"""From the end of a node until its replica starts again."""

REFERENCE_SECONDS = 1e-6
"""What a turn of the driver takes for each reference that it waits for: as long as `ray.wait` and
the driver take for four thousand (measured: 1.4 to 2.4 ms and 0.6 ms)."""


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
    """Processor time of the driver, without what stands for Ray here."""


def of_cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the cluster; its processor time is not the driver's."""

    @wraps(function)
    def timed(self: SimulatedCluster, *arguments: Any) -> Any:
        began = time.process_time()
        try:
            return function(self, *arguments)
        finally:
            self.cluster_seconds += time.process_time() - began

    return timed


class SimulatedReplica:
    """A replica, which outlives its processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lives = 0
        self.free_at = 0.0
        """When it has done what it was given."""
        self.calls: list[Call] = []

    @property
    def node_id(self) -> str:
        return f"{self.number}-{self.lives}"


class SimulatedCluster:
    """Replicas as a driver knows them (`headcount.jobs.run.replicas.Replicas`), and its clock."""

    def __init__(self, count: int, seconds: np.ndarray, commit: Commit) -> None:
        self.seconds: list[float] = seconds.tolist()
        """How long each shard takes."""
        self.commit = commit
        self.now = 0.0
        self.cluster_seconds = 0.0
        self.replicas = [SimulatedReplica(number) for number in range(count)]
        self.gone: set[str] = set()
        self.news: deque[Event] = deque()
        """What has happened, and was not told yet."""
        self._moments: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        for replica in self.replicas:
            self._load(replica, LOAD_SECONDS)

    def clock(self) -> float:
        return self.now

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Let something happen at a moment; of one moment, in the order of these calls."""
        self._count += 1
        heapq.heappush(self._moments, (moment, self._count, event))

    def _load(self, replica: SimulatedReplica, moment: float) -> None:
        replica.free_at = moment
        life = replica.lives

        def load() -> None:
            # Its process may have ended meanwhile.
            if replica.lives == life:
                place = ReplicaPlace(replica.node_id, replica.node_id)
                self.news.append(Loaded(replica.number, place))

        self.at(moment, load)

    def vanish(self, count: int) -> None:
        """Lose the nodes of some replicas; everything that was under way there fails."""
        for replica in self.replicas[:count]:
            self.gone.add(replica.node_id)
            replica.lives += 1
            self.news.append(Died(replica.number))
            for call in replica.calls:
                self.news.append(Ended(call, Failure(call.shard, "died"), with_replica=True))
            replica.calls.clear()
            self._load(replica, self.now + AWAY_SECONDS + LOAD_SECONDS)

    def _pass_until(self, deadline: float, is_enough: Callable[[], bool]) -> None:
        while True:
            # What has happened meanwhile is there; then the clock jumps to the next moment.
            if not self._moments or self._moments[0][0] > self.now:
                if is_enough() or self.now >= deadline:
                    return
                next_moment = self._moments[0][0] if self._moments else deadline
                self.now = min(next_moment, deadline)
            else:
                heapq.heappop(self._moments)[2]()

    # What a driver asks for.

    def __len__(self) -> int:
        return len(self.replicas)

    @of_cluster
    def measure(self, call: Call) -> None:
        replica = self.replicas[call.replica]
        replica.free_at = max(self.now, replica.free_at) + self.seconds[call.shard]
        replica.calls.append(call)

        def end() -> None:
            if call in replica.calls:
                replica.calls.remove(call)
                facts = {"shard": call.shard, "attempt": call.attempt}
                self.news.append(Ended(call, self.commit.model_copy(update=facts)))

        self.at(replica.free_at, end)

    @of_cluster
    def events(self, most: int) -> list[Event]:
        # One that is loaded is also waited for: it may be told to leave.
        references = len(self.replicas) + sum(len(replica.calls) for replica in self.replicas)
        self.now += REFERENCE_SECONDS * references
        self._pass_until(self.now + 1.0, lambda: bool(self.news))
        return [self.news.popleft() for _ in range(min(most, len(self.news)))]

    def look(self) -> list[InHand]:
        return []

    def leave(self, reason: str) -> None:
        raise AssertionError(reason)

    @of_cluster
    def gone_nodes(self, node_ids: set[str]) -> set[str]:
        """A probe of a node that is there takes no time, one of a node that is gone the most."""
        gone = self.gone & node_ids
        if gone:
            self._pass_until(self.now + PROBE_SECONDS, lambda: False)
        return gone

    def lack(self) -> None:
        return None


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
    cluster = SimulatedCluster(replicas, seconds, Commit.model_validate(facts))
    cluster.at(vanish_at, lambda: cluster.vanish(vanishing))
    said: list[str] = []
    times: list[float] = []
    is_done = np.zeros(shards, bool)
    began = time.process_time()
    driver = Driver(plan.run, np.arange(shards), cluster, said.append, clock=cluster.clock)
    for outcome in driver.outcomes():
        # A shard that nodes vanish under is no failure.
        assert isinstance(outcome, Commit)
        assert not is_done[outcome.shard]
        is_done[outcome.shard] = True
        times.append(cluster.now)
    driver_seconds = time.process_time() - began - cluster.cluster_seconds
    assert is_done.all()
    assert len(said) == vanishing, said
    ideal_seconds = LOAD_SECONDS + float(seconds.sum()) / replicas
    silence = float(np.diff(times).max())
    return Simulated(shards, times[-1], ideal_seconds, silence, driver_seconds)
