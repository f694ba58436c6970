"""Measure shards in this process: for a small run, Ray takes longer to start than the run takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jobs.plan import Plan
from jobs.run_identity import begun_precisions
from schemas.commits import Commit, Failure
from schemas.errors import RunError
from schemas.scan import Scan
from workers.interventions.settlement import check_begun
from workers.model.model_info import ModelInfo
from workers.process import prepare_process
from workers.replica import Replica, is_device_failure, resolve_device
from workers.shard import failure_of, note_failure, run_shard

MakeReplica = Callable[[ModelInfo, Scan, str], Replica]
"""Makes the replica that measures: a class, or a function that shares a loaded model."""


def measure_in_process(
    plan: Plan,
    shards: np.ndarray,
    device: str,
    cores: int = 0,
    make_replica: MakeReplica = Replica,
) -> Iterator[Commit | Failure]:
    """Measure `shards` one after the other; yields the commit or failure of each.

    Uses all cores if `cores` is 0. A shard is tried once, and the next command tries it again: a
    process that is killed could not try it again anyway.
    """
    device = resolve_device(device)
    prepare_process(threads=cores or None)
    replica = make_replica(plan.info, plan.scan, device)
    check_begun(begun_precisions(plan.run), replica.precision, plan.run.run_id, device)
    for shard in shards.tolist():
        # The note of an earlier command says how often the shard has failed.
        failed_attempts, _ = plan.run.failure(shard) or (0, "")
        attempt = failed_attempts + 1
        try:
            outcome = run_shard(replica, plan.run, plan.sequences.shard(shard), attempt)
        except Exception as error:
            outcome = note_failure(plan.run, failure_of(shard, error), attempt)
            # After such an error every call on the device fails, so the other shards would too.
            if is_device_failure(error):
                raise RunError(
                    f"shard {shard}: {outcome.error}; the same command continues in a new process"
                ) from None
        yield outcome
