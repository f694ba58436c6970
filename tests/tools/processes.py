"""Processes that tests start: how they are started, found and ended."""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil

from headcount.jobs import endings

MARK = "HEADCOUNT_TEST"
"""A variable that marks processes: children, those of Ray too, inherit it."""

DIES_WITH_ITS_PARENT = (
    ("setpriv", "--pdeathsig", "KILL")
    if sys.platform.startswith("linux") and shutil.which("setpriv")
    else ()
)
"""The beginning of a command that the kernel kills if the test that started it is killed.

Ray starts its own processes in the same way, so those of a driver end with the driver.
"""


PRELOADED = [
    # Ray imports these three, and pyarrow the fourth.
    "aiohttp",
    "jsonschema",
    "requests",
    "pandas",
    "headcount",
    "headcount.jobs.commands.cluster",
    "headcount.jobs.commands.runs",
    "headcount.jobs.plan.plan",
    "headcount.jobs.commands.scan",
    "headcount.jobs.upkeep.status",
    "headcount.queries.ask.asking",
    "headcount.queries.ask.formats",
    "tests.tools.processes",
    "tests.toys.toy_replica",
]
"""What commands have imported when they start: all that is large but Ray, which reads RAY_AUTH_MODE
while it is imported and never again, and but the models of transformers, for which few commands of
tests have a use.
"""


class CommandServer(NamedTuple):
    """A process that commands are forked from: where it listens, what it lives for, its number."""

    address: str
    alive: int
    pid: int


COMMAND_SERVERS: dict[str, CommandServer] = {}
"""By worker of pytest, if those are forks of one process (`tests/tools/forked_tests.py`)."""


def libraries_alone(venv: Path) -> Path:
    """Make a virtual environment with this one's libraries and without this project."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    # A .pth file inside a directory that a .pth file names is not read, so the editable install of
    # this project stays out.
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "libraries.pth").write_text("\n".join(sorted(libraries)))
    return venv


def free_port() -> int:
    """A port at which nobody listens.

    Systems hand out ports above these, and Ray's workers take ports below.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port in a hundred")


@contextlib.contextmanager
def kept_endings() -> Iterator[None]:
    """Keep how this process ends at a signal, whatever commands and Ray do to that meanwhile."""
    handlers = {number: signal.getsignal(number) for number in endings.STOPPING}
    state = {k: v for k, v in vars(endings._ProcessState).items() if not k.startswith("_")}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in state.items():
            setattr(endings._ProcessState, name, value)


def kill(mark: str) -> None:
    """End all processes that have MARK=mark in their environment. A driver that was killed may
    leave its Ray behind.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """What is said on the way, and then the answer."""
        return self.stderr + self.stdout


class Command:
    """`headcount …` in a process of its own, which is forked from one that has imported everything.

    Starting Python and importing torch takes longer than most commands. Tests of what happens while
    Python starts, such as of files that hide modules, need a real start.
    """

    def __init__(
        self,
        *words: str | Path,
        environment: Mapping[str, str],
        directory: Path,
        constants: Mapping[str, float] = MappingProxyType({}),
        main: str = "headcount.command_line.main",
        stdout: Path | None = None,
    ) -> None:
        """`constants` are set first, by `module.NAME`: seconds that no test should wait.

        `main` is the function to run, by `module.name`. `stdout` is a device or a pipe that is
        there, if a test wants to see what happens to it.
        """
        self._output = Path(tempfile.mkdtemp(prefix="headcount-command-"))
        # A process that is killed at once opens neither.
        for name in ("stdout", "stderr"):
            (self._output / name).touch()
        self._stdout = stdout or self._output / "stdout"
        outputs = (self._stdout, self._output / "stderr")
        place = (dict(environment), directory, outputs)
        self._process = start_fork(_run_command, main, [*map(str, words)], *place, dict(constants))

    @property
    def pid(self) -> int:
        """The number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def ended(self, timeout: float = 120) -> Ended:
        """Wait until the command has ended. After the timeout it is killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        written = self._stdout.parent == self._output
        stdout = self._stdout.read_text() if written else ""
        stderr = (self._output / "stderr").read_text()
        shutil.rmtree(self._output)
        return Ended(code, stdout, stderr)


def start_fork(function: Callable[..., None], *arguments: object) -> ForkServerProcess:
    """A process that runs a function, forked from one that has imported everything."""
    process = fork_server().Process(target=function, args=arguments)
    with warnings.catch_warnings():
        # A helper process of Python's that was killed beside a test is started again.
        warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)
        process.start()
    return process


@cache
def fork_server() -> ForkServerContext:
    """What commands and workers are forked from: a process that ends when this one has ended."""
    context = multiprocessing.get_context("forkserver")
    if forked := COMMAND_SERVERS.get(os.environ.get("PYTEST_XDIST_WORKER", "")):
        server: Any = forkserver._forkserver
        server._forkserver_address = forked.address
        server._forkserver_alive_fd = forked.alive
        server._forkserver_pid = forked.pid
        # It runs, but is no child of this process, which Python would ask the kernel for.
        server.ensure_running = lambda: None
    context.set_forkserver_preload(PRELOADED)
    return context


def start_fork_server() -> None:
    """Start it before this process's environment changes: it would keep the changes for good."""
    fork_server()
    # The module has a name for it, which would ask for one of its own.
    forkserver._forkserver.ensure_running()  # pyright: ignore[reportAttributeAccessIssue]


def _run_command(
    main: str,
    words: list[str],
    environment: dict[str, str],
    directory: Path,
    outputs: tuple[Path, Path],
    constants: dict[str, float],
) -> None:
    """Become `headcount …`. `outputs` are its stdout and its stderr."""
    end_with_the_tests()
    descriptors = [os.open(path, os.O_WRONLY | os.O_TRUNC) for path in outputs]
    stdin = os.open(os.devnull, os.O_RDONLY)
    _become(["headcount", *words], environment, str(directory), [stdin, *descriptors])
    # The old one believes that it can be told to go back, which is not true of a pipe.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for path, seconds in constants.items():
        module_name, _, name = path.rpartition(".")
        module = import_module(module_name)
        assert hasattr(module, name), path
        setattr(module, name, seconds)
    module_name, _, name = main.rpartition(".")
    getattr(import_module(module_name), name)()


def _become(
    words: list[str], environment: dict[str, str], directory: str, descriptors: list[int]
) -> None:
    """Take over a command line, an environment, a directory, and stdin, stdout and stderr."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = words
    # Python would import it when it starts; a forked process has started.
    if "FAULTS" in os.environ:
        import_module("tests.faults.sitecustomize")


def become_what_is_asked(listener: socket.socket) -> None:
    """Fork for every request of `forked_worker.py`; return in each fork, as what it asked for."""
    # Nobody asks how a fork ended: the kernel forgets it at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        with connection:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as file:
                words, environment, directory = json.load(file)
            if os.fork() == 0:
                break
        for descriptor in descriptors:
            os.close(descriptor)
    listener.close()
    connection.close()
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _become(words, environment, directory, descriptors)


def fork_workers(listener: socket.socket) -> None:
    """Fork a worker of Ray for every request of `forked_worker.py`.

    This process has imported everything but Ray, which reads its settings while it is imported:
    which job a worker belongs to is one of them.
    """
    end_with_the_tests()
    assert "ray" not in sys.modules
    # Modules of tests import it.
    import_module("pytest")
    become_what_is_asked(listener)
    # As Ray's `setup_worker.py` does it, for an environment that only sets variables.
    setup_worker = import_module("ray._private.workers.setup_worker")
    options, sys.argv = setup_worker.parser.parse_known_args(sys.argv)
    context = json.loads(options.serialized_runtime_env_context or "{}")
    assert not context.get("command_prefix")
    import_module("ray._private.utils").update_envs(context.get("env_vars", {}))
    # The first word is Ray's program of a worker.
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def end_with_the_tests() -> None:
    """Let the kernel kill this process, which `fork_server` has forked, when the tests have ended.

    The process that it is forked from ends when nobody holds the other end of a pipe any more. It
    hands that end to its children, too, so that a child would keep it alive.
    """
    alive = forkserver._forkserver._forkserver_alive_fd  # pyright: ignore[reportAttributeAccessIssue]
    os.close(alive)
    end_with_parent()


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it has ended."""
    if sys.platform.startswith("linux"):
        death_signal_option = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal_option, signal.SIGKILL)
