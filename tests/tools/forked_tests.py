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
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

from headcount.workers.process import prepare_process

# Before all libraries that have something to do at the end.
from tests.tools import end_at_once  # noqa: F401
from tests.tools.forked_worker import SERVER
from tests.tools.processes import (
    COMMAND_SERVERS,
    PRELOADED,
    CommandServer,
    become_what_is_asked,
    end_with_parent,
)

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
"""Not Ray and nothing of Hugging Face: they read the environment while they are imported, and each
command of a test may have one of its own.
"""

IMPORTED_BY_TESTS = [
    "datasets",
    "peft",
    "transformer_lens",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
"""What processes that test have imported as well. They have one environment."""


class Tests:
    """The process that those which test are forked from."""

    def __init__(self, number: int) -> None:
        """Start it, for so many. Whoever asks for a fork waits until everything is imported."""
        self._directory = tempfile.TemporaryDirectory(prefix="hc-", ignore_cleanup_errors=True)
        path = f"{self._directory.name}/tests"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            command = [sys.executable, "-m", __name__, str(listener.fileno()), str(number)]
            os.environ[SERVER] = path
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()])

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
    for worker in range(int(sys.argv[2])):
        _fork_command_server(f"gw{worker}")
    prepare_process()
    for name in IMPORTED_BY_TESTS:
        import_module(name)
    gc.enable()
    become_what_is_asked(listener)
    # It was asked for as `python -u -c PROGRAM`, with which execnet begins.
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    exec(sys.argv[-1], vars(main_module))
    sys.exit()


def _fork_command_server(worker: str) -> None:
    """Fork what a worker's commands are forked from (`processes.fork_server`)."""
    address = f"{os.environ[SERVER]}-{worker}"
    alive, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            gc.freeze()
            gc.enable()
            try:
                forkserver.main(listener.detach(), alive, [])
            finally:
                os._exit(0)
    COMMAND_SERVERS[worker] = CommandServer(address, held, pid)


if __name__ == "__main__":
    main()
