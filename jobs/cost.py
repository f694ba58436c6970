"""What a plan will cost, from a short measured run on this machine."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass

from jobs.plan import Plan
from schemas.scan import Scan
from workers.replica import Replica
from workers.sequences import ShardInput
from workers.shard import heads_table, parquet_bytes, sequences_table


@dataclass(frozen=True)
class Cost:
    """Measured on a sample, extrapolated to the plan."""

    device: str
    batch_size: int
    tokens_per_second: float
    bytes_on_disk: int
    peak_memory: int
    seconds: float


def measure_cost(plan: Plan, batches: int = 3) -> Cost:
    """Measure a few batches of the plan's first shard with one replica, and write none of it."""
    replica = Replica(plan.info, plan.scan)
    first = plan.sequences.shard(0)
    tokens = first.tokens[: replica.batch_size]
    speeds: list[float] = []
    for repeat in range(batches + 1):
        began = time.perf_counter()
        measured = replica.measure(tokens, plan.scan.interventions[0])
        if repeat:  # The first pass warms up.
            speeds.append(tokens.size / (time.perf_counter() - began))
    sample = ShardInput(0, 0, tokens, {k: v[: len(tokens)] for k, v in first.origin.items()}, [])
    size = sum(len(parquet_bytes(table(plan.scan, sample, measured))) for table in (heads_table, sequences_table))
    speed = statistics.median(speeds)
    scale = len(plan.sequences) * len(plan.scan.interventions) / len(tokens)
    return Cost(
        device=replica.device,
        batch_size=replica.batch_size,
        tokens_per_second=speed,
        bytes_on_disk=round(size * scale),
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=plan.tokens / speed,
    )


def meanings(scan: Scan) -> list[tuple[str, str, str]]:
    """Every resolved field of a scan: name, value, meaning."""
    fields = type(scan).model_fields
    return [(name, _show(getattr(scan, name)), fields[name].description or "") for name in fields if name != "input"]


def _show(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
