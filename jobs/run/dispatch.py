"""Hand out shards to replicas, and see that every shard gets an outcome: a commit or a failure.

A replica reads, measures, writes and commits a shard by itself. Ray places the replicas, replaces
those that die and waits for nodes. The driver decides what Ray cannot know: which shard is given
out again, which shard is to blame for a death, and when a slow replica is not worth waiting for.

A shard is done when its commit exists, no matter which replica wrote it. So giving a shard out
twice is always safe, and the driver may do so whenever it is in doubt.

Where a replica's next shard comes from, in this order (`_next_shard`):

1. Its own span of new shards, so that it reads the corpus's files forward. If the span is used up,
   it steals half of the longest span of another replica (`jobs.run.shards`).
2. The retries: shards that failed once, so that they hold up nobody.
3. The suspects and the stragglers, for an idle replica only.

What can happen to a shard that was given out:

* It fails with an exception: it is tried again on any replica, `ATTEMPTS` times in all.
* Its replica dies: every shard in that replica may be to blame. Each of them becomes a suspect,
  which is tried again alone in a replica. If that replica dies too, the blame is clear.
* Its replica is told to leave, because the machine is taken back (`jobs.run.preemption`): the
  replica finishes the shard that it measures and returns the others. No try counts.
* Its node vanishes without notice: no try counts either, unless nodes vanish under one shard again
  and again.
* It takes far longer than others: it is a straggler, and another replica that has nothing else to
  do measures it too. The first outcome counts.

`outcomes` is the loop that all of this happens in. It waits for events: a replica is loaded, a
replica was told to leave, or a call has ended. What a look at all replicas finds serves for the
events of one turn, because a look at a thousand takes as long as a hundred events. If the driver
itself is told to end, it hands out nothing more, tells the replicas to leave, and takes what they
still finish.
"""

import contextlib
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.exceptions
from ray import cloudpickle

from headcount.jobs.cluster.ray_cluster import (
    FIRST_COMMIT,
    draining_nodes,
    lack_of_room,
    last_line,
    ray_in_words,
)
from headcount.jobs.endings import is_finishing, work_begins
from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.preemption import gone_nodes
from headcount.jobs.run.replica_actor import CALLS, DEPTH, InHand, ReplicaActor, ReplicaPlace
from headcount.jobs.run.shards import Attempts, GatheredElsewhere, Spans, order_of_driver
from headcount.jobs.upkeep import phases
from headcount.jobs.upkeep.metrics import IDLE_SHARE, IDLE_WINDOW, SHARDS, SHARDS_REPEATED
from headcount.schemas.errors import RunError
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import absolute
from headcount.workers.provenance.code_fingerprint import read_code
from headcount.workers.replica import Replica
from headcount.workers.shard import note_failure

MOST_LOST_NODES = 10  # under a shard: it may be the cause, and the next try counts

SLOW = 3.0  # a shard is a straggler after this many times the median duration
LEAST_PATIENCE = 2.0  # seconds before any shard is a straggler, however short the others are
MOST_FAILED_STARTS = 20  # give up after this many failed starts in a row
RESTART_PAUSE = 0.1  # seconds before Ray is asked again for a replica that it is starting again
RECENT_SHARDS = 64  # shards whose durations make the median
MOST_EVENTS = 100  # events that are taken before the replicas are given further shards

LOOK_SECONDS = 2.0  # between two looks at the cluster: what drains, what is done

STARTING_NOTICE = 30.0  # seconds without any replica after which a line says why nothing happens


def dispatch(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    say: Callable[[str], None],
    replica_class: type[Replica] = Replica,
    begin: Callable[[], None] = lambda: None,
    measured: Callable[[int, int], None] = lambda shard, tokens: None,
) -> Generator[Commit | Failure, None, None]:
    """Measure `shards` on replicas; yields each commit and each failed attempt as it arrives.

    `begin` is called once the first replica is loaded, and before it gets a shard; `measured` with
    how many tokens of a shard are measured, while that takes long.
    """
    with ray_in_words(plan.run.run_id):
        dispatcher = _Dispatcher(plan, shards, resources, say, replica_class, begin, measured)
        try:
            yield from dispatcher.outcomes()
        finally:
            # A shard that is cut off has no commit. After Ray's end `ray.kill` would join another
            # cluster of this machine.
            if ray.is_initialized():
                for replica in dispatcher.replicas:
                    ray.kill(replica.actor)


class _Call(NamedTuple):
    """A shard that a replica works at."""

    shard: int
    started: float  # by the driver's monotonic clock


@dataclass(eq=False)
class _RemoteReplica:
    actor: Any  # Ray's handle. Ray gives it a new process if the old one dies; the handle stays.
    readiness: ray.ObjectRef | None = None  # fulfilled once it is loaded; then none
    ask_again: float | None = None
    """When Ray is asked for another reference, because it is starting the replica again; by the
    driver's monotonic clock.
    """
    calls: dict[ray.ObjectRef, _Call] = field(default_factory=dict[ray.ObjectRef, _Call])
    """The shards it works at, by Ray's reference of the result; `DEPTH` at most."""
    has_suspect: bool = False  # whether it measures a suspect, and so no other shard beside it
    place: ReplicaPlace | None = None  # where it was when it was last ready
    notice: ray.ObjectRef | None = None  # fulfilled once it is told to leave
    answer: ray.ObjectRef | None = None  # fulfilled with how far it is, if it was asked
    was_asked_to_leave: bool = False  # whether this driver has passed a notice on to it
    is_leaving: bool = False  # whether it was told to leave, so that it gets no further shard
    excuse: str | None = None  # why its end is no shard's fault; none if it is
    commits: deque[Commit] = field(default_factory=lambda: deque[Commit](maxlen=IDLE_WINDOW))
    """Its last ones since it was loaded, which tell how long it waits for shards."""

    @property
    def ready(self) -> bool:
        """Whether it is loaded."""
        return self.readiness is None


class _Dispatcher:
    """Who measures what, until every shard has an outcome."""

    def __init__(
        self,
        plan: Plan,
        shards: np.ndarray,
        resources: Resources,
        say: Callable[[str], None],
        replica_class: type[Replica],
        begin: Callable[[], None] = lambda: None,
        measured: Callable[[int, int], None] = lambda shard, tokens: None,
    ) -> None:
        self.plan = plan
        self.measured = measured
        self.begin: Callable[[], None] | None = begin  # none once it was called
        self.resources = resources
        self.say = say
        self.is_open = np.zeros(plan.manifest.shards, bool)  # whether a shard needs an outcome
        self.is_open[shards] = True
        self.n_shards = self.open_count = len(shards)

        # Where the next shard comes from, in this order.
        self.spans = Spans(order_of_driver(plan.run, shards))
        self.elsewhere = GatheredElsewhere(plan.run)
        self.retries: deque[int] = deque()
        self.suspects: deque[int] = deque()

        self.attempts = Attempts(plan.run)
        self.durations: deque[float] = deque(maxlen=RECENT_SHARDS)
        """Seconds from handing out a shard to its commit, of the last shards."""
        self.failed_starts = 0  # starts that failed since a replica was loaded
        self.gone_nodes: set[str] = set()  # nodes that have vanished
        self.lost_nodes: Counter[int] = Counter()  # nodes that vanished under each shard
        self.failures = 0  # shards that were reported as failed
        self.working: dict[ray.ObjectRef, _RemoteReplica] = {}  # by calls that have not ended
        self.last_look = 0.0  # when the cluster was last looked at, by the monotonic clock

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
        on_gpu = resources.device == "cuda"
        start_actor = ReplicaActor.options(
            num_cpus=max(1, resources.cores) if on_gpu else resources.cores,
            num_gpus=int(on_gpu),
            max_concurrency=CALLS,
            max_restarts=-1,  # A node that comes back, or a new one, gets the replica.
            max_task_retries=0,  # Which shard is tried again is decided here.
            scheduling_strategy="SPREAD",
        ).remote
        arguments = (read_code(), reference_bytes, resources, replica_class, resources.directory)
        # More replicas than shards would have nothing to do. None of them is waited for here.
        count = min(resources.replicas, self.open_count)
        self.replicas = [_RemoteReplica(start_actor(*arguments)) for _ in range(count)]

    def outcomes(self) -> Iterator[Commit | Failure]:
        """Yield commits and failed attempts as they arrive."""
        phases.note("waiting for machines")
        for replica in self.replicas:
            self._await_start(replica)
        if (lack := lack_of_room(self.resources)) is not None:
            self.say(lack)
        last_notice = time.monotonic()
        while self.open_count:
            self._look_at_the_cluster()
            if is_finishing():
                if not any(replica.calls for replica in self.replicas):
                    break
                for replica in self.replicas:
                    self._ask_to_leave(replica, "the scan is being stopped")
            else:
                stragglers = self._stragglers()
                for replica in self.replicas:
                    self._fill(replica, stragglers)
            yield from self._next_outcomes()
            # A user who waits for a machine, or for a large model, must not think that this hangs.
            if any(replica.ready for replica in self.replicas):
                last_notice = time.monotonic()
            elif time.monotonic() - last_notice > STARTING_NOTICE:
                self.say(
                    lack_of_room(self.resources)
                    or "no replica yet: the model is being loaded, or all cores are taken"
                )
                last_notice = time.monotonic()
        self._show_progress()

    def _next_outcomes(self) -> Iterator[Commit | Failure]:
        """Wait for an event; yields the outcomes that it and others bring."""
        for replica in self.replicas:
            if replica.ask_again is not None and time.monotonic() >= replica.ask_again:
                self._await_start(replica)
        noticing = {r.notice: r for r in self.replicas if r.notice is not None}
        asked = [r for r in self.replicas if r.ask_again is None]
        starting = {r.readiness: r for r in asked if r.readiness is not None}
        # Ray keeps the order of those that have arrived: a notice explains the calls that failed.
        references = [*noticing, *self.working, *starting]
        # One second at most: a straggler shows by the clock, not by an event.
        timeout = RESTART_PAUSE if len(asked) < len(self.replicas) else 1.0
        arrived, _ = ray.wait(references, num_returns=1, timeout=timeout)
        if arrived and len(references) > 1:
            most = min(MOST_EVENTS, len(references))
            arrived, _ = ray.wait(references, num_returns=most, timeout=0)
        if not references:
            # Of no references Ray waits for none. Nobody else works who could be held up.
            time.sleep(timeout)
        for reference in arrived:
            if reference in starting:
                self._end_start(starting[reference], reference)
            elif reference in noticing:
                # An event before it may have been the death of the replica.
                if noticing[reference].notice == reference:
                    self._heed_notice(noticing[reference], reference)
            else:
                outcome = self._end_call(self.working.pop(reference), reference)
                if outcome is not None:
                    yield outcome

    def _look_at_the_cluster(self) -> None:
        """Tell replicas whose node drains to leave, and Prometheus how far the shards are."""
        if time.monotonic() - self.last_look < LOOK_SECONDS:
            return
        self.last_look = time.monotonic()
        draining = draining_nodes()
        for replica in self.replicas:
            if replica.place is not None and replica.place.node_id in draining:
                self._ask_to_leave(replica, "its node is being drained")
        self._ask_how_far()
        self._show_progress()

    def _ask_how_far(self) -> None:
        """Tell how far the replicas were, and ask those again that measure a shard for long."""
        for replica in self.replicas:
            if replica.answer is not None:
                arrived, _ = ray.wait([replica.answer], num_returns=1, timeout=0)
                if not arrived:
                    continue
                # One that has died says nothing, and its shards come back.
                with contextlib.suppress(ray.exceptions.RayError):
                    in_hand: InHand | None = ray.get(replica.answer)
                    if in_hand is not None and self.is_open[in_hand.shard]:
                        self.measured(*in_hand)
                replica.answer = None
            latest = time.monotonic() - LOOK_SECONDS
            if replica.ready and any(call.started < latest for call in replica.calls.values()):
                replica.answer = replica.actor.how_far.remote()

    def _show_progress(self) -> None:
        """Set all gauges. Ray forgets one when it was read once, so they are set again and again,
        those of the replicas too: this process is always awake.
        """
        running = {call.shard for replica in self.replicas for call in replica.calls.values()}
        n_running = sum(bool(self.is_open[shard]) for shard in running)
        counts = {
            "waiting": self.open_count - n_running,
            "running": n_running,
            "done": self.n_shards - self.open_count - self.failures,
            "failed": self.failures,
        }
        run_id = self.plan.run.run_id
        for shard_state, count in counts.items():
            SHARDS.tell(count, run_id=run_id, state=shard_state)
        for replica in self.replicas:
            if replica.commits:
                idle = sum(commit.idle_seconds for commit in replica.commits)
                busy = sum(commit.compute_seconds for commit in replica.commits)
                last = replica.commits[-1]
                share = idle / (idle + busy) if idle else 0.0
                IDLE_SHARE.tell(share, run_id=run_id, node=last.host, replica=last.replica)

    def _tell_repeated(self, reason: str) -> None:
        SHARDS_REPEATED.tell(1, run_id=self.plan.run.run_id, reason=reason)

    def _ask_to_leave(self, replica: _RemoteReplica, reason: str) -> None:
        if replica.ready and not replica.was_asked_to_leave:
            replica.was_asked_to_leave = True
            replica.actor.leave.remote(reason)  # The answer is the replica's notice.

    def _await_start(self, replica: _RemoteReplica) -> None:
        """Ask Ray for news of a replica that is not loaded yet; do not wait for it here."""
        replica.commits.clear()
        replica.is_leaving = False
        replica.notice = None
        replica.ask_again = None
        replica.readiness = replica.actor.ready.remote()

    def _end_start(self, replica: _RemoteReplica, reference: ray.ObjectRef) -> None:
        """Count a replica as loaded, or wait for the next one; raise if its constructor raised."""
        try:
            place: ReplicaPlace = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:
            # Ray is starting it again, which is no failed start. It says so at once, and would say
            # so thousands of times before the start has ended.
            replica.ask_again = time.monotonic() + RESTART_PAUSE
        except ray.exceptions.RayError as error:
            self.failed_starts += 1
            constructor_raised = getattr(error, "actor_init_failed", False)
            if constructor_raised or self.failed_starts > MOST_FAILED_STARTS:
                raise RunError(f"no replica can be made: {last_line(str(error))}") from None
            self._await_start(replica)
        else:
            if self.begin is not None:
                self.begin()
                self.begin = None
            replica.readiness = None
            replica.place = place
            replica.notice = replica.actor.told_to_leave.remote()
            replica.was_asked_to_leave = False
            replica.excuse = None
            self.failed_starts = 0
            work_begins()

    def _heed_notice(self, replica: _RemoteReplica, reference: ray.ObjectRef) -> None:
        """Give a replica no further shard because it was told to leave, or has died idle."""
        replica.notice = None
        try:
            reason: str = ray.get(reference)
        except ray.exceptions.RayError:
            # The death of an idle replica shows nowhere else.
            self._note_death(replica)
            return
        replica.is_leaving = True
        replica.excuse = "preempted"
        if not is_finishing() and replica.place is not None:
            self.say(f"a replica on {replica.place.host} leaves: {reason}")

    def _note_death(self, replica: _RemoteReplica) -> None:
        """Find out why a replica died, once for all of its calls, and wait for its successor."""
        # Another of its calls, or its notice, has told already.
        if not replica.ready:
            return
        if replica.excuse is None and replica.place and self._is_gone(replica.place.node_id):
            self.say(f"{replica.place.host} is gone: its shards are measured elsewhere")
            replica.excuse = "node_lost"
        self._await_start(replica)

    def _is_gone(self, node_id: str) -> bool:
        if node_id not in self.gone_nodes and gone_nodes({node_id}):
            # Often many vanish at once, and to find one takes seconds. So all are asked.
            places = [replica.place for replica in self.replicas if replica.place is not None]
            self.gone_nodes |= gone_nodes({place.node_id for place in places})
        return node_id in self.gone_nodes

    def _fill(self, replica: _RemoteReplica, stragglers: deque[int]) -> None:
        """Give a replica as many shards as it takes at once; a suspect stays alone."""
        if replica.is_leaving:
            if not replica.calls:
                # Nothing keeps it now. Its successor is the same actor in another process.
                self._await_start(replica)
            return
        while replica.ready and not replica.has_suspect and len(replica.calls) < DEPTH:
            shard = self._next_shard(replica, stragglers)
            if shard is None:
                return
            reference = replica.actor.measure.remote(shard, self.attempts.failed(shard) + 1)
            replica.calls[reference] = _Call(shard, time.monotonic())
            self.measured(shard, 0)
            self.working[reference] = replica

    def _next_shard(self, replica: _RemoteReplica, stragglers: deque[int]) -> int | None:
        """What a replica measures next: new shards first, so that failing ones delay nobody."""
        while (shard := self.spans.take(replica)) is not None:
            if shard not in self.elsewhere:
                return shard
            self._close(shard)
        if self.retries:
            return self.retries.popleft()
        if replica.calls:
            return None
        # Only an idle replica is left from here: a suspect must be alone in it, and a straggler is
        # measured a second time only where nothing else is to do.
        if self.suspects:
            replica.has_suspect = True
            return self.suspects.popleft()
        if stragglers:
            self._tell_repeated("straggler")
            return stragglers.popleft()
        return None

    def _stragglers(self) -> deque[int]:
        """The open shards that take far too long, if a replica is idle; the oldest first.

        A shard that was given out twice counts from the second time. Otherwise it would be given to
        every replica that becomes idle.
        """
        # Without a duration nobody knows yet what is slow.
        if not self.durations or all(r.calls for r in self.replicas if r.ready):
            return deque()
        last_start: dict[int, float] = {}
        for replica in self.replicas:
            for call in replica.calls.values():
                if self.is_open[call.shard]:
                    earlier_start = last_start.get(call.shard, call.started)
                    last_start[call.shard] = max(call.started, earlier_start)
        patience = max(LEAST_PATIENCE, SLOW * statistics.median(self.durations))
        latest = time.monotonic() - patience
        slow = [shard for shard, start in last_start.items() if start < latest]
        return deque(sorted(slow, key=last_start.__getitem__))

    def _end_call(
        self, replica: _RemoteReplica, reference: ray.ObjectRef
    ) -> Commit | Failure | None:
        """The outcome of a call; none if no try counts, or if its shard has an outcome already."""
        call = replica.calls.pop(reference)
        had_suspect, replica.has_suspect = replica.has_suspect, False
        died = False
        try:
            result: Commit | Failure | None = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            # The call itself raised, for example because its result could not be sent. The
            # replica lives.
            result = Failure(call.shard, last_line(str(error)))
        except ray.exceptions.RayError as error:
            # The replica died. All its calls end here, one after the other.
            self._note_death(replica)
            result = Failure(call.shard, f"its replica died ({last_line(str(error))})")
            died = True
            is_excused = replica.excuse is not None
            if replica.excuse == "node_lost":
                # If nodes vanish again and again under one shard, it is to blame after all.
                self.lost_nodes[call.shard] += 1
                is_excused = self.lost_nodes[call.shard] < MOST_LOST_NODES
            if is_excused:
                result = None
        # Two replicas had this shard, and the other one was first.
        if not self.is_open[call.shard]:
            return None
        if result is None:
            # It was told to leave before it measured the shard, or has ended for such a reason.
            self._tell_repeated(replica.excuse or "preempted")
            # What was measured alone must stay alone.
            (self.suspects if had_suspect else self.retries).append(call.shard)
            return None
        if isinstance(result, Commit):
            if not self.durations and self.resources.cluster is not None:
                self.say(f"{self.plan.run.run_id}: {FIRST_COMMIT}")
            self.durations.append(time.monotonic() - call.started)
            replica.commits.append(result)
            self._close(call.shard)
            return result
        return self._retry_or_report(result, died)

    def _retry_or_report(self, failure: Failure, died: bool) -> Failure:
        """Queue a shard again; after enough attempts, its failure is the last."""
        shard = failure.shard
        if self.attempts.may_try_again(shard):
            queue = self.suspects if died else self.retries
            queue.append(shard)
            self._tell_repeated("died" if died else "failed")
            return replace(failure, is_last=False)
        self._close(shard)
        self.failures += 1
        if died:
            # A replica leaves a note of a failure in the run. One that died could not.
            return note_failure(self.plan.run, failure, self.attempts.failed(shard))
        return failure

    def _close(self, shard: int) -> None:
        self.is_open[shard] = False
        self.open_count -= 1
