"""How the machinery around the replicas scales: `python -m benchmarks.scale`, or `make scale`.

Four questions, each with its target: how fast commits are made where replicas do no work, how close
a scan through Ray comes to the same engine in a plain loop, how two one-core replicas compare with
one, and what plan, status and resume cost where a run has a million shards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from benchmarks.measured_on import machine
from jobs.dispatch import dispatch
from jobs.plan import Plan, make_plan, prepare_run
from jobs.ray_cluster import Resources, connect
from jobs.run_identity import begun_precisions
from jobs.run_loop import missing_shards, say_what_differs
from jobs.status import read_status
from schemas.commits import COMMITS, DROPPED, FOLD, Method
from schemas.digests import digest_of
from schemas.intervention import NONE, Intervention
from schemas.measured_heads import MeasuredHeads
from schemas.run_directory import data_path
from schemas.scan import parse_scan
from schemas.statistics import KIND
from schemas.tables import chance_column
from workers.interventions.settlement import Settlement
from workers.model.model_info import ModelInfo
from workers.process import prepare_process
from workers.provenance.machine import device_name, measuring_versions
from workers.replica import InterventionMeasurements, Replica
from workers.shard import run_shard

RESULTS = Path(__file__).parent / "results" / "scale.json"
MILLION = 1_000_000
BYTES = 20_000
"""Size of each of its data files."""

WRITTEN = ("heads", "sequences")
"""Tables that a shard writes where the scan asks for no profiles."""


class Idler(Replica):
    """A replica that does no work: every statistic is zero."""

    def __init__(
        self, info: ModelInfo, scan: Any, device: str = "auto", threads: int | None = None
    ) -> None:
        self.scan, self.info, self.free_since = scan, info, None
        self.device = "cpu"
        self.settlement = Settlement("float32", {})

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Zeros at once."""
        shape = len(tokens), self.info.n_layers, self.info.n_heads
        statistics = self.scan.formulas(KIND)
        heads = {s.name: np.zeros(shape, np.float32) for s in statistics}
        chance = {
            chance_column(s.name): np.zeros(len(tokens), np.float32) for s in statistics if s.chance
        }
        method = Method(
            intervention=str(intervention),
            engine="none",
            precision="float32",
            attention="",
            built_layers=[],
        )
        every = MeasuredHeads.every(self.info.n_layers, self.info.n_heads)
        return InterventionMeasurements({"heads": heads, "sequences": chance}, {}, every, method)


def plan_of(out: Path, name: str, **fields: Any) -> Plan:
    """A new run of some shards."""
    base = {
        "model": "bundled:gpt2-mini",
        "n_ctx": 256,
        "input": {"family": "repeated_random"},
        "out": str(out),
    }
    plan = make_plan(parse_scan(base | fields), name)
    prepare_run(plan, "")
    return plan


def through_ray(
    plan: Plan, replicas: int, cores: int, replica: type[Replica] = Replica
) -> tuple[float, float]:
    """Shards per second from the first forward pass to the last commit, and seconds before that."""
    began = time.perf_counter()
    connect(Resources(2, 1, "cpu"))  # Ray is started once, with both cores.
    resources = Resources(replicas, cores, "cpu")
    first = last = 0.0
    for outcome in dispatch(plan, np.arange(plan.manifest.shards), resources, print, replica):
        last = time.perf_counter()
        first = first or last - getattr(outcome, "seconds", 0.0)
    return plan.manifest.shards / (last - first), first - began


def in_a_loop(plan: Plan, threads: int) -> float:
    """Shards per second of the same engine without Ray."""
    prepare_process(threads)
    replica = Replica(plan.info, plan.scan, "cpu")
    began = time.perf_counter()
    for shard in range(plan.manifest.shards):
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return plan.manifest.shards / (time.perf_counter() - began)


def no_work(out: Path) -> dict[str, float]:
    """Commits per second where the replica computes nothing: two data files and a commit each,
    fsynced.
    """
    plan = plan_of(out, "idle", sequences=8000, sequences_per_shard=4, n_ctx=64)
    rate, start = through_ray(plan, 1, 1, Idler)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"shards_per_second": rate, "start_seconds": start, "driver_peak_mb": peak}


def overhead(out: Path, rounds: int, shards: int = 10) -> list[dict[str, float]]:
    """The same shards, of about a second each: in a loop, through Ray on one replica, through Ray
    on two; in both orders.
    """
    # Batches of one size: a search for the best one would be another in each.
    size = {"sequences_per_shard": 80, "sequences": 80 * shards, "batch_size": 8}
    ways: dict[str, Callable[[Plan], float]] = {
        "loop": lambda plan: in_a_loop(plan, 1),
        "one": lambda plan: through_ray(plan, 1, 1)[0],
        "two": lambda plan: through_ray(plan, 2, 1)[0],
    }
    found = []
    for turn in range(rounds):
        order = list(ways) if turn % 2 else list(reversed(ways))
        rates = {way: ways[way](plan_of(out, f"{way}{turn}", **size)) for way in order}
        found.append({way: rates[way] for way in ways})
    return found


def write_million(out: Path, missing: int = 1000) -> Path:
    """A run of a million shards of one sequence, all but `missing` of them done, their commits
    folded.
    """
    plan = plan_of(
        out,
        "million",
        model="bundled:attn-only-2l-mini",
        n_ctx=32,
        sequences=MILLION,
        sequences_per_shard=1,
    )
    home = Path(str(plan.run.path))
    done = np.setdiff1d(
        np.arange(MILLION), np.random.default_rng(0).choice(MILLION, missing, replace=False)
    )
    for table in WRITTEN:
        (home / data_path(table, "none", "")).mkdir(parents=True)
        for shard in done:
            file = os.open(
                str(plan.run.data_file(table, "none", int(shard))), os.O_CREAT | os.O_RDWR
            )
            os.ftruncate(file, BYTES)  # A size, and no content on the disk.
            os.close(file)
    (home / "commits").mkdir()
    for number, start in enumerate(range(0, len(done), FOLD)):
        rows = [_commit(plan, int(shard)) for shard in done[start : start + FOLD]]
        table = pa.Table.from_pylist(rows, schema=COMMITS)
        table = table.append_column(DROPPED, pa.array([False] * len(table)))
        pq.write_table(
            table, home / "commits" / f"fold-{number:06d}-00000000.parquet", compression="zstd"
        )
    return home


def _commit(plan: Plan, shard: int) -> dict[str, Any]:
    files = [
        {
            "table": t,
            "intervention": "none",
            "path": data_path(t, "none", plan.run.data_file(t, "none", shard).name),
        }
        | {"rows": 16, "bytes": BYTES, "shards": 1}
        | {"digest": digest_of(f"{t} {shard}".encode())}
        for t in WRITTEN
    ]
    times = {
        "seconds": 1.0 + shard % 7 / 10,
        "compute_seconds": 1.0,
        "idle_seconds": 0.01,
        "finished": datetime.now(UTC),
    }
    who = {
        "host": f"node-{shard % 50}",
        "replica": f"node-{shard % 50}-{shard % 100}",
        "attempt": 1,
    }
    method = {"intervention": "none", "engine": "fused", "precision": "float32"}
    how = {
        "code": plan.code,
        "device": device_name("cpu"),
        "versions": [version.model_dump() for version in measuring_versions()],
        "methods": [method | {"attention": "tiles", "built_layers": []}],
        "bad_rows": [],
        "files": files,
    }
    what = {
        "run_id": plan.run.run_id,
        "shard": shard,
        "start": shard,
        "stop": shard + 1,
        "rows": 16,
        "tokens": 32,
    }
    return what | times | who | how


def plan_again(plan: Plan) -> int:
    """What `headcount plan` reads of a run that was begun: how many shards are done."""
    assert begun_precisions(plan.run) == {"float32"}
    return plan.shards_done


def resume(plan: Plan) -> int:
    """What `headcount resume` reads before the first shard: how many are missing."""
    missing = missing_shards(plan)
    assert begun_precisions(plan.run) == {"float32"}
    assert list(say_what_differs(plan.run, [], print)) == []
    return len(missing)


QUESTIONS: dict[str, Callable[[Plan], int]] = {
    "plan": plan_again,
    "status": lambda plan: read_status(plan.run).done,
    "resume": resume,
}


def ask(question: str, run: Path) -> dict[str, float]:
    """Seconds and memory of a new process that answers one question about a run."""
    command = [sys.executable, "-m", "benchmarks.scale", "--ask", question, str(run)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    answer, peak = done.stdout.split()
    return {"seconds": seconds, "peak_mb": float(peak), "answer": int(answer)}


def answer(question: str, run: Path) -> None:
    """Answer one question about a run, in this process."""
    scan = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 32,
        "sequences": MILLION,
        "sequences_per_shard": 1,
    }
    plan = make_plan(
        parse_scan(scan | {"input": {"family": "repeated_random"}, "out": str(run.parent)}),
        "million",
    )
    found = QUESTIONS[question](plan)
    # Not ru_maxrss, which begins with that of the process that started this one.
    peak = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    print(found, int(peak[1]) / 1e3 if peak else 0)


def report(found: dict[str, Any], console: Console) -> None:
    """Every figure beside its target."""
    ratio = statistics.median(turn["one"] / turn["loop"] for turn in found["overhead"])
    growth = statistics.median(turn["two"] / turn["one"] for turn in found["overhead"])
    rows = [
        (
            "commits where replicas do no work",
            f"{found['no_work']['shards_per_second']:.0f} shards/s",
            ">= 100",
        ),
        ("through Ray over a plain loop, shards of a second", f"{ratio:.3f}", ">= 0.95"),
        ("two one-core replicas over one", f"{growth:.2f}", ">= 1.8"),
    ]
    for question, cost in found["million"].items():
        rows.append(
            (
                f"{question}, 1,000,000 shards",
                f"{cost['seconds']:.1f} s, {cost['peak_mb']:.0f} MB",
                "10 s, 1000 MB",
            )
        )
    for row in rows:
        console.print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, (52, 22, 14), strict=True))
        )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ask", nargs=2, metavar=("QUESTION", "RUN"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=["no_work", "overhead", "million"])
    options = parser.parse_args()
    if options.ask:
        answer(options.ask[0], Path(options.ask[1]))
        return
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory(prefix="headcount-scale-") as folder:
        out = Path(folder)
        if options.only in (None, "no_work"):
            found["no_work"] = no_work(out)
        if options.only in (None, "overhead"):
            found["overhead"] = overhead(out, options.rounds)
        if options.only in (None, "million"):
            run = write_million(out)
            found["million"] = {question: ask(question, run) for question in QUESTIONS}
    found |= {"machine": machine(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    report(found, Console())


if __name__ == "__main__":
    main()
