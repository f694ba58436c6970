"""Measure shards on replicas: each reads, measures, writes and commits; the driver hands out shards
and sees that all end.

Ray places the replicas, replaces those that die and waits for nodes. Here is what it cannot know:
which shard may be given out again, when a shard is to blame, and when a slow replica is not worth
waiting for. A shard is done when its commit exists, whoever wrote it, so giving one out twice is
always safe.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import ray.exceptions
from ray import cloudpickle

from jobs.plan import Plan, begun_precisions
from jobs.ray_cluster import Resources, last_line
from jobs.replica_actor import DEPTH, ReplicaActor
from jobs.spans import Spans
from schemas.commits import Commit, Failure
from schemas.errors import RunError
from workers.replica import Replica
from workers.shard import noted

ATTEMPTS = 3
"""How often a shard is tried before it is reported."""

SLOW = 3.0
"""A shard that takes so many times the median is measured elsewhere too, once there is nothing else
to do.
"""

STILLBORN = 20
"""When so many replicas have died before they were there, no more are made."""


def dispatch(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    say: Callable[[str], None],
    replica: type[Replica] = Replica,
) -> Iterator[Commit | Failure]:
    """Measure `shards` on replicas; yields each one's commit or failure as it arrives, in no order."""
    dispatch = _Dispatch(plan, shards, resources, say, replica)
    try:
        yield from dispatch.outcomes()
    except ray.exceptions.RayError as error:
        raise RunError(
            f"{plan.run.run_id}: Ray gave up ({last_line(str(error))}); the same command goes on where it stopped"
        ) from None
    finally:
        dispatch.end()


@dataclass(eq=False)
class _Seat:
    """A replica as the driver sees it."""

    actor: Any
    ready: bool = False
    waiting_for: Any = None
    flying: dict[Any, tuple[int, float]] = field(default_factory=dict)
    """Shard and start of each call."""
    alone: bool = False
    """Whether it measures a shard that may have killed a replica, and nothing else."""


class _Dispatch:
    """Who measures what, until every shard has an outcome."""

    def __init__(
        self,
        plan: Plan,
        shards: np.ndarray,
        resources: Resources,
        say: Callable[[str], None],
        replica: type[Replica],
    ) -> None:
        self.plan, self.say = plan, say
        self.missing = len(shards)
        self.spans = Spans(shards)
        self.open = np.zeros(plan.manifest.shards, bool)
        self.open[shards] = True
        self.retries: deque[int] = deque()
        self.suspects: deque[int] = deque()
        self.attempts = Counter(
            {s: f[0] for s in plan.run.failed_shards() if (f := plan.run.failure(s)) is not None}
        )
        self.tried: Counter[int] = Counter()
        self.lasted: deque[float] = deque(maxlen=64)
        self.stillborn = 0
        # Sent as bytes: Ray warns of a reference, which it would not keep for a replica that is
        # made anew; this one is kept here.
        self.known = ray.put((plan.sequences.index, plan.sequences.corpus))
        known = cloudpickle.dumps(self.known)  # pyright: ignore[reportPrivateImportUsage]
        gpu = resources.device == "cuda"
        options = {
            "num_cpus": max(1, resources.cores) if gpu else resources.cores,
            "num_gpus": int(gpu),
            "max_concurrency": DEPTH,
            "max_restarts": -1,  # A node that comes back, or a new one, gets the replica.
            "max_task_retries": 0,  # Which shard is tried again is decided here.
            "scheduling_strategy": "SPREAD",
        }
        make = ReplicaActor.options(**options).remote
        begun = begun_precisions(plan.run)
        arguments = (plan.scan, plan.info, plan.run, plan.code, known, resources)
        self.seats = [
            _Seat(make(*arguments, replica, begun))
            for _ in range(min(resources.replicas, self.missing))
        ]

    def outcomes(self) -> Iterator[Commit | Failure]:
        """Commits and failures as they arrive, one for each shard."""
        for seat in self.seats:
            self._expect(seat)
        told = time.monotonic()
        while self.missing:
            for seat in self.seats:
                self._occupy(seat)
            calls: dict[Any, _Seat] = {call: seat for seat in self.seats for call in seat.flying}
            waits = {seat.waiting_for: seat for seat in self.seats if not seat.ready}
            done, _ = ray.wait([*calls, *waits], num_returns=1, timeout=1.0)
            for call in done:
                if call in waits:
                    self._arrive(waits[call])
                elif (outcome := self._outcome(calls[call], call)) is not None:
                    yield outcome
            if any(seat.ready for seat in self.seats):
                told = time.monotonic()
            elif time.monotonic() - told > 30:
                self.say(
                    "no replica yet: the model is being loaded, or the cluster has no room for one"
                )
                told = time.monotonic()

    def end(self) -> None:
        """Let the replicas go, whatever they do."""
        for seat in self.seats:
            ray.kill(seat.actor)

    def _expect(self, seat: _Seat) -> None:
        seat.ready, seat.waiting_for = False, seat.actor.ready.remote()

    def _arrive(self, seat: _Seat) -> None:
        """A replica is there, or can never be."""
        try:
            ray.get(seat.waiting_for)
        except ray.exceptions.RayError as error:
            self.stillborn += 1
            if getattr(error, "actor_init_failed", False) or self.stillborn > STILLBORN:
                raise RunError(f"no replica can be made: {last_line(str(error))}") from None
            self._expect(seat)
        else:
            seat.ready, self.stillborn = True, 0

    def _occupy(self, seat: _Seat) -> None:
        """Give a replica as many shards as it takes at once."""
        while seat.ready and not seat.alone and len(seat.flying) < DEPTH:
            shard = self._next(seat)
            if shard is None:
                return
            call = seat.actor.measure.remote(shard, self.attempts[shard] + 1)
            seat.flying[call] = shard, time.monotonic()

    def _next(self, seat: _Seat) -> int | None:
        shard = self.spans.take(seat)
        if shard is None and self.retries:
            shard = self.retries.popleft()
        if shard is None and self.suspects and not seat.flying:
            seat.alone = True
            shard = self.suspects.popleft()
        if shard is None and not seat.flying:
            shard = self._straggler(seat)
        return shard

    def _straggler(self, idle: _Seat) -> int | None:
        """The shard that was given out longest ago, if that is far too long ago, and to others."""
        given: dict[int, float] = {}
        for shard, since in (
            call for seat in self.seats if seat is not idle for call in seat.flying.values()
        ):
            given[shard] = max(since, given.get(shard, since))
        shard = min((s for s in given if self.open[s]), key=given.__getitem__, default=None)
        if shard is None or not self.lasted:
            return None
        patience = max(2.0, SLOW * statistics.median(self.lasted))
        return shard if time.monotonic() - given[shard] > patience else None

    def _outcome(self, seat: _Seat, call: Any) -> Commit | Failure | None:
        """What became of a shard; none where it is tried again, or was done elsewhere meanwhile."""
        shard, since = seat.flying.pop(call)
        seat.alone = died = False
        try:
            outcome: Any = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            outcome = Failure(shard, last_line(str(error)))
        except ray.exceptions.RayError as error:
            if seat.ready:
                self._expect(seat)
            if getattr(error, "preempted", False):
                self.retries.extend([shard] if self.open[shard] else [])
                return None
            outcome = Failure(shard, f"its replica died ({last_line(str(error))})")
            died = True
        if not self.open[shard]:
            return None
        if not isinstance(outcome, Commit):
            return self._failed(outcome, died)
        self.lasted.append(time.monotonic() - since)
        return self._end(outcome)

    def _failed(self, failure: Failure, died: bool) -> Failure | None:
        """Try a shard again, or report it; one that may have killed its replica is tried alone."""
        self.tried[failure.shard] += 1
        self.attempts[failure.shard] += 1
        if self.tried[failure.shard] < ATTEMPTS:
            (self.suspects if died else self.retries).append(failure.shard)
            return None
        if died:
            failure = noted(self.plan.run, failure, self.attempts[failure.shard])
        return self._end(failure)

    def _end(self, outcome: Any) -> Any:
        self.open[outcome.shard] = False
        self.missing -= 1
        return outcome
