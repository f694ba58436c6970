"""Measure shards in this process: for a small run, Ray takes longer to start than the run takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jobs.plan import Plan, check_precision
from schemas.commits import Commit, Failure
from schemas.errors import RunError
from workers.replica import Replica, broken, resolve_device
from workers.shard import failed, noted, run_shard


def measure_in_process(
    plan: Plan, shards: np.ndarray, device: str, cores: int = 0, replica: type[Replica] = Replica
) -> Iterator[Commit | Failure]:
    """Measure `shards` one after the other, on all cores unless told; yields commits and failures:
    nothing is tried again.
    """
    device = resolve_device(device)
    check_precision(plan, device)
    made = replica(plan.info, plan.scan, device, threads=cores or None)
    for shard in shards.tolist():
        before, _ = plan.run.failure(shard) or (0, "")
        try:
            outcome = run_shard(made, plan.run, plan.sequences.shard(shard), before + 1)
        except Exception as error:
            outcome = noted(plan.run, failed(shard, error), before + 1)
            if broken(error):
                raise RunError(
                    f"shard {shard}: {outcome.error}; the same command goes on in a new process"
                ) from None
        yield outcome
