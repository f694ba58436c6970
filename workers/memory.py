"""Memory in bytes, cores and GPUs of this machine.

The peak is watched here: `ru_maxrss` is in KiB or bytes, by system, and begins with the peak of the
process that started this one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from headcount.schemas.repeating import repeated

SECONDS_BETWEEN_LOOKS = 0.005  # at the memory in use; a pass holds tensors for longer


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


@dataclass
class PeakMemory:
    """The most memory that this process held while a block ran, in bytes."""

    main: int = 0  # peak of main memory
    gpu: int = 0  # peak of the GPU's memory, by tensors; 0 on a CPU


@contextmanager
def peak_memory(device: str) -> Iterator[PeakMemory]:
    """Within it, the memory that this process holds is watched."""
    peak, process = PeakMemory(), psutil.Process()

    def look() -> None:
        peak.main = max(peak.main, process.memory_info().rss)

    # PyTorch itself keeps the peak of the GPU, which starts anew here.
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    try:
        with repeated(look, SECONDS_BETWEEN_LOOKS):
            yield peak
    finally:
        # Once more, because a block may be shorter than the time between two looks.
        look()
        if device != "cpu":
            peak.gpu = torch.cuda.max_memory_allocated()
