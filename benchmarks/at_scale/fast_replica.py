"""Whether a replica ever waits: `python -m benchmarks.at_scale.fast_replica`.

The replica has no model. It takes two million tokens a second, which no GPU does today with GPT-2,
and gives the rows of GPT-2: 12 layers of 12 heads with the default statistics, for sequences of
1,024 tokens. Everything around it is real: Ray, the dispatch, the tables, their files, the commits.

Two measurements, each with its target:

* Which share of its time does the replica wait, on a disk and on an S3 server of this machine?
* How many tokens a second does one thread write as rows, from measured numbers to the commit?
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.at_scale.scale import Idler, begin_run
from benchmarks.measured_on import measured_now
from headcount.jobs.cluster.ray_cluster import Resources, connect
from headcount.jobs.plan.plan import Plan
from headcount.jobs.run.ray_replicas import measure_on_ray
from headcount.schemas.errors import RunError
from headcount.schemas.files.commit import Commit
from headcount.schemas.scans.intervention import NONE, Intervention
from headcount.schemas.scans.scan import Scan
from headcount.workers.model.info.model_info import ModelInfo
from headcount.workers.replica import InterventionMeasurements
from headcount.workers.shard import MeasuredShard, commit_shard, measure_shard
from tests.s3.s3_server import S3Server
from tests.toys.random_model import UNTRAINED, write_random_model

RESULTS = Path(__file__).parent.parent / "results" / "fast_replica.json"

TOKENS_PER_SECOND = 2e6
"""What the replica takes."""

N_CTX = 1024
GPT2_SIZES = {"n_layers": 12, "n_heads": 12, "n_ctx": N_CTX, "d_vocab": 50257}

TARGETS = {"idle": "<= 5 %", "written": ">= 5"}

UNDEFINED_SHARE = 0.01
"""Share of the numbers that are NaN, and so NULL in the files."""


class FastReplica(Idler):
    """A replica that takes its tokens at a fixed speed, and gives random numbers for them."""

    def __init__(
        self, info: ModelInfo, scan: Scan, device: str = "auto", threads: int | None = None
    ) -> None:
        super().__init__(info, scan, device, threads)
        self.numbers: dict[int, InterventionMeasurements] = {}
        """What it gives, by number of sequences. It is drawn once: drawing takes longer than two
        million tokens a second allow.
        """

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Random numbers, after the time that the tokens take."""
        deadline = time.perf_counter() + tokens.size / TOKENS_PER_SECOND
        if len(tokens) not in self.numbers:
            self.numbers[len(tokens)] = self._drawn(tokens, intervention)
        # A negative time would be an error; only the first shard, which is drawn, may take longer.
        time.sleep(max(0.0, deadline - time.perf_counter()))
        return self.numbers[len(tokens)]

    def _drawn(self, tokens: np.ndarray, intervention: Intervention) -> InterventionMeasurements:
        """Numbers between 0 and 1, which do not repeat, with a few that are undefined."""
        measurements = super().measure(tokens, intervention)
        generator = np.random.default_rng(0)
        for columns in measurements.tables.values():
            for values in columns.values():
                values[...] = generator.random(values.shape, np.float32)
                values[generator.random(values.shape) < UNDEFINED_SHARE] = np.nan
        return measurements


def fast_run(out: str, model: Path, name: str, shards: int, fields: Mapping[str, object]) -> Plan:
    """A new run of GPT-2's size, with shards of the default number of sequences."""
    shard_size = Scan.model_fields["sequences_per_shard"].default
    defaults = {
        "model": str(model),
        "n_ctx": N_CTX,
        "sequences": shards * shard_size,
        "input": {"family": "uniform_random"},
    }
    return begin_run(out, name, {**defaults, **fields})


def share_of_waiting(plan: Plan) -> dict[str, float]:
    """How long a replica waited for shards, as a share of its time; and the speed of the whole."""
    connect(Resources(1, 1, "cpu"))
    commits: list[Commit] = []
    arrivals: list[float] = []
    shards = np.arange(plan.manifest.shards)
    for outcome in measure_on_ray(plan, shards, Resources(1, 1, "cpu"), print, FastReplica):
        if not isinstance(outcome, Commit):
            raise RunError(f"shard {outcome.shard}: {outcome.error}")
        commits.append(outcome)
        arrivals.append(time.perf_counter())
    # The first shard is left out: it draws the numbers, and the replica has not waited before it.
    timed = sorted(commits, key=lambda commit: commit.finished)[1:]
    idle = sum(commit.idle_seconds for commit in timed)
    busy = sum(commit.compute_seconds for commit in timed)
    tokens = sum(commit.tokens for commit in timed)
    return {
        "idle_share": idle / (idle + busy),
        "tokens_per_second": tokens / (arrivals[-1] - arrivals[0]),
        "longest_wait_seconds": max(commit.idle_seconds for commit in timed),
        "write_seconds": statistics.median(c.seconds - c.compute_seconds for c in timed),
    }


def written_by_a_thread(plan: Plan) -> list[dict[str, float]]:
    """Millions of tokens a second that one thread writes: by its processor time, and by the clock.

    The clock also counts what the disk and other processes take.
    """
    replica = FastReplica(plan.info, plan.scan)
    measured = measure_shard(replica, plan.sequences.shard(0))
    figures: list[dict[str, float]] = []
    for shard in range(plan.manifest.shards):
        numbered = _as_shard(measured, shard)
        cpu_start, start = time.thread_time(), time.perf_counter()
        commit_shard(plan.scan, plan.run, numbered, attempt=1)
        cpu_seconds, seconds = time.thread_time() - cpu_start, time.perf_counter() - start
        tokens = numbered.input.tokens.size / 1e6
        figures.append({"by_processor": tokens / cpu_seconds, "by_clock": tokens / seconds})
    return figures[1:]


def _as_shard(measured: MeasuredShard, shard: int) -> MeasuredShard:
    """The same measurements, as if they were those of another shard."""
    start = shard * len(measured.input.tokens)
    return replace(measured, input=replace(measured.input, shard=shard, start=start))


def spread(values: Sequence[float]) -> str:
    """The median and the range, as text."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def report(results: Mapping[str, Any], console: Console) -> None:
    """Print every figure with its spread beside its target."""
    for way, rounds in results["waiting"].items():
        idle = spread([100 * figures["idle_share"] for figures in rounds])
        speed = spread([figures["tokens_per_second"] / 1e6 for figures in rounds])
        console.print(
            f"{way}: waits {idle} % of its time ({TARGETS['idle']}), {speed} Mtokens/s, "
            f"at a load of {results['measured'][way]['load_average']} on {os.cpu_count()} cores"
        )
    for clock in ("by_processor", "by_clock") if "written" in results else ():
        speed = spread([figures[clock] for figures in results["written"]])
        console.print(f"one thread writes, {clock}: {speed} Mtokens/s ({TARGETS['written']})")


def main() -> None:
    """Measure, print the figures, keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=80, help="shards of a round")
    parser.add_argument("--only", choices=["disk", "store", "written"])
    parser.add_argument(
        "--corpus", help="a file of documents (.jsonl, .jsonl.zst, …) instead of random tokens"
    )
    options = parser.parse_args()
    fields: dict[str, object] = {}
    if options.corpus:
        fields["input"] = {"family": "pile", "files": [options.corpus], "packing": "concat"}
    # With --only the other figures stay as they were measured before, each with its own record.
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    measured: dict[str, Any] = results.setdefault("measured", {})
    source = "corpus" if options.corpus else "random tokens"
    waiting: dict[str, Any] = results.setdefault("waiting", {})
    with tempfile.TemporaryDirectory(prefix="headcount-fast-") as directory, S3Server() as server:
        os.environ.update(server.env())
        model = write_random_model(
            Path(directory) / "model", "bundled:gpt2-mini", GPT2_SIZES, UNTRAINED
        )
        places = {"disk": directory, "store": "s3://bucket/runs"}
        for place, out in places.items():
            if options.only not in (None, place):
                continue
            rounds = waiting[f"{place}, {source}"] = []
            for number in range(options.rounds):
                plan = fast_run(out, model, f"{place}{number}", options.shards, fields)
                rounds.append(share_of_waiting(plan))
            # Waiting is measured by the clock: it counts what other programs take of the cores.
            measured[f"{place}, {source}"] = measured_now()
        if options.only in (None, "written"):
            plan = fast_run(directory, model, "written", options.shards, {})
            results["written"] = written_by_a_thread(plan)
            measured["written"] = measured_now()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    report(results, Console())


if __name__ == "__main__":
    main()
