"""Passes of a model: how long they take, and what is said of them before they begin."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headcount.jobs.console import duration

if TYPE_CHECKING:
    from headcount.workers.known_models import KnownModels


class Passes:
    """The passes of a command that measures losses: of one model, which it loads and times once."""

    def __init__(self) -> None:
        self.later = 0  # that come after those which are announced
        self.seconds: float | None = None  # of a pass, once some were timed
        self.models: KnownModels | None = None


def seconds_of(run: Callable[[int], object], sequences: int) -> float:
    """How long a sequence takes if so many are run at a time, after one that warms up."""
    run(1)
    began = time.perf_counter()
    run(sequences)
    return (time.perf_counter() - began) / sequences


def words_of_passes(passes: int, n_ctx: int, seconds: float | None, later: int = 0) -> str:
    """How many passes there will be, how long they take, and that they may be stopped; some more
    passes may come `later`.

    >>> words_of_passes(8, 256, 1.0, 60)
    '8 passes of 256 tokens, about 8.0 s by the time of the first, and then at most 60 more, about \
1 min 0 s; after Ctrl-C the same command goes on where it was'
    """
    line = f"{passes:,} passes of {n_ctx:,} tokens"
    if seconds is not None:
        line += f", about {duration(passes * seconds)} by the time of the first"
    if later:
        line += f", and then at most {later:,} more"
        line += "" if seconds is None else f", about {duration(later * seconds)}"
    return f"{line}; after Ctrl-C the same command goes on where it was"
