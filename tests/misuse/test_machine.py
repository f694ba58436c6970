"""Whatever the machine is like: nothing hangs, nothing traces, and files of the user break nothing.

Each case is the real command in a process of its own, on the real thing.
"""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from tests import toy_runs

ROOT = Path(__file__).parent.parent.parent
SCAN = """
model = "bundled:gpt2-mini"
n_ctx = 16
sequences = 4
sequences_per_shard = 2
input.family = "uniform_random"
"""
HIDING = ("jobs", "workers", "schemas", "models", "queries", "reproduce", "torch", "numpy")
"""Names of modules that a scan imports, ours and others."""


def headcount(
    directory: Path,
    *words: str | Path,
    through: tuple[str, ...] = (),
    stdout: int | None = None,
    seconds: float = 30,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run `headcount …` in a directory, with these variables set, or taken away where they are none."""
    env: dict[str, str | None] = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [*through, sys.executable, "-m", "headcount", *map(str, words)],
        cwd=directory,
        env={name: value for name, value in env.items() if value is not None},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds,
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "own.toml").write_text(SCAN)
    return tmp_path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    toy_runs.write_run(tmp_path / "runs", "toy-1a2b3c4d", {"sink_mass": lambda _: 0.5})
    return tmp_path / "runs"


@pytest.fixture
def silent() -> Iterator[str]:
    """HOST:PORT of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# Files of the user


@pytest.mark.parametrize("replicas", ["0", "1"])
def test_files_of_the_user_hide_nothing(here: Path, replicas: str) -> None:
    for name in HIDING:
        (here / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    done = headcount(here, "scan", "own.toml", "--replicas", replicas, seconds=120)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert "log level" not in done.stderr
    assert len(list(here.glob("runs/run_id=*/commits/*.json"))) == 2


# No end


UNANSWERED = [
    ("scan own.toml --device cuda --replicas 0", "--device cuda: 1 GPU wanted"),
    ("scan own.toml --device cuda", "--device cuda: 1 GPU wanted"),
    ("scan own.toml --address nohost.invalid:1", "nohost.invalid:1: no answer ("),
    ("scan own.toml --address nowhere", "nowhere: expected HOST:PORT of the cluster's head"),
    ("scan own.toml --address SILENT", "SILENT: no answer in 10 s; expected HOST:PORT"),
    ("list --address http://SILENT", "http://SILENT: no Ray cluster answers there (nothing said"),
    (
        "list s3://bucket/runs",
        "s3://bucket: the store at http://SILENT does not answer (timed out)",
    ),
]


def test_what_does_not_answer_is_one_line_within_30_seconds(here: Path, silent: str) -> None:
    store = {"AWS_ENDPOINT_URL": f"http://{silent}", "AWS_REGION": "us-east-1"}

    def last_line(number: int, words: str) -> tuple[int, str]:
        arguments = words.replace("SILENT", silent).split()
        if "scan" in arguments:
            # Two at a time at work on one run would be refused for that.
            arguments += ["--set", f"out=runs{number}"]
        done = headcount(here, *arguments, variables=store, seconds=60)
        return done.returncode, done.stderr.splitlines()[-1].replace(silent, "SILENT")

    cases = [case for case in UNANSWERED if "cuda" not in case[0] or not torch.cuda.is_available()]
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(last_line, range(len(cases)), [words for words, _ in cases]))
    for (words, start), (code, line) in zip(cases, said, strict=True):
        assert code == 2, words
        assert line.startswith(f"error: {start}"), words


@pytest.mark.parametrize(
    "words",
    [
        "scan own.toml --replicas 0 --set out=s3://bucket/runs",
        "status s3://bucket/runs/run_id=a-1",
        "query s3://bucket/runs heads",
        "report s3://bucket/runs",
        "compact s3://bucket/runs",
    ],
)
def test_a_store_that_is_down_is_one_line(here: Path, words: str) -> None:
    store = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "us-east-1"}
    done = headcount(here, *words.split(), variables=store)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: s3://bucket: the store at http://127.0.0.1:9 does not answer (Connection refused); "
        "bring it or the network up, or name another address in AWS_ENDPOINT_URL, then run the "
        "same command\n"
    )


def test_ray_without_a_network_is_one_line(here: Path) -> None:
    alone = ("unshare", "--net")
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network can be taken away here")
    done = headcount(here, "scan", "own.toml", through=alone)
    assert done.returncode == 2
    assert "error: Ray on this machine: its processes cannot talk to each other" in done.stderr


# No traces


def test_a_full_disk_behind_stdout_is_one_line(runs: Path) -> None:
    for words in (
        ("list", runs),
        ("status", runs / "run_id=toy-1a2b3c4d"),
        ("query", runs, "heads"),
    ):
        with open("/dev/full", "w") as full:
            done = headcount(runs, *words, stdout=full.fileno())
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert "No space left on device" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_has_enough_is_no_error(runs: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = headcount(runs, "query", runs, "heads", "--format", "csv", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_home_that_is_not_there_is_no_error(here: Path) -> None:
    done = headcount(
        here, "scan", "own.toml", "--replicas", "0", variables={"HOME": "/nonexistent"}
    )
    assert (done.returncode, "rror" in done.stderr) == (0, False), done.stderr


def test_a_user_whom_the_machine_does_not_know_asks_and_is_answered(runs: Path) -> None:
    """As in a container: neither HOME nor an entry in passwd."""
    as_nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "runs"
        shutil.copytree(runs, place)
        os.chmod(folder, 0o755)
        can_start = [*as_nobody, sys.executable, "-c", f"import os; os.listdir({str(ROOT)!r})"]
        if (
            shutil.which("setpriv") is None
            or subprocess.run(can_start, capture_output=True).returncode
        ):
            pytest.skip("no other user can start Python here")
        words = ("query", place, "SELECT count(*) FROM heads", "--format", "csv")
        done = headcount(place, *words, through=as_nobody, variables={"HOME": None})
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.splitlines()[1]) > 0


@pytest.mark.parametrize(
    ("variables", "ellipsis"),
    [({"PYTHONIOENCODING": "ascii"}, "\\u2026"), ({"LC_ALL": "C"}, "…"), ({"HOME": None}, "…")],
)
def test_an_environment_without_the_usual_is_no_error(
    here: Path, variables: dict[str, str | None], ellipsis: str
) -> None:
    done = headcount(here, "list", "absent", variables=variables)
    assert done.stderr == (
        "error: absent: no run here; expected a run directory, or a directory that holds "
        f"run_id={ellipsis} directories\n"
    )


def test_few_files_may_be_open(here: Path) -> None:
    done = headcount(
        here, "scan", "own.toml", "--replicas", "0", through=("sh", "-c", 'ulimit -n 64; "$@"', "-")
    )
    assert (done.returncode, "rror" in done.stderr) == (0, False), done.stderr


def test_a_mistake_of_ours_is_one_line_and_a_file(tmp_path: Path) -> None:
    code = "from jobs.endings import ended_in_lines\nwith ended_in_lines():\n    {}['a key']"
    for debug in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ
            | {"TMPDIR": str(tmp_path)}
            | ({"HEADCOUNT_DEBUG": "1"} if debug else {}),
            capture_output=True,
            text=True,
        )
        assert ("Traceback" in done.stderr) == debug
        if not debug:
            (file,) = tmp_path.glob("headcount-error-*.txt")
            assert done.stderr == (
                f"error: this is a mistake in headcount (KeyError: 'a key'); where it arose is in "
                f"{file}\n"
            )
            assert "Traceback" in file.read_text()


# Interrupts


def interrupted(words: list[str | Path], seconds: float, number: int) -> tuple[int, str]:
    """Exit code and stderr of a command that gets a signal after some seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headcount", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.parametrize("seconds", [0.06, 0.3, 2.0])
def test_an_interrupt_is_quiet_at_any_moment(here: Path, seconds: float) -> None:
    words = ["scan", here / "own.toml", "--replicas", "0"]
    words += ["--set", f"out={here}", "--set", "sequences=1000000"]
    for number in (signal.SIGINT, signal.SIGTERM):
        code, errors = interrupted(words, seconds, number)
        # Before our first line the interpreter itself may die of it, which is as quiet.
        assert code in (128 + number, -number)
        assert "Traceback" not in errors
        assert len([line for line in errors.splitlines() if "tokens" not in line]) <= 1
        if code > 0:
            assert errors.splitlines()[-1].startswith("stopped")


# The front door


def test_the_front_door_says_what_it_is(tmp_path: Path) -> None:
    done = headcount(tmp_path, "--version")
    assert done.stdout.startswith("headcount 0.2.0, code ") or "not installed" in done.stdout
    short, long = (headcount(tmp_path, "scan", option).stdout for option in ("-h", "--help"))
    assert short == long
    assert short.startswith("Usage: headcount scan")


def test_a_run_is_found_by_its_name(tmp_path: Path, runs: Path) -> None:
    for run in ("toy", "toy-1a2b3c4d", "runs/run_id=toy-1a2b3c4d"):
        assert "every shard is committed" in headcount(tmp_path, "status", run).stdout
    done = headcount(tmp_path, "status", "toys")
    assert done.stderr.startswith(
        f"error: {runs}: unknown run 'toys': Known: toy-1a2b3c4d; --runs names"
    )
    toy_runs.write_run(runs, "toy-99999999", {"sink_mass": lambda _: 0.5})
    done = headcount(tmp_path, "status", "toy", "--runs", runs)
    assert done.stderr == (
        f"error: {runs}: 2 runs have the name toy; say which: toy-1a2b3c4d, toy-99999999\n"
    )


def test_watching_ends_with_the_run_or_quietly(tmp_path: Path) -> None:
    run = toy_runs.write_run(tmp_path / "runs", "toy-1", {"sink_mass": lambda _: 0.5}, commit=[0])
    words = [
        sys.executable,
        "-m",
        "headcount",
        "status",
        str(run.path),
        "--watch",
        "--every",
        "0.2",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as p:
        assert p.stdout is not None
        assert p.stderr is not None
        for _ in range(2):
            assert "  shards 1 of 2 done" in p.stdout.readline()
        p.send_signal(signal.SIGINT)
        assert p.wait(30) == 130
        assert p.stderr.read() == "stopped\n"
    whole = toy_runs.write_run(tmp_path / "runs", "toy-2", {"sink_mass": lambda _: 0.5})
    ours, theirs = pty.openpty()
    done = headcount(tmp_path, "status", str(whole.path), "--watch", stdout=theirs)
    os.close(theirs)
    assert done.returncode == 0
    assert b"complete  every shard is committed" in os.read(ours, 10_000)
    os.close(ours)
