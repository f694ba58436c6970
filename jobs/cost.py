"""What a plan will cost, from a short measured run on this machine."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from jobs.plan import Plan
from schemas.commits import Method
from schemas.intervention import Intervention
from schemas.kinds import TABLES
from schemas.parquet import parquet_bytes
from schemas.scan import Scan
from workers.inputs.sequences import ShardInput
from workers.interventions.settlement import settle
from workers.memory import PeakMemory, available_cores
from workers.model.model_info import ModelInfo
from workers.replica import InterventionMeasurements, Replica, resolve_device
from workers.shard import intervention_tables


@dataclass(frozen=True)
class InterventionCost:
    """What one intervention takes."""

    method: Method
    """How the scan will measure it."""
    tokens_per_second: float
    """Of all replicas together."""
    seconds: float
    """For all sequences of the plan."""


@dataclass(frozen=True)
class TableCost:
    """What one table will hold."""

    table: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """Measurements of a sample, extrapolated to the plan."""

    device: str
    """What the scan will run on."""
    precision: str
    measured_on: str
    """What the sample ran on: another device if this machine does not have the scan's."""
    measured_in: str
    """The precision of the sample."""
    replicas: int
    batch_size: int
    interventions: list[InterventionCost]
    tables: list[TableCost]
    peak_memory: int
    gpu_memory: int

    @property
    def seconds(self) -> float:
        """Time of the whole scan."""
        return sum(cost.seconds for cost in self.interventions)

    @property
    def bytes_on_disk(self) -> int:
        """Size of all tables."""
        return sum(cost.bytes for cost in self.tables)


def _devices(device: str) -> tuple[str, str]:
    """The device of a scan, and the one of this machine that is measured in its place."""
    here = resolve_device("auto")
    device = here if device == "auto" else device
    return device, device if device in (here, "cpu") else here


def threads_of(device: str, replicas: int) -> int | None:
    """Threads of one of some replicas on this machine; none means all that there are.

    Replicas on GPUs have one each; those on a CPU share its cores.
    """
    sharing = replicas > 1 and _devices(device)[1] == "cpu"
    return max(1, available_cores() // replicas) if sharing else None


class Rehearsal:
    """A replica for measuring what a scan will cost.

    Making one settles how each intervention will be measured on the scan's device, which need not
    be here, and refuses what cannot run there.
    """

    def __init__(
        self, scan: Scan, info: ModelInfo, device: str = "auto", replicas: int = 1
    ) -> None:
        self.device, self.measured_on = _devices(device)
        self.replicas = replicas
        # Loading may take more memory than measuring.
        with PeakMemory(self.measured_on) as self.loading:
            self.replica = Replica(info, scan, self.measured_on)
        self.settlement = settle(self.replica.model, scan, self.device)

    def measure(self, plan: Plan, passes: int = 4, patience: float = 20.0) -> Cost:
        """Measure a few batches of the plan's first shard, and write none of it.

        Each intervention is timed. A batch size that is to be found is looked for under the first
        one, as in a scan; after `patience` seconds under an intervention, the size being tried must
        do.
        """
        first = plan.sequences.shard(0)
        speeds: list[float] = []
        samples: list[InterventionMeasurements] = []
        with PeakMemory(self.measured_on) as memory:
            for intervention in plan.scan.interventions:
                speed, sample = _timed(self.replica, first, intervention, passes, patience)
                speeds.append(speed * max(1, self.replicas))
                samples.append(sample)
        tokens = len(plan.sequences) * plan.scan.n_ctx
        # Engines do not depend on the device, the precision does.
        settled = {"precision": self.settlement.precision}
        costs = [
            InterventionCost(sample.method.model_copy(update=settled), speed, tokens / speed)
            for sample, speed in zip(samples, speeds, strict=True)
        ]
        return Cost(
            device=self.device,
            precision=self.settlement.precision,
            measured_on=self.measured_on,
            measured_in=self.replica.precision,
            replicas=self.replicas,
            batch_size=self.replica.batch.size,
            interventions=costs,
            tables=_tables(plan, self.replica, first, samples),
            peak_memory=max(memory.main, self.loading.main),
            gpu_memory=max(memory.gpu, self.loading.gpu),
        )


def measure_cost(plan: Plan, passes: int = 4, patience: float = 20.0) -> Cost:
    """What a plan costs on this machine, with one replica."""
    return Rehearsal(plan.scan, plan.info).measure(plan, passes, patience)


def _timed(
    replica: Replica,
    first: ShardInput,
    intervention: Intervention,
    passes: int,
    patience: float,
) -> tuple[float, InterventionMeasurements]:
    """Tokens per second under an intervention, and what was measured."""
    speeds: dict[int, list[float]] = {}
    until = time.perf_counter() + patience
    while True:
        size = min(replica.batch.size, len(first.tokens))
        labels = None if first.labels is None else first.labels[:size]
        partner = None if first.partner is None else first.partner[:size]
        began = time.perf_counter()
        measured = replica.measure(first.tokens[:size], intervention, labels, partner)
        seconds = time.perf_counter() - began
        speeds_of_size = speeds.setdefault(size, [])
        speeds_of_size.append(size * replica.scan.n_ctx / seconds)
        late = time.perf_counter() > until
        searching = replica.batch.searching and size == replica.batch.size and not late
        if not searching and len(speeds_of_size) >= (2 if late else passes):
            # The first pass warms up.
            return statistics.median(speeds_of_size[1:]), measured


def _tables(
    plan: Plan, replica: Replica, first: ShardInput, samples: list[InterventionMeasurements]
) -> list[TableCost]:
    """Rows and bytes of every table that the scan writes."""
    sequences, shards = len(plan.sequences), plan.manifest.shards
    costs = dict.fromkeys(TABLES, (0.0, 0.0))
    for measured in samples:
        count = len(next(iter(measured.heads.values())))
        half = count // 2
        half_sizes = _sizes(plan, first, measured, half) if half else {}
        for name, (rows, size) in _sizes(plan, first, measured, count).items():
            if TABLES[name].has("sequence"):
                # A file costs something by itself, and each sequence adds to it. A whole sample and
                # half of it say how much either is.
                _, half_size = half_sizes.get(name, (0, 0))
                each = (size - half_size) / (count - half)
                file = max(0.0, size - each * count)
                more = (rows / count * sequences, each * sequences + file * shards)
            else:
                # As large for one sequence as for a whole shard.
                more = (rows * shards, size * shards)
            costs[name] = (costs[name][0] + more[0], costs[name][1] + more[1])
    for name, table in replica.weights().items():
        # A run has one file of them, whatever its sequences and interventions.
        costs[name] = (table.num_rows, len(parquet_bytes(table)))
    return [
        TableCost(name, round(rows), round(size)) for name, (rows, size) in costs.items() if size
    ]


def _sizes(
    plan: Plan, first: ShardInput, measured: InterventionMeasurements, n: int
) -> dict[str, tuple[int, int]]:
    """Rows and bytes of every table of the first `n` sequences under one intervention."""
    origin = {name: values[:n] for name, values in first.origin.items()}
    labels = first.labels and first.labels[:n]
    sample = ShardInput(0, 0, first.tokens[:n], origin, [], labels)
    tables = intervention_tables(plan.scan, sample, measured.first(n))
    return {name: (rows.num_rows, len(parquet_bytes(rows))) for name, rows in tables.items()}


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
