"""What it costs if a node dies without notice in the middle of a run: `python -m
tests.tools.node_loss`.

A run on a head and two nodes, of one replica each, is measured twice: undisturbed, and with every
process of one node killed after a third of the shards. Another node joins at once, as a cloud would
start it. Replicas compute nothing and take their time, so that the figures are not those of a
model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster
from rich.console import Console

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import run_to_end
from headcount.schemas.scans.scan import parse_scan
from tests.tools.committed_rows import compare, rows_of
from tests.tools.workers import NODE_OPTIONS, joined
from tests.toys.toy_replica import PACE, SteadyReplica

SCAN = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 64,
    "sequences_per_shard": 4,
    "input": {"family": "repeated_random"},
}


class NotingReplica(SteadyReplica):
    """Takes its time for every shard, and leaves a file for each that it has begun."""

    def misbehave(self, token: int) -> None:
        """Note the process, and sleep."""
        (Path(self.scan.out) / f"begun-{time.monotonic_ns()}-{os.getpid()}").touch()
        super().misbehave(token)


def begun_by(plan: Plan) -> list[int]:
    """The process that began each measurement, in the order of time."""
    files = sorted(Path(plan.scan.out).glob("begun-*"))
    return [int(file.name.rpartition("-")[2]) for file in files]


def kill_node_in_the_middle(cluster: Cluster, plan: Plan) -> None:
    """Kill every process of the node that began the last measurement, and add another node."""
    while len(begun_by(plan)) < plan.manifest.shards / 3:
        time.sleep(0.05)
    raylet = psutil.Process(psutil.Process(begun_by(plan)[-1]).ppid())
    # The raylet first: it would report the end of the others.
    for process in (raylet, *raylet.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.add_node(wait=False, **NODE_OPTIONS, num_cpus=1)


def measure(cluster: Cluster, out: Path, shards: int, is_hit: bool) -> tuple[Plan, float]:
    """Bring a run to its end; returns its plan, and seconds from the first commit to the last."""
    plan = make_plan(parse_scan(SCAN | {"out": str(out), "sequences": 4 * shards}), "node-loss")
    prepare_run(plan, "")
    console = Console(highlight=False, width=200)
    # Ray adds nodes in the main thread only.
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(
            run_to_end, plan, Resources(2, 1, "cpu"), console, replica_class=NotingReplica
        )
        if is_hit:
            kill_node_in_the_middle(cluster, plan)
        assert run.result() == []
    finished = plan.run.commit_log(["finished"])["finished"].to_pylist()
    return plan, (max(finished) - min(finished)).total_seconds()


def main() -> None:
    """Measure both runs, and print the difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=240)
    shards: int = parser.parse_args().shards
    cluster = Cluster(initialize_head=True, head_node_args=NODE_OPTIONS | {"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(wait=True, **NODE_OPTIONS, num_cpus=1)
    with tempfile.TemporaryDirectory(prefix="node-loss-") as folder, joined(cluster):
        calm, calm_seconds = measure(cluster, Path(folder) / "calm", shards, is_hit=False)
        hit, seconds = measure(cluster, Path(folder) / "hit", shards, is_hit=True)
        lost, doubled, wrong = compare(rows_of(hit.run), rows_of(calm.run))
        attempts = hit.run.commit_log(["attempt"])["attempt"].to_pylist()
        print(
            f"{shards} shards of {PACE} s on two replicas: {calm_seconds:.1f} s undisturbed, "
            f"{seconds:.1f} s with a node killed; {len(begun_by(hit)) - shards} shards measured "
            f"again, {sum(attempt > 1 for attempt in attempts)} tries counted, {lost} rows lost, "
            f"{doubled} doubled, {wrong} with other values"
        )
    cluster.shutdown()


if __name__ == "__main__":
    from tests.tools.node_loss import main as main_of_module  # Workers find the class by this name.

    main_of_module()
