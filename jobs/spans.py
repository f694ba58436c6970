"""Who measures which shards: contiguous spans, so that a replica reads the corpus's files forward."""

from __future__ import annotations

import numpy as np


class Spans:
    """Shards in order, shared out among owners; an owner with nothing left takes half of the
    longest span.

    >>> spans = Spans(np.arange(10, 18))
    >>> [spans.take(owner) for owner in "aaab"]
    [10, 11, 12, 15]
    >>> [spans.take(owner) for owner in "bbaaa"]
    [16, 17, 13, 14, None]
    """

    def __init__(self, shards: np.ndarray) -> None:
        self.shards = shards
        # What no owner has had yet is the span of None. Its taker gets the whole of it.
        self.spans: dict[object, tuple[int, int]] = {None: (0, len(shards))}

    def take(self, owner: object) -> int | None:
        """The owner's next shard; none if all are taken."""
        start, stop = self.spans.get(owner, (0, 0))
        if start == stop:
            start, stop = self._split_longest()
        if start == stop:
            return None
        self.spans[owner] = start + 1, stop
        return int(self.shards[start])

    def _split_longest(self) -> tuple[int, int]:
        """The second half of the longest span; its owner keeps the first half."""
        longest = max(self.spans, key=self._length)
        start, stop = self.spans[longest]
        middle = start if longest is None else (start + stop) // 2
        self.spans[longest] = start, middle
        return middle, stop

    def _length(self, owner: object) -> int:
        start, stop = self.spans[owner]
        return stop - start
