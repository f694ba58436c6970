"""Workers of Ray that start at once: each is a fork of a process that has imported everything.

A worker takes two to three seconds of a processor to start, most of them for torch. Tests that end
many replicas share that work. Everything else is Ray's: who starts a worker, when, and what runs in
it. The workers of `test_remote.py` and `test_cluster.py` are started as users start them.

`python -m tests.workers` is that process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.utils import update_envs
from ray._private.workers import setup_worker

from tests.forked_worker import SERVER

ROOT = Path(__file__).parent.parent

FORKED = {"setup_worker_path": str(Path(__file__).with_name("forked_worker.py"))}
"""Options of a node of `ray.cluster_utils.Cluster` whose workers are forks."""

ROOM_FOR_A_TITLE = "-" * 100
"""A worker writes its name over its command line. What is longer would end in the environment."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Provide the process that workers of nodes with the options FORKED are forked from."""
    with tempfile.TemporaryDirectory(prefix="hc-") as directory:
        path = f"{directory}/workers"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.workers", str(listener.fileno()), ROOM_FOR_A_TITLE],
                cwd=ROOT,
                pass_fds=[listener.fileno()],
                env=os.environ | {SERVER: path},
            )
        os.environ[SERVER] = path
        try:
            yield
        finally:
            del os.environ[SERVER]
            server.kill()
            server.wait()


def _serve(listener: socket.socket) -> None:
    """Fork a worker for every request."""
    # Nobody asks how a worker ended: the kernel forgets it at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        with connection:
            _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
            with connection.makefile("rb") as file:
                request = json.load(file)
            if os.fork() == 0:
                listener.close()
                connection.close()
                _become_worker(request, outputs)
                return
            for descriptor in outputs:
                os.close(descriptor)


def _become_worker(request: dict[str, Any], outputs: list[int]) -> None:
    """Be the process that Ray has asked for."""
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    # As `setup_worker.py` does it, for an environment that only sets variables.
    options, sys.argv = setup_worker.parser.parse_known_args(request["words"])
    environment = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}")
    assert not environment.command_prefix
    update_envs(environment.env_vars)
    # The first word is Ray's program of a worker.
    sys.path[0] = str(Path(sys.argv[0]).parent)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it has ended."""
    if sys.platform.startswith("linux"):
        death_signal_option = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(death_signal_option, signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent()
    for name in (
        "ray._private.workers.default_worker",
        "jobs.replica_actor",
        "tests.preloaded",
        "tests.toy_replica",
    ):
        import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_path(sys.argv[0], run_name="__main__")
