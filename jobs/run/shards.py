"""Which shards a driver hands out, in which order, and how often it tries one.

Several drivers may be at work on one run in a store, which has no locks. So each measures the
shards in another order, and looks whether a shard is committed before it is measured: by its
commit's file, and by the segments of other drivers. Where two come to the same shard at the same
moment, the first commit counts. On a disk a lock (`jobs.lock`) lets in one driver only.
"""

import random
import time
from collections import Counter
from pathlib import Path

import numpy as np

from headcount.schemas.files.commits import Segments, gathered_shards
from headcount.schemas.files.run_directory import RunDirectory

ATTEMPTS = 3  # how often a command tries a shard before it reports it

SPANS = 64
"""Spans of neighbouring shards that a driver measures in random order. Two drivers may come to the
same span, so the longer a span is, the more shards are measured twice.
"""

LOOK_SECONDS = 10.0  # seconds between two looks at the segments


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


class Attempts:
    """The failed attempts at the shards of a run, of which earlier commands have left notes."""

    def __init__(self, run: RunDirectory) -> None:
        notes = {shard: run.failure(shard) for shard in run.failed_shards()}
        # A note that cannot be read counts as no attempt.
        self._earlier = Counter({shard: note[0] for shard, note in notes.items() if note})
        self._here: Counter[int] = Counter()

    def failed(self, shard: int) -> int:
        """How many attempts at a shard have failed, those of earlier commands included."""
        return self._earlier[shard] + self._here[shard]

    def may_try_again(self, shard: int) -> bool:
        """Count an attempt that has failed; whether this command tries the shard again."""
        self._here[shard] += 1
        return self._here[shard] < ATTEMPTS


class Spans:
    """Shards in order, divided among owners, so that each reads files forward; one without any
    steals half of the longest span.

    >>> spans = Spans(np.arange(10, 18))
    >>> [spans.take(owner) for owner in "aaab"]
    [10, 11, 12, 15]
    >>> [spans.take(owner) for owner in "bbaaa"]
    [16, 17, 13, 14, None]
    """

    def __init__(self, shards: np.ndarray) -> None:
        self.shards = shards
        # An owner's span is `shards[start:stop]`. Shards that nobody has had yet belong to None.
        self.spans: dict[object, tuple[int, int]] = {None: (0, len(shards))}
        self.left = len(shards)

    def take(self, owner: object) -> int | None:
        """The owner's next shard; none if all are taken."""
        start, stop = self.spans.get(owner, (0, 0))
        if start == stop and self.left:
            # The second half of the longest span, which its owner loses, or all of it if None owns
            # it. The owner keeps the first half, because that is where it reads now.
            longest = max(self.spans, key=lambda one: self.spans[one][1] - self.spans[one][0])
            first, stop = self.spans[longest]
            start = first if longest is None else (first + stop) // 2
            self.spans[longest] = first, start
        if start == stop:
            return None
        self.left -= 1
        self.spans[owner] = start + 1, stop
        return int(self.shards[start])
