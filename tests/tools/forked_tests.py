"""Processes that test at once: forks of one process that has imported what is large.

Each of them would import three thousand modules, and so would the process that its commands are
forked from. With `pytest -n 3` that is a third of what all tests take of the processors.
"""

import gc
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

# Before all libraries that have something to do at the end.
from tests.tools import end_at_once  # noqa: F401
from tests.tools.forked_worker import SERVER
from tests.tools.processes import PRELOADED, become_what_is_asked, end_with_parent

CAN_FORK = sys.platform.startswith("linux") and sys.version_info < (3, 14)
"""Later versions want a key from whoever asks for a command's process."""

IMPORTED = [
    *PRELOADED,
    "boto3",
    "headcount.exports",
    "headcount.reproduce",
    "moto",
    "polars",
    "selenium.webdriver",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
    "triton",
    "werkzeug",
]
"""Not Ray and nothing of Hugging Face: they read the environment while they are imported."""


class Tests:
    """The process that those which test are forked from."""

    def __init__(self) -> None:
        """Start it. Whoever asks for a fork waits until everything is imported."""
        self._directory = tempfile.TemporaryDirectory(prefix="hc-", ignore_cleanup_errors=True)
        path = f"{self._directory.name}/tests"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            command = [sys.executable, "-m", __name__, str(listener.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        os.environ[SERVER] = path

    @property
    def python(self) -> str:
        """What is started instead of Python, as a command line."""
        return shlex.join([sys.executable, "-S", str(Path(__file__).with_name("forked_worker.py"))])

    def end(self) -> None:
        """End the process and all its forks."""
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


def main() -> None:
    """Import, and fork for every request of `forked_worker.py`."""
    end_with_parent()
    listener = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    gc.enable()
    become_what_is_asked(listener)
    _fork_command_server()
    # It was asked for as `python -u -c PROGRAM`, with which execnet begins.
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    exec(sys.argv[-1], vars(main_module))
    sys.exit()


def _fork_command_server() -> None:
    """Fork the process that commands of tests are forked from (`processes.fork_server`)."""
    resource_tracker.ensure_running()
    address = f"{os.environ[SERVER]}-{os.getpid()}"
    alive, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(held)
            # The one that tests talks through these.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            try:
                forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = held
    server._forkserver_pid = pid


if __name__ == "__main__":
    main()
