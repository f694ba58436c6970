"""A replica in a Ray actor: it reads, measures, writes and commits the shards that it is given.

An actor may start on another machine than the driver's. So it first checks that it has the same
code, the same weights and the same tokenizer: otherwise its rows would mean something else.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import ray
from ray import cloudpickle

from jobs.ray_cluster import Resources
from schemas.commits import Commit, Failure
from schemas.errors import RunError
from schemas.run_directory import RunDirectory
from schemas.scan import Scan
from workers.inputs.sequences import Sequences
from workers.interventions import needs_partners
from workers.interventions.settlement import check_begun
from workers.model.model_info import ModelInfo, describe, find_model
from workers.process import prepare_process
from workers.provenance.code_fingerprint import code_fingerprint
from workers.replica import Replica, is_device_failure
from workers.shard import commit_shard, failure_of, measure_shard, note_failure

DEPTH = 3
"""Shards that a replica works at: one is read, one is measured, one is written."""


@ray.remote
class ReplicaActor:
    """A replica in an actor: it turns a shard's number into the shard's commit."""

    def __init__(
        self,
        scan: Scan,
        info: ModelInfo,
        run: RunDirectory,
        code: str,
        corpus_reference: bytes,
        resources: Resources,
        replica_class: type[Replica],
        begun: frozenset[str],
        directory: str | None,
    ) -> None:
        # Paths of the scan may be relative to the driver's directory, if it is on this machine.
        if directory is not None:
            os.chdir(directory)
        local_code = code_fingerprint()
        if local_code != code:
            raise RunError(
                f"this node runs code {local_code}, the driver {code}; remove the installed copy"
            )
        # One thread for everything that computes. OpenMP makes a team of threads for each thread
        # that computes. Two teams are more threads than cores, which then sleep between operations:
        # 17,800 tokens/s instead of 29,900.
        self.computing = ThreadPoolExecutor(max_workers=1)
        threads = resources.cores if resources.device == "cpu" else None
        self.computing.submit(prepare_process, threads).result()
        local_info = describe(find_model(scan.model, scan.revision))
        if local_info.sha256 != info.sha256:
            raise RunError(
                f"model {scan.model}: this node has weights {local_info.sha256}, "
                f"the driver {info.sha256}"
            )
        self.run = run
        # The driver has listed and indexed the corpus's files; no replica does it again.
        index, corpus, tokenizer = ray.get(cloudpickle.loads(corpus_reference))
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
        check_begun(begun, self.replica.precision, run.run_id, resources.device)

    def ready(self) -> None:
        """Return as soon as the replica is loaded: Ray calls no method before `__init__` ends."""

    def measure(self, shard: int, attempt: int) -> Commit | Failure:
        """Read, measure, write and commit one shard; returns its commit, or why it failed.

        Ray runs `DEPTH` of these calls at once, each in a thread. The lock lets one of them read,
        and the computing thread measures for one of them, so that they form a pipeline.
        """
        try:
            with self.reading:
                shard_input = self.sequences.shard(shard)
            measured = self.computing.submit(measure_shard, self.replica, shard_input).result()
            return commit_shard(self.replica.scan, self.run, measured, attempt)
        except Exception as error:
            # The device is lost to this process, and every later call would fail. If the process
            # dies, Ray restarts the actor in a new one.
            if is_device_failure(error):
                os._exit(1)
            return note_failure(self.run, failure_of(shard, error), attempt)
