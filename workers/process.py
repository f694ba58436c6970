"""What is set once for a whole process, by the command or the actor that owns it."""

from __future__ import annotations

import csv
import ctypes
import logging
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Numbers of glibc's options (malloc.h)."""

LARGEST = 32 << 20
"""Bytes up to which memory comes from the heap: the most that glibc takes for `MMAP_THRESHOLD`."""

CSV_FIELD = 1 << 30
"""Characters of a field of a CSV file: a text may be longer than the 128 KiB that Python allows."""


def prepare_process(threads: int | None = None) -> None:
    """Set up a process that describes, loads or runs models; nothing else in the house does.

    `threads` is how many its products take, by default one for each core. PyTorch counts them for
    the thread that calls this.
    """
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    csv.field_size_limit(CSV_FIELD)
    keep_freed_memory()
    quieten_libraries()


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: given back to the kernel, every batch's tensors are zeroed and
    mapped page by page anew.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none.
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, LARGEST)
            mallopt(TRIM_THRESHOLD, (1 << 31) - 1)


def quieten_libraries() -> None:
    """Keep the libraries' bars and notices off the terminal; what matters is checked here and
    raised.
    """
    from transformers.utils import logging as messages

    messages.set_verbosity_error()
    messages.disable_progress_bar()
    logging.getLogger("transformer_lens").setLevel(logging.ERROR)
