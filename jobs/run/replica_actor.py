"""A replica in a Ray actor: it reads, measures, writes and commits the shards that it is given.

An actor may start on another machine than the driver's. So it first checks that it has the same
code, the same weights and the same tokenizer: otherwise its rows would mean something else.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ray
from ray import cloudpickle

from headcount.jobs.metrics import BAD_ROWS, PHASE_SECONDS, TOKENS_MEASURED, node_name
from headcount.jobs.plan.begun_with import begun_precisions
from headcount.jobs.resources import Resources
from headcount.jobs.run.preemption import LeaveNotice
from headcount.jobs.run.replicas import InHand, ReplicaPlace
from headcount.jobs.run.schedule import DEPTH
from headcount.schemas.errors import RunError, SilentStoreError
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.object_stores import wait_for_store
from headcount.schemas.plugins import activate
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.sequences import Sequences, ShardInput
from headcount.workers.interventions import needs_partners
from headcount.workers.interventions.settlement import check_begun
from headcount.workers.model.info.description import check_same_model, described
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.provenance.code_fingerprint import Code, check_code
from headcount.workers.replica import Replica, is_device_failure
from headcount.workers.shard import (
    MeasuredShard,
    commit_shard,
    committed_shard,
    failure_of,
    measure_shard,
    note_failure,
)

CALLS = DEPTH + 3  # calls at once: its shards, the wait for a notice, how far it is, and one more


@ray.remote
class ReplicaActor:
    """A replica in an actor: it turns a shard's number into the shard's commit."""

    def __init__(
        self,
        driver_code: Code,
        work_reference: bytes,
        resources: Resources,
        replica_class: type[Replica],
        directory: str | None,
    ) -> None:
        self.leave_notice = LeaveNotice()
        # Paths of the scan may be relative to the driver's directory, if it is on this machine.
        if directory is not None:
            os.chdir(directory)
        check_code(driver_code)
        # The driver has listed and indexed the corpus's files; no replica does it again.
        scan: Scan
        info: ModelInfo
        scan, info, self.run, index, corpus, tokenizer = ray.get(cloudpickle.loads(work_reference))
        # One thread for everything that computes. OpenMP makes a team of threads for each thread
        # that computes. Two teams are more threads than cores, which then sleep between operations:
        # 17,800 tokens/s instead of 29,900.
        self.computing = ThreadPoolExecutor(max_workers=1)
        threads = resources.cores if resources.device == "cpu" else None
        self.computing.submit(prepare_process, threads).result()
        local_info = described(scan)
        check_same_model(scan.model, local_info, info)
        activate(scan.plugins)
        partners = needs_partners(scan.interventions)
        self.sequences = Sequences(scan, local_info, index, corpus, partners)
        if tokenizer is not None and tokenizer != self.sequences.tokenizer.fingerprint:
            raise RunError(
                f"model {scan.model}: this node has the tokenizer "
                f"{self.sequences.tokenizer.fingerprint}, the run {tokenizer}"
            )
        self.reading = threading.Lock()
        self.replica = self.computing.submit(
            replica_class, local_info, scan, resources.device
        ).result()
        # A replica that starts anew while the store stands still must not end the run.
        wait_for_store(self.run.path)
        run_id, precision = self.run.run_id, self.replica.precision
        check_begun(begun_precisions(self.run), precision, run_id, resources.device)
        self.tags = {"run_id": run_id, "node": node_name()}
        self.in_hand: InHand | None = None
        self.replica.on_tokens = self._note_tokens
        self.leave_notice.is_loaded = True

    def ready(self) -> ReplicaPlace:
        """Where the replica is, as soon as it is loaded: Ray calls no method before that."""
        if self.leave_notice.came:
            # For ever, which is a moment: the process is about to exit.
            threading.Event().wait()
        node_id = ray.get_runtime_context().get_node_id()
        return ReplicaPlace(node_id, node_name())

    def told_to_leave(self) -> str:
        """Wait until the replica is told to leave; returns why."""
        return self.leave_notice.wait()

    def how_far(self) -> InHand | None:
        """The shard that is measured now, if any, and how far it is."""
        return self.in_hand

    def leave(self, reason: str) -> None:
        """Begin no further shard, finish the one that is measured, and exit."""
        self.leave_notice.tell(reason)

    def measure(self, shard: int, attempt: int) -> Commit | Failure | None:
        """Read, measure, write and commit one shard; returns its commit, or why it failed.

        Returns none if the replica was told to leave before it measured the shard.

        Ray runs `DEPTH` of these calls at once, each in a thread. The lock lets one of them read,
        and the computing thread measures for one of them, so that they form a pipeline.
        """
        with self.leave_notice.call():
            try:
                # Another driver may have it, or a replica that was only slow.
                stop = (shard + 1) * self.replica.scan.sequences_per_shard
                committed = committed_shard(self.run, shard, min(stop, len(self.sequences)))
                if committed is not None:
                    return committed
                with self.reading:
                    if self.leave_notice.came:
                        return None
                    began = time.perf_counter()
                    shard_input = self.sequences.shard(shard)
                    self._tell_seconds("reading", time.perf_counter() - began)
                measured = self.computing.submit(self._measure, shard_input).result()
                if measured is None:
                    return None
                began = time.perf_counter()
                commit = commit_shard(self.replica.scan, self.run, measured, attempt)
                self._tell_seconds("writing", time.perf_counter() - began)
                BAD_ROWS.tell(len(commit.bad_rows), **self.tags)
                return commit
            except Exception as error:
                # The device is lost to this process, and every later call would fail. If the
                # process dies, Ray restarts the actor in a new one.
                if is_device_failure(error):
                    os._exit(1)
                failure = failure_of(shard, error)
                # A note would wait for minutes, too.
                if isinstance(error, SilentStoreError):
                    return failure
                return note_failure(self.run, failure, attempt)

    def _measure(self, shard_input: ShardInput) -> MeasuredShard | None:
        # The notice may have come while the shard waited for its turn.
        if self.leave_notice.came:
            return None
        self.in_hand = InHand(shard_input.shard, 0)
        try:
            measured = measure_shard(self.replica, shard_input)
        finally:
            self.in_hand = None
        self._tell_seconds("measuring", measured.seconds)
        tokens = measured.input.tokens.size * len(measured.measured)
        TOKENS_MEASURED.tell(tokens, **self.tags)
        return measured

    def _note_tokens(self, tokens: int) -> None:
        if self.in_hand is not None:
            self.in_hand = self.in_hand._replace(tokens=tokens)

    def _tell_seconds(self, phase: str, seconds: float) -> None:
        PHASE_SECONDS.tell(seconds, **self.tags, phase=phase)
