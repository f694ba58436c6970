"""How many sequences go into one forward pass."""

from __future__ import annotations

FIRST_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens in the first forward pass when the batch size is to be found."""

MOST_TOKENS = {"cpu": 16384, "cuda": 1 << 20}
"""No batch is larger: a CPU gains nothing, and its memory is not ours alone."""

GAIN = 1.05
"""A larger batch has to be this much faster to be kept."""

TRIALS = 2
"""Times a size is tried while sizes are compared; the first is slower, as memory is being laid out.
"""


class BatchSize:
    """How many sequences a forward pass takes: fixed, or found while the scan runs.

    Doubles as long as that is faster, and halves for good when memory runs out.
    """

    def __init__(self, asked: int | str, device: str, n_ctx: int) -> None:
        self.size = asked if isinstance(asked, int) else max(1, FIRST_TOKENS[device] // n_ctx)
        self.most = self.size if isinstance(asked, int) else max(1, MOST_TOKENS[device] // n_ctx)
        self.searching = self.size < self.most
        self._seconds: list[float] = []
        self._best = (0.0, self.size)

    def halve(self) -> None:
        """Memory ran out."""
        self.size = self.most = self.size // 2
        self.searching = False

    def note(self, sequences: int, seconds: float) -> None:
        """A pass over a number of sequences took so long."""
        if not self.searching or sequences < self.size:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < TRIALS:
            return
        speed = self.size / min(self._seconds)
        if speed < GAIN * self._best[0]:
            self.size, self.searching = self._best[1], False
            return
        self._best = (speed, self.size)
        self._seconds.clear()
        self.size = min(2 * self.size, self.most)
        self.searching = self._best[1] < self.most
