"""Runs under seeded schedules of faults, and whether each row is there once in the end.

`make chaos SCHEDULES=200 SEED=7`. A schedule is a scan on a real Ray cluster of a head and two
nodes, on a disk or in a store that can have faults. Faults hit it at random moments. Then the same
command is given until it succeeds, and its rows are compared with those of an undisturbed run.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
from ray.cluster_utils import Cluster

from headcount.jobs.lock import locked
from headcount.jobs.plan.plan import make_plan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.upkeep.checking import check_run
from headcount.jobs.upkeep.cleaning import clean
from headcount.schemas.files.run_directory import RunDirectory, shard_file_name
from headcount.schemas.places import StorePath, names
from headcount.schemas.scans.scan_file import load_scan
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica
from tests import ROOT
from tests.s3.s3_server import Action, Rule, S3Server
from tests.tools.committed_rows import Rows, compare, rows_of
from tests.tools.processes import MARK, Command, kept_endings, kill, start_fork_server
from tests.tools.workers import NODE_OPTIONS, forked_workers, start_cluster
from tests.toys.runs_here import measured

FAULTS = ROOT / "tests" / "faults"
NODES = 2
"""Nodes of one core beside the head, which has none."""
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
PATIENCE_SECONDS = 240.0
"""Longer than any driver lives, and any fault is waited for."""

POLL_SECONDS = 0.05


class PlannedFault(NamedTuple):
    """A fault, and after how many committed shards it strikes."""

    after_shards: int
    kind: str


Life = list[PlannedFault]
"""The faults in the life of one driver."""


@dataclass
class World:
    """A cluster, a store, and the scan that is run on them."""

    folder: Path
    rng: random.Random
    store: S3Server
    workers_parent: psutil.Process
    """What workers are forked from."""
    cluster: Cluster | None = None
    out: str = ""
    n_replicas: int = 2
    main: str = "headcount.command_line.main"
    """What a driver runs. A toy replica has a main of its own."""
    errors: str = ""
    """What the drivers of this schedule have printed to stderr."""
    in_store: bool | None = None
    """Whether runs are written to the store. None draws it for each run."""
    bad_requests: int = 20
    """How many requests the store refuses when it falters. It loses half as many answers."""
    still_seconds: float = 60.0
    """How long the store answers nothing when it stands still."""
    driver: Command | None = None
    second_drivers: list[Command] = field(default_factory=list)
    suspended: list[psutil.Process] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    """How often each fault has happened, over all schedules."""

    @property
    def scan_file(self) -> Path:
        return self.folder / "chaos.toml"

    @property
    def orders(self) -> Path:
        """The folder of the orders that `faults/sitecustomize.py` obeys."""
        return self.folder / "orders"

    @property
    def run(self) -> RunDirectory:
        return RunDirectory.of(self.out, load_scan(self.scan_file).run_id("chaos"))

    def begin_schedule(self) -> None:
        """Choose an empty place to write to, on this disk or in the store."""
        name = f"{self.rng.getrandbits(32):08x}"
        in_store = self.rng.choice([False, True]) if self.in_store is None else self.in_store
        self.out = f"s3://bucket/{name}" if in_store else str(self.folder / name)
        self.errors = ""
        self.withdraw_faults()

    def withdraw_faults(self) -> None:
        """Withdraw the orders that nobody has obeyed, and let suspended processes continue."""
        self.store.set_rules()
        for order in self.orders.iterdir():
            order.unlink(missing_ok=True)
        for process in self.suspended:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        # Their driver has ended, so they end too, perhaps after one more file.
        psutil.wait_procs(self.suspended, timeout=PATIENCE_SECONDS)
        self.suspended.clear()

    def ensure_cluster(self) -> Cluster:
        """The head and its nodes. Nodes that are gone are replaced."""
        if self.cluster is None:
            self.cluster = start_cluster(num_cpus=0)
        while len(self.cluster.worker_nodes) < NODES:
            self.add_node(self.cluster)
        self.cluster.wait_for_nodes()
        return self.cluster

    def add_node(self, cluster: Cluster) -> None:
        """Add a node of one core, and do not wait for it."""
        cluster.add_node(**NODE_OPTIONS, num_cpus=1, wait=False)

    def start_driver(self) -> Command:
        """Give the user's command: a new driver of the run."""
        cluster = self.ensure_cluster()
        words = ["scan", str(self.scan_file), "--set", f"out={self.out}"]
        words += ["--replicas", str(self.n_replicas), "--address", cluster.address]
        self.driver = Command(
            *words,
            # A driver in a job sends no code. The nodes of this machine have it.
            environment=os.environ | {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},
            directory=ROOT,
            main=self.main,
        )
        return self.driver

    def replicas(self) -> list[psutil.Process]:
        return [process for process in self.workers_parent.children() if is_replica(process)]

    def committed_shards(self) -> int:
        """How many shards are committed.

        The commits of so few shards are never merged, so their files are counted: reading them
        twenty times a second would keep the store from its work.
        """
        return sum(name.startswith("shard-") for name in names(self.run.commits_directory))

    def wait_for_drivers(self) -> int:
        """Wait until all drivers have ended; returns the exit code of the last one."""
        assert self.driver is not None
        for driver in (*self.second_drivers, self.driver):
            code, _, errors = driver.ended(PATIENCE_SECONDS)
            self.errors += errors
        self.second_drivers.clear()
        return code


def is_replica(process: psutil.Process) -> bool:
    """Whether a worker has become a replica. It may also have ended meanwhile."""
    # One that has just ended has no command line.
    with contextlib.suppress(psutil.Error, IndexError):
        return process.cmdline()[0].startswith("ray::ReplicaActor")
    return False


def halt_after_commits(orders: Path, commits: int) -> None:
    """Order a driver's replicas to commit so many shards, and then to wait for ever."""
    # `pass` comes before `wait`: orders are obeyed in the order of their names. A replica works at
    # a few shards at once, and each of them must wait.
    for number in range(commits):
        (orders / f"pass@commit.{number}").touch()
    for number in range(8):
        (orders / f"wait@commit.{number}").touch()


def sends(number: int, to_driver: bool) -> Callable[[World], None]:
    """A fault: the driver or a replica gets a signal, whatever it is doing."""

    def strike(world: World) -> None:
        receivers = [world.driver] if to_driver else world.replicas()[:1]
        for process in receivers:
            with contextlib.suppress(psutil.NoSuchProcess):
                assert process is not None
                process.send_signal(number)

    return strike


def strikes_at_write(action: str, point: str, path: str) -> Callable[[World], None]:
    """A fault that strikes at the next such write; it waits until then or the driver's end.

    On a disk a replica strikes itself, because it is the one that knows the moment; the order is a
    file. In a store the server does.
    """

    def strike(world: World) -> None:
        assert world.driver is not None
        store, order = world.store, world.orders / f"{action}@{point}.{world.rng.getrandbits(16)}"
        in_store = isinstance(world.run.path, StorePath)
        if in_store:
            pids = [process.pid for process in world.replicas()]
            server_action = Action(kill=pids) if action == "kill" else Action(status=500)
            store.set_rules(Rule(server_action, method="PUT", path=path, count=1))
        else:
            order.touch()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while world.driver.poll() is None and time.monotonic() < deadline:
            if store.spent() != [0] if in_store else not order.exists():
                return
            time.sleep(POLL_SECONDS)

    return strike


def store_answers_503(world: World) -> None:
    """Some requests are refused, some answers are lost, some take long."""
    seed = world.rng.getrandbits(16)
    few = max(1, world.bad_requests // 2)
    world.store.set_rules(
        Rule({"status": 503}, count=world.bad_requests, probability=0.2, seed=seed),
        Rule({"cut": "after"}, count=few, probability=0.1, seed=seed + 1),
        Rule({"cut": "before"}, count=few, probability=0.1, seed=seed + 2),
        Rule({"delay": 0.5}, count=few, probability=0.1, seed=seed + 3),
    )


def store_stands_still(world: World) -> None:
    """The store takes requests and answers none for a while."""
    if isinstance(world.run.path, StorePath):
        with world.store.standing_still():
            time.sleep(world.still_seconds)


def replica_slow(world: World) -> None:
    """A replica stands still until the run is over."""
    for process in world.replicas()[:1]:
        process.suspend()
        world.suspended.append(process)


def node_lost(world: World) -> None:
    """kill -9 of a raylet; another node comes in its place."""
    cluster = world.ensure_cluster()
    cluster.remove_node(world.rng.choice([*cluster.worker_nodes]), allow_graceful=False)
    world.add_node(cluster)


def head_lost(world: World) -> None:
    """The head and everything on the cluster dies; the next command finds a new one."""
    assert world.driver is not None
    if world.cluster is not None:
        # A driver would wait ten seconds for a head that is gone.
        for driver in (world.driver, *world.second_drivers):
            driver.send_signal(signal.SIGKILL)
        world.cluster.shutdown()
        world.cluster = None


def second_driver(world: World) -> None:
    """The same command is given twice at once."""
    first = world.driver
    world.second_drivers.append(world.start_driver())
    world.driver = first


def left_behind(world: World) -> None:
    """What a dead worker may leave: half a temporary file, a data file without its commit."""
    if isinstance(world.run.path, StorePath):
        return
    heads = world.run.path / "heads" / "intervention=none"
    heads.mkdir(parents=True, exist_ok=True)
    # The first is never looked at; the second is deleted when all shards are done.
    (heads / f".shard-{world.rng.randrange(SHARDS):06d}.parquet.dead.tmp").write_bytes(b"PAR1 half")
    (heads / shard_file_name(SHARDS - 1, "0" * 32)).write_bytes(b"PAR1 half")


FAULTS_BY_NAME: dict[str, Callable[[World], None]] = {
    "replica_killed": sends(signal.SIGKILL, to_driver=False),
    # The notice of a preemption.
    "replica_terminated": sends(signal.SIGTERM, to_driver=False),
    "driver_killed": sends(signal.SIGKILL, to_driver=True),
    "driver_terminated": sends(signal.SIGTERM, to_driver=True),
    "driver_interrupted": sends(signal.SIGINT, to_driver=True),
    # Just before a data file appears.
    "replica_killed_while_writing": strikes_at_write("kill", "data", "/heads/"),
    # Between the data files and the commit.
    "replica_killed_before_its_commit": strikes_at_write("kill", "commit", "/commits/"),
    # No space left on device, or the store says 500.
    "disk_full_for_data": strikes_at_write("full", "data", "/sequences/"),
    "disk_full_for_a_commit": strikes_at_write("full", "commit", "/commits/"),
    "store_answers_503": store_answers_503,
    "store_stands_still": store_stands_still,
    "replica_slow": replica_slow,
    "node_lost": node_lost,
    "head_lost": head_lost,
    "second_driver": second_driver,
    "left_behind": left_behind,
}


class Result(NamedTuple):
    """The faults that happened, and how many rows are not there once with their value."""

    faults: list[str]
    lost: int
    doubled: int
    wrong: int

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)


def draw_life(rng: random.Random) -> Life:
    # The last shards are left to the end of the run, so that every fault finds it at work.
    drawn = rng.choices(list(FAULTS_BY_NAME), k=rng.randint(1, 3))
    return sorted(PlannedFault(rng.randrange(SHARDS - 4), kind) for kind in drawn)


def run_schedule(world: World, expected: Rows, lives: list[Life]) -> Result:
    """Bring one scan to its end, with faults in the first lives of its driver."""
    world.begin_schedule()
    faults: list[str] = []
    exit_codes = [_run_driver(world, life, faults) for life in lives]
    some_wake = bool(world.suspended)
    world.withdraw_faults()
    # A user who meets an error gives the same command again.
    while exit_codes[-1] != 0 and len(exit_codes) < len(lives) + 4:
        world.start_driver()
        exit_codes.append(world.wait_for_drivers())
    lost, doubled, wrong = compare(rows_of(world.run.path), expected)
    if some_wake:
        # What a replica writes after the end of its run is deleted by a compaction only.
        with locked(world.run):
            clean(world.run, print)
    # A file that is not what its commit says would be left out by every query.
    checked = check_run(world.run)
    wrong += sum(len(damage.shards) for damage in checked.damaged)
    # A bare glob would count one that no commit refers to.
    wrong += checked.unreferenced
    return Result(faults, lost, doubled, wrong)


def _run_driver(world: World, life: Life, struck: list[str]) -> int:
    """Run one driver through the faults of its life; returns its exit code.

    Adds each fault that happens to `struck`.
    """
    driver = world.start_driver()
    for planned in life:
        deadline = time.monotonic() + PATIENCE_SECONDS
        # Most faults strike a replica, so one must be alive.
        while world.committed_shards() < planned.after_shards or not world.replicas():
            if driver.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        if driver.poll() is not None:
            break
        struck.append(planned.kind)
        world.struck[planned.kind] += 1
        FAULTS_BY_NAME[planned.kind](world)
    return world.wait_for_drivers()


def reference(scan_file: Path, out: Path, replica_class: type[Replica] = Replica) -> Rows:
    """The rows of a run that nothing disturbs: shard by shard in this process, without Ray."""
    prepare_process(threads=1)
    plan = make_plan(load_scan(scan_file, [f"out={out}"]), "chaos")
    prepare_run(plan, "")
    return rows_of(measured(plan, replica_class).run.path)


@contextmanager
def open_world(seed: int, replica_class: type[Replica] = Replica) -> Iterator[tuple[World, Rows]]:
    """Everything that schedules need, and the rows of an undisturbed run.

    Replicas measure as this class does: they have a model or are toys.
    """
    start_fork_server()
    before = dict(os.environ)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        store = stack.enter_context(S3Server())
        # Drivers, Ray's processes and replicas inherit these: whoever writes obeys orders, and
        # whoever is left behind in the end is found by the mark.
        orders = {"PYTHONPATH": str(FAULTS), "FAULTS": str(folder / "orders"), MARK: str(folder)}
        os.environ |= orders | store.env()
        stack.enter_context(kept_endings())
        parent = stack.enter_context(forked_workers())
        world = World(folder, random.Random(seed), store, parent)
        if replica_class is not Replica:
            world.main = "tests.toys.toy_replica.main"
        world.orders.mkdir()
        world.scan_file.write_text(SCAN)
        expected = reference(world.scan_file, folder / "undisturbed", replica_class)
        try:
            yield world, expected
        finally:
            for driver in filter(None, (world.driver, *world.second_drivers)):
                driver.send_signal(signal.SIGKILL)
            if world.cluster is not None:
                world.cluster.shutdown()
            kill(str(folder))
    os.environ.clear()
    os.environ |= before


def main() -> None:
    """Run schedules. `make chaos` calls it from another program: a file that is run itself is also
    imported by what workers are forked from, and this one imports Ray.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bad = 0
    with open_world(options.seed) as (world, expected):
        for number in range(1, options.schedules + 1):
            began = time.monotonic()
            lives = [draw_life(world.rng) for _ in range(world.rng.randint(1, 2))]
            result = run_schedule(world, expected, lives)
            bad += not result.good
            where = "a store" if "://" in world.out else "a disk"
            seconds = time.monotonic() - began
            print(f"{number}: in {seconds:.0f} s on {where}, {result}", flush=True)
        print(", ".join(f"{kind} {count}" for kind, count in world.struck.most_common()))
    print(f"{options.schedules} schedules of {len(expected):,} rows, {bad} bad")
    sys.exit(bool(bad))
