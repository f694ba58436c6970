"""On any machine: nothing hangs, nothing prints a stack trace, and files of the user break nothing.

Most cases are the real command in a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pty
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from headcount.command_line import main
from headcount.jobs.cluster.ray_cluster import _check_head
from headcount.schemas.errors import RunError
from tests import ROOT
from tests.tools.processes import DIES_WITH_ITS_PARENT, Command, Ended
from tests.toys import toy_runs

SCAN = """
model = "bundled:gpt2-mini"
n_ctx = 16
sequences = 4
sequences_per_shard = 2
input.family = "uniform_random"
"""
HIDING = ("torch", "numpy")
"""Names of modules that a scan imports."""


def headcount(
    directory: Path,
    *words: str | Path,
    through: tuple[str, ...] = (),
    stdout: int = subprocess.PIPE,
    seconds: float = 120,
    variables: Mapping[str, str | None] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """Run `headcount …` in a directory, with these variables set, or removed if they are None."""
    return subprocess.run(
        [*DIES_WITH_ITS_PARENT, *through, sys.executable, "-m", "headcount", *map(str, words)],
        cwd=directory,
        env=environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds,
    )


def environment(variables: Mapping[str, str | None]) -> dict[str, str]:
    """This environment with some variables set, or removed if they are None."""
    every = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return {name: value for name, value in every.items() if value is not None}


def ended_side_by_side(
    directory: Path,
    commands: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    constants: Mapping[str, float] = MappingProxyType({}),
) -> list[Ended]:
    """How several commands end that run at once: they wait more than they compute."""
    started = [
        Command(
            *words,
            environment=environment(variables),
            directory=directory,
            constants=constants,
        )
        for words in commands
    ]
    return [command.ended(timeout=200) for command in started]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a scan in it."""
    (tmp_path / "own.toml").write_text(SCAN)
    return tmp_path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with one run."""
    toy_runs.write_run(tmp_path / "runs", "toy-1a2b3c4d", {"sink_mass": lambda _: 0.5})
    return tmp_path / "runs"


@pytest.fixture
def silent() -> Iterator[str]:
    """HOST:PORT of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


# Files of the user


def hide_modules(directory: Path) -> None:
    """Write files of the user that have the names of modules."""
    for name in HIDING:
        (directory / f"{name}.py").write_text("raise SystemExit('a file of the user')")


def check_scanned(done: Ended, directory: Path) -> None:
    """Check that a scan has ended well, and complained about nothing."""
    assert (done.code, "rror" in done.stderr) == (0, False), done.stderr
    assert "log level" not in done.stderr
    assert len(list(directory.glob("runs/run_id=*/commits/*.json"))) == 2


def test_files_of_the_user_hide_nothing_and_no_home_is_wanted(directory: Path) -> None:
    """Neither here nor in the replicas."""
    hide_modules(directory)
    no_home = {"HOME": "/nonexistent"}
    done = headcount(directory, "scan", "own.toml", "--replicas", "1", variables=no_home)
    check_scanned(Ended(done.returncode, "", done.stderr), directory)


def main_with_few_files() -> None:
    """`headcount …` as after `ulimit -n 64`."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    main()


def test_a_scan_on_the_cpu_is_one_process_and_wants_few_files(directory: Path) -> None:
    words = ("scan", "own.toml", "--device", "cpu")
    done = Command(
        *words,
        environment=environment({}),
        directory=directory,
        main=f"{__name__}.{main_with_few_files.__name__}",
    )
    check_scanned(done.ended(), directory)


# No end


UNANSWERED = [
    (
        "scan own.toml --address SILENT",
        "SILENT: takes connections, and is no head of a Ray cluster that answers in 1 s; expected",
    ),
    ("list --address http://SILENT", "http://SILENT: no Ray cluster answers there (nothing said"),
    (
        "list s3://bucket/runs",
        "s3://bucket: the store at http://SILENT does not answer (timed out)",
    ),
]

WAITED_FOR = {
    "headcount.jobs.cluster.ray_cluster.CONNECT_SECONDS": 1.0,
    "headcount.jobs.cluster.ray_cluster.JOIN_SECONDS": 1.0,
    "headcount.jobs.cluster.submission.CONNECT_SECONDS": 1.0,
    "headcount.schemas.files.places.PROBE_SECONDS": 1.0,
    "headcount.schemas.files.places.PROBING_SECONDS": 1.5,
}
"""What ends the waiting, and seconds that a test can wait."""


def test_what_does_not_answer_is_one_line(directory: Path, silent: str) -> None:
    store = {"AWS_ENDPOINT_URL": f"http://{silent}", "AWS_REGION": "us-east-1"}
    commands = [words.replace("SILENT", silent).split() for words, _ in UNANSWERED]
    for (words, start), ended in zip(
        UNANSWERED, ended_side_by_side(directory, commands, store, WAITED_FOR), strict=True
    ):
        line = ended.stderr.splitlines()[-1].replace(silent, "SILENT")
        assert ended.code == 2, words
        assert line.startswith(f"error: {start}"), words


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("nohost.invalid:1", "nohost.invalid:1: no answer ("),
        ("nowhere", "nowhere: expected HOST:PORT of the cluster's head"),
    ],
)
def test_an_address_of_nothing_is_one_line(address: str, problem: str) -> None:
    with pytest.raises(RunError) as refusal:
        _check_head(address)
    (line,) = str(refusal.value).splitlines()
    assert line.startswith(problem)


def test_a_wait_that_is_too_long_ends_no_notebook_and_none_of_its_children() -> None:
    program = """
import subprocess, sys, time
from headcount.jobs.cluster.ray_cluster import _given_up_after
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
with _given_up_after(0.01, "too long"):
    time.sleep(0.5)
print(child.poll())
child.kill()
"""
    done = subprocess.run(
        [*DIES_WITH_ITS_PARENT, sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "error: too long\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("replicas", ["0", "1"])
def test_a_gpu_that_is_not_there_is_one_line(
    command: Callable[..., tuple[int, list[str]]], directory: Path, replicas: str
) -> None:
    words = ("scan", directory / "own.toml", "--device", "cuda", "--replicas", replicas)
    code, (line,) = command(*words, "--set", f"out={directory}")
    assert code == 2
    assert line.startswith("error: --device cuda: 1 GPU wanted")


def test_no_wait_is_longer_than_30_seconds() -> None:
    for path in WAITED_FOR:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) <= 30, path


def test_a_store_that_is_down_is_one_line(directory: Path) -> None:
    store = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_REGION": "us-east-1"}
    commands = (
        "scan own.toml --replicas 0 --set out=s3://bucket/runs",
        "status s3://bucket/runs/run_id=a-1",
        "query s3://bucket/runs heads",
        "report s3://bucket/runs",
        "compact s3://bucket/runs",
    )
    line = (
        "error: s3://bucket: the store at http://127.0.0.1:9 does not answer (Connection refused); "
        "bring it or the network up, or name another address in AWS_ENDPOINT_URL, then run the "
        "same command\n"
    )
    every_ended = ended_side_by_side(
        directory,
        [words.split() for words in commands],
        store,
        {"headcount.schemas.files.places.PAUSE_SECONDS": 0},
    )
    for words, ended in zip(commands, every_ended, strict=True):
        assert ended == (2, "", line), words


def main_without_network() -> None:
    """`headcount …` as below `unshare --net`."""
    new_network = 0x40000000  # CLONE_NEWNET
    assert ctypes.CDLL(None).unshare(new_network) == 0
    main()


def test_ray_without_a_network_is_one_line(directory: Path) -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no network can be taken away here")
    done = Command(
        *("scan", "own.toml", "--replicas", "1"),
        environment=environment({}),
        directory=directory,
        main=f"{__name__}.{main_without_network.__name__}",
    ).ended()
    assert done.code == 2
    assert "error: Ray on this machine: its processes cannot talk to each other" in done.stderr


# No traces


def test_a_full_disk_behind_stdout_is_one_line(runs: Path) -> None:
    commands = [
        Command(*words, environment=environment({}), directory=runs, stdout=Path("/dev/full"))
        for words in (("list", runs), ("status", runs / "run_id=toy-1a2b3c4d"))
    ]
    # What Python does at its end, a fork does not do.
    with open("/dev/full", "w") as full:
        done = headcount(runs, "query", runs, "heads", stdout=full.fileno())
    every_ended = [command.ended() for command in commands]
    for code, _, errors in (*every_ended, Ended(done.returncode, "", done.stderr)):
        assert code == 2
        assert errors.startswith("error: ")
        assert "No space left on device" in errors
        assert len(errors.splitlines()) == 1


def test_a_reader_that_has_enough_is_no_error(runs: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = headcount(runs, "query", runs, "heads", "--format", "csv", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


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
    directory: Path, variables: dict[str, str | None], ellipsis: str
) -> None:
    done = headcount(directory, "list", "absent", variables=variables)
    assert done.stderr == (
        f"error: {directory / 'absent'}: no run here; expected a run directory, or a directory "
        f"that holds run_id={ellipsis} directories\n"
    )


def test_a_mistake_of_ours_is_one_line_and_a_file(tmp_path: Path) -> None:
    code = (
        "from headcount.jobs.endings import ended_in_lines\nwith ended_in_lines():\n    {}['a key']"
    )
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
                f"error: this is a mistake in headcount (KeyError: 'a key'); its stack trace is in "
                f"{file}\n"
            )
            assert "Traceback" in file.read_text()


# Interrupts


def died_before_our_first_lines(errors: str) -> bool:
    """Whether Python was interrupted before the front door had said what an interrupt does."""
    if "init_import_site" in errors:
        return True
    front_door = ROOT / "headcount" / "command_line.py"
    lines = front_door.read_text(encoding="utf-8").splitlines()
    handler_is_set = next(n for n, line in enumerate(lines, 1) if "signal.signal(" in line)
    frames = re.findall(r'File "(.+?)", line (\d+)', errors)
    in_front_door = [int(number) for file, number in frames if file == str(front_door)]
    return bool(frames) and all(number < handler_is_set for number in in_front_door)


@pytest.mark.parametrize("seconds", [0.06, 0.3, 2.0])
def test_an_interrupt_is_quiet_at_any_moment(directory: Path, seconds: float) -> None:
    command = [*DIES_WITH_ITS_PARENT, sys.executable, "-m", "headcount", "scan", "own.toml"]
    command += ["--replicas", "0", "--set", "sequences=1000000"]
    numbers = (signal.SIGINT, signal.SIGTERM)
    processes = [
        subprocess.Popen(
            [*command, "--set", f"out=runs-{number}"],
            cwd=directory,
            env=environment({}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in numbers
    ]
    time.sleep(seconds)
    for process, number in zip(processes, numbers, strict=True):
        process.send_signal(number)
    for process, number in zip(processes, numbers, strict=True):
        _, errors = process.communicate(timeout=120)
        if died_before_our_first_lines(errors):
            continue
        # A process that has no handler yet dies of the signal itself, which is as quiet.
        assert process.returncode in (128 + number, -number)
        assert "Traceback" not in errors
        assert len([line for line in errors.splitlines() if "tokens" not in line]) <= 1
        if process.returncode > 0:
            assert errors.splitlines()[-1].startswith("stopped")


# The front door


def test_a_wrong_scan_is_refused_before_any_other_runs_and_without_torch(directory: Path) -> None:
    (directory / "wrong.toml").write_text("n_ctx = 0\n" + SCAN.replace("n_ctx", "seed"))
    code = (
        "import sys, headcount.command_line\n"
        "sys.argv = ['headcount', 'scan', 'own.toml', 'wrong.toml']\n"
        "try:\n    headcount.command_line.main()\n"
        "except SystemExit as left:\n    print(left.code, {'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env=environment({}),
        capture_output=True,
        text=True,
    )
    assert done.stderr == "error: wrong.toml: n_ctx: expected 1 or more, got 0\n"
    assert done.stdout == "2 set()\n"
    assert not (directory / "runs").exists()


def test_the_front_door_says_what_it_is(tmp_path: Path) -> None:
    done = headcount(tmp_path, "--version")
    installed = f"headcount {version('headcount')}, code "
    assert done.stdout.startswith(installed) or "not installed" in done.stdout
    short, long = ended_side_by_side(tmp_path, [["scan", "-h"], ["scan", "--help"]], {})
    assert (short.code, short) == (0, long)
    assert short.stdout.startswith("Usage: headcount scan")


def test_a_run_is_found_by_its_name(tmp_path: Path, runs: Path) -> None:
    toy = "toy-1a2b3c4d"
    commands = [
        *(["status", run] for run in ("toy", toy, f"runs/run_id={toy}")),
        ["status", "toys"],
    ]
    *every_found, unknown = ended_side_by_side(tmp_path, commands, {})
    for found in every_found:
        assert "every shard is committed" in found.stdout
    assert unknown.stderr.startswith(
        f"error: {runs}: unknown run 'toys': Known: {toy}; --runs names"
    )
    toy_runs.write_run(runs, "toy-99999999", {"sink_mass": lambda _: 0.5})
    (ambiguous,) = ended_side_by_side(tmp_path, [["status", "toy", "--runs", str(runs)]], {})
    assert ambiguous.stderr == (
        f"error: {runs}: 2 runs have the name toy; say which: {toy}, toy-99999999\n"
    )


def test_watching_ends_with_the_run_or_quietly(tmp_path: Path) -> None:
    run = toy_runs.write_run(tmp_path / "runs", "toy-1", {"sink_mass": lambda _: 0.5}, commit=[0])
    command = [*DIES_WITH_ITS_PARENT, sys.executable, "-m", "headcount", "status", str(run.path)]
    with subprocess.Popen(
        [*command, "--watch", "--every", "0.2"],
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        for _ in range(2):
            assert "  shards 1 of 2 done" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(120) == 130
        assert watching.stderr.read() == "stopped\n"
    complete = toy_runs.write_run(tmp_path / "runs", "toy-2", {"sink_mass": lambda _: 0.5})
    our_end, its_end = pty.openpty()
    done = Command(
        *("status", str(complete.path), "--watch"),
        environment=environment({}),
        directory=tmp_path,
        stdout=Path(os.ttyname(its_end)),
    ).ended()
    assert done.code == 0
    assert b"complete  every shard is committed" in os.read(our_end, 10_000)
    os.close(its_end)
    os.close(our_end)
