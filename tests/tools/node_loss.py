"""What it costs if a node dies without notice in the middle of a run.

`python -m tests.tools.node_loss`.
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
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import run_to_end
from headcount.schemas.scans.scan import parse_scan
from tests.tools.chaos import NODE_OPTIONS
from tests.tools.committed_rows import compare, rows_of
from tests.toys.toy_replica import PACE, ToyReplica

SCAN: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 64,
    "sequences_per_shard": 4,
    "input": {"family": "repeated_random"},
}


class NotingReplica(ToyReplica):
    """Takes its time for every shard, and leaves a file for each that it has begun."""

    def misbehave(self, token: int) -> None:
        """Note the process, and sleep."""
        (Path(self.scan.out) / f"begun-{time.monotonic_ns()}-{os.getpid()}").touch()
        time.sleep(PACE)


def begun_by(plan: Plan) -> list[int]:
    """The process that began each measurement, in the order of time."""
    files = sorted(Path(plan.scan.out).glob("begun-*"))
    return [int(file.name.rpartition("-")[2]) for file in files]


def new_plan(out: Path, shards: int) -> Plan:
    """A run of so many shards in a directory of its own."""
    plan = make_plan(parse_scan(SCAN | {"out": str(out), "sequences": 4 * shards}), "node-loss")
    prepare_run(plan, "")
    return plan


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


def main() -> None:
    """Measure both runs, and print the difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shards", type=int, default=240)
    shards: int = parser.parse_args().shards
    cluster = Cluster(initialize_head=True, head_node_args=NODE_OPTIONS | {"num_cpus": 0})
    console = Console(highlight=False, width=200)
    resources = Resources(2, 1, "cpu")
    try:
        for _ in range(2):
            cluster.add_node(wait=True, **NODE_OPTIONS, num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        with tempfile.TemporaryDirectory(prefix="node-loss-") as directory:
            seconds: list[float] = []
            plans = [new_plan(Path(directory) / name, shards) for name in ("calm", "hit")]
            for plan in plans:
                # Ray adds nodes in the main thread only.
                with ThreadPoolExecutor(1) as pool:
                    run = pool.submit(
                        run_to_end, plan, resources, console, replica_class=NotingReplica
                    )
                    if seconds:
                        kill_node_in_the_middle(cluster, plan)
                    assert run.result() == []
                commits = plan.run.commit_log(["finished", "attempt"]).to_pydict()
                spread = max(commits["finished"]) - min(commits["finished"])
                seconds.append(spread.total_seconds())
            calm, hit = plans
            lost, doubled, wrong = compare(rows_of(hit.run), rows_of(calm.run))
            again = len(begun_by(hit)) - shards
            counted = sum(attempt > 1 for attempt in commits["attempt"])
            print(
                f"{shards} shards of {PACE} s on two replicas: {seconds[0]:.1f} s undisturbed, "
                f"{seconds[1]:.1f} s with a node killed; {again} shards measured again, {counted} "
                f"tries counted, {lost} rows lost, {doubled} doubled, {wrong} with other values"
            )
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    from tests.tools.node_loss import main as main_of_module  # Workers find the class by this name.

    main_of_module()
