"""Plans of a cache by replicas on Ray: the same as in one process, whoever dies on the way."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headcount.jobs.resources import Resources
from headcount.jobs.run.ray_trial import TrialOnRay
from headcount.schemas.errors import RunError
from headcount.workers.cache_trial import CacheTrial, Half
from tests import ROOT
from tests.tools.processes import Command, Ended, kept_endings, start_fork_server
from tests.tools.workers import NODE_OPTIONS, forked_workers, joined_cluster, start_cluster
from tests.toys.commands import error_of

PATIENCE_SECONDS = 600.0  # on a machine that does other things, too

SIZES = {"n_ctx": 192, "sequences": 5}  # more than can be shared evenly
WORDS = (
    "cache-plan", "bundled:gpt2-mini", "--loss", "0.05", "--n-ctx", "192", "--sequences", "5",
    "--window", "24", "--device", "cpu",
)  # fmt: skip
TWO = ("--replicas", "2", "--cores", "1")
SAVED_AT_ONCE = {"headcount.exports.shared.confirmation.SAVED_SECONDS": 0.0}


def planning(folder: Path, *words: str, **variables: str) -> Command:
    return Command(
        *WORDS, "-o", folder, *words, environment=os.environ | variables, directory=ROOT,
        constants=SAVED_AT_ONCE,
    )  # fmt: skip


def plan_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def wait_for_answers(folder: Path, count: int, command: Command) -> None:
    """Wait until so much of a plan is known."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    known = 0
    while known < count and command.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError):
            known = len(plan_in(folder)["answers"])
    assert count <= known, command.ended(1).output


def actors_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes below one that have become actors of a trial."""
    found: list[psutil.Process] = []
    for child in process.children(recursive=True):
        # One that has just ended has no command line.
        with contextlib.suppress(psutil.Error, IndexError):
            if child.cmdline()[0].startswith("ray::TrialActor"):
                found.append(child)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, dict[str, Any]]:
    """How the command ends that measures in its own process, and its plan."""
    folder = tmp_path_factory.mktemp("alone")
    ended = planning(folder, "--replicas", "0").ended(PATIENCE_SECONDS)
    assert ended.code == 0, ended.output
    return ended, plan_in(folder)


def check_same(ended: Ended, folder: Path, alone: tuple[Ended, dict[str, Any]]) -> None:
    """Hold a plan and its table to those of one process."""
    expected_end, expected = alone
    assert ended.code == 0, ended.output
    # The last line has the name of the folder. Ray says before which machines it has lost.
    *table, _ = expected_end.stdout.splitlines()
    assert ended.stdout.splitlines()[-1 - len(table) : -1] == table
    plan = plan_in(folder)
    assert plan["heads"] == expected["heads"]
    assert [*plan["answers"]] == [*expected["answers"]]
    for name, rows in expected["answers"].items():
        answers, expected_answers = (
            np.array(each, float) for each in (plan["answers"][name], rows)
        )
        np.testing.assert_allclose(answers, expected_answers, atol=1e-5, err_msg=name)
    (rounds,), (expected_rounds,) = (each["opened"].values() for each in (plan, expected))
    assert len(rounds) == len(expected_rounds) > 2
    for one, other in zip(rounds, expected_rounds, strict=True):
        assert one["opened"] == other["opened"]
        for name in ("recall", "loss", "gains"):
            np.testing.assert_allclose(one[name], other[name], atol=1e-6, err_msg=name)


@pytest.mark.long
def test_replicas_give_the_plan_of_one_process_though_one_dies_and_the_command_is_stopped(
    tmp_path: Path, alone: tuple[Ended, dict[str, Any]]
):
    command = planning(tmp_path, *TWO)
    wait_for_answers(tmp_path, 5, command)
    first, _ = actors_of(psutil.Process(command.pid))
    first.kill()
    known = len(plan_in(tmp_path)["answers"])
    wait_for_answers(tmp_path, known + 5, command)
    second, third = actors_of(psutil.Process(command.pid))
    assert first not in (second, third)
    command.send_signal(signal.SIGINT)
    stopped = command.ended(PATIENCE_SECONDS)
    assert stopped.code == 130
    assert "stopped; the same command continues the cache-plan where it stopped" in stopped.stderr
    assert "Traceback" not in stopped.output
    psutil.wait_procs([second, third], timeout=20)
    assert not second.is_running()
    assert not third.is_running()
    answers = plan_in(tmp_path)["answers"]
    assert known + 5 <= len(answers) < len(alone[1]["answers"])

    ended = planning(tmp_path, *TWO).ended(PATIENCE_SECONDS)
    check_same(ended, tmp_path, alone)
    finished = plan_in(tmp_path)["answers"]
    # What was known is kept to the last digit; of some, more sequences were asked for.
    assert all(finished[name][: len(rows)] == rows for name, rows in answers.items())


@pytest.fixture
def workers() -> Iterator[psutil.Process]:
    """What workers of clusters of this test are forked from."""
    start_fork_server()
    with kept_endings(), forked_workers() as parent:
        yield parent


@pytest.mark.long
def test_a_machine_that_is_lost_loses_nothing(
    tmp_path: Path, workers: psutil.Process, alone: tuple[Ended, dict[str, Any]]
):
    cluster = start_cluster(num_cpus=0)
    nodes = [cluster.add_node(**NODE_OPTIONS, num_cpus=1) for _ in range(2)]
    try:
        at = ("--address", str(cluster.address), *TWO)
        # A driver in a job sends no code. The nodes of this machine have it.
        command = planning(tmp_path, *at, RAY_JOB_CONFIG_JSON_ENV_VAR="{}")
        wait_for_answers(tmp_path, 5, command)
        assert len(actors_of(workers)) == 2
        cluster.remove_node(nodes[0], allow_graceful=False)
        cluster.add_node(**NODE_OPTIONS, num_cpus=1, wait=False)
        check_same(command.ended(PATIENCE_SECONDS), tmp_path, alone)
        assert not actors_of(workers)
    finally:
        cluster.shutdown()


@pytest.mark.long
def test_each_sequence_is_answered_by_who_has_it_and_an_error_is_a_line():
    options = {**SIZES, "reads_prompts": True}
    here = CacheTrial("bundled:gpt2-mini", [], **options)
    with joined_cluster(num_cpus=3) as cluster:
        resources = Resources(replicas=3, cores=1, device="cpu", address=cluster.address)
        there = TrialOnRay(resources, "bundled:gpt2-mini", [], **options)
        passed: list[int] = []
        there.passed = passed.append
        with there.loaded():
            assert (there.prompt, there.own_windows()) == (here.prompt, here.own_windows())
            rows: list[tuple[Half, range]] = [
                ("chooses", range(1)), ("chooses", range(1, 5)), ("reports", range(2, 4)),
            ]  # fmt: skip
            for half, some in rows:
                answers, expected = (
                    np.array(trial.answers(half, "stream_other_heads(4,24)", some), float)
                    for trial in (there, here)
                )
                np.testing.assert_allclose(answers, expected, atol=1e-5)
            # Those that are compared with the whole cache went through it first.
            assert sum(passed) == 1 + 4 + 2 + 5
            with pytest.raises(RunError) as refused:
                there.answers("chooses", "no_such_change(4)", range(2))
        lines = str(refused.value).splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("a replica cannot measure: interventions: unknown intervention")


def test_a_cluster_for_no_replica_is_refused(tmp_path: Path):
    refused = error_of(*WORDS, "-o", tmp_path / "plan", "--replicas", 0, "--address", "127.0.0.1:1")
    assert "--replicas 0 measures in this process, --address 127.0.0.1:1 on a cluster" in refused
    assert not (tmp_path / "plan").exists()
