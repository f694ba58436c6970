"""What a plan will cost: a few batches are measured on this machine and extrapolated."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

from headcount.jobs.plan.plan import Plan
from headcount.schemas.files.commit import Method
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.scans.intervention import Intervention
from headcount.schemas.scans.kinds import TABLES
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.sequences import ShardInput
from headcount.workers.interventions.settlement import settle
from headcount.workers.memory import available_cores, peak_memory
from headcount.workers.model.files.model_info import ModelInfo
from headcount.workers.replica import InterventionMeasurements, Replica, resolve_device
from headcount.workers.shard import intervention_tables


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
    """Sequences in one forward pass; no more than a shard has."""
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


class _Devices(NamedTuple):
    """The device that a scan will run on, and the device of this machine that stands for it."""

    scan_device: str
    measured_on: str


def _devices(device: str) -> _Devices:
    """The devices of a scan, which may run on another machine."""
    best_here = resolve_device("auto")
    scan_device = best_here if device == "auto" else device
    is_here = scan_device in (best_here, "cpu")
    return _Devices(scan_device, scan_device if is_here else best_here)


def threads_of(device: str, replicas: int) -> int | None:
    """Threads of one of several replicas on this machine; none means all that there are.

    Replicas on a CPU share its cores. Each replica on a GPU has a GPU of its own.
    """
    shares_cores = replicas > 1 and _devices(device).measured_on == "cpu"
    return max(1, available_cores() // replicas) if shares_cores else None


class Rehearsal:
    """A replica that measures what a scan will cost.

    Making one settles how each intervention will be measured on the scan's device, which another
    machine may have. What cannot run there is refused.
    """

    def __init__(
        self, scan: Scan, info: ModelInfo, device: str = "auto", replicas: int = 1
    ) -> None:
        self.device, self.measured_on = _devices(device)
        self.replicas = replicas
        # Loading may take more memory than measuring, so its peak counts too.
        with peak_memory(self.measured_on) as self.loading:
            self.replica = Replica(info, scan, self.measured_on)
        self.settlement = settle(self.replica.model, scan, self.device)

    def measure(self, plan: Plan, passes: int = 4, patience: float = 20.0) -> Cost:
        """Measure a few batches of the plan's first shard under each intervention; write nothing.

        With `batch_size = "auto"`, the size is searched under the first intervention, as in a scan.
        After `patience` seconds under an intervention the search ends with the size it has reached.
        """
        first_shard = plan.sequences.shard(0)
        speeds: list[float] = []
        samples: list[InterventionMeasurements] = []
        with peak_memory(self.measured_on) as memory:
            for intervention in plan.scan.interventions:
                speed, sample = _measured_speed(
                    self.replica, first_shard, intervention, passes, patience
                )
                # Replicas read and write by themselves, so their speeds add up.
                speeds.append(speed * max(1, self.replicas))
                samples.append(sample)
        tokens = plan.manifest.sequences * plan.scan.n_ctx
        # Engines do not depend on the device. The precision does.
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
            batch_size=min(self.replica.batch.size, len(first_shard.tokens)),
            interventions=costs,
            tables=_table_costs(plan, self.replica, first_shard, samples),
            peak_memory=max(memory.main, self.loading.main),
            gpu_memory=max(memory.gpu, self.loading.gpu),
        )


def _measured_speed(
    replica: Replica,
    first_shard: ShardInput,
    intervention: Intervention,
    passes: int,
    patience: float,
) -> tuple[float, InterventionMeasurements]:
    """Tokens per second under an intervention, and the measurements of the last pass.

    While the batch size is searched, passes have different sizes. Only passes of the size at which
    the search ends tell the speed.
    """
    speeds_by_size: dict[int, list[float]] = {}
    deadline = time.perf_counter() + patience
    while True:
        size = min(replica.batch.size, len(first_shard.tokens))
        labels = None if first_shard.labels is None else first_shard.labels[:size]
        partner = None if first_shard.partner is None else first_shard.partner[:size]
        began = time.perf_counter()
        measured = replica.measure(first_shard.tokens[:size], intervention, labels, partner)
        seconds = time.perf_counter() - began
        # The search may come back to a size, whose passes then count together.
        speeds = speeds_by_size.setdefault(size, [])
        speeds.append(size * replica.scan.n_ctx / seconds)
        is_late = time.perf_counter() > deadline
        # A size that is cut off by the end of the shard cannot grow any more.
        is_searching = replica.batch.searching and size == replica.batch.size and not is_late
        passes_needed = 2 if is_late else passes
        if not is_searching and len(speeds) >= passes_needed:
            # The first pass warms up: it lays out memory, and loads what is loaded late.
            return statistics.median(speeds[1:]), measured


def _table_costs(
    plan: Plan, replica: Replica, first_shard: ShardInput, samples: list[InterventionMeasurements]
) -> list[TableCost]:
    """Rows and bytes of every table that the scan writes."""
    rows_of = dict.fromkeys(TABLES, 0.0)
    bytes_of = dict.fromkeys(TABLES, 0.0)
    for measured in samples:
        for name, size in _extrapolated_sizes(plan, first_shard, measured).items():
            rows_of[name] += size.rows
            bytes_of[name] += size.bytes
    for name, table in replica.weights().items():
        # A run has one file of them, for any number of sequences and interventions.
        rows_of[name] = table.num_rows
        bytes_of[name] = len(parquet_bytes(table))
    return [
        TableCost(name, round(rows_of[name]), round(bytes_of[name]))
        for name in TABLES
        if bytes_of[name]
    ]


class _TableSize(NamedTuple):
    """The size of a table, or of a part of it."""

    rows: float
    bytes: float


def _extrapolated_sizes(
    plan: Plan, first_shard: ShardInput, measured: InterventionMeasurements
) -> dict[str, _TableSize]:
    """The size of every table in the whole run, under one intervention.

    The bytes of a file are `file + each * n`, with a fixed part and a part for each of its n
    sequences. Two sizes determine both: that of the whole sample and that of half of it.
    """
    sequences, shards = plan.manifest.sequences, plan.manifest.shards
    # Every column has one row for each sequence of the sample.
    count = len(next(iter(measured.heads.values())))
    half = count // 2
    sizes = _sizes(plan, first_shard, measured, count)
    half_sizes = _sizes(plan, first_shard, measured, half) if half else {}
    extrapolated: dict[str, _TableSize] = {}
    for name, size in sizes.items():
        if TABLES[name].has("sequence"):
            half_bytes = half_sizes[name].bytes if name in half_sizes else 0
            each = (size.bytes - half_bytes) / (count - half)
            file = max(0.0, size.bytes - each * count)
            extrapolated[name] = _TableSize(
                size.rows / count * sequences, each * sequences + file * shards
            )
        else:
            # Such a table is as large for one sequence as for a whole shard.
            extrapolated[name] = _TableSize(size.rows * shards, size.bytes * shards)
    return extrapolated


def _sizes(
    plan: Plan, first_shard: ShardInput, measured: InterventionMeasurements, count: int
) -> dict[str, _TableSize]:
    """The size of every table of the first `count` sequences under one intervention."""
    # A shard of the first sequences, written as a replica would write it.
    origin = {name: values[:count] for name, values in first_shard.origin.items()}
    labels = first_shard.labels and first_shard.labels[:count]
    sample = ShardInput(0, 0, first_shard.tokens[:count], origin, [], labels)
    tables = intervention_tables(plan.scan, sample, measured.first(count))
    return {
        name: _TableSize(table.num_rows, len(parquet_bytes(table)))
        for name, table in tables.items()
    }


def field_meanings(scan: Scan) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every field of a scan but `input`, whose options differ."""
    meanings: list[tuple[str, str, str]] = []
    for name, field in type(scan).model_fields.items():
        if name != "input":
            description = " ".join((field.description or "").split())
            value: object = getattr(scan, name)
            if isinstance(value, tuple):
                value = ", ".join(map(str, value)) or "none"
            meanings.append((name, str(value), description))
    return meanings
