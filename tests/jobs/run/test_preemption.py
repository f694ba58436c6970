"""Machines that are taken back: replicas and drivers finish what they measure, and nothing counts.

Real signals to real processes, on a Ray cluster of a head and two nodes.
"""

from __future__ import annotations

import io
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster
from ray.scripts.scripts import drain_node
from ray.util.placement_group import placement_group, remove_placement_group
from rich.console import Console

from headcount.jobs import endings
from headcount.jobs.cluster.ray_cluster import Resources
from headcount.jobs.endings import Stopped, listen_to_signals
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run
from headcount.jobs.run.loop import run_to_end
from headcount.schemas.scans.scan import parse_scan
from tests.tools.committed_rows import rows_of
from tests.tools.workers import FORKED, NODE_OPTIONS, joined_cluster
from tests.toys.toy_replica import ToyReplica

SHARDS = 60
PACE = 0.1
SLOW_FROM = 40
SLOW_PACE = 5.0
"""Seconds of the shards after the first ones. However slow the machine is, the run must not end
before what the test does to it; and a replica that never ended a shard could not leave.
"""
SILENT = Console(quiet=True)
SCAN: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 8,
    "sequences": SHARDS,
    "sequences_per_shard": 1,
    "statistics": ["sink_mass"],
    "input": {"family": "uniform_random"},
}
"""A scan of shards of one sequence."""


class NotingReplica(ToyReplica):
    """Takes its time for every shard, and leaves a file for each that it has measured.

    Once the test has done all that it does, it is quick.
    """

    def misbehave(self, token: int) -> None:
        out = Path(self.scan.out)
        began = time.monotonic()
        is_slow = len(list(out.glob("measured-*"))) >= SLOW_FROM
        pace = SLOW_PACE if is_slow else PACE
        while time.monotonic() < began + pace and not (out / "over").exists():
            time.sleep(PACE / 2)
        (out / f"measured-{time.monotonic_ns()}-{os.getpid()}").touch()


class SelfStoppingReplica(ToyReplica):
    """Gets SIGTERM in the middle of its third shard, which takes as long as a file says."""

    measured = 0

    def misbehave(self, token: int) -> None:
        self.measured += 1
        if self.measured == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(float((Path(self.scan.out) / "seconds").read_text()))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    new_plan = make_plan(parse_scan(SCAN | {"out": str(tmp_path)}), "preempted")
    prepare_run(new_plan, "")
    return new_plan


@pytest.fixture
def _signals_heard() -> Iterator[None]:
    """The handlers that a command has."""
    previous = listen_to_signals()
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two nodes, of which each has room for one replica."""
    with joined_cluster(num_cpus=1, resources={"head": 1}) as cluster:
        cluster.add_node(wait=True, **NODE_OPTIONS, **FORKED, num_cpus=1)
        yield cluster


def committed(plan: Plan) -> list[int]:
    return plan.run.commit_log([])["shard"].to_pylist()


def measurements(plan: Plan) -> list[int]:
    """The process of each measurement, in the order of time."""
    files = sorted(Path(plan.scan.out).glob("measured-*"))
    return [int(file.name.rpartition("-")[2]) for file in files]


def when(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def drain(node_id: str, address: str) -> None:
    """Announce that a node is taken away in 30 s, as a cloud's notice does."""
    # `ray drain-node`, in this process: another one would import Ray anew.
    words = ["--address", address, "--node-id", node_id]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    words += ["--deadline-remaining-seconds", "30"]
    drain_node.main(words, standalone_mode=False)


@pytest.mark.long
@pytest.mark.usefixtures("_signals_heard")
def test_a_node_a_replica_and_the_driver_are_taken_away(cluster: Cluster, plan: Plan) -> None:
    # A node of Ray has taken SIGTERM for itself.
    listen_to_signals()
    # A replica costs seconds to start. So there is one, which begins on the node because the head
    # is taken, and moves to the head when the node is drained.
    head_taken = placement_group([{"CPU": 1, "head": 1}])
    assert head_taken.wait(60)
    (node,) = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process
    printed = io.StringIO()

    def disturb() -> None:
        try:
            take_away()
        finally:
            (Path(plan.scan.out) / "over").touch()

    def take_away() -> None:
        when(lambda: len(measurements(plan)) >= 4)
        remove_placement_group(head_taken)
        drain(node.node_id, str(cluster.address))
        first_process = measurements(plan)[0]
        when(lambda: measurements(plan)[-1] != first_process)
        # Nothing is left on the node, so its own process has ended.
        raylet.wait(timeout=30)
        os.kill(measurements(plan)[-1], signal.SIGTERM)
        when(lambda: "SIGTERM" in printed.getvalue())
        os.kill(os.getpid(), signal.SIGTERM)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    console = Console(file=printed, width=200)
    with pytest.raises(Stopped) as end:
        run_to_end(plan, Resources(1, 1, "cpu"), console, replica_class=NotingReplica)
    disturber.join()
    assert end.value.number == signal.SIGTERM
    reasons = re.findall(r"a replica on \S+ leaves: (.*)", printed.getvalue())
    assert reasons == ["its node is being drained", "SIGTERM"]
    # Everything that was measured was committed: nothing was done in vain.
    assert 5 <= len(committed(plan)) == len(measurements(plan)) < SHARDS
    assert len(set(measurements(plan))) == 2

    # The same command measures the rest.
    in_this_process = Resources(0, 1, "cpu")
    assert run_to_end(plan, in_this_process, SILENT, replica_class=NotingReplica) == []
    assert committed(plan) == list(range(SHARDS))
    assert len(measurements(plan)) == SHARDS
    # No try counted against a shard.
    assert set(plan.run.commit_log(["attempt"])["attempt"].to_pylist()) == {1}
    assert plan.run.failed_shards() == []
    heads = rows_of(plan.run).select(["sequence", "layer", "head"])
    assert len(heads) == SHARDS * plan.info.n_layers * plan.info.n_heads
    assert len(heads.group_by(heads.column_names).aggregate([])) == len(heads)


@pytest.mark.usefixtures("_signals_heard")
def test_a_shard_in_this_process_is_finished_before_the_command_ends(
    plan: Plan, tmp_path: Path
) -> None:
    (tmp_path / "seconds").write_text("0.2")
    with pytest.raises(Stopped):
        run_to_end(plan, Resources(0, 1, "cpu"), SILENT, replica_class=SelfStoppingReplica)
    assert committed(plan) == [0, 1, 2]
    assert run_to_end(plan, Resources(0, 1, "cpu"), SILENT, replica_class=ToyReplica) == []
    assert committed(plan) == list(range(SHARDS))


@pytest.mark.usefixtures("_signals_heard")
def test_a_long_shard_is_dropped(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "FINISHING_SECONDS", 0.3)
    (tmp_path / "seconds").write_text("60")
    began = time.monotonic()
    with pytest.raises(Stopped):
        run_to_end(plan, Resources(0, 1, "cpu"), SILENT, replica_class=SelfStoppingReplica)
    assert time.monotonic() - began < 30
    assert committed(plan) == [0, 1]
