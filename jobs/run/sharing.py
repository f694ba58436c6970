"""Several drivers on one run in a store share its shards.

A store has no locks. So each driver measures the shards in another order, and looks whether a shard
is committed before it is measured: by its commit's file, and by the segments of other drivers.
Where two come to the same shard at the same moment, the first commit counts. On a disk a lock
(`jobs.run.lock`) lets in one driver only.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from headcount.schemas.files.commits import Segments, gathered_shards
from headcount.schemas.files.run_directory import RunDirectory

SPANS = 64
"""Spans of neighbouring shards that a driver measures in random order. Two drivers may come to the
same span, so the longer a span is, the more shards are measured twice.
"""

LOOK_SECONDS = 10.0
"""Seconds between two looks at the segments."""


def order_of_driver(run: RunDirectory, shards: np.ndarray) -> np.ndarray:
    """The order in which a driver measures shards."""
    if isinstance(run.path, Path) or not len(shards):
        return shards
    # Neighbours stay together, because a replica reads the corpus's files forward.
    spans = np.array_split(shards, min(SPANS, len(shards)))
    random.SystemRandom().shuffle(spans)
    return np.concatenate(spans)


class GatheredElsewhere:
    """The shards of a run in a store that other drivers have put into segments meanwhile."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.shards: set[int] = set()
        self._segments: Segments = {}
        self._last_look = time.monotonic()

    def __contains__(self, shard: int) -> bool:
        in_store = not isinstance(self.run.path, Path)
        if in_store and time.monotonic() - self._last_look >= LOOK_SECONDS:
            self.shards = gathered_shards(self.run.commits_directory, self._segments)
            self._last_look = time.monotonic()
        return shard in self.shards
