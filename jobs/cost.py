"""What a plan will cost, from a short measured run on this machine."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass

from jobs.plan import Plan
from schemas.parquet import parquet_bytes
from schemas.scan import Scan
from workers.inputs.sequences import ShardInput
from workers.replica import InterventionMeasurements, Replica
from workers.shard import intervention_tables


@dataclass(frozen=True)
class Cost:
    """Measurements of a sample, extrapolated to the plan."""

    device: str
    batch_size: int
    precision: str
    tokens_per_second: float
    bytes_on_disk: int
    peak_memory: int
    seconds: float


def measure_cost(plan: Plan, passes: int = 4, patience: float = 20.0) -> Cost:
    """Measure a few batches of the plan's first shard with one replica, and write none of it.

    A batch size that is to be found is looked for, as in a scan; after `patience` seconds the one
    being tried must do.
    """
    replica = Replica(plan.info, plan.scan)
    first = plan.sequences.shard(0)
    speeds: dict[int, list[float]] = {}
    until = time.perf_counter() + patience
    while True:
        some = slice(replica.batch.size)
        tokens = first.tokens[some]
        partner = None if first.partner is None else first.partner[some]
        began = time.perf_counter()
        measured = replica.measure(tokens, plan.scan.interventions[0], partner=partner)
        seen = speeds.setdefault(len(tokens), [])
        seen.append(tokens.size / (time.perf_counter() - began))
        late = time.perf_counter() > until
        searching = replica.batch.searching and len(tokens) == replica.batch.size and not late
        if not searching and len(seen) >= (2 if late else passes):
            break
    speed = statistics.median(seen[1:])  # The first pass warms up.
    return Cost(
        device=replica.device,
        batch_size=len(tokens),
        precision=replica.precision,
        tokens_per_second=speed,
        bytes_on_disk=_bytes_on_disk(plan, first, len(tokens), measured)
        + _bytes_of_weights(replica),
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=plan.tokens / speed,
    )


def _bytes_on_disk(
    plan: Plan, shard: ShardInput, count: int, measured: InterventionMeasurements
) -> int:
    """Size of all files: what a file costs by itself, and what a sequence adds, from a whole sample
    and half of it.
    """

    def size(n: int) -> int:
        origin = {name: values[:n] for name, values in shard.origin.items()}
        sample = ShardInput(0, 0, shard.tokens[:n], origin, [], shard.labels and shard.labels[:n])
        tables = intervention_tables(plan.scan, sample, measured.first(n))
        return sum(len(parquet_bytes(table)) for table in tables.values())

    half = count // 2
    each = (size(count) - size(half)) / (count - half) if half else size(count)
    file = max(0.0, size(count) - each * count)
    return round(
        (each * len(plan.sequences) + file * plan.manifest.shards) * len(plan.scan.interventions)
    )


def _bytes_of_weights(replica: Replica) -> int:
    """Size of the files that are written once in a run."""
    return sum(len(parquet_bytes(table)) for table in replica.weights().values())


def meanings(scan: Scan) -> list[tuple[str, str, str]]:
    """Every resolved field of a scan: name, value, meaning."""
    fields = type(scan).model_fields
    return [
        (name, _show(getattr(scan, name)), " ".join((fields[name].description or "").split()))
        for name in fields
        if name != "input"
    ]


def _show(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
