"""Measure shards in this process: for a small run, Ray takes longer to start than the run takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from headcount.jobs.plan.identity import begun_precisions
from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.attempts import Attempts
from headcount.schemas.errors import RunError
from headcount.schemas.files.commits import Commit, Failure
from headcount.schemas.scans.scan import Scan
from headcount.workers.interventions.settlement import check_begun
from headcount.workers.model.files.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica, is_device_failure, resolve_device
from headcount.workers.shard import failure_of, note_failure, run_shard

MakeReplica = Callable[[ModelInfo, Scan, str], Replica]
"""Makes the replica that measures: a class, or a function that shares a loaded model."""


def measure_in_process(
    plan: Plan,
    shards: np.ndarray,
    device: str,
    cores: int = 0,
    make_replica: MakeReplica = Replica,
) -> Iterator[Commit | Failure]:
    """Measure `shards` one after the other; yields each commit and each failed attempt.

    Uses all cores if `cores` is 0.
    """
    device = resolve_device(device)
    prepare_process(threads=cores or None)
    replica = make_replica(plan.info, plan.scan, device)
    check_begun(begun_precisions(plan.run), replica.precision, plan.run.run_id, device)
    attempts = Attempts(plan.run)
    remaining = deque(shards.tolist())
    while remaining:
        shard = remaining.popleft()
        attempt = attempts.failed(shard) + 1
        try:
            outcome = run_shard(replica, plan.run, plan.sequences.shard(shard), attempt)
        except Exception as error:
            outcome = note_failure(plan.run, failure_of(shard, error), attempt)
            # After such an error every call on the device fails, so the other shards would too.
            if is_device_failure(error):
                raise RunError(
                    f"shard {shard}: {outcome.error}; the same command continues in a new process"
                ) from None
            if attempts.may_try_again(shard):
                # At once: then a cause that is in every shard is known after a few of them.
                remaining.appendleft(shard)
                outcome = replace(outcome, is_last=False)
        yield outcome
