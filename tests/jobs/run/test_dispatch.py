"""The driver's decisions, with replicas that misbehave on real Ray.

Which shard is given out again, which shard is to blame for a death, and when a slow replica is not
waited for.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from rich.console import Console
from typer.testing import CliRunner

import headcount
from headcount.jobs.cluster.ray_cluster import SYSTEM_CONFIG, Resources
from headcount.jobs.plan.plan import Plan, make_plan, prepare_run, replan
from headcount.jobs.run import dispatch
from headcount.jobs.run.attempts import ATTEMPTS
from headcount.jobs.run.loop import MOST_FAILURES, run_to_end
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import find_runs
from headcount.schemas.scans.scan import parse_scan
from headcount.workers.model.files.model_info import ModelInfo
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests import ROOT
from tests.tools.processes import Command
from tests.tools.workers import FORKED, NODE_OPTIONS, joined_cluster
from tests.toys import toy_models as toy
from tests.toys.toy_replica import SteadyReplica, ToyReplica

SILENT = Console(quiet=True)
IDLE_SCAN: dict[str, Any] = {
    "model": "bundled:attn-only-2l-mini",
    "n_ctx": 8,
    "sequences": 60,
    "sequences_per_shard": 1,
    "statistics": ["sink_mass"],
    "input": {"family": "uniform_random"},
}
"""A scan of 60 shards, of one sequence each."""


class KillingReplica(ToyReplica):
    """Dies whenever it measures the token in the file `poison`."""

    def misbehave(self, token: int) -> None:
        if token == int((Path(self.scan.out) / "poison").read_text()):
            os.kill(os.getpid(), signal.SIGKILL)


class SleepingReplica(ToyReplica):
    """One of them takes ten minutes for every shard."""

    def misbehave(self, token: int) -> None:
        slow_replica = Path(self.scan.out) / "slow"
        # A link appears whole or not at all, so exactly one process becomes the slow one.
        with contextlib.suppress(FileExistsError):
            os.link(self._file_with_own_id(), slow_replica)
        is_slow = slow_replica.read_text() == str(os.getpid())
        time.sleep(600 if is_slow else 0.05)

    def _file_with_own_id(self) -> Path:
        file = Path(self.scan.out) / f"replica-{os.getpid()}"
        file.write_text(str(os.getpid()))
        return file


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


class SlowlyRestartedReplica(OnceFailingReplica):
    """Also dies at its third shard, and takes a second to start again."""

    def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
        super().__init__(info, scan, device)
        self.measured = 0
        started = Path(scan.out) / "started"
        if started.exists():
            time.sleep(1)
        started.touch()

    def misbehave(self, token: int) -> None:
        self.measured += 1
        if self.measured == 3 and not (Path(self.scan.out) / "died").exists():
            (Path(self.scan.out) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # If every shard failed, the run would be stopped.
        if token % 2:
            super().misbehave(token)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """Room for two replicas, whose processes are forks: the tests below kill a dozen."""
    with joined_cluster(num_cpus=2):
        yield


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    new_plan = make_plan(parse_scan(IDLE_SCAN | {"out": str(tmp_path)}), "idle")
    prepare_run(new_plan, "")
    return new_plan


def done_shards(plan: Plan) -> list[int]:
    return plan.run.commit_log([])["shard"].to_pylist()


def first_tokens_of(plan: Plan) -> list[int]:
    """The first random token of each shard, by which replicas tell shards apart."""
    return [int(plan.sequences.shard(shard).tokens[0, 1]) for shard in range(60)]


def test_a_shard_that_kills_its_replica_is_reported_and_the_others_are_done(
    plan: Plan, tmp_path: Path
) -> None:
    first_tokens = first_tokens_of(plan)
    # No other shard begins with its token, so it alone is to blame.
    deadly_shard = next(s for s in range(17, 60) if first_tokens.count(first_tokens[s]) == 1)
    (tmp_path / "poison").write_text(str(first_tokens[deadly_shard]))
    (failure,) = run_to_end(plan, Resources(2, 1, "cpu"), SILENT, replica_class=KillingReplica)
    assert failure.shard == deadly_shard
    assert "its replica died" in failure.error
    assert done_shards(plan) == [s for s in range(60) if s != deadly_shard]
    assert plan.run.failure(deadly_shard) == (ATTEMPTS, failure.error)
    # The next command tries the shard again, and counts its attempts from there.
    (tmp_path / "poison").write_text("-1")
    assert run_to_end(plan, Resources(1, 1, "cpu"), SILENT, replica_class=KillingReplica) == []
    assert done_shards(plan) == list(range(60))
    assert {c.attempt for c in plan.run.commits() if c.shard == deadly_shard} == {ATTEMPTS + 1}


def test_a_slow_restart_is_waited_for_and_a_shard_that_fails_once_is_tried_again(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MOST_FAILED_STARTS", 1)
    resources = Resources(1, 1, "cpu")
    assert run_to_end(plan, resources, SILENT, replica_class=SlowlyRestartedReplica) == []
    assert done_shards(plan) == list(range(60))


def test_a_slow_replica_does_not_delay_the_end(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LEAST_PATIENCE", 0.5)
    began = time.monotonic()
    assert run_to_end(plan, Resources(2, 1, "cpu"), SILENT, replica_class=SleepingReplica) == []
    # Waiting for the slow replica would take ten minutes. Ray may take one to start.
    assert time.monotonic() - began < 300
    assert done_shards(plan) == list(range(60))


def test_a_poisoned_shard_fails_alone_and_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, runs = tmp_path / "texts.jsonl", tmp_path / "runs"
    lines = [json.dumps({"text": letter * 64}) for letter in "a" * 8 + "b" * 8 + "c" * 8]
    texts.write_text("\n".join([*lines[:10], "{broken", *lines[10:]]) + "\n")
    (poisoned,) = set(TextTokenizer(ROOT / "models" / "gpt2-mini", 257).encode("b"))
    runs.mkdir()
    (runs / "poison").write_text(str(poisoned))
    scan_file = tmp_path / "poisoned.toml"
    scan_file.write_text(
        f'model = "bundled:gpt2-mini"\nn_ctx = 32\nsequences = 24\nsequences_per_shard = 8\n'
        f'out = "{runs}"\nbad_rows = 0.05\n[input]\nfamily = "pile"\nfiles = "{texts}"\n'
    )
    # The model has no part in it.
    with_toy_replicas = partial(run_to_end, replica_class=SteadyReplica)
    monkeypatch.setattr("headcount.jobs.run.loop.run_to_end", with_toy_replicas)
    result = CliRunner().invoke(headcount.app, ["scan", str(scan_file), "--replicas", "1"])
    assert f"{texts}, line 11 (invalid JSON)" in result.stderr
    assert isinstance(result.exception, RunError)
    assert str(result.exception).startswith("1 shard failed")
    (run,) = find_runs(runs)
    assert [commit.shard for commit in run.commits()] == [0, 2]
    failure = run.failure(1)
    assert failure is not None
    assert failure[0] == ATTEMPTS
    assert f"poisoned by token {poisoned}" in failure[1]


@pytest.mark.parametrize("replicas", [0, 1])
def test_when_nothing_succeeds_the_other_shards_are_not_tried(plan: Plan, replicas: int) -> None:
    with pytest.raises(
        RunError,
        match=rf"stopped, because {MOST_FAILURES} shards in a row could not be measured, the last "
        r"with: MemoryError: not here .*; mend the cause and run the same command again",
    ):
        run_to_end(plan, Resources(replicas, 1, "cpu"), SILENT, replica_class=FailingReplica)
    assert done_shards(plan) == []


def test_without_ray_a_shard_is_tried_as_often_as_with_it_and_the_next_command_continues(
    plan: Plan, tmp_path: Path
) -> None:
    first_tokens = first_tokens_of(plan)
    failing_shard = next(s for s in range(7, 60) if first_tokens.count(first_tokens[s]) == 1)
    (tmp_path / "poison").write_text(str(first_tokens[failing_shard]))
    resources = Resources(0, 1, "cpu")
    (failure,) = run_to_end(plan, resources, SILENT, replica_class=PoisonedReplica)
    assert failure.shard == failing_shard
    assert failure.error.startswith("OSError: poisoned (")
    assert plan.run.failure(failing_shard) == (ATTEMPTS, failure.error)
    assert done_shards(plan) == [shard for shard in range(60) if shard != failing_shard]
    (tmp_path / "poison").write_text("-1")
    assert run_to_end(plan, resources, SILENT, replica_class=PoisonedReplica) == []
    # The first shard with a token fails once, and then no other with it.
    attempts = [1 + (first_tokens.index(token) == s) for s, token in enumerate(first_tokens)]
    attempts[failing_shard] = ATTEMPTS + 2
    assert plan.run.commit_log(["attempt"])["attempt"].to_pylist() == attempts


def test_a_loop_can_stop_at_the_first_failure_and_continue_later(
    plan: Plan, tmp_path: Path
) -> None:
    first_tokens = first_tokens_of(plan)
    failing_shard = next(s for s in range(7, 60) if first_tokens.count(first_tokens[s]) == 1)
    (tmp_path / "poison").write_text(str(first_tokens[failing_shard]))
    run = partial(
        run_to_end,
        plan,
        Resources(0, 1, "cpu"),
        Console(file=io.StringIO(), width=200),
        replica_class=PoisonedReplica,
        stop_at_failure=True,
    )
    with pytest.raises(RunError) as failure:
        run()
    line = str(failure.value)
    assert line.startswith(f"{plan.run.run_id}: shard {failing_shard} failed: OSError: poisoned (")
    assert "\n" not in line
    assert done_shards(plan) == list(range(failing_shard))
    (tmp_path / "poison").write_text("-1")
    assert run() == []
    assert done_shards(plan) == list(range(60))


def test_a_short_run_says_two_lines_without_a_terminal(plan: Plan) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=100)
    assert run_to_end(plan, Resources(0, 1, "cpu"), console, replica_class=ToyReplica) == []
    first_line, last_line = printed.getvalue().splitlines()
    assert first_line == f"{plan.run.run_id}: 480 tokens, 60 shards, 0 of them done"
    assert re.match(r"480 tokens in .*, .* tokens/s, replicas busy \d+%$", last_line)


def test_a_replica_in_this_process_computes_on_as_many_cores_as_it_is_given(plan: Plan) -> None:
    threads: list[int] = []

    class NotingReplica(ToyReplica):
        def __init__(self, info: ModelInfo, scan: Any, device: str = "auto") -> None:
            threads.append(torch.get_num_threads())
            super().__init__(info, scan, device)

    before = torch.get_num_threads()
    try:
        assert run_to_end(plan, Resources(0, 3, "cpu"), SILENT, replica_class=NotingReplica) == []
    finally:
        torch.set_num_threads(before)
    assert threads == [3]


def test_a_replica_in_this_process_and_a_cluster_contradict_each_other() -> None:
    with pytest.raises(
        RunError, match=r"--replicas 0 measures in this process, --address here:6379 on a cluster"
    ):
        Resources(0, address="here:6379")


# A file system of a size that can be changed, which ends with the process.
SMALL_DISK = """
import subprocess, sys
from tests.jobs.run.test_dispatch import *
from tests.toys.toy_runs import local

disk = sys.argv[1]

def resize(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)

resize("size=256k")
plan = make_plan(parse_scan(IDLE_SCAN | {"out": disk}), "idle")
prepare_run(plan, "")
in_this_process = Resources(0, 1, "cpu")
with pytest.raises(RunError, match="3 shards in a row could not be .*No space left on device"):
    run_to_end(plan, in_this_process, SILENT, replica_class=ToyReplica)
assert len(done_shards(plan)) < 60
assert not list(local(plan.run.path).rglob("*.tmp"))
assert plan.run.damaged_files([plan.run.commit log()]) == []
# No shard was committed half, so more room is all that is missing.
resize("size=16m,remount")
assert run_to_end(plan, in_this_process, SILENT, replica_class=ToyReplica) == []
assert done_shards(plan) == list(range(60))
"""


def test_a_full_disk_leaves_whole_shards_and_more_room_completes_the_run(tmp_path: Path) -> None:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    own_mounts = ["unshare", *as_root, "--mount"]
    try:
        subprocess.run(
            [*own_mounts, "mount", "-t", "tmpfs", "tmpfs", tmp_path],
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    ended = subprocess.run(
        [*own_mounts, sys.executable, "-c", SMALL_DISK, tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr


class SlowReplica(ToyReplica):
    """Leaves time to kill the head."""

    def misbehave(self, token: int) -> None:
        time.sleep(0.2)


def drive_until_the_head_dies() -> None:
    """Begin a run in the directory that the command line names, and kill its head.

    Workers of its cluster are forks of the process that the test has provided.
    """
    head_options = NODE_OPTIONS | FORKED | {"num_cpus": 1, "_system_config": SYSTEM_CONFIG}
    cluster = Cluster(initialize_head=True, head_node_args=head_options)
    ray.init(address=cluster.address, log_to_driver=False)
    plan = make_plan(parse_scan(IDLE_SCAN | {"out": sys.argv[1]}), "idle")
    prepare_run(plan, "")

    def kill_head() -> None:
        while len(done_shards(plan)) < 5:
            time.sleep(0.05)
        for process in psutil.Process().children(recursive=True):
            if process.name() == "gcs_server":
                process.kill()

    threading.Thread(target=kill_head, daemon=True).start()
    console = Console(stderr=True)
    run_to_end(plan, Resources(1, 1, "cpu"), console, replica_class=SlowReplica)


def test_a_head_that_dies_ends_the_driver_in_words_and_the_run_continues(tmp_path: Path) -> None:
    driver = Command(
        tmp_path,
        # Ray would look for its head for a minute.
        environment=os.environ
        | {"RAY_gcs_rpc_server_reconnect_timeout_s": "1", "PYTHONPATH": str(ROOT)},
        directory=ROOT,
        main="tests.jobs.run.test_dispatch.drive_until_the_head_dies",
    )
    ended = driver.ended(timeout=300)
    assert ended.code == 1
    assert "Failed to connect to GCS" in ended.stderr
    assert "Traceback" not in ended.stderr
    (run,) = find_runs(tmp_path)
    assert 5 <= len(run.commit_log([])) < 60
    plan = replan(run)
    # Whoever measures: what is missing follows from the commits.
    assert run_to_end(plan, Resources(0, 1, "cpu"), SILENT, replica_class=ToyReplica) == []
    assert done_shards(plan) == list(range(60))


def test_a_node_with_another_tokenizer_measures_nothing(tmp_path: Path) -> None:
    model = toy.save_byte_model(tmp_path / "bytes")
    (tmp_path / "a.jsonl").write_text('{"text": "abcdefghijklmnop"}\n')
    fields = {
        "model": str(model),
        "n_ctx": 8,
        "sequences": 1,
        "statistics": ["entropy"],
        "input": {"family": "pile", "files": str(tmp_path / "a.jsonl")},
        "out": str(tmp_path / "runs"),
    }
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
        run_to_end(plan, Resources(1, 1, "cpu"), SILENT, replica_class=ToyReplica)
    assert done_shards(plan) == []
