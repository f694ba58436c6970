"""Which replica measures which shard: the policy, without a cluster and without a clock of its own.

A `Schedule` is told what happens to replicas and to the shards that they work at, and answers which
shards to give out, and what became of one. `jobs.run.dispatch` asks and tells it.

A shard is done when its commit exists, no matter which replica wrote it. So giving a shard out
twice is always safe, and that is done whenever there is a doubt.

Where a replica's next shard comes from, in this order (`_next_shard`):

1. Its own span of new shards, so that it reads the corpus's files forward. If the span is used up,
   it steals half of the longest span of another replica (`jobs.run.shards`).
2. The retries: shards that failed once, so that they hold up nobody.
3. The suspects and the stragglers, for an idle replica only.

What can happen to a shard that was given out (`ended`):

* It fails with an exception: it is tried again on any replica, `ATTEMPTS` times in all.
* Its replica dies: every shard in that replica may be to blame. Each of them becomes a suspect,
  which is tried again alone in a replica. If that replica dies too, the blame is clear.
* Its replica is told to leave, because the machine is taken back (`jobs.run.preemption`): the
  replica finishes the shard that it measures and returns the others. No try counts.
* Its node vanishes without notice: no try counts either, unless nodes vanish under one shard again
  and again.
* It takes far longer than others: it is a straggler, and another replica that has nothing else to
  do measures it too. The first outcome counts.
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from headcount.jobs.run.shards import Attempts, Spans
from headcount.schemas.errors import RunError
from headcount.schemas.files.commit import Commit, Failure

DEPTH = 3  # shards that a replica works at: one is read, one is measured, one is written

MOST_LOST_NODES = 10  # under a shard: it may be the cause, and the next try counts

SLOW = 3.0  # a shard is a straggler after this many times the median duration
LEAST_PATIENCE = 2.0  # seconds before any shard is a straggler, however short the others are
RECENT_SHARDS = 64  # shards whose durations make the median

MOST_FAILED_STARTS = 20  # give up after this many failed starts in a row

Repetition = Literal["failed", "died", "node_lost", "preempted", "straggler"]
"""Why a shard is given out again."""


class Call(NamedTuple):
    """A shard that is given to a replica."""

    replica: int
    shard: int
    attempt: int
    started: float  # by the clock of the schedule


@dataclass
class _Replica:
    takes_shards: bool = False  # whether it is loaded, and was not told to leave
    excuse: Literal["preempted", "node_lost"] | None = None
    """Why its end is no shard's fault; none if it is."""
    calls: list[Call] = field(default_factory=list[Call])  # what it works at; `DEPTH` at most
    has_suspect: bool = False  # whether it measures a suspect, and so no other shard beside it


class Schedule:
    """Who measures what, until every shard has an outcome: a commit or a last failure.

    `order` has the shards as they are to be measured. Those that are in `done_elsewhere` when their
    turn comes are closed without an outcome. `clock` tells seconds; `repeats` is told why a shard
    is given out again.
    """

    def __init__(
        self,
        order: np.ndarray,
        replicas: int,
        attempts: Attempts,
        clock: Callable[[], float],
        done_elsewhere: Container[int] = (),
        repeats: Callable[[Repetition], None] = lambda why: None,
    ) -> None:
        self.attempts = attempts
        self.clock = clock
        self.done_elsewhere = done_elsewhere
        self.repeats = repeats
        self.replicas = [_Replica() for _ in range(replicas)]
        self.is_open = np.zeros(order.max(initial=-1) + 1, bool)  # whether it needs an outcome
        self.is_open[order] = True
        self.n_shards = self.open_count = len(order)
        self.failures = 0  # shards that were reported as failed
        self.failed_starts = 0  # starts that failed since a replica was loaded

        # Where the next shard comes from, in this order.
        self.spans = Spans(order)
        self.retries: deque[int] = deque()
        self.suspects: deque[int] = deque()

        self.durations: deque[float] = deque(maxlen=RECENT_SHARDS)
        """Seconds from handing out a shard to its commit, of the last shards."""
        self.lost_nodes: Counter[int] = Counter()  # nodes that vanished under each shard

    # What happens to replicas.

    def loaded(self, replica: int) -> None:
        """A replica is there, perhaps in another process than before: it takes shards."""
        self.failed_starts = 0
        self.replicas[replica].takes_shards = True
        self.replicas[replica].excuse = None

    def not_loaded(self, error: str, is_for_ever: bool) -> None:
        """A replica did not start; raises if no other one will."""
        self.failed_starts += 1
        if is_for_ever or self.failed_starts > MOST_FAILED_STARTS:
            raise RunError(f"no replica can be made: {error}")

    def leaves(self, replica: int) -> None:
        """A replica was told to leave: it takes no further shard."""
        self.replicas[replica].takes_shards = False
        self.replicas[replica].excuse = "preempted"

    def is_excused(self, replica: int) -> bool:
        """Whether it is known already that the end of a replica is no shard's fault."""
        return self.replicas[replica].excuse is not None

    def died(self, replica: int, with_node: bool) -> None:
        """A replica's process has ended. All of its calls end after this."""
        self.replicas[replica].takes_shards = False
        if with_node:
            self.replicas[replica].excuse = "node_lost"

    # Who is at work.

    def is_there(self, replica: int) -> bool:
        """Whether a replica is loaded, or has not returned all of its shards."""
        return self.replicas[replica].takes_shards or bool(self.replicas[replica].calls)

    @property
    def is_at_work(self) -> bool:
        """Whether any shard is given out."""
        return any(replica.calls for replica in self.replicas)

    @property
    def running_count(self) -> int:
        """How many shards without an outcome are given out."""
        running = {call.shard for replica in self.replicas for call in replica.calls}
        return sum(bool(self.is_open[shard]) for shard in running)

    # What is given out.

    def new_calls(self) -> Iterator[Call]:
        """Give each replica as many shards as it takes at once; a suspect stays alone."""
        stragglers = self._stragglers()
        for number, replica in enumerate(self.replicas):
            while replica.takes_shards and not replica.has_suspect and len(replica.calls) < DEPTH:
                shard = self._next_shard(number, stragglers)
                if shard is None:
                    break
                call = Call(number, shard, self.attempts.failed(shard) + 1, self.clock())
                replica.calls.append(call)
                yield call

    def _next_shard(self, number: int, stragglers: deque[int]) -> int | None:
        """What a replica measures next: new shards first, so that failing ones delay nobody."""
        while (shard := self.spans.take(number)) is not None:
            if shard not in self.done_elsewhere:
                return shard
            self._close(shard)
        if self.retries:
            return self.retries.popleft()
        if self.replicas[number].calls:
            return None
        # Only an idle replica is left from here: a suspect must be alone in it, and a straggler is
        # measured a second time only where nothing else is to do.
        if self.suspects:
            self.replicas[number].has_suspect = True
            return self.suspects.popleft()
        if stragglers:
            self.repeats("straggler")
            return stragglers.popleft()
        return None

    def _stragglers(self) -> deque[int]:
        """The open shards that take far too long, if a replica is idle; the oldest first.

        A shard that was given out twice counts from the second time. Otherwise it would be given to
        every replica that becomes idle.
        """
        # Without a duration nobody knows yet what is slow.
        if not self.durations or all(r.calls for r in self.replicas if r.takes_shards):
            return deque()
        last_start: dict[int, float] = {}
        for replica in self.replicas:
            for call in replica.calls:
                if self.is_open[call.shard]:
                    earlier_start = last_start.get(call.shard, call.started)
                    last_start[call.shard] = max(call.started, earlier_start)
        patience = max(LEAST_PATIENCE, SLOW * statistics.median(self.durations))
        latest = self.clock() - patience
        slow = [shard for shard, start in last_start.items() if start < latest]
        return deque(sorted(slow, key=last_start.__getitem__))

    # What became of it.

    def ended(
        self, call: Call, result: Commit | Failure | None, with_replica: bool = False
    ) -> Commit | Failure | None:
        """Take back a shard with its result, none if the replica returned it unmeasured.

        `with_replica` says that the replica died. Answers with what is to be reported: nothing if
        no try counts, or if the shard has an outcome already.
        """
        replica = self.replicas[call.replica]
        replica.calls.remove(call)
        had_suspect, replica.has_suspect = replica.has_suspect, False
        if with_replica and self._is_no_fault(call.shard, replica):
            result = None
        # Two replicas had this shard, and the other one was first.
        if not self.is_open[call.shard]:
            return None
        if result is None:
            self.repeats(replica.excuse or "preempted")
            # What was measured alone must stay alone.
            (self.suspects if had_suspect else self.retries).append(call.shard)
            return None
        if isinstance(result, Commit):
            self.durations.append(self.clock() - call.started)
            self._close(call.shard)
            return result
        return self._retry_or_report(result, with_replica)

    def _is_no_fault(self, shard: int, replica: _Replica) -> bool:
        """Whether a shard is not to blame for the death of its replica."""
        if replica.excuse != "node_lost":
            return replica.excuse is not None
        # If nodes vanish again and again under one shard, it is to blame after all.
        self.lost_nodes[shard] += 1
        return self.lost_nodes[shard] < MOST_LOST_NODES

    def _retry_or_report(self, failure: Failure, with_replica: bool) -> Failure:
        """Queue a shard again; after enough attempts, its failure is the last."""
        shard = failure.shard
        if self.attempts.may_try_again(shard):
            (self.suspects if with_replica else self.retries).append(shard)
            self.repeats("died" if with_replica else "failed")
            return replace(failure, is_last=False)
        self._close(shard)
        self.failures += 1
        return failure

    def _close(self, shard: int) -> None:
        self.is_open[shard] = False
        self.open_count -= 1
