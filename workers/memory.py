"""Memory in bytes, cores and GPUs of this machine, the same on every system.

The operating system's own peak is not used. `ru_maxrss` is in KiB on Linux and in bytes on macOS,
and it begins with the peak of the process that started this one.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

import psutil
import torch

SECONDS_BETWEEN_LOOKS = 0.005
"""Seconds between two looks at the memory in use; a forward pass holds its tensors for longer."""


def total_memory() -> int:
    """Bytes of main memory."""
    return psutil.virtual_memory().total


def available_cores() -> int:
    """Cores that this process may use; all of them if the system does not say."""
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
        """Peak of main memory."""
        self.gpu = 0
        """Peak of the GPU's memory, by tensors; 0 on a CPU."""
        self._process = psutil.Process()
        self._has_ended = threading.Event()
        # A daemon, so that an error in the block never keeps the process alive.
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        """Begin to watch."""
        # PyTorch itself keeps the peak of the GPU, which starts anew here.
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
        self._has_ended.set()
        self._watcher.join()
        self._look()  # A block may be shorter than the time between two looks.
        if self.device != "cpu":
            self.gpu = torch.cuda.max_memory_allocated()

    def _watch(self) -> None:
        while not self._has_ended.wait(SECONDS_BETWEEN_LOOKS):
            self._look()

    def _look(self) -> None:
        self.main = max(self.main, self._process.memory_info().rss)
