"""Keep the memory that one forward pass frees for the next one."""

from __future__ import annotations

import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Numbers of glibc's options (malloc.h)."""

LARGEST = 32 << 20
"""Bytes up to which memory comes from the heap: the most that glibc takes for `MMAP_THRESHOLD`."""


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: given back to the kernel, every batch's tensors are zeroed and
    mapped page by page anew.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none.
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, LARGEST)
            mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
