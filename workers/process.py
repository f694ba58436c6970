"""What is set once for a whole process, by the command or the actor that owns it."""

import atexit
import csv
import ctypes
import gc
import logging
import os
import sys

from headcount.schemas.process import collect_garbage_rarely

CSV_FIELD_CHARACTERS = 1 << 28
"""Characters of a field of a CSV file: a text may be longer than the 128 KiB that Python allows.
More than that is no text but a quote that nobody closed.
"""


def prepare_process(threads: int | None = None) -> None:
    """Set up a process that describes, loads or runs models; nothing else in the house does.

    `threads` is how many of them a matrix product takes, by default one for each core.
    """
    if threads is not None:
        import torch

        # PyTorch counts them for the thread that calls this, so call it where the model will run.
        torch.set_num_threads(threads)
    csv.field_size_limit(CSV_FIELD_CHARACTERS)
    collect_garbage_rarely()
    # Registered once, however often a process is prepared.
    atexit.unregister(_leave_all_objects)
    atexit.register(_leave_all_objects)
    keep_freed_memory()
    # Progress bars and notices stay off the terminal: what matters in them is checked here and
    # raised. The libraries read these variables when they are imported. Importing them here would
    # take 0.4 s, and not every process loads a model.
    logging.getLogger("transformer_lens").setLevel(logging.ERROR)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["DATASETS_VERBOSITY"] = "critical"  # What it calls an error it also raises.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "huggingface_hub" in sys.modules:
        # It has read its variable already, so both libraries are told.
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def _leave_all_objects() -> None:
    """Spare the end of this process two last looks through all objects, a second after torch."""
    # DuckDB's library prints a list of its objects that outlive it.
    if "duckdb" not in sys.modules:
        gc.freeze()


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, which the kernel would zero and map anew for every batch."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it.
    if mallopt is not None:
        # Options by their numbers in malloc.h: M_MMAP_THRESHOLD at its largest value, so that
        # memory comes from the heap, and M_TRIM_THRESHOLD, which keeps what is free at its end.
        mallopt(-3, 32 << 20)
        mallopt(-1, (1 << 31) - 1)
