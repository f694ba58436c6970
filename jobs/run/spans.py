"""Which replica measures which shards: spans of neighbours, so that it reads files forward."""

from __future__ import annotations

import numpy as np


class Spans:
    """Shards in order, divided among owners; one without any steals half of the longest span.

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

    def take(self, owner: object) -> int | None:
        """The owner's next shard; none if all are taken."""
        start, stop = self.spans.get(owner, (0, 0))
        if start == stop:
            start, stop = self._steal()
        if start == stop:
            return None
        self.spans[owner] = start + 1, stop
        return int(self.shards[start])

    def _steal(self) -> tuple[int, int]:
        """The second half of the longest span, which its owner loses; all of it if None owns it.

        The owner keeps the first half, because that is where it reads now.
        """
        longest = max(self.spans, key=lambda owner: self.spans[owner][1] - self.spans[owner][0])
        start, stop = self.spans[longest]
        middle = start if longest is None else (start + stop) // 2
        self.spans[longest] = start, middle
        return middle, stop
