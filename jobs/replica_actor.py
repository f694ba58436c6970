"""A replica in a Ray actor: reads, measures, writes and commits the shards whose numbers it is
given.
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
from workers.code_fingerprint import code_fingerprint
from workers.inputs.sequences import Sequences
from workers.model.model_info import ModelInfo, describe, find_model
from workers.replica import Replica, broken
from workers.shard import commit_shard, failed, measure_shard, noted

DEPTH = 3
"""Shards in a replica at once: one is read, one measured, one written."""


@ray.remote
class ReplicaActor:
    """A replica in an actor: turns a shard's number into its commit."""

    def __init__(
        self,
        scan: Scan,
        info: ModelInfo,
        run: RunDirectory,
        code: str,
        known: bytes,
        resources: Resources,
        replica: type[Replica],
    ) -> None:
        if code_fingerprint() != code:
            raise RunError(
                f"this node runs code {code_fingerprint()}, the driver {code}; remove the installed copy"
            )
        here = describe(find_model(scan.model, scan.revision))
        if here.sha256 != info.sha256:
            raise RunError(
                f"model {scan.model}: this node has weights {here.sha256}, the driver {info.sha256}"
            )
        self.run = run
        # The driver has listed and indexed the files; nobody does it again.
        index, corpus = ray.get(cloudpickle.loads(known))
        self.sequences = Sequences(scan, here, index, corpus)
        self.reading = threading.Lock()
        # One thread for everything that computes: OpenMP makes a team of threads for each thread
        # that does, and stops
        # spinning when the teams outnumber the cores.
        self.thread = ThreadPoolExecutor(max_workers=1)
        threads = resources.cores if resources.device == "cpu" else None
        self.replica = self.thread.submit(
            replica, here, scan, resources.device, threads=threads
        ).result()

    def ready(self) -> None:
        """Answers once the replica is there."""

    def measure(self, shard: int, attempt: int) -> Commit | Failure:
        """Read, measure, write and commit one shard; several calls at a time are each in another of
        these.
        """
        try:
            with self.reading:
                read = self.sequences.shard(shard)
            done = self.thread.submit(measure_shard, self.replica, read).result()
            return commit_shard(self.replica.scan, self.run, done, attempt)
        except Exception as error:
            if broken(error):
                os._exit(1)
            return noted(self.run, failed(shard, error), attempt)
