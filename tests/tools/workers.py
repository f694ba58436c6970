"""Clusters whose workers start at once: each is a fork of a process that has imported everything.

A worker takes two to three seconds of a processor to start, most of them for torch. Tests that end
many replicas share that work. Everything else is Ray's: who starts a worker, when, and what runs in
it. The workers of `test_remote.py`, `test_cluster.py` and `test_runs.py` are started as users start
them.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from headcount.jobs.cluster.ray_cluster import SYSTEM_CONFIG
from headcount.jobs.endings import listen_to_signals
from tests.tools.forked_worker import SERVER
from tests.tools.processes import start_fork
from tests.tools.worker_server import serve

FORKED = {"setup_worker_path": str(Path(__file__).with_name("forked_worker.py"))}
"""Options of a node of `ray.cluster_utils.Cluster` whose workers are forks."""

NODE_OPTIONS: dict[str, Any] = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,  # It would start machines that are missing. Here there are none to start.
    "object_store_memory": 80 << 20,
}
"""Options of a node of `ray.cluster_utils.Cluster`, without processes that no test needs."""


@contextmanager
def joined_cluster(**options: Any) -> Iterator[Cluster]:
    """Connect this process to a cluster of one node with these options. Its workers are forks."""
    with forked_workers():
        head_options = NODE_OPTIONS | FORKED | {"_system_config": SYSTEM_CONFIG} | options
        cluster = Cluster(initialize_head=True, head_node_args=head_options)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            # Ray has taken SIGTERM for itself.
            listen_to_signals()
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def forked_workers() -> Iterator[None]:
    """Provide the process that workers of nodes with the options FORKED are forked from."""
    with tempfile.TemporaryDirectory(prefix="hc-") as directory:
        path = f"{directory}/workers"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            server = start_fork(serve, listener)
        os.environ[SERVER] = path
        try:
            yield
        finally:
            del os.environ[SERVER]
            server.kill()
            server.join()
