"""The process that workers of Ray are forked from (`tests/tools/workers.py`).

It has imported everything but Ray, which reads its settings while it is imported: which job a
worker belongs to is one of them. So this module does not import Ray before a fork.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.tools.processes import end_with_parent, end_with_the_tests


def serve(listener: socket.socket) -> None:
    """Fork a worker for every request of `forked_worker.py`."""
    end_with_the_tests()
    assert "ray" not in sys.modules
    # Modules of tests import it.
    import_module("pytest")
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
            for descriptor in outputs:
                os.close(descriptor)


def _become_worker(request: dict[str, Any], outputs: list[int]) -> None:
    """Be the process that Ray has asked for, to its end."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in enumerate(outputs, start=1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    # Python would import it when it starts; a forked process has started.
    if "FAULTS" in os.environ:
        import_module("tests.faults.sitecustomize")
    # As Ray's `setup_worker.py` does it, for an environment that only sets variables.
    setup_worker = import_module("ray._private.workers.setup_worker")
    options, sys.argv = setup_worker.parser.parse_known_args(request["words"])
    context = json.loads(options.serialized_runtime_env_context or "{}")
    assert not context.get("command_prefix")
    import_module("ray._private.utils").update_envs(context.get("env_vars", {}))
    # The first word is Ray's program of a worker.
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
