"""On any machine: nothing hangs, nothing prints a stack trace, and files of the user break nothing.

What needs a Python that starts is the real command in a process of its own.
"""

import contextlib
import importlib
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from headcount.jobs import endings
from headcount.jobs.cluster import ray_cluster
from tests import ROOT
from tests.misuse.conftest import Command
from tests.tools.processes import DIES_WITH_ITS_PARENT
from tests.toys import toy_runs
from tests.toys.commands import ended, printed

SCAN = """
model = "bundled:gpt2-mini"
n_ctx = 16
sequences = 4
sequences_per_shard = 2
input.family = "uniform_random"
"""


HEADCOUNT = ("-m", "headcount")


def headcount(
    directory: Path, *words: str | Path, through: Iterable[str] = (),
    program: Iterable[str] = HEADCOUNT, **variables: str | None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `headcount …` in a directory, with these variables set, or removed if they are None."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    env = {name: value for name, value in env.items() if value is not None}
    command = [*DIES_WITH_ITS_PARENT, *through, sys.executable, *program, *map(str, words)]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, cwd=directory, env=env, timeout=120, **streams)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "own.toml").write_text(SCAN)
    return tmp_path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    toy_runs.write_run(tmp_path / "runs", "toy-1a2b3c4d", {"sink_mass": lambda _: 0.5})
    return tmp_path / "runs"


# Files of the user


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "files"), [(("--device", "cpu"), 64), (("--replicas", "1"), 1024)]
)
def test_files_of_the_user_hide_nothing_and_no_home_is_wanted(
    directory: Path, options: tuple[str, ...], files: int
):
    """Neither here nor in replicas. A scan on the CPU is one process, and opens few files."""
    for name in ("torch", "numpy"):
        (directory / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    limited = ("sh", "-c", f'ulimit -n {files} && exec "$@"', "sh")
    words = ("scan", "own.toml", *options)
    done = headcount(directory, *words, through=limited, HOME="/nonexistent")
    assert (done.returncode, "rror" in done.stderr) == (0, False), done.stderr
    assert "log level" not in done.stderr
    assert len(list(directory.glob("runs/run_id=*/commits/*.json"))) == 2


# No end


WAITED_FOR = {
    "headcount.jobs.cluster.ray_cluster.CONNECT_SECONDS": 0.3,
    "headcount.jobs.cluster.ray_cluster.JOIN_SECONDS": 0.3,
    "headcount.jobs.cluster.submission.CONNECT_SECONDS": 0.3,
    "headcount.schemas.object_stores.PROBE_SECONDS": 0.3,
    "headcount.schemas.object_stores.PROBING_SECONDS": 0.5,
}
"""What ends the waiting, and seconds that a test can wait."""


def test_what_does_not_answer_is_one_line(
    command: Command, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(directory)
    for path, seconds in WAITED_FOR.items():
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) <= 30, path
        monkeypatch.setattr(path, seconds)
    # It takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{silent}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        # A command, and how it is refused.
        for words, start in (
            (f"scan own.toml --address {silent}",
             f"{silent}: no head of a Ray cluster answers there (it takes connections, and has "),
            (f"list --address http://{silent}",
             f"http://{silent}: no Ray cluster answers there (nothing said"),
            ("list s3://bucket/runs",
             f"s3://bucket: the store at http://{silent} does not answer (timed out)"),
        ):  # fmt: skip
            code, lines = command(*words.split())
            assert code == 2, words
            assert lines[-1].startswith(f"error: {start}"), words


@pytest.mark.long
def test_ray_without_a_network_is_one_line(directory: Path):
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("no network can be taken away here")
    # A minute is a long time for a test.
    soon = f"import {ray_cluster.__name__} as ray; ray.START_SECONDS = 10.0"
    program = ("-c", f"{soon}\nfrom headcount.command_line import main\nmain()")
    words = ("scan", "own.toml", "--replicas", "1")
    done = headcount(directory, *words, through=("unshare", "--net"), program=program)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: Ray on this machine did not start in 10")
    assert ray_cluster.START_SECONDS <= 60


# No traces


@pytest.mark.long
def test_a_user_whom_the_machine_does_not_know_asks_and_is_answered(runs: Path):
    """As in a container: neither HOME nor an entry in passwd."""
    as_nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "runs"
        shutil.copytree(runs, place)
        os.chmod(folder, 0o755)
        can_start = [*as_nobody, sys.executable, "-c", f"import os; os.listdir({str(ROOT)!r})"]
        is_there = shutil.which("setpriv") is not None
        if not is_there or subprocess.run(can_start, capture_output=True).returncode:
            pytest.skip("no other user can start Python here")
        words = ("query", place, "SELECT count(*) FROM heads", "--format", "csv")
        done = headcount(place, *words, through=as_nobody, HOME=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.splitlines()[1]) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "ellipsis"),
    [({"PYTHONIOENCODING": "ascii"}, "\\u2026"), ({"LC_ALL": "C", "HOME": None}, "…")],
)
def test_an_environment_without_the_usual_is_no_error(
    directory: Path, variables: dict[str, Any], ellipsis: str
):
    done = headcount(directory, "list", "absent", **variables)
    assert done.stderr == (
        f"error: {directory / 'absent'}: no run here; expected a run directory, or a directory "
        f"that holds run_id={ellipsis} directories\n"
    )


def test_a_mistake_of_ours_is_one_line_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit), endings.ended_in_lines():
        raise KeyError("a key")
    (file,) = tmp_path.glob("headcount-error-*.txt")
    assert capsys.readouterr().err == (
        f"error: this is a mistake in headcount (KeyError: 'a key'); its stack trace is in {file}\n"
    )
    assert "Traceback" in file.read_text()
    monkeypatch.setenv("HEADCOUNT_DEBUG", "1")
    with pytest.raises(KeyError), endings.ended_in_lines():
        raise KeyError("a key")


# Interrupts


@pytest.mark.parametrize(("words", "number", "line"), [
    ("scan a.toml", signal.SIGINT, "stopped; the same command continues the scan where it stopped"),
    ("scan a.toml --new", signal.SIGTERM,
     "stopped; the same command without --new continues the scan where it stopped"),
    ("query runs heads", signal.SIGHUP, "stopped"),
])  # fmt: skip
def test_a_command_that_is_stopped_says_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: str, number: int, line: str,
):  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["headcount", *words.split()])
    monkeypatch.setattr(endings._ProcessState, "has_children", False)
    with pytest.raises(SystemExit) as end, endings.ended_in_lines():
        raise KeyboardInterrupt if number == signal.SIGINT else endings.Stopped(number)
    assert (end.value.code, capsys.readouterr().err) == (128 + number, f"{line}\n")


def test_a_command_ends_although_a_library_waits_at_its_end():
    program = """
import atexit, time
from headcount.jobs import endings
atexit.register(time.sleep, 60)
endings.CLEANING_SECONDS = 0.5
with endings.ended_in_lines():
    raise endings.HeadcountError("it ends")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (2, "error: it ends\n")


def errors_of_stopped(process: subprocess.Popen[str], number: signal.Signals, stderr: Path) -> str:
    """What a process printed that has got a signal. If Python ignored that, it gets another."""
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        assert IGNORED_BY_PYTHON.match(stderr.read_text()), stderr.read_text()
        process.send_signal(number)
        process.wait(timeout=60)
    return IGNORED_BY_PYTHON.sub("", stderr.read_text())


def died_before_our_first_lines(errors: str) -> bool:
    """Whether Python was interrupted before the front door had said what an interrupt does."""
    if "init_import_site" in errors:
        return True
    front_door = ROOT / "headcount" / "command_line.py"
    lines = front_door.read_text(encoding="utf-8").splitlines()
    handler_is_set = next(n for n, line in enumerate(lines, 1) if "signal(SIGINT, _leave" in line)
    frames = re.findall(r'File "(.+?)", line (\d+)', errors)
    in_front_door = [int(number) for file, number in frames if file == str(front_door)]
    return bool(frames) and all(number < handler_is_set for number in in_front_door)


IGNORED_BY_PYTHON = re.compile(
    r"Exception ignored in: <function _get_module_lock\S* at \w+>\nTraceback .*\n"
    r'  File "<frozen importlib._bootstrap>", line \d+, in cb\nKeyboardInterrupt: ?\n'
)
"""What Python prints if an interrupt comes while it lets go of an import's lock. Nobody can know of
it before the front door's first lines, for example in Python's own start."""


def test_nothing_is_imported_before_the_front_door_says_what_an_interrupt_does():
    program = (
        "import sys; before = {*sys.modules}; import headcount.command_line;"
        "print(sorted({*sys.modules} - before - {'__future__'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "['headcount', 'headcount.command_line']\n"


@pytest.mark.long
def test_an_interrupt_is_quiet_at_any_moment(directory: Path):
    command = [*DIES_WITH_ITS_PARENT, sys.executable, *HEADCOUNT, "scan", "own.toml"]
    command += ["--replicas", "0", "--set", "sequences=1000000"]
    started_at = time.monotonic()
    interrupt, end = signal.SIGINT, signal.SIGTERM
    moments = ((0.06, interrupt), (0.3, end), (2.0, interrupt), (2.0, end))
    options: dict[str, Any] = {"cwd": directory, "text": True}
    options |= {"env": os.environ | {"PYTHONPATH": str(ROOT)}}
    processes: list[tuple[subprocess.Popen[str], Path]] = []
    for case, _ in enumerate(moments):
        stderr = directory / f"stderr-{case}"
        with stderr.open("w") as file:
            streams = {"stdout": subprocess.DEVNULL, "stderr": file}
            words = [*command, "--set", f"out=runs-{case}"]
            processes.append((subprocess.Popen(words, **options, **streams), stderr))
    for (process, _), (seconds, number) in zip(processes, moments, strict=True):
        time.sleep(max(0, started_at + seconds - time.monotonic()))
        process.send_signal(number)
    for (process, stderr), (_, number) in zip(processes, moments, strict=True):
        errors = errors_of_stopped(process, number, stderr)
        if died_before_our_first_lines(errors):
            continue
        # A process that has no handler yet dies of the signal itself, which is as quiet.
        assert process.returncode in (128 + number, -number)
        assert "Traceback" not in errors
        assert len([line for line in errors.splitlines() if "tokens" not in line]) <= 1
        if process.returncode > 0:
            assert errors.splitlines()[-1].startswith("stopped")


# The front door


def test_help_is_found_by_letter_and_a_run_by_name(runs: Path, monkeypatch: pytest.MonkeyPatch):
    assert printed("scan", "-h") == printed("scan", "--help")
    assert "headcount scan" in printed("scan", "-h") or "scan [OPTIONS]" in printed("scan", "-h")
    monkeypatch.chdir(runs.parent)
    for run in ("toy", "toy-1a2b3c4d", "runs/run_id=toy-1a2b3c4d"):
        assert "every shard is committed" in printed("status", run)


def test_watching_ends_with_the_run(runs: Path):
    our_end, its_end = pty.openpty()
    with open(its_end, "w") as terminal:
        run = runs / "run_id=toy-1a2b3c4d"
        assert ended("status", run, "--watch", stdout_to=terminal) == (0, "", "")
    shown, line = b"", b"complete  every shard is committed"
    # A terminal hands over what it has in pieces.
    while line not in shown and select.select([our_end], [], [], 10)[0]:
        shown += os.read(our_end, 10_000)
    assert line in shown
    os.close(our_end)


def test_a_command_that_reads_runs_says_so_on_a_terminal(runs: Path, tmp_path: Path):
    for words in (("report", runs, "-o", tmp_path / "report.html"), ("text", runs, "9")):
        our_end, its_end = pty.openpty()
        shown: list[bytes] = []
        # The terminal takes only some kilobytes that nobody has read.
        reader = threading.Thread(target=read_terminal, args=(our_end, shown))
        with open(its_end, "w") as terminal:
            reader.start()
            ended(*words, stderr_to=terminal)
        reader.join()
        os.close(our_end)
        assert b"reading the run" in b"".join(shown), words


def read_terminal(terminal: int, received: list[bytes]) -> None:
    """Read what is written to a terminal until its other end is closed."""
    # Linux says that by an error.
    with contextlib.suppress(OSError):
        while some := os.read(terminal, 10_000):
            received.append(some)
