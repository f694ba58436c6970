"""Run a plan on Ray: CPU tasks read and tokenise, a pool of replicas measures and commits, commits come back.

Ray does the placement, the backpressure and the retries; a shard is done when its commit exists, whoever wrote it.
"""

from __future__ import annotations

import logging
import os
import pickle
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import ray.data
import ray.exceptions

from jobs.plan import Plan
from schemas.errors import HeadcountError, RunError
from schemas.runs import Commit, RunDirectory
from schemas.scan import Scan
from workers.code import code_fingerprint
from workers.models import ModelInfo
from workers.replica import Replica, resolve_precision
from workers.sequences import Sequences, ShardInput
from workers.shard import commit_shard, measure_shard, record_failure

SHARDS_PER_TASK = 16
"""Shards that one reading task yields, so that a file is opened once for many."""


@dataclass(frozen=True)
class Failure:
    """A shard that could not be measured, and why."""

    shard: int
    error: str


@dataclass(frozen=True)
class Resources:
    """What the replicas get."""

    replicas: int = 1
    cores: int = 0
    """Cores of each replica; 0 shares out the machine's."""


def missing_shards(plan: Plan) -> list[int]:
    """The shards that have no commit yet, or whose files are no longer as committed."""
    done = {commit.shard for commit in plan.run.commits() if not any(plan.run.damaged_files(commit))}
    return [shard for shard in range(plan.manifest.shards) if shard not in done]


def start_ray(resources: Resources) -> Resources:
    """Start Ray on this machine unless it runs already; returns the resources with the cores filled in."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    resources = Resources(resources.replicas, resources.cores or max(1, available // resources.replicas))
    if not ray.is_initialized():
        os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        # Ray's C++ core reports on stderr what Ray Data does by design (constructor arguments of a pool's actors).
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(
            # One logical core more than the replicas take: a reader that finds none would wait for ever.
            num_cpus=resources.replicas * resources.cores + 1,
            object_store_memory=min(1 << 30, psutil.virtual_memory().available // 4),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    return resources


def execute(plan: Plan, shards: Sequence[int], resources: Resources) -> Iterator[Commit | Failure]:
    """Measure `shards` on replicas; yields each one's commit or failure as it arrives, in no order."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Every shard is a block of its own, so that it is measured as soon as it is read and retried alone.
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    groups = [list(shards[i : i + SHARDS_PER_TASK]) for i in range(0, len(shards), SHARDS_PER_TASK)]
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= resources.replicas else 0
    device = "cuda" if gpus else "cpu"
    check_precision(plan, device)
    # The driver has listed and indexed the files; no worker does it again.
    known = ray.put((plan.sequences.index, plan.sequences.corpus))
    rows = (
        ray.data.from_items([{"shards": group} for group in groups], override_num_blocks=len(groups))
        .flat_map(_ReadShards(plan.scan, plan.info, known), num_cpus=1)
        .map(
            _ReplicaActor,  # pyright: ignore[reportArgumentType]  (a class with __call__ is meant)
            fn_constructor_args=(plan.scan, plan.info, plan.run, plan.manifest.code, resources.cores, device),
            # Two calls at a time: one writes its shard while the other computes.
            compute=ray.data.ActorPoolStrategy(
                size=resources.replicas, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True
            ),
            num_cpus=0 if gpus else resources.cores,
            num_gpus=gpus,
        )
    )
    try:
        for row in rows.iter_rows():
            yield pickle.loads(row["outcome"])
    except ray.exceptions.RayError as error:
        raise RunError(
            f"{plan.run.run_id}: Ray gave up ({_cause(error)}); the same command goes on where it stopped"
        ) from None


def check_precision(plan: Plan, device: str) -> None:
    """Refuse to go on in another precision than the run was begun in."""
    precision = resolve_precision(plan.scan, device)
    begun = next(plan.run.commits(), None)
    if begun is not None and begun.precision != precision:
        raise RunError(
            f"{plan.run.run_id}: begun in {begun.precision}, and precision = 'auto' means {precision} on this {device}; "
            "go on where it was begun, or start a new run with that precision in the scan"
        )


class _ReadShards:
    """Reads and tokenises shards, one row each."""

    def __init__(self, scan: Scan, info: ModelInfo, known: Any) -> None:
        self.scan, self.info, self.known = scan, info, known

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        index, corpus = ray.get(self.known)
        sequences = Sequences(self.scan, self.info, index, corpus)
        for shard in row["shards"]:
            try:
                yield {"input": pickle.dumps(sequences.shard(int(shard)))}
            except HeadcountError as error:
                yield {"input": pickle.dumps(Failure(int(shard), str(error)))}


class _ReplicaActor:
    """A replica in an actor: turns a shard's input into its commit."""

    def __init__(self, scan: Scan, info: ModelInfo, run: RunDirectory, code: str, cores: int, device: str) -> None:
        if code_fingerprint() != code:
            raise RunError(f"this node runs code {code_fingerprint()}, the driver {code}; remove the installed copy")
        self.run = run
        # One thread for everything that computes: OpenMP makes a team of threads for each thread that does, and stops
        # spinning when the teams outnumber the cores.
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.replica = self.thread.submit(Replica, info, scan, device, threads=cores).result()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard: ShardInput | Failure = pickle.loads(row["input"])
        return {"outcome": pickle.dumps(self._outcome(shard))}

    def _outcome(self, shard: ShardInput | Failure) -> Commit | Failure:
        if isinstance(shard, ShardInput):
            try:
                done = self.thread.submit(measure_shard, self.replica, shard).result()
                return commit_shard(self.replica.scan, self.run, done)
            except HeadcountError as error:
                shard = Failure(shard.shard, str(error))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                shard = Failure(shard.shard, f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")
        try:
            record_failure(self.run, shard.shard, shard.error)
        except HeadcountError as error:
            return Failure(shard.shard, f"{shard.error}; {error}")
        return shard


def _cause(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
