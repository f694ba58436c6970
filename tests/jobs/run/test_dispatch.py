"""The driver's decisions, with replicas that misbehave on real Ray.

Which shard is given out again, which shard is to blame for a death, when a slow replica is not
waited for, and what becomes of machines that are taken back. `test_faults.py` has what happens to
disks, stores and processes.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray._private.node import Node
from ray._private.utils import check_version_info, compute_version_info
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from rich.console import Console

from headcount.jobs import endings, phases
from headcount.jobs.cluster.ray_cluster import (
    HEAD_SECONDS,
    RECONNECT,
    Resources,
    version_problem,
)
from headcount.jobs.endings import Stopped, listen_to_signals
from headcount.jobs.job_state import JobState, is_state, states_in
from headcount.jobs.plan.plan import Plan, make_plan, replan
from headcount.jobs.plan.run_plan import prepare_run
from headcount.jobs.run import ray_replicas, schedule
from headcount.jobs.run.commit_log import MOST_FAILURES
from headcount.jobs.run.dispatch import FIRST_COMMIT
from headcount.jobs.run.loop import refuse_failures, tokens_of
from headcount.jobs.run.measuring import run_to_end
from headcount.jobs.run.shards import ATTEMPTS
from headcount.jobs.upkeep.status import Status, read_status
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory, find_runs
from headcount.schemas.scans.scan_file import parse_scan
from headcount.schemas.values import in_toml
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.replica import Replica
from tests import ROOT
from tests.tools.processes import Command, free_port, kept_endings
from tests.tools.workers import NODE_OPTIONS, joined_cluster, start_cluster
from tests.toys import toy_models as toy
from tests.toys.refusals import refused
from tests.toys.toy_replica import ToyReplica

SILENT = Console(quiet=True)
IN_PROCESS = Resources(0, 1, "cpu")
IDLE_SCAN: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini", "n_ctx": 8, "sequences": 60, "sequences_per_shard": 1,
    "statistics": ["sink_mass"], "input": {"family": "uniform_random"},
}  # fmt: skip
"""A scan of 60 shards, of one sequence each."""
PACE = 0.1


class SleepingReplica(ToyReplica):
    """One of them takes ten minutes for every shard."""

    def misbehave(self, token: int) -> None:
        slow_replica, own = (Path(self.scan.out) / name for name in ("slow", f"own-{os.getpid()}"))
        own.write_text(str(os.getpid()))
        # A link appears whole or not at all, so exactly one process becomes the slow one.
        with contextlib.suppress(FileExistsError):
            os.link(own, slow_replica)
        time.sleep(600 if slow_replica.read_text() == str(os.getpid()) else 0.05)


class FailingReplica(ToyReplica):
    """Fails at every shard."""

    def misbehave(self, token: int) -> None:
        raise MemoryError("not here")


class OnceFailingReplica(ToyReplica):
    """Fails at each shard once."""

    def misbehave(self, token: int) -> None:
        note = Path(self.scan.out) / f"seen-{token}"
        if not note.exists():
            note.touch()
            raise OSError("the first time")


class PoisonedReplica(OnceFailingReplica):
    """Also fails whenever it measures the token in the file `poison`."""

    def misbehave(self, token: int) -> None:
        if token == int((Path(self.scan.out) / "poison").read_text()):
            raise OSError("poisoned")
        super().misbehave(token)


class KillingReplica(OnceFailingReplica):
    """Dies whenever it measures the token in the file `poison`, and is slow to start again.

    It fails once at each shard with an odd token: if every shard failed, the run would be stopped.
    """

    def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
        super().__init__(info, scan, device)
        started = Path(scan.out) / "started"
        if started.exists():
            time.sleep(0.5)
        started.touch()

    def misbehave(self, token: int) -> None:
        if token == int((Path(self.scan.out) / "poison").read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        if token % 2:
            super().misbehave(token)


class OnceDyingReplica(ToyReplica):
    """The first one that measures dies, and takes longer to start again than the others need."""

    def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
        super().__init__(info, scan, device)
        out = Path(scan.out)
        (out / f"start-{os.getpid()}").touch()
        # Two were asked for, so the third is another process for one of them.
        time.sleep(60 if len(list(out.glob("start-*"))) > 2 else 0)

    def misbehave(self, token: int) -> None:
        with contextlib.suppress(FileExistsError):
            (Path(self.scan.out) / "dead").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)  # So long that the driver hears of the other one meanwhile.


class NotingReplica(ToyReplica):
    """Takes its time for every shard, and leaves a file for each that it has measured.

    After forty it is so slow that the run cannot end before what the test does to it, and quick
    once that is over.
    """

    def misbehave(self, token: int) -> None:
        out = Path(self.scan.out)
        seconds = 5.0 if len(list(out.glob("measured-*"))) >= 40 else PACE
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (out / "over").exists():
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


class WaitingReplica(Replica):
    """A replica with a model. After two batches it waits for a file `over`."""

    launched = 0

    def _launch(self, *arguments: Any) -> Any:
        while self.launched == 2 and not (Path(self.scan.out) / "over").exists():
            time.sleep(PACE)
        self.launched += 1
        return super()._launch(*arguments)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Ray with room for two replicas, whose processes are forks: the tests below kill a dozen."""
    with joined_cluster(num_cpus=2) as cluster:
        yield cluster


needs_ray = pytest.mark.usefixtures("cluster")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    new_plan = make_plan(parse_scan(IDLE_SCAN | {"out": str(tmp_path)}), "idle")
    prepare_run(new_plan, "")
    return new_plan


def done_shards(plan: Plan) -> list[int]:
    return plan.run.commit_log([])["shard"].to_pylist()


def finish_here(plan: Plan, replica_class: type[ToyReplica] = ToyReplica) -> None:
    """Let the next command measure what is missing, whoever measured the rest."""
    assert run_to_end(plan, IN_PROCESS, SILENT, replica_class) == []
    assert done_shards(plan) == list(range(60))


def first_tokens_of(plan: Plan) -> list[int]:
    """The first random token of each shard, by which replicas tell shards apart."""
    return [int(plan.sequences.shard(shard).tokens[0, 1]) for shard in range(60)]


def poison_a_shard(plan: Plan, first: int) -> int:
    """Let replicas misbehave at a shard, whose number is returned."""
    tokens = first_tokens_of(plan)
    # No other shard begins with its token, so it alone is to blame.
    shard = next(s for s in range(first, 60) if tokens.count(tokens[s]) == 1)
    poison(plan, tokens[shard])
    return shard


def poison(plan: Plan, token: int) -> None:
    (Path(plan.scan.out) / "poison").write_text(str(token))


@needs_ray
def test_a_shard_that_kills_its_replica_is_reported_and_the_others_are_done(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow restart is waited for, and is no failed one.
    monkeypatch.setattr(schedule, "MOST_FAILED_STARTS", 1)
    deadly_shard = poison_a_shard(plan, 17)
    (failure,) = run_to_end(plan, Resources(2, 1, "cpu"), SILENT, KillingReplica)
    assert failure.shard == deadly_shard
    assert "its replica died" in failure.error
    assert done_shards(plan) == [s for s in range(60) if s != deadly_shard]
    assert plan.run.failure(deadly_shard) == (ATTEMPTS, failure.error)
    # The next command tries the shard again, and counts its attempts from there.
    finish_here(plan)
    assert {c.attempt for c in plan.run.commits() if c.shard == deadly_shard} == {ATTEMPTS + 1}


@needs_ray
@pytest.mark.long
def test_a_replica_that_starts_again_holds_up_no_other(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Waiting for it would take four minutes.
    monkeypatch.setattr(ray_replicas, "RESTART_PAUSE", 240)
    began = time.monotonic()
    assert run_to_end(plan, Resources(2, 1, "cpu"), SILENT, OnceDyingReplica) == []
    assert time.monotonic() - began < 240
    assert done_shards(plan) == list(range(60))


@needs_ray
@pytest.mark.long
def test_a_slow_replica_does_not_delay_the_end(plan: Plan) -> None:
    # Waiting for the slow replica would take ten minutes.
    began = time.monotonic()
    assert run_to_end(plan, Resources(2, 1, "cpu"), SILENT, SleepingReplica) == []
    assert time.monotonic() - began < 300
    assert done_shards(plan) == list(range(60))


@needs_ray
@pytest.mark.long
def test_batches_of_a_shard_that_takes_long_are_in_the_status_before_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "BEAT_SECONDS", 0.2)
    fields = {"sequences": 8, "sequences_per_shard": 8, "batch_size": 2, "out": str(tmp_path)}
    plan = make_plan(parse_scan(IDLE_SCAN | fields), "waiting")
    prepare_run(plan, "")

    def status_in_hand() -> Status:
        try:
            when(lambda: read_status(plan.run).tokens_in_hand > 0)
            return read_status(plan.run)
        finally:
            (tmp_path / "over").touch()

    with phases.taken(), ThreadPoolExecutor(1) as thread:
        phases.about(plan.run)
        status = thread.submit(status_in_hand)
        assert run_to_end(plan, Resources(1, 1, "cpu"), SILENT, WaitingReplica) == []
    # Two batches of two sequences of 8 tokens.
    in_hand = status.result()
    assert (in_hand.tokens, in_hand.tokens_done, in_hand.tokens_in_hand) == (64, 0, 32)
    assert read_status(plan.run).tokens_done == 64


@pytest.mark.parametrize("replicas", [0, pytest.param(1, marks=pytest.mark.long)])
def test_when_nothing_succeeds_the_other_shards_are_not_tried(
    plan: Plan, replicas: int, request: pytest.FixtureRequest
) -> None:
    if replicas:
        request.getfixturevalue("cluster")
    with pytest.raises(
        RunError,
        match=rf"stopped, because {MOST_FAILURES} shards in a row could not be measured, the last "
        r"with: MemoryError: not here .*; mend the cause and run the same command again",
    ):
        run_to_end(plan, Resources(replicas, 1, "cpu"), SILENT, FailingReplica)
    assert done_shards(plan) == []
    assert len(plan.run.failed_shards()) >= MOST_FAILURES


def test_without_ray_a_shard_is_tried_as_often_as_with_it_and_the_next_command_continues(
    plan: Plan,
) -> None:
    failing_shard = poison_a_shard(plan, 7)
    # A loop can stop at the first failure.
    with pytest.raises(RunError, match=rf"{plan.run.run_id}: shard {failing_shard} failed: OSErr"):
        run_to_end(plan, IN_PROCESS, SILENT, PoisonedReplica, stop_at_failure=True)
    assert done_shards(plan) == list(range(failing_shard))
    (failure,) = run_to_end(plan, IN_PROCESS, SILENT, PoisonedReplica)
    assert failure.shard == failing_shard
    assert failure.error.startswith("OSError: poisoned (")
    assert plan.run.failure(failing_shard) == (2 * ATTEMPTS, failure.error)
    line = refused(
        RunError, refuse_failures, {plan.run: [failure], RunDirectory(Path("other")): []}
    )
    assert line == (
        "1 shard failed, all others are committed; mend the cause, then headcount resume "
        f"{plan.run.path} continues it"
    )
    assert done_shards(plan) == [shard for shard in range(60) if shard != failing_shard]
    poison(plan, -1)
    assert run_to_end(plan, IN_PROCESS, SILENT, PoisonedReplica) == []
    # The first shard with a token fails once, and then no other with it.
    tokens = first_tokens_of(plan)
    attempts = [1 + (tokens.index(token) == shard) for shard, token in enumerate(tokens)]
    attempts[failing_shard] = 2 * ATTEMPTS + 2
    assert plan.run.commit_log(["attempt"])["attempt"].to_pylist() == attempts


def test_a_short_run_says_two_lines_without_a_terminal(plan: Plan) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=100)
    assert run_to_end(plan, IN_PROCESS, console, ToyReplica) == []
    first_line, last_line = printed.getvalue().splitlines()
    assert first_line == f"{plan.run.run_id}: 480 tokens, 60 shards, 0 of them done"
    assert re.match(r"480 tokens in .*, .* tokens/s, replicas busy \d+%$", last_line)


@pytest.mark.usefixtures("one_thread")
def test_a_replica_in_this_process_computes_on_as_many_cores_as_it_is_given(plan: Plan) -> None:
    threads: list[int] = []

    class CountingReplica(ToyReplica):
        def misbehave(self, token: int) -> None:
            threads.append(torch.get_num_threads())

    assert run_to_end(plan, Resources(0, 3, "cpu"), SILENT, CountingReplica) == []
    assert set(threads) == {3}


def test_the_tokens_of_shards_know_that_the_last_is_short(tmp_path: Path) -> None:
    fields = {"out": str(tmp_path), "sequences": 10, "sequences_per_shard": 4}
    plan = make_plan(parse_scan(IDLE_SCAN | fields), "short")
    chosen = ([], [0], [2], [0, 2])
    tokens = [tokens_of(plan, np.array(shards, int)) for shards in chosen]
    assert tokens == [0, 32, 16, 48]
    assert tokens_of(plan, np.arange(3)) == plan.tokens == 80


def test_a_cluster_of_other_versions_is_refused_with_what_to_do() -> None:
    own_ray, own_python = compute_version_info()
    minor, _, patch = own_ray.rpartition(".")
    submit = ", or headcount submit --address http://HOST:8265, whose driver runs on the cluster"
    needs = f'pip install "ray[default]=={own_ray}" on the cluster\'s machines, start it again'
    near = f"{minor}.{int(patch) + 1}"
    for versions, advice in {
        ("2.9.3", own_python): needs,
        ("2.9.3", "3.9.1"): needs,
        (near, own_python): f'pip install "ray[default]=={near}" here{submit}',
        (own_ray, "3.9.1"): f"run it with Python 3.9.1 here{submit}",
    }.items():
        cluster = dict(zip(("ray_version", "python_version"), versions, strict=True))
        with pytest.raises(RuntimeError) as mismatch:
            check_version_info(cluster, "a node")
        assert version_problem(mismatch.value) == (
            f"the cluster runs Ray {versions[0]} with Python {versions[1]}, this machine Ray "
            f"{own_ray} with Python {own_python}; {advice}"
        )
    assert version_problem(RuntimeError("no such cluster")) is None


@contextlib.contextmanager
def run_on_a_head_of_its_own(tmp_path: Path, **variables: str) -> Iterator[tuple[Node, Command]]:
    """A head, and a driver with one replica there that has measured some shards of sixty."""
    cluster = start_cluster(num_cpus=1)
    scan_file = tmp_path / "idle.toml"
    fields = IDLE_SCAN | {"out": str(tmp_path)}
    scan_file.write_text("".join(f"{key} = {in_toml(value)}\n" for key, value in fields.items()))
    # A driver in a job sends no code. The node of this machine has it.
    environment = os.environ | {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"} | variables
    words = ["scan", scan_file, "--replicas", "1", "--address", cluster.address]
    main = "tests.toys.toy_replica.main"
    driver = Command(*words, environment=environment, directory=ROOT, main=main)
    try:
        when(lambda: driver.poll() is not None or len(list(tmp_path.glob("*/commits/*"))) >= 5)
        assert cluster.head_node is not None
        yield cluster.head_node, driver
    finally:
        driver.send_signal(signal.SIGKILL)
        cluster.shutdown()


@needs_ray
@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "problem"),
    [
        ("gcs_server", r"the cluster's head, \S+, is gone for 10 s"),
        ("raylet", "Ray has ended on this machine"),
    ],
)
def test_a_driver_without_ray_ends_in_one_line_and_the_run_continues(
    tmp_path: Path, process: str, problem: str
) -> None:
    with run_on_a_head_of_its_own(tmp_path) as (head, driver):
        head.all_processes[process][0].process.kill()
        killed = time.monotonic()
        ended = driver.ended(timeout=60)
        assert time.monotonic() - killed < 20
    assert ended.code == 2
    first_line, *progress, last_line = ended.stderr.splitlines()
    assert first_line.endswith("480 tokens, 60 shards, 0 of them done")
    # It is the driver of a job, which tells programs, too.
    told = [state for state in states_in(ended.stderr) if state.state == "measuring"]
    assert told == [JobState(state="measuring", words=FIRST_COMMIT)]
    of_progress = f"[0-9]+ of 480 tokens, .*|{find_runs(tmp_path)[0].run_id}: {FIRST_COMMIT}"
    said = [line for line in progress if not is_state(line)]
    assert all(re.fullmatch(of_progress, line) for line in said), ended.stderr
    (run,) = find_runs(tmp_path)
    advice = "start the cluster again, and the same command continues where it stopped"
    assert re.fullmatch(f"error: {run.run_id}: {problem}; {advice}", last_line)
    phase = read_status(run).phase
    assert re.match(f"failed while measuring: {problem}, ", phase or "")
    assert 5 <= len(run.commit_log([])) < 60
    # Whoever measures: what is missing follows from the commits.
    finish_here(replan(run))


@needs_ray
@pytest.mark.long
@pytest.mark.parametrize("storage", ["rocksdb", "redis"])
def test_a_driver_goes_on_when_a_head_that_keeps_its_state_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    with contextlib.ExitStack() as stack:
        if storage == "rocksdb":
            monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
            monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "head"))
        else:
            if (program := shutil.which("redis-server")) is None:
                pytest.skip("needs the program redis-server")
            port = free_port()
            words = [program, "--port", f"{port}", "--bind", "127.0.0.1", "--save", ""]
            server = stack.enter_context(subprocess.Popen(words, stdout=subprocess.DEVNULL))
            stack.callback(server.kill)
            monkeypatch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        head, driver = stack.enter_context(run_on_a_head_of_its_own(tmp_path, **{RECONNECT: "60"}))
        head.kill_gcs_server()
        time.sleep(HEAD_SECONDS + 3)
        assert driver.poll() is None
        head.start_gcs_server()
        ended = driver.ended()
    assert (ended.code, "error" in ended.stderr) == (0, False), ended.stderr
    (run,) = find_runs(tmp_path)
    assert done_shards(replan(run)) == list(range(60))


@needs_ray
@pytest.mark.long
def test_a_node_with_another_tokenizer_measures_nothing(tmp_path: Path) -> None:
    model = toy.save_byte_model(tmp_path / "bytes")
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefghijklmnop"}\n')
    fields = IDLE_SCAN | {"model": str(model), "sequences": 1, "out": str(tmp_path / "runs")}
    fields |= {"input": {"family": "pile", "files": str(tmp_path / "a.jsonl")}}
    plan = make_plan(parse_scan(fields), "toy")
    prepare_run(plan, "")
    # The driver has read the tokenizer; the replica reads another one.
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer.replace('"a": 97', '"a": 98', 1))
    assert (model / "tokenizer.json").read_text() != tokenizer
    # One line of ours, although it was raised in another process.
    with pytest.raises(
        RunError,
        match=r"^no replica can be made: .*this node has the tokenizer \w{16}, the run \w{16}$",
    ):
        run_to_end(plan, Resources(1, 1, "cpu"), SILENT, ToyReplica)
    assert done_shards(plan) == []


# Machines that are taken back: replicas and drivers finish what they measure, and nothing counts.


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
    from ray.scripts.scripts import drain_node

    words = ["--address", address, "--node-id", node_id]
    words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    words += ["--deadline-remaining-seconds", "30"]
    drain_node.main(words, standalone_mode=False)


@pytest.mark.long
def test_a_node_a_replica_and_the_driver_are_taken_away(cluster: Cluster, plan: Plan) -> None:
    # A replica costs seconds to start. So there is one, which begins on the node because the head
    # is taken, and moves to the head when the node is drained.
    head_taken = placement_group([{"CPU": 2}])
    assert head_taken.wait(60)
    node = cluster.add_node(wait=True, **NODE_OPTIONS, num_cpus=1)
    # A node of Ray has taken SIGTERM for itself.
    listen_to_signals()
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

    console = Console(file=printed, width=200)
    with ThreadPoolExecutor(1) as pool:
        disturbance = pool.submit(disturb)
        with pytest.raises(Stopped) as end:
            run_to_end(plan, Resources(1, 1, "cpu"), console, NotingReplica)
    disturbance.result()
    cluster.remove_node(node)
    assert end.value.number == signal.SIGTERM
    reasons = re.findall(r"a replica on \S+ leaves: (.*)", printed.getvalue())
    assert reasons == ["its node is being drained", "SIGTERM"]
    # Everything that was measured was committed: nothing was done in vain.
    assert 5 <= len(done_shards(plan)) == len(measurements(plan)) < 60
    assert len(set(measurements(plan))) == 2

    # The same command measures the rest.
    finish_here(plan, NotingReplica)
    assert len(measurements(plan)) == 60
    # No try counted against a shard.
    assert set(plan.run.commit_log(["attempt"])["attempt"].to_pylist()) == {1}
    assert plan.run.failed_shards() == []


@pytest.mark.parametrize(("seconds", "finished"), [(0.2, [0, 1, 2]), (60, [0, 1])])
def test_a_shard_in_this_process_is_finished_or_dropped_if_it_takes_long(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, seconds: float, finished: list[int]
) -> None:
    monkeypatch.setattr(endings, "FINISHING_SECONDS", 0.3 if seconds > 1 else 30)
    (Path(plan.scan.out) / "seconds").write_text(str(seconds))
    began = time.monotonic()
    with kept_endings():
        listen_to_signals()
        with pytest.raises(Stopped):
            run_to_end(plan, IN_PROCESS, SILENT, SelfStoppingReplica)
    assert time.monotonic() - began < 30
    assert done_shards(plan) == finished
    finish_here(plan)
