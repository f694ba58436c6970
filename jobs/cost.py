"""What a plan will cost, from a short measured run on this machine."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass

from jobs.plan import Plan
from schemas.scan import Scan
from workers.replica import Measured, Replica
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
    speed = statistics.median(speeds)
    return Cost(
        device=replica.device,
        batch_size=replica.batch_size,
        tokens_per_second=speed,
        bytes_on_disk=_bytes_on_disk(plan, first, len(tokens), measured),
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=plan.tokens / speed,
    )


def _bytes_on_disk(plan: Plan, shard: ShardInput, count: int, measured: Measured) -> int:
    """Size of all files: what a file costs by itself, and what a sequence adds, from a whole sample and half of it."""

    def size(n: int) -> int:
        origin = {name: values[:n] for name, values in shard.origin.items()}
        heads = {name: values[:n] for name, values in measured.heads.items()}
        chance = {name: values[:n] for name, values in measured.chance.items()}
        sample, part = ShardInput(0, 0, shard.tokens[:n], origin, []), Measured(heads, chance, measured.engine)
        return sum(len(parquet_bytes(table(plan.scan, sample, part))) for table in (heads_table, sequences_table))

    half = count // 2
    each = (size(count) - size(half)) / (count - half) if half else size(count)
    file = max(0.0, size(count) - each * count)
    return round((each * len(plan.sequences) + file * plan.manifest.shards) * len(plan.scan.interventions))


def meanings(scan: Scan) -> list[tuple[str, str, str]]:
    """Every resolved field of a scan: name, value, meaning."""
    fields = type(scan).model_fields
    return [(name, _show(getattr(scan, name)), fields[name].description or "") for name in fields if name != "input"]


def _show(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
