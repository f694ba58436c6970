"""Runs under seeded schedules of faults, and whether each row is there once in the end.

`make chaos SCHEDULES=200 SEED=7`, or `python -m tests.chaos`. A schedule is a scan on a real Ray
cluster of a head and two nodes, on a disk or in a store behind a proxy; faults hit it at random
moments; then the same command is given until it succeeds, and its rows are compared with those of
an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from ray.cluster_utils import Cluster

from jobs.checking import check_run
from jobs.plan import make_plan, prepare_run
from schemas.places import StorePath
from schemas.run_directory import RunDirectory
from schemas.scan import load_scan
from tests.processes import MARK, kill, marked
from tests.s3_server import Rule, S3Server
from workers.process import prepare_process
from workers.replica import Replica
from workers.shard import run_shard

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).parent / "faults"
SHARDS = 24
SCAN = f"""
model = "bundled:attn-only-2l-mini"
n_ctx = 128
batch_size = 4
sequences = {SHARDS * 4 - 1}
sequences_per_shard = 4
[input]
family = "repeated_random"
"""
PATIENCE = 240.0
NODE: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 << 20}


@dataclass
class World:
    """A cluster, a store, and the scan that is run on them."""

    folder: Path
    rng: random.Random
    proxy: S3Server
    cluster: Cluster | None = None
    out: str = ""
    n_replicas: int = 2
    replica: type[Replica] = Replica
    in_store: bool | None = None
    """Where runs are written; by chance unless told."""
    driver: subprocess.Popen[str] | None = None
    stopped: list[psutil.Process] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    @property
    def scan_file(self) -> Path:
        return self.folder / "chaos.toml"

    @property
    def orders(self) -> Path:
        return self.folder / "orders"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory.of(self.out, load_scan(self.scan_file).run_id("chaos"))

    def begin(self) -> None:
        """An empty place to write to, on this disk or in the store."""
        name = f"{self.rng.getrandbits(32):08x}"
        in_store = self.rng.choice([False, True]) if self.in_store is None else self.in_store
        self.out = f"s3://bucket/{name}" if in_store else str(self.folder / name)
        (self.folder / "driver.log").unlink(missing_ok=True)
        self.clear()

    def said(self) -> str:
        """What the drivers have printed."""
        return (self.folder / "driver.log").read_text()

    def clear(self) -> None:
        """Withdraw the orders that nobody has obeyed."""
        self.proxy.set_rules()
        for order in self.orders.iterdir():
            order.unlink(missing_ok=True)
        for process in self.stopped:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
        self.stopped.clear()

    def ensure_cluster(self) -> Cluster:
        """A head and two nodes of one core each, those that are gone replaced."""
        if self.cluster is None:
            self.cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
        while len(self.cluster.worker_nodes) < 2:
            self.cluster.add_node(**NODE | {"num_cpus": 1}, wait=False)
        self.cluster.wait_for_nodes()
        return self.cluster

    def start(self) -> subprocess.Popen[str]:
        """The command of a user."""
        cluster = self.ensure_cluster()
        program = "headcount" if self.replica is Replica else self.replica.__module__
        command = [
            sys.executable,
            "-m",
            program,
            "scan",
            str(self.scan_file),
            "--set",
            f"out={self.out}",
        ]
        command += ["--replicas", str(self.n_replicas), "--address", cluster.address]
        # A driver in a job sends no code: the nodes of this machine have it.
        environment = os.environ | {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
        with (self.folder / "driver.log").open("a") as log:
            self.driver = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, text=True, env=environment
            )
        return self.driver

    def replicas(self) -> list[psutil.Process]:
        """The processes of the replicas."""
        return list(marked(str(self.folder), "ray::ReplicaActor"))

    def commits(self) -> int:
        """Shards done."""
        return len(self.run.ledger([]))


FAULT: dict[str, Callable[[World], None]] = {}


def fault(function: Callable[[World], None]) -> Callable[[World], None]:
    """Register something that may happen."""
    FAULT[function.__name__] = function
    return function


@fault
def replica_killed(world: World) -> None:
    """kill -9, whatever it is doing."""
    for process in world.replicas()[:1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@fault
def replica_terminated(world: World) -> None:
    """SIGTERM: the notice of a preemption."""
    for process in world.replicas()[:1]:
        process.terminate()


@fault
def replica_killed_while_writing(world: World) -> None:
    """Just before a data file appears."""
    _at_write(world, "kill", "data", r"/heads/")


@fault
def replica_killed_before_its_commit(world: World) -> None:
    """Between the data files and the commit."""
    _at_write(world, "kill", "commit", r"/commits/")


@fault
def disk_full_for_data(world: World) -> None:
    """No space left on device, or the store says 500, for a data file."""
    _at_write(world, "full", "data", r"/sequences/")


@fault
def disk_full_for_a_commit(world: World) -> None:
    """The same for a commit."""
    _at_write(world, "full", "commit", r"/commits/")


@fault
def store_answers_503(world: World) -> None:
    """Some requests are refused, some answers are lost, some take long."""
    seed = world.rng.getrandbits(16)
    world.proxy.set_rules(
        Rule({"status": 503}, count=20, probability=0.2, seed=seed),
        Rule({"cut": "after"}, count=10, probability=0.1, seed=seed + 1),
        Rule({"cut": "before"}, count=10, probability=0.1, seed=seed + 2),
        Rule({"delay": 0.5}, count=10, probability=0.1, seed=seed + 3),
    )


@fault
def replica_slow(world: World) -> None:
    """A replica stands still until the run is over."""
    for process in world.replicas()[:1]:
        process.suspend()
        world.stopped.append(process)


@fault
def node_lost(world: World) -> None:
    """kill -9 of a raylet; another node comes in its place."""
    cluster = world.ensure_cluster()
    cluster.remove_node(world.rng.choice(list(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(**NODE | {"num_cpus": 1}, wait=False)


@fault
def driver_killed(world: World) -> None:
    """kill -9 of the driver."""
    assert world.driver is not None
    world.driver.kill()


@fault
def driver_terminated(world: World) -> None:
    """SIGTERM of the driver."""
    assert world.driver is not None
    world.driver.terminate()


@fault
def head_lost(world: World) -> None:
    """The head and everything on the cluster dies; the next command finds a new one."""
    assert world.driver is not None
    if world.cluster is not None:
        world.driver.kill()
        world.cluster.shutdown()
        world.cluster = None


@fault
def second_driver(world: World) -> None:
    """The same command is given twice at once."""
    first = world.driver
    second = world.start()
    second.wait(PATIENCE)
    world.driver = first


@fault
def left_behind(world: World) -> None:
    """What a dead worker may leave: half a temporary file, a data file without its commit."""
    if isinstance(world.run.path, StorePath):
        return
    heads = world.run.path / "heads" / "intervention=none"
    heads.mkdir(parents=True, exist_ok=True)
    (heads / f".shard-{world.rng.randrange(SHARDS):06d}.parquet.dead.tmp").write_bytes(b"PAR1 half")
    late = world.run.data_file("heads", "none", SHARDS - 1)
    if not world.run.commit_file(SHARDS - 1).is_file():
        Path(str(late)).write_bytes(b"PAR1 half")


def _at_write(world: World, action: str, point: str, path: str) -> None:
    """Give an order for the next such write, and wait until it is obeyed, as long as there is a
    driver.
    """
    order = world.orders / f"{action}@{point}.{world.rng.getrandbits(16)}"
    in_store = isinstance(world.run.path, StorePath)
    if in_store:
        pids = [process.pid for process in world.replicas()]
        rule = Rule(
            {"kill": pids} if action == "kill" else {"status": 500},
            method="PUT",
            path=path,
            count=1,
        )
        world.proxy.set_rules(rule)
    else:
        order.touch()
    assert world.driver is not None
    while world.driver.poll() is None and (
        world.proxy.spent() == [0] if in_store else order.exists()
    ):
        time.sleep(0.05)


@dataclass(frozen=True)
class Result:
    """What a schedule came to."""

    faults: list[str]
    expected: int
    lost: int
    doubled: int
    wrong: int
    seconds: float

    @property
    def good(self) -> bool:
        """Whether each row is there once, with its value."""
        return not (self.lost or self.doubled or self.wrong)


KEYS = ["sequence", "layer", "head"]


def rows_of(run: RunDirectory) -> pa.Table:
    """Every row of `heads` that a reader who follows the commits finds."""
    files = [f.path for c in run.commits() for f in c.files if f.table == "heads"]
    tables = [pq.ParquetFile(pa.BufferReader((run.path / f).read_bytes())).read() for f in files]
    return (
        pa.concat_tables(tables)
        .drop_columns("run_id")  # The runs that are compared have names of their own.
        .sort_by([(key, "ascending") for key in KEYS])
    )


def compare(found: pa.Table, expected: pa.Table) -> tuple[int, int, int]:
    """Rows lost, rows doubled, rows with other values."""
    a, b = (Counter(zip(*(t[k].to_pylist() for k in KEYS), strict=True)) for t in (found, expected))
    lost, doubled = sum((b - a).values()), sum((a - b).values())
    if lost or doubled:
        return lost, doubled, 0
    x, y = found.to_pandas(), expected.to_pandas()
    floats = [c for c in y.columns if y[c].dtype == "float32"]
    near = (x[floats] - y[floats]).abs().fillna(0) <= 1e-5 * (1 + y[floats].abs().fillna(0))
    same = near & (x[floats].isna() == y[floats].isna())
    return 0, 0, int((~same.all(axis=1)).sum())


def draw(rng: random.Random) -> list[list[tuple[int, str]]]:
    """The faults of one or two drivers' lives, and after how many shards each comes."""
    chosen = [rng.choices(list(FAULT), k=rng.randint(1, 3)) for _ in range(rng.randint(1, 2))]
    return [sorted((rng.randrange(SHARDS - 4), kind) for kind in kinds) for kinds in chosen]


def run_schedule(world: World, expected: pa.Table, lives: list[list[tuple[int, str]]]) -> Result:
    """One scan, hit by faults, brought to its end."""
    began = time.monotonic()
    world.begin()
    faults: list[str] = []
    exits = [_live(world, life, faults) for life in lives]
    world.clear()
    while exits[-1] != 0 and len(exits) < len(lives) + 4:
        exits.append(world.start().wait(PATIENCE))
    lost, doubled, wrong = compare(rows_of(world.run), expected)
    # A file that is not what its commit says would be left out by every query.
    wrong += sum(len(damage.shards) for damage in check_run(world.run).damaged)
    return Result(faults, len(expected), lost, doubled, wrong, time.monotonic() - began)


def _live(world: World, faults: list[tuple[int, str]], happened: list[str]) -> int:
    """One driver's life: each fault comes when so many shards are done. Returns how the driver
    ended.
    """
    driver = world.start()
    for commits, kind in faults:
        deadline = time.monotonic() + PATIENCE
        while world.commits() < commits or not world.replicas():
            if driver.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if driver.poll() is not None:
            break
        happened.append(kind)
        world.happened[kind] += 1
        FAULT[kind](world)
    return driver.wait(PATIENCE)


def reference(scan_file: Path, out: Path, kind: type[Replica] = Replica) -> pa.Table:
    """The rows of a run that nothing disturbs: shard by shard in this process, without Ray."""
    prepare_process(threads=1)
    plan = make_plan(load_scan(scan_file, [f"out={out}"]), "chaos")
    prepare_run(plan, "")
    replica = kind(plan.info, plan.scan, "cpu")
    for shard in range(plan.manifest.shards):
        run_shard(replica, plan.run, plan.sequences.shard(shard))
    return rows_of(plan.run)


@contextmanager
def world(seed: int, replica: type[Replica] = Replica) -> Iterator[tuple[World, pa.Table]]:
    """Everything that schedules need, and the rows of an undisturbed run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        proxy = stack.enter_context(S3Server())
        os.environ |= proxy.env() | {
            "PYTHONPATH": str(FAULTS),
            "FAULTS": str(folder / "orders"),
            MARK: str(folder),
        }
        made = World(folder, random.Random(seed), proxy, replica=replica)
        made.orders.mkdir()
        made.scan_file.write_text(SCAN)
        expected = reference(made.scan_file, folder / "undisturbed", replica)
        try:
            yield made, expected
        finally:
            if made.driver is not None:
                made.driver.kill()
            if made.cluster is not None:
                made.cluster.shutdown()
            kill(str(folder))


def main() -> None:
    """Run schedules and say what came of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lost = doubled = wrong = expected = 0
    with world(options.seed) as (made, rows):
        for number in range(options.schedules):
            result = run_schedule(made, rows, draw(made.rng))
            expected += result.expected
            lost, doubled, wrong = (
                lost + result.lost,
                doubled + result.doubled,
                wrong + result.wrong,
            )
            verdict = (
                "ok"
                if result.good
                else f"LOST {result.lost}, DOUBLED {result.doubled}, WRONG {result.wrong}"
            )
            where = made.out.partition("://")[0] if "://" in made.out else "disk"
            print(
                f"{number + 1}: {where}, {', '.join(result.faults)}: {verdict} in "
                f"{result.seconds:.0f} s",
                flush=True,
            )
        print(", ".join(f"{kind} {count}" for kind, count in made.happened.most_common()))
    print(
        f"{options.schedules} schedules, {expected:,} rows expected, {lost} rows lost, {doubled} "
        f"rows doubled, {wrong} rows with other values"
    )
    sys.exit(bool(lost or doubled or wrong))


if __name__ == "__main__":
    main()
