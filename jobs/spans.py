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
        # Nobody's span is there for the taking, whole.
        self.spans: dict[object, tuple[int, int]] = {None: (0, len(shards))}

    def take(self, owner: object) -> int | None:
        """The owner's next shard; none where all are taken."""
        start, stop = self.spans.get(owner, (0, 0))
        if start == stop:
            start, stop = self._steal()
        if start == stop:
            return None
        self.spans[owner] = start + 1, stop
        return int(self.shards[start])

    def _steal(self) -> tuple[int, int]:
        victim = max(self.spans, key=lambda owner: self.spans[owner][1] - self.spans[owner][0])
        start, stop = self.spans[victim]
        middle = start if victim is None else (start + stop) // 2
        self.spans[victim] = start, middle
        return middle, stop
