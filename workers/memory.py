"""Memory, cores and GPUs of this machine, in bytes and whole ones, whatever the system.

The operating system's own counters are not used: `ru_maxrss` is in KiB on Linux and in bytes on
macOS, and begins with the peak of the process that started this one.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

import psutil
import torch

INTERVAL = 0.005
"""Seconds between two looks at the memory in use; a forward pass holds its tensors for longer."""


def total_memory() -> int:
    """Bytes of main memory."""
    return psutil.virtual_memory().total


def available_cores() -> int:
    """Cores that this process may use; where the system does not say, all of them."""
    process = psutil.Process()
    # macOS cannot bind a process to cores.
    if hasattr(process, "cpu_affinity"):
        return len(process.cpu_affinity() or ())
    return os.cpu_count() or 1


def available_gpus() -> int:
    """GPUs that this process may use."""
    return torch.cuda.device_count()


class PeakMemory:
    """The most memory that this process holds while a block runs, in bytes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.main = 0
        """Of main memory."""
        self.gpu = 0
        """Of the GPU's, by tensors; 0 on a CPU."""
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        """Begin to watch."""
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End watching."""
        self._ended.set()
        self._watcher.join()
        self._look()
        if self.device != "cpu":
            self.gpu = torch.cuda.max_memory_allocated()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        self.main = max(self.main, self._process.memory_info().rss)
