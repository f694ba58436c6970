"""What a plan will cost: a batch of each intervention is measured here, and taken as often as the
scan has batches.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from headcount.jobs.plan.plan import Plan
from headcount.schemas.errors import counted
from headcount.schemas.files.commit import Method
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.scans.intervention import Intervention
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.sequences import ShardInput
from headcount.workers.interventions.settlement import settle
from headcount.workers.memory import available_cores, peak_memory
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.replica import InterventionMeasurements, Replica, resolve_device
from headcount.workers.shard import intervention_tables

PATIENCE = 20.0  # seconds after which the search for a batch size ends where it is


Tell = Callable[[str], None]


@dataclass(frozen=True)
class InterventionCost:
    """What one intervention takes."""

    method: Method  # how the scan will measure it
    tokens_per_second: float
    """Of all replicas together, as far as this machine has cores for them; of one replica on the
    device that stands in, if the scan's is not here.
    """
    seconds: float  # for all sequences of the plan, at that speed


@dataclass(frozen=True)
class Cost:
    """Measurements of a batch, times the batches of the plan."""

    device: str  # what the scan will run on
    precision: str
    measured_on: str  # device of the batch: another one if the scan's is not here
    measured_in: str  # the precision of the batch
    replicas: int
    batch_size: int  # sequences in one forward pass; no more than a shard has
    interventions: list[InterventionCost]
    rows: dict[str, int]  # rows of each table that the scan writes
    bytes: int  # size of all tables on the disk
    peak_memory: int
    gpu_memory: int

    @property
    def is_of_device(self) -> bool:
        """Whether the scan's device was measured: the time of another one says nothing of it."""
        return self.measured_on == self.device

    @property
    def seconds(self) -> float:
        """Time of the whole scan."""
        return sum(cost.seconds for cost in self.interventions)

    def of_sequences(self, before: int, sequences: int) -> "Cost":
        """The cost of another run of a model of these sizes, with so many sequences."""
        share = sequences / before
        return replace(
            self,
            interventions=[replace(one, seconds=share * one.seconds) for one in self.interventions],
            rows={name: round(share * count) for name, count in self.rows.items()},
            bytes=round(share * self.bytes),
        )


def _devices(device: str) -> tuple[str, str]:
    """The device that a scan will run on, and the device of this machine that stands for it."""
    best_here = resolve_device("auto")
    scan_device = best_here if device == "auto" else device
    return scan_device, "cpu" if scan_device == "cpu" else best_here


def threads_of(device: str, replicas: int) -> int | None:
    """Threads of one of several replicas here, which share the cores of a CPU; none means all."""
    shares_cores = replicas > 1 and _devices(device)[1] == "cpu"
    return max(1, available_cores() // replicas) if shares_cores else None


def replicas_at_once(device: str, replicas: int) -> int:
    """How many of some replicas work at a time where the cost is measured: each needs a core of its
    own, or a GPU like that of this machine; of a device that is not here, one stands for nothing
    but itself.

    >>> replicas_at_once("cpu", 0), replicas_at_once("cpu", 10**6) == available_cores()
    (1, True)
    """
    device, measured_on = _devices(device)
    if device != measured_on:
        return 1
    most = available_cores() if device == "cpu" else replicas
    return max(1, min(replicas, most))


def has_same_sizes(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether two models cost the same: they differ in nothing but names and numbers."""
    names = {"path": "", "name": "", "sha256": "", "files": (), "notes": ()}
    return replace(one, **names) == replace(other, **names)


class Rehearsal:
    """Measures what a scan will cost, settled for its device, which another machine may have."""

    def __init__(
        self, scan: Scan, info: ModelInfo, device: str = "auto", replicas: int = 1
    ) -> None:
        self.device, self.measured_on = _devices(device)
        self.replicas = replicas
        # Loading may take more memory than measuring, so its peak counts too.
        with peak_memory(self.measured_on) as self.loading:
            self.replica = Replica(info, scan, self.measured_on)
        self.settlement = settle(self.replica.model, scan, self.device)

    def measure(self, plan: Plan, tell: Tell = lambda _: None) -> Cost:
        """Measure a batch of the plan's first shard under each intervention; write nothing.

        `tell` is told which pass is made. With `batch_size = "auto"`, the size is searched under
        the first intervention, as in a scan.
        """
        replica, shard = self.replica, plan.sequences.shard(0)
        sequences, shards = plan.manifest.sequences, plan.manifest.shards
        costs: list[InterventionCost] = []
        rows, sizes = dict.fromkeys(TABLES, 0.0), dict.fromkeys(TABLES, 0.0)
        with peak_memory(self.measured_on) as memory:
            interventions = plan.scan.interventions
            for number, intervention in enumerate(interventions, start=1):
                of_all = f" ({number} of {len(interventions)})" if interventions[1:] else ""
                tell_pass = partial(_tell, tell, f"{intervention}{of_all}: ")
                seconds, batch, measured = _measured_batch(replica, shard, intervention, tell_pass)
                in_batch = len(batch.tokens)
                # Replicas read and write by themselves, so their speeds add up.
                speed = batch.tokens.size / seconds
                speed *= replicas_at_once(self.device, self.replicas)
                # Engines do not depend on the device. The precision does.
                method = measured.method.model_copy(update={"precision": self.settlement.precision})
                tokens = sequences * plan.scan.n_ctx
                costs.append(InterventionCost(method, speed, tokens / speed))
                for name, table in intervention_tables(plan.scan, batch, measured).items():
                    # A table without sequences is as large for one of them as for a whole shard.
                    times = sequences / in_batch if TABLES[name].has("sequence") else shards
                    rows[name] += table.num_rows * times
                    sizes[name] += len(parquet_bytes(table)) * times
        for name, table in replica.weights().items():
            # A run has one file of them, for any number of sequences and interventions.
            rows[name], sizes[name] = table.num_rows, len(parquet_bytes(table))
        return Cost(
            device=self.device,
            precision=self.settlement.precision,
            measured_on=self.measured_on,
            measured_in=replica.precision,
            replicas=self.replicas,
            batch_size=min(replica.batch.size, len(shard.tokens)),
            interventions=costs,
            rows={name: round(count) for name, count in rows.items() if sizes[name]},
            bytes=round(sum(sizes.values())),
            peak_memory=max(memory.main, self.loading.main),
            gpu_memory=max(memory.gpu, self.loading.gpu),
        )


def _tell(tell: Tell, before: str, words: str) -> None:
    tell(f"{before}{words}")


def _tell_share(tell: Tell, words: str, before: int, tokens: int, done: int) -> None:
    tell(f"{words}{(done - before) / tokens:.0%}")


def _measured_batch(
    replica: Replica, shard: ShardInput, intervention: Intervention, tell: Tell
) -> tuple[float, ShardInput, InterventionMeasurements]:
    """Seconds of a batch of a shard, the batch, and its measurements.

    The first pass of a size warms up: it lays out memory, and loads what is loaded late. The faster
    of the next two counts. While the batch size is searched, only the size counts that stays.
    """
    deadline = time.perf_counter() + PATIENCE
    size, passes = 0, list[float]()
    while True:
        size_before, size = size, min(replica.batch.size, len(shard.tokens))
        if size != size_before:
            passes = []
            # The same array in all passes: what a replica knows of the untouched model, it knows by
            # the array.
            tokens = shard.tokens[:size]
            labels = None if shard.labels is None else shard.labels[:size]
            partner = None if shard.partner is None else shard.partner[:size]
        words = f"pass {len(passes) + 1} of {counted(size, 'sequence')} at a time"
        tell(words)
        before = replica.tokens_measured
        replica.on_tokens = partial(_tell_share, tell, f"{words}, ", before, tokens.size)
        began = time.perf_counter()
        measured = replica.measure(tokens, intervention, labels, partner)
        passes.append(time.perf_counter() - began)
        # A size that is cut off by the end of the shard cannot grow any more.
        is_searching = replica.batch.searching and replica.batch.size <= len(shard.tokens)
        is_late = time.perf_counter() > deadline
        if len(passes) > (1 if is_late else 2) and (is_late or not is_searching):
            origin = {name: values[:size] for name, values in shard.origin.items()}
            return min(passes[1:]), ShardInput(0, 0, tokens, origin, [], labels), measured
