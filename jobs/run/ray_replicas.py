"""Replicas in actors of Ray, which places them, replaces those that die and waits for nodes."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import ray.exceptions
from ray import cloudpickle

from headcount.jobs.cluster.ray_cluster import (
    draining_nodes,
    lack_of_room,
    last_line,
    ray_in_words,
    room_of_replica,
)
from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.dispatch import LOOK_SECONDS, Driver
from headcount.jobs.run.preemption import gone_nodes
from headcount.jobs.run.replica_actor import CALLS, ReplicaActor
from headcount.jobs.run.replicas import (
    Died,
    Ended,
    Event,
    InHand,
    Leaves,
    Loaded,
    NotLoaded,
    ReplicaPlace,
)
from headcount.jobs.run.schedule import Call
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import absolute
from headcount.workers.provenance.code_fingerprint import read_code
from headcount.workers.replica import Replica

RESTART_PAUSE = 0.1  # seconds before Ray is asked again for a replica that it is starting again


def measure_on_ray(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    say: Callable[[str], None],
    replica_class: type[Replica] = Replica,
    begin: Callable[[], None] = lambda: None,
    measured: Callable[[int, int], None] = lambda shard, tokens: None,
) -> Generator[Commit | Failure, None, None]:
    """Measure `shards` on the Ray that this process is connected to, as `Driver` says."""
    on_cluster = resources.cluster is not None
    with ray_in_words(plan.run.run_id):
        # More replicas than shards would have nothing to do.
        count = min(resources.replicas, len(shards))
        replicas = RayReplicas(plan, resources, replica_class, count)
        try:
            driver = Driver(plan.run, shards, replicas, say, begin, measured, on_cluster)
            yield from driver.outcomes()
        finally:
            replicas.kill()


@dataclass(eq=False)
class _Actor:
    number: int  # of the replica
    handle: Any  # Ray's. Ray gives the actor a new process if the old one dies; the handle stays.
    readiness: ray.ObjectRef | None = None  # fulfilled once it is loaded; then none
    ask_again: float | None = None
    """When Ray is asked for another reference, because it is starting the replica again."""
    calls: dict[ray.ObjectRef, Call] = field(default_factory=dict[ray.ObjectRef, Call])
    """The shards it works at, by Ray's reference of the result."""
    place: ReplicaPlace | None = None  # where it was when it was last ready
    notice: ray.ObjectRef | None = None  # fulfilled once it is told to leave
    answer: ray.ObjectRef | None = None  # fulfilled with how far it is, if it was asked
    was_asked_to_leave: bool = False  # whether this driver has passed a notice on to it
    is_leaving: bool = False  # whether it was told to leave

    @property
    def is_loaded(self) -> bool:
        return self.readiness is None

    def await_start(self) -> None:
        """Ask Ray for news of a replica that is not loaded yet; do not wait for it here."""
        self.is_leaving = False
        self.notice = None
        self.ask_again = None
        self.readiness = self.handle.ready.remote()

    def ask_to_leave(self, reason: str) -> None:
        """Tell it to leave, once; the answer is its notice."""
        if self.is_loaded and not self.was_asked_to_leave:
            self.was_asked_to_leave = True
            self.handle.leave.remote(reason)


class RayReplicas:
    """Replicas of a plan on Ray (`jobs.run.replicas.Replicas`); none is waited for here."""

    def __init__(
        self, plan: Plan, resources: Resources, replica_class: type[Replica], count: int
    ) -> None:
        self.resources = resources
        # What all replicas need, sent once. They get the reference as bytes: Ray warns of one among
        # an actor's arguments, because it does not keep the object for an actor that restarts; but
        # this process keeps it as long as there are replicas.
        self.work_reference = ray.put(
            (
                plan.scan,
                plan.info,
                # Replicas on a cluster work in another directory than this process.
                RunDirectory(absolute(plan.run.path)),
                plan.sequences.index,
                plan.sequences.corpus,
                plan.manifest.identity.get("tokenizer"),
            )
        )
        reference_bytes = cloudpickle.dumps(  # pyright: ignore[reportPrivateImportUsage]
            self.work_reference
        )
        start_actor = ReplicaActor.options(
            **room_of_replica(resources),
            max_concurrency=CALLS,
            max_restarts=-1,  # A node that comes back, or a new one, gets the replica.
            max_task_retries=0,  # Which shard is tried again is decided by the schedule.
            scheduling_strategy="SPREAD",
        ).remote
        arguments = (read_code(), reference_bytes, resources, replica_class, resources.directory)
        self.actors = [_Actor(number, start_actor(*arguments)) for number in range(count)]
        self.working: dict[ray.ObjectRef, _Actor] = {}  # by calls that have not ended
        self.is_ending = False  # whether all were told to leave, so that none is wanted again
        for actor in self.actors:
            actor.await_start()

    def __len__(self) -> int:
        return len(self.actors)

    def kill(self) -> None:
        """End all replicas; a shard that is cut off has no commit."""
        # After Ray's end `ray.kill` would join another cluster of this machine.
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor.handle)

    def measure(self, call: Call) -> None:
        """Give a shard to a replica."""
        actor = self.actors[call.replica]
        reference = actor.handle.measure.remote(call.shard, call.attempt)
        actor.calls[reference] = call
        self.working[reference] = actor

    def leave(self, reason: str) -> None:
        """Tell all replicas to finish what they measure, and to leave."""
        self.is_ending = True
        for actor in self.actors:
            actor.ask_to_leave(reason)

    def gone_nodes(self, node_ids: set[str]) -> set[str]:
        """Which of some nodes are dead."""
        return gone_nodes(node_ids)

    def lack(self) -> str | None:
        """What a replica needs that no machine of the cluster has, in words."""
        return lack_of_room(self.resources)

    def look(self) -> Iterator[InHand]:
        """Tell replicas whose node drains to leave, and how far those are that take long."""
        draining = draining_nodes()
        latest = time.monotonic() - LOOK_SECONDS
        for actor in self.actors:
            if actor.place is not None and actor.place.node_id in draining:
                actor.ask_to_leave("its node is being drained")
            if actor.answer is not None:
                arrived, _ = ray.wait([actor.answer], num_returns=1, timeout=0)
                if not arrived:
                    continue
                # One that has died says nothing, and its shards come back.
                with contextlib.suppress(ray.exceptions.RayError):
                    in_hand: InHand | None = ray.get(actor.answer)
                    if in_hand is not None:
                        yield in_hand
                actor.answer = None
            if actor.is_loaded and any(call.started < latest for call in actor.calls.values()):
                actor.answer = actor.handle.how_far.remote()

    def events(self, most: int) -> Iterator[Event]:
        """Wait a second at most until something happens; tells that, and what else is known."""
        for actor in self.actors:
            # A replica that leaves is kept by its calls alone. Its successor is the same actor in
            # another process.
            has_left = actor.is_leaving and not actor.calls and not self.is_ending
            if has_left or (actor.ask_again is not None and time.monotonic() >= actor.ask_again):
                actor.await_start()
        noticing = {actor.notice: actor for actor in self.actors if actor.notice is not None}
        asked = [actor for actor in self.actors if actor.ask_again is None]
        starting = {actor.readiness: actor for actor in asked if actor.readiness is not None}
        # Ray keeps the order of those that have arrived: a notice explains the calls that failed.
        references = [*noticing, *self.working, *starting]
        # One second at most: a straggler shows by the clock, not by an event.
        timeout = RESTART_PAUSE if len(asked) < len(self.actors) else 1.0
        arrived, _ = ray.wait(references, num_returns=1, timeout=timeout)
        if arrived and len(references) > 1:
            arrived, _ = ray.wait(references, num_returns=min(most, len(references)), timeout=0)
        if not references:
            # Of no references Ray waits for none. Nobody else works who could be held up.
            time.sleep(timeout)
        for reference in arrived:
            if reference in starting:
                yield from self._end_start(starting[reference], reference)
            elif reference in noticing:
                # An event before it may have been the death of the replica.
                if noticing[reference].notice == reference:
                    yield from self._end_notice(noticing[reference], reference)
            else:
                yield from self._end_call(self.working.pop(reference), reference)

    def _end_start(self, actor: _Actor, reference: ray.ObjectRef) -> Iterator[Event]:
        """A replica is loaded, or the next one is waited for."""
        try:
            place: ReplicaPlace = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:
            # Ray is starting it again, which is no failed start. It says so at once, and would say
            # so thousands of times before the start has ended.
            actor.ask_again = time.monotonic() + RESTART_PAUSE
        except ray.exceptions.RayError as error:
            constructor_raised = getattr(error, "actor_init_failed", False)
            yield NotLoaded(last_line(str(error)), constructor_raised)
            actor.await_start()
        else:
            actor.readiness = None
            actor.place = place
            yield Loaded(actor.number, place)
            actor.notice = actor.handle.told_to_leave.remote()
            actor.was_asked_to_leave = False

    def _end_notice(self, actor: _Actor, reference: ray.ObjectRef) -> Iterator[Event]:
        """A replica was told to leave, or has died."""
        actor.notice = None
        try:
            reason: str = ray.get(reference)
        except ray.exceptions.RayError:
            # The death of an idle replica shows nowhere else.
            yield from self._end(actor)
        else:
            actor.is_leaving = True
            yield Leaves(actor.number, reason)

    def _end_call(self, actor: _Actor, reference: ray.ObjectRef) -> Iterator[Event]:
        """A call has ended, by itself or with its replica."""
        call = actor.calls.pop(reference)
        try:
            result: Commit | Failure | None = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            # The call itself raised, for example because its result could not be sent. The
            # replica lives.
            yield Ended(call, Failure(call.shard, last_line(str(error))))
        except ray.exceptions.RayError as error:
            # The replica died. All its calls end here, one after the other.
            yield from self._end(actor)
            why = f"its replica died ({last_line(str(error))})"
            yield Ended(call, Failure(call.shard, why), with_replica=True)
        else:
            yield Ended(call, result)

    def _end(self, actor: _Actor) -> Iterator[Event]:
        """A replica has died; its successor is waited for."""
        # Another of its calls, or its notice, has told already.
        if actor.is_loaded:
            yield Died(actor.number)
            actor.await_start()
