"""Passes of a model: how long they take, and what is said of them before they begin."""

import time
from collections.abc import Callable

from headcount.jobs.console import duration


def seconds_of(run: Callable[[int], object], sequences: int) -> float:
    """How long a sequence takes if so many are run at a time, after one that warms up."""
    run(1)
    began = time.perf_counter()
    run(sequences)
    return (time.perf_counter() - began) / sequences


def words_of_passes(passes: int, n_ctx: int, seconds: float | None) -> str:
    """How many passes there will be, how long they take, and that they may be stopped.

    >>> words_of_passes(8, 256, 1.0)
    '8 passes of 256 tokens, about 8.0 s by the time of the first; after Ctrl-C the same command \
goes on where it was'
    """
    line = f"{passes:,} passes of {n_ctx:,} tokens"
    if seconds is not None:
        line += f", about {duration(passes * seconds)} by the time of the first"
    return f"{line}; after Ctrl-C the same command goes on where it was"
