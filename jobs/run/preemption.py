"""Machines that are taken back: how a replica hears of it, leaves in order, and how nodes vanish.

Slurm, Kubernetes and clouds take a machine back with a notice of some seconds, or with none. A
replica hears two kinds of notice: SIGTERM to its process, and Ray's draining of its node, which the
driver passes on. It then begins no further shard, finishes the one that it measures, and exits.
Ray starts it again on a node that stays.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import ray

from headcount.jobs.cluster.ray_cluster import accepts_connections

LEAVE_SECONDS = 25.0
"""A replica that was told to leave exits after this time, whatever it is doing. Google Cloud and
Slurm give 30 s.
"""

ANSWER_SECONDS = 1.0
"""How long a leaving replica stays when it has nothing more to do: for its answers to be sent, and
for calls that were on their way when it was told.
"""

PROBES = 256  # nodes that are probed at a time


class LeaveNotice:
    """Whether a replica's process was told to leave; ends the process when it was.

    It is made in the main thread, before the model is loaded.
    """

    def __init__(self) -> None:
        self.is_loaded = False  # while it is loading there is nothing to finish: it exits at once
        self._reason = ""
        self._told = threading.Event()
        self._calls = 0
        self._waits = 0  # how often somebody has begun to wait
        self._lock = threading.Lock()
        # Ray's main thread waits outside of Python, where no handler of Python's runs. But every
        # signal is also written to this pipe at once, by the handler in C.
        reader, writer = os.pipe()
        # A handler must never wait, not even for a full pipe.
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Ray's own handler would end the process in the middle of its shards.
        signal.signal(signal.SIGTERM, lambda number, frame: None)

        def listen() -> None:
            while signal.SIGTERM not in os.read(reader, 64):
                pass
            self.tell("SIGTERM")

        threading.Thread(target=listen, daemon=True).start()

    @property
    def came(self) -> bool:
        """Whether the process was told to leave."""
        return self._told.is_set()

    def wait(self) -> str:
        """Wait until the process is told to leave, or somebody else waits; returns why."""
        # A driver that lost its connection asks again. Its first call must not keep a thread.
        self._waits += 1
        wait = self._waits
        while not self._told.wait(timeout=1.0):
            if wait != self._waits:
                return ""
        return self._reason

    def tell(self, reason: str) -> None:
        """Tell the process to leave. The first reason counts."""
        with self._lock:
            if self._told.is_set():
                return
            if not self.is_loaded:
                _exit()
            self._reason = reason
            self._told.set()
        threading.Thread(target=self._exit_in_order, daemon=True).start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call, which the process tries to finish before it exits."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    def _exit_in_order(self) -> None:
        deadline = time.monotonic() + LEAVE_SECONDS
        # Calls that were on their way must arrive, to be given back.
        time.sleep(ANSWER_SECONDS)
        while self._calls and time.monotonic() < deadline:
            time.sleep(0.05)
        # A call has ended before Ray has sent its answer.
        time.sleep(ANSWER_SECONDS)
        _exit()


def _exit() -> None:
    # Not `ray.actor.exit_actor`: Ray does not start an actor again that left by itself.
    os._exit(128 + signal.SIGTERM)


def gone_nodes(node_ids: set[str]) -> set[str]:
    """Which of some nodes are dead: they take no connections 15 s before Ray's head notices."""
    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in node_ids]
    hosts = [node["NodeManagerAddress"] for node in alive]
    ports = [node["NodeManagerPort"] for node in alive]
    with ThreadPoolExecutor(PROBES) as pool:
        answers = pool.map(accepts_connections, hosts, ports)
        answering = {
            node["NodeID"] for node, is_there in zip(alive, answers, strict=True) if is_there
        }
    return node_ids - answering
