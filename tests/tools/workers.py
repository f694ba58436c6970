"""Clusters whose workers start at once: each is a fork of a process that has imported everything.

A worker takes two to three seconds of a processor to start, most of them for torch. Tests that end
many replicas share that work. Everything else is Ray's: who starts a worker, when, and what runs in
it. The workers of `test_remote.py` and `test_cluster.py` are started as users start them.
"""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from headcount.jobs.cluster.ray_cluster import SYSTEM_CONFIG
from headcount.jobs.endings import listen_to_signals
from tests.tools.forked_worker import SERVER
from tests.tools.processes import fork_workers, kept_endings, start_fork

NODE_OPTIONS: dict[str, Any] = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,  # It would start machines that are missing. Here there are none to start.
    "object_store_memory": 80 << 20,
    "setup_worker_path": str(Path(__file__).with_name("forked_worker.py")),
}
"""Options of a node of `ray.cluster_utils.Cluster` whose workers are forks, without processes that
no test needs.
"""


WORKER_PARENTS: list[psutil.Process] = []
"""The processes whose children are the workers of clusters that are there now."""


def start_cluster(**options: Any) -> Cluster:
    """A cluster of one node with these options."""
    head_options = NODE_OPTIONS | {"_system_config": SYSTEM_CONFIG} | options
    return Cluster(initialize_head=True, head_node_args=head_options)


@contextmanager
def joined_cluster(**options: Any) -> Iterator[Cluster]:
    """Start a cluster of one node with these options, and connect this process to it."""
    with kept_endings(), forked_workers():
        cluster = start_cluster(**options)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            # Ray has taken SIGTERM for itself.
            listen_to_signals()
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def forked_workers() -> Iterator[psutil.Process]:
    """Provide the process that workers of nodes of NODE_OPTIONS are children of."""
    with tempfile.TemporaryDirectory(prefix="hc-") as directory:
        path = f"{directory}/workers"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            server = start_fork(fork_workers, listener)
        os.environ[SERVER] = path
        parent = psutil.Process(server.pid)
        WORKER_PARENTS.append(parent)
        try:
            yield parent
        finally:
            WORKER_PARENTS.remove(parent)
            del os.environ[SERVER]
            server.kill()
            server.join()
