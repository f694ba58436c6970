"""How the machinery around the replicas scales: `make scale`.

Eight measurements, each with its target:

* How fast are commits made if replicas do no work?
* How close does a scan through Ray come to the same engine in a plain loop?
* How do two one-core replicas compare with one?
* How much work are up to a thousand replicas for the driver, and what if a hundred vanish at once?
* What do plan, status and resume cost if a run has a million shards?
* How soon does resume know what is missing of 100,000 shards after its driver was killed?
* How long does a connection for queries take if a run has 100,000 shards?
* How long does it take to compact them?
"""

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
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from benchmarks.measured_on import measured_now
from headcount.jobs.cluster.ray_cluster import Resources, connect
from headcount.jobs.plan.begun_with import begun_precisions
from headcount.jobs.plan.plan import Plan, make_plan, replan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.run.commit_log import CommitLog
from headcount.jobs.run.loop import missing_shards
from headcount.jobs.run.ray_replicas import measure_on_ray
from headcount.jobs.upkeep.status import read_status
from headcount.schemas.files.commit import COMMITS, Commit, Method
from headcount.schemas.files.commits import COMMITS_PER_SEGMENT, write_segment
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.parquet import parquet_bytes
from headcount.schemas.files.run_directory import RunDirectory, data_path, shard_file_name
from headcount.schemas.measured_heads import MeasuredHeads
from headcount.schemas.scans.intervention import NONE, Intervention
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.tables import uniform_column, with_partitions
from headcount.workers.interventions.settlement import Settlement
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.provenance.machine import device_name, measuring_versions
from headcount.workers.replica import InterventionMeasurements, Replica
from headcount.workers.shard import intervention_tables, run_shard
from tests.tools.simulated_cluster import simulate

RESULTS = Path(__file__).parent.parent / "results" / "scale.json"
MILLION = 1_000_000

FILE_BYTES = 20_000
"""Size of each data file of the run of a million shards."""

WRITTEN_TABLES = ("heads", "sequences")
"""Tables that a shard writes if the scan asks for no profiles."""

UNCOMPACTED = 100_000
"""Shards of a run with real files, which is opened for queries and compacted."""

MILLION_SCAN = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 32,
    "sequences": MILLION,
    "sequences_per_shard": 1,
}

SIMULATED = {1: 20_000, 10: 20_000, 100: 100_000, 1000: 1_000_000}
"""Shards of simulated runs, by the number of replicas. A tenth of them vanishes at once."""

SIMULATED_RATE = 150
"""Commits a second that the replicas of a simulated run make together."""

TARGETS = {
    "no_work": ">= 100",
    "through_ray": ">= 0.95",
    "two_replicas": ">= 1.8",
    "replicas": ">= 150",
    "million": "10 s, 1000 MB",
    "killed": "15 s",
    "open": "5 s",
}


class Idler(Replica):
    """A replica that does no work: every statistic is zero."""

    def __init__(
        self, info: ModelInfo, scan: Scan, device: str = "auto", threads: int | None = None
    ) -> None:
        # Not Replica's own: that one loads a model.
        self.scan = scan
        self.info = info
        self.free_since = None
        self.device = "cpu"
        self.settlement = Settlement("float32", {})

    def measure(
        self,
        tokens: np.ndarray,
        intervention: Intervention = NONE,
        labels: list[list[str]] | None = None,
        partner: np.ndarray | None = None,
    ) -> InterventionMeasurements:
        """Zeros for every statistic, without a forward pass."""
        shape = (len(tokens), self.info.n_layers, self.info.n_heads)
        statistics = self.scan.formulas(STATISTICS)
        heads = {s.name: np.zeros(shape, np.float32) for s in statistics}
        uniform_baseline = {
            uniform_column(s.name): np.zeros(len(tokens), np.float32)
            for s in statistics
            if s.uniform_baseline
        }
        method = Method(
            intervention=str(intervention),
            engine="none",
            precision="float32",
            attention="",
            built_layers=[],
        )
        every = MeasuredHeads.every(self.info.n_layers, self.info.n_heads)
        return InterventionMeasurements(
            {"heads": heads, "sequences": uniform_baseline}, every, method
        )


def begin_run(out: Path | str, name: str, fields: Mapping[str, object]) -> Plan:
    """A new run without a shard, of a scan with these fields."""
    defaults = {
        "model": "bundled:gpt2-mini",
        "n_ctx": 256,
        "input": {"family": "repeated_random"},
        "out": str(out),
    }
    plan = make_plan(parse_scan({**defaults, **fields}), name)
    prepare_run(plan, "")
    return plan


def through_ray(
    plan: Plan, replicas: int, cores: int, replica: type[Replica] = Replica
) -> tuple[float, float]:
    """Shards per second from the first forward pass to the last commit, and seconds before that."""
    start_time = time.perf_counter()
    connect(Resources(2, 1, "cpu"))  # Ray is started once, with both cores.
    resources = Resources(replicas, cores, "cpu")
    shards = np.arange(plan.manifest.shards)
    first_pass = last_commit = 0.0
    for outcome in measure_on_ray(plan, shards, resources, print, replica):
        last_commit = time.perf_counter()
        # The first outcome arrives when its shard is committed; its pass began that much earlier.
        first_pass = first_pass or last_commit - getattr(outcome, "seconds", 0.0)
    return len(shards) / (last_commit - first_pass), first_pass - start_time


def in_a_loop(plan: Plan, threads: int) -> float:
    """Shards per second of the same engine without Ray."""
    prepare_process(threads)
    replica = Replica(plan.info, plan.scan, "cpu")
    start_time = time.perf_counter()
    for shard in range(plan.manifest.shards):
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return plan.manifest.shards / (time.perf_counter() - start_time)


def no_work(out: Path) -> dict[str, float]:
    """Commits per second if the replica computes nothing: two data files and a commit for each
    shard, with fsync.
    """
    plan = begin_run(out, "idle", {"sequences": 8000, "sequences_per_shard": 4, "n_ctx": 64})
    cpu_start = time.process_time()
    rate, start_seconds = through_ray(plan, 1, 1, Idler)
    driver_seconds = time.process_time() - cpu_start
    # Linux counts ru_maxrss in KiB.
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {
        "shards_per_second": rate,
        "start_seconds": start_seconds,
        "driver_seconds": driver_seconds,
        "driver_peak_mb": peak_mb,
    }


def overhead(out: Path, rounds: int, shards: int = 10) -> list[dict[str, float]]:
    """Shards per second of the same shards of about a second each, in every round: in a loop,
    through Ray on one replica, through Ray on two.
    """
    # Batches have one size: a search for the best one could end differently in each way.
    fields = {"sequences_per_shard": 80, "sequences": 80 * shards, "batch_size": 8}
    ways: dict[str, Callable[[Plan], float]] = {
        "loop": lambda plan: in_a_loop(plan, 1),
        "one": lambda plan: through_ray(plan, 1, 1)[0],
        "two": lambda plan: through_ray(plan, 2, 1)[0],
    }
    rates_by_round: list[dict[str, float]] = []
    for number in range(rounds):
        # Every second round goes backwards, so that no way is always the first.
        order = list(ways) if number % 2 else list(reversed(ways))
        rates = {way: ways[way](begin_run(out, f"{way}{number}", fields)) for way in order}
        rates_by_round.append({way: rates[way] for way in ways})
    return rates_by_round


def simulated(out: Path) -> dict[str, dict[str, float]]:
    """The driver's work for replicas that are simulated, by their number."""
    figures: dict[str, dict[str, float]] = {}
    for replicas, shards in SIMULATED.items():
        fields = {**MILLION_SCAN, "sequences": shards}
        plan = begin_run(out, f"simulated{replicas}", fields)
        half = shards / SIMULATED_RATE / 2
        run = simulate(plan, replicas, replicas // 10, replicas / SIMULATED_RATE, vanish_at=half)
        figures[str(replicas)] = run._asdict()
    return figures


def write_million(out: Path, missing: int = 1000) -> Path:
    """The directory of a run of a million shards of one sequence: all but `missing` of them are
    done, and their commits are gathered.
    """
    plan = begin_run(out, "million", MILLION_SCAN)
    run_directory = Path(str(plan.run.path))
    missing_shards = np.random.default_rng(0).choice(MILLION, missing, replace=False)
    done_shards = np.setdiff1d(np.arange(MILLION), missing_shards)
    for table in WRITTEN_TABLES:
        (run_directory / data_path(table, "none", "")).mkdir(parents=True)
        for shard in done_shards:
            _write_sparse_file(str(plan.run.path / _path(table, int(shard))))
    (run_directory / "commits").mkdir()
    for start in range(0, len(done_shards), COMMITS_PER_SEGMENT):
        commits = [
            commit_row(plan, int(shard))
            for shard in done_shards[start : start + COMMITS_PER_SEGMENT]
        ]
        write_segment(plan.run.commits_directory, pa.Table.from_pylist(commits, schema=COMMITS))
    return run_directory


def _write_sparse_file(path: str) -> None:
    """A file that has a size and takes no room on the disk: two million of them must fit."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.ftruncate(descriptor, FILE_BYTES)
    os.close(descriptor)


def commit_row(plan: Plan, shard: int) -> dict[str, Any]:
    """The commit of a shard, as a row of a segment."""
    return {
        "run_id": plan.run.run_id,
        "shard": shard,
        "start": shard,
        "stop": shard + 1,
        "rows": 16,
        "tokens": 32,
        # A few different values, as on a real cluster: equal ones would compress to nothing.
        "seconds": 1.0 + shard % 7 / 10,
        "compute_seconds": 1.0,
        "idle_seconds": 0.01,
        "finished": datetime.now(UTC),
        "host": f"node-{shard % 50}",
        "replica": f"node-{shard % 50}-{shard % 100}",
        "attempt": 1,
        "code": plan.code,
        "device": device_name("cpu"),
        "versions": [version.model_dump() for version in measuring_versions()],
        "methods": [
            {
                "intervention": "none",
                "engine": "fused",
                "precision": "float32",
                "attention": "tiles",
                "built_layers": [],
            }
        ],
        "bad_rows": [],
        "files": [_data_file(plan, table, shard) for table in WRITTEN_TABLES],
    }


def _path(table: str, shard: int) -> str:
    return data_path(table, "none", shard_file_name(shard, "0" * 32))


def _data_file(plan: Plan, table: str, shard: int) -> dict[str, Any]:
    """A data file of a shard, as its commit lists it."""
    return {
        "table": table,
        "intervention": "none",
        "path": _path(table, shard),
        "rows": 16,
        "bytes": FILE_BYTES,
        "shards": 1,
        "digest": digest_of(f"{table} {shard}".encode()),
    }


def write_uncompacted(out: Path, shards: int = UNCOMPACTED) -> Path:
    """The directory of a run of real, tiny shards. All are done, and most are gathered."""
    fields = {
        **MILLION_SCAN,
        "sequences": shards,
        "input": {"family": "repeated_random"},
        "statistics": ["entropy", "sink_mass"],
    }
    plan = begin_run(out, "uncompacted", fields)
    run_directory = Path(str(plan.run.path))
    first_shard = plan.sequences.shard(0)
    measurements = Idler(plan.info, plan.scan).measure(first_shard.tokens)
    tables = intervention_tables(plan.scan, first_shard, measurements)
    for table in tables:
        (run_directory / data_path(table, "none", "")).mkdir(parents=True)
    plan.run.commits_directory.mkdir()  # pyright: ignore[reportAttributeAccessIssue]
    commits: list[dict[str, Any]] = []
    for shard in range(shards):
        files = [_write_small_file(plan, name, shard, rows) for name, rows in tables.items()]
        commits.append(commit_row(plan, shard) | {"files": files})
        if len(commits) == COMMITS_PER_SEGMENT:
            write_segment(plan.run.commits_directory, pa.Table.from_pylist(commits, COMMITS))
            commits = []
    for commit in map(Commit.model_validate, commits):
        content = commit.model_dump_json(indent=1).encode()
        Path(str(plan.run.commit_file(commit.shard))).write_bytes(content)
    return run_directory


def _write_small_file(plan: Plan, table: str, shard: int, rows: pa.Table) -> dict[str, Any]:
    """Write a shard's rows of a table, without fsync; returns the file as a commit lists it."""
    for key in ("shard", "sequence"):
        index = rows.schema.get_field_index(key)
        field = rows.schema.field(index)
        rows = rows.set_column(index, field, pa.array(np.full(len(rows), shard), field.type))
    content = parquet_bytes(with_partitions(rows, plan.run.run_id, "none"))
    Path(str(plan.run.path / _path(table, shard))).write_bytes(content)
    fields = {"rows": len(rows), "bytes": content.size, "digest": digest_of(content)}
    return _data_file(plan, table, shard) | fields


def open_for_queries(run: Path) -> dict[str, float]:
    """Seconds of a new process that opens a run for queries, by the clock and of its cores."""
    code = (
        "import sys, time; from headcount.queries.ask.asking import open_runs; "
        "times = time.perf_counter(), time.process_time(); open_runs(sys.argv[1]); "
        "print(time.perf_counter() - times[0], time.process_time() - times[1])"
    )
    command = [sys.executable, "-c", code, str(run)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, cpu_seconds = map(float, process.stdout.split())
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def compact_by_command(run: Path) -> dict[str, float]:
    """Seconds of `headcount compact`, by the clock and of all cores."""
    start_time, start_usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "headcount", "compact", str(run)]
    subprocess.run(command, capture_output=True, check=True)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": time.perf_counter() - start_time,
        "cpu_seconds": usage.ru_utime
        + usage.ru_stime
        - start_usage.ru_utime
        - start_usage.ru_stime,
    }


def plan_again(plan: Plan) -> int:
    """How many shards are done, as `headcount plan` reads it of a run that was begun."""
    assert begun_precisions(plan.run) == {"float32"}
    return plan.shards_done


def resume(plan: Plan) -> int:
    """How many shards are missing, as `headcount resume` reads it before the first shard."""
    missing = missing_shards(plan)
    assert begun_precisions(plan.run) == {"float32"}
    with CommitLog(plan.run, print):
        pass
    return len(missing)


QUERIES: Mapping[str, Callable[[Plan], int]] = {
    "plan": plan_again,
    "status": lambda plan: read_status(plan.run).done,
    "resume": resume,
}


def ask(query: str, run: Path) -> dict[str, float]:
    """Seconds and memory of a new process that answers one query about a run."""
    command = [sys.executable, "-m", "benchmarks.at_scale.scale", "--ask", query, str(run)]
    start_time = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start_time
    answer, peak_mb, cpu_seconds = map(float, process.stdout.split())
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_mb}
    return {**figures, "answer": int(answer)}


def print_answer(query: str, run: Path) -> None:
    """Answer one query about a run in this process, and print its peak memory in MB."""
    answer = QUERIES[query](replan(RunDirectory(run)))
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    peak = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    print(answer, int(peak[1]) / 1e3 if peak else 0, time.process_time())


def figures_of(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The section of each figure, what it is of, the figure, and its target."""
    rounds = results["overhead"]
    over_loop = statistics.median(rates["one"] / rates["loop"] for rates in rounds)
    two_over_one = statistics.median(rates["two"] / rates["one"] for rates in rounds)
    commits = f"{results['no_work']['shards_per_second']:.0f} shards/s"
    yield "no_work", "commits if replicas do no work", commits, TARGETS["no_work"]
    through_ray = "through Ray over a plain loop, shards of a second"
    yield "overhead", through_ray, f"{over_loop:.3f}", TARGETS["through_ray"]
    yield (
        "overhead",
        "two one-core replicas over one",
        f"{two_over_one:.2f}",
        TARGETS["two_replicas"],
    )
    for replicas, run in results["simulated"].items():
        rate = f"{run['shards'] / run['driver_seconds']:.0f} shards/s of a core"
        yield "simulated", f"dispatch to {replicas} replicas", rate, TARGETS["replicas"]
        times = f"{run['seconds']:.0f} s, {run['longest_silence']:.1f} s silent"
        yield "simulated", "  all shards; a tenth vanishes", times, f"{run['ideal_seconds']:.0f} s"
    queries = [("million", query, MILLION, cost) for query, cost in results["million"].items()]
    queries.append(("killed", "resume after kill -9", UNCOMPACTED, results["killed"]))
    for section, what, shards, cost in queries:
        # Figures from before the processor's time was kept have none.
        of_core = f" ({cost['cpu_seconds']:.1f} of a core)" if "cpu_seconds" in cost else ""
        measured = f"{cost['seconds']:.1f} s{of_core}, {cost['peak_mb']:.0f} MB"
        yield section, f"{what}, {shards:,} shards", measured, TARGETS[section]
    for what, cost in results["uncompacted"].items():
        measured = f"{cost['seconds']:.1f} s ({cost['cpu_seconds']:.1f} s of a core)"
        yield "uncompacted", f"{what}, {UNCOMPACTED:,} shards", measured, TARGETS.get(what, "")


def report(results: Mapping[str, Any], measured_here: Collection[str], console: Console) -> None:
    """Print every figure beside its target, and when it was measured if not by this command."""
    for section, what, measured, target in figures_of(results):
        older = "" if section in measured_here else f"of {results['measured'][section]['time']}"
        console.print(f"{what:<52}  {measured:<26}  {target:<16}  {older}")


def main() -> None:
    """Measure, print the figures, keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ask", nargs=2, metavar=("QUESTION", "RUN"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--only", choices=["no_work", "overhead", "simulated", "million", "killed", "uncompacted"]
    )
    options = parser.parse_args()
    if options.ask:
        query, run = options.ask
        print_answer(query, Path(run))
        return
    # With --only the other figures stay as they were measured before, each with its own record.
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    measured_here: list[str] = []

    def keep(name: str, figures: object) -> None:
        measured_here.append(name)
        results[name] = figures
        results.setdefault("measured", {})[name] = measured_now()

    with tempfile.TemporaryDirectory(prefix="headcount-scale-") as directory:
        out = Path(directory)
        if options.only in (None, "no_work"):
            keep("no_work", no_work(out))
        if options.only in (None, "overhead"):
            keep("overhead", overhead(out, options.rounds))
        if options.only in (None, "simulated"):
            keep("simulated", simulated(out))
        if options.only in (None, "million"):
            run_directory = write_million(out)
            keep("million", {query: ask(query, run_directory) for query in QUERIES})
        if options.only in (None, "killed", "uncompacted"):
            run_directory = write_uncompacted(out)
        if options.only in (None, "killed"):
            keep("killed", ask("resume", run_directory))
        if options.only in (None, "uncompacted"):
            costs = {
                "open": open_for_queries(run_directory),
                "compact": compact_by_command(run_directory),
            }
            keep("uncompacted", costs)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    report(results, measured_here, Console())


if __name__ == "__main__":
    main()
