"""Drive replicas on a cluster until every shard has an outcome: a commit or a failure.

A replica reads, measures, writes and commits a shard by itself. The cluster places the replicas,
replaces those that die and waits for nodes (`jobs.run.replicas`). The driver decides what the
cluster cannot know: which shard is given out again, which shard is to blame for a death, and when a
slow replica is not worth waiting for. That is the `Schedule`; here is the loop that asks and tells
it. If the driver itself is told to end, it hands out nothing more, tells the replicas to leave, and
takes what they still finish.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from headcount.jobs import phases
from headcount.jobs.endings import is_finishing, work_begins
from headcount.jobs.job_state import StateTeller
from headcount.jobs.metrics import IDLE_SHARE, IDLE_WINDOW, SHARDS, SHARDS_REPEATED
from headcount.jobs.run.replicas import (
    Died,
    Ended,
    Event,
    Leaves,
    Loaded,
    NotLoaded,
    ReplicaPlace,
    Replicas,
)
from headcount.jobs.run.schedule import Repetition, Schedule
from headcount.jobs.run.shards import Attempts, GatheredElsewhere, order_of_driver
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.run_directory import RunDirectory
from headcount.workers.shard import note_failure

MOST_EVENTS = 100
"""Events that are taken before the replicas are given further shards: a look at a thousand replicas
takes as long as a hundred events.
"""

LOOK_SECONDS = 2.0  # between two looks at the cluster: what drains, what is done

NO_REPLICA = "no replica yet: the model is being loaded, or all cores are taken"
FIRST_COMMIT = "the first shard is committed"

STARTING_NOTICE = 30.0  # seconds without any replica after which a line says why nothing happens


class Driver:
    """What goes to and fro between a schedule and its replicas, and what people are told of it.

    `begin` is called once the first replica is loaded, and before it gets a shard; `measured` with
    how many tokens of a shard are measured, while that takes long.
    """

    def __init__(
        self,
        run: RunDirectory,
        shards: np.ndarray,
        replicas: Replicas,
        say: Callable[[str], None],
        begin: Callable[[], None] = lambda: None,
        measured: Callable[[int, int], None] = lambda shard, tokens: None,
        on_cluster: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.replicas = replicas
        self.say = say
        self.state = StateTeller(say)
        self.begin: Callable[[], None] | None = begin  # none once it was called
        self.measured = measured
        self.says_first_commit = on_cluster
        self.clock = clock
        self.schedule = Schedule(
            order_of_driver(run, shards),
            len(replicas),
            Attempts(run),
            clock,
            GatheredElsewhere(run),
            self._count_repeated,
        )
        self.places: dict[int, ReplicaPlace] = {}  # where each replica was when last loaded
        self.gone_nodes: set[str] = set()  # nodes that have vanished
        self.commits: list[deque[Commit]] = [
            deque(maxlen=IDLE_WINDOW) for _ in range(len(replicas))
        ]
        """The last ones of each replica since it was loaded, which tell how long it waits."""
        self.last_look = -math.inf  # when the cluster was last looked at
        self.last_sign = clock()  # when a replica was there, or a line said that none is

    def outcomes(self) -> Iterator[Commit | Failure]:
        """Give out shards, take what has happened, and tell the schedule, until all is done.

        Yields each commit and each failed attempt as it arrives.
        """
        phases.note("waiting for machines")
        if (lack := self.replicas.lack()) is not None:
            self.state.tell("short of machines", lack)
        while self.schedule.open_count:
            self._look()
            if is_finishing():
                if not self.schedule.is_at_work:
                    break
                self.replicas.leave("the scan is being stopped")
            else:
                for call in self.schedule.new_calls():
                    self.replicas.measure(call)
                    self.measured(call.shard, 0)
            for event in self.replicas.events(MOST_EVENTS):
                outcome = self._outcome_of(event)
                if outcome is not None:
                    yield outcome
            self._say_if_no_replica_is_there()
        self._show_progress()

    def _outcome_of(self, event: Event) -> Commit | Failure | None:
        """Tell the schedule what has happened; answers with what is to be reported."""
        match event:
            case Ended(call, result, with_replica):
                outcome = self.schedule.ended(call, result, with_replica)
                if isinstance(outcome, Commit):
                    self._note_commit(call.replica, outcome)
                elif outcome is not None and with_replica and outcome.is_last:
                    # A replica leaves a note of a failure in the run. One that died could not.
                    failed_attempts = self.schedule.attempts.failed(call.shard)
                    return note_failure(self.run, outcome, failed_attempts)
                return outcome
            case Loaded(replica, place):
                self._note_loaded(replica, place)
            case NotLoaded(error, is_for_ever):
                self.schedule.not_loaded(error, is_for_ever)
            case Leaves(replica, reason):
                self.schedule.leaves(replica)
                if not is_finishing():
                    self.say(f"a replica on {self.places[replica].host} leaves: {reason}")
            case Died(replica):
                self.schedule.died(replica, with_node=self._lost_its_node(replica))
        return None

    def _note_loaded(self, replica: int, place: ReplicaPlace) -> None:
        if self.begin is not None:
            self.begin()
            self.begin = None
        self.places[replica] = place
        self.commits[replica].clear()
        self.schedule.loaded(replica)
        work_begins()

    def _lost_its_node(self, replica: int) -> bool:
        """Whether a replica died with its node, if nothing else explains it; says so."""
        place = self.places[replica]
        if self.schedule.is_excused(replica) or not self._is_gone(place.node_id):
            return False
        self.say(f"{place.host} is gone: its shards are measured elsewhere")
        return True

    def _is_gone(self, node_id: str) -> bool:
        if node_id not in self.gone_nodes and self.replicas.gone_nodes({node_id}):
            # Often many vanish at once, and to find one takes seconds. So all are asked.
            node_ids = {place.node_id for place in self.places.values()}
            self.gone_nodes |= self.replicas.gone_nodes(node_ids)
        return node_id in self.gone_nodes

    def _note_commit(self, replica: int, commit: Commit) -> None:
        self.commits[replica].append(commit)
        if self.says_first_commit:
            self.says_first_commit = False
            self.state.tell("measuring", FIRST_COMMIT, self.run.run_id)

    def _say_if_no_replica_is_there(self) -> None:
        """A user who waits for a machine, or for a large model, must not think that this hangs."""
        if any(map(self.schedule.is_there, range(len(self.replicas)))):
            self.last_sign = self.clock()
        elif self.clock() - self.last_sign > STARTING_NOTICE:
            if (lack := self.replicas.lack()) is not None:
                self.state.tell("short of machines", lack)
            else:
                self.state.tell("without replicas", NO_REPLICA)
            self.last_sign = self.clock()

    def _look(self) -> None:
        """Hear now and then how far long shards are, and tell Prometheus."""
        if self.clock() - self.last_look < LOOK_SECONDS:
            return
        self.last_look = self.clock()
        for in_hand in self.replicas.look():
            if self.schedule.is_open[in_hand.shard]:
                self.measured(*in_hand)
        self._show_progress()

    def _show_progress(self) -> None:
        """Set all gauges. Ray forgets one when it was read once, so they are set again and again,
        those of the replicas too: this process is always awake.
        """
        schedule, run_id = self.schedule, self.run.run_id
        counts = {
            "waiting": schedule.open_count - schedule.running_count,
            "running": schedule.running_count,
            "done": schedule.n_shards - schedule.open_count - schedule.failures,
            "failed": schedule.failures,
        }
        for shard_state, count in counts.items():
            SHARDS.tell(count, run_id=run_id, state=shard_state)
        for replica, commits in enumerate(self.commits):
            if commits and schedule.is_there(replica):
                idle = sum(commit.idle_seconds for commit in commits)
                busy = sum(commit.compute_seconds for commit in commits)
                last = commits[-1]
                share = idle / (idle + busy) if idle else 0.0
                IDLE_SHARE.tell(share, run_id=run_id, node=last.host, replica=last.replica)

    def _count_repeated(self, why: Repetition) -> None:
        SHARDS_REPEATED.tell(1, run_id=self.run.run_id, reason=why)
