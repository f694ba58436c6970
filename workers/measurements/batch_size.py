"""How many sequences go into one forward pass."""

from __future__ import annotations

FIRST_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens in the first forward pass if the batch size is to be found."""

MOST_TOKENS = {"cpu": 16384, "cuda": 1 << 20}
"""No batch is larger: a CPU gains nothing, and its memory is not ours alone."""

REQUIRED_GAIN = 1.05
"""A larger batch has to be this much faster to be used."""

TRIALS = 2
"""Passes of each size while sizes are compared. The first one is slower, as it lays out memory."""


class BatchSize:
    """How many sequences a forward pass takes: fixed, or found while the scan runs.

    It doubles as long as that is faster. If memory runs out, it halves for good.
    """

    def __init__(self, requested_size: int | str, device: str, n_ctx: int) -> None:
        """`requested_size` is a number of sequences, or `auto`."""
        if isinstance(requested_size, int):
            self.size = requested_size
            self.largest = requested_size
        else:
            self.size = max(1, FIRST_TOKENS[device] // n_ctx)
            self.largest = max(1, MOST_TOKENS[device] // n_ctx)
        self.searching = self.size < self.largest
        self._seconds_of_trials: list[float] = []
        self._best_speed = 0.0
        self._best_size = self.size

    def halve(self) -> None:
        """Go on with half of the size, because memory ran out."""
        self.size //= 2
        self.largest = self.size
        self.searching = False

    def note(self, sequences: int, seconds: float) -> None:
        """A pass over a number of sequences took so long."""
        # The last batch of a shard is often not full, and its speed says nothing of the size.
        if not self.searching or sequences < self.size:
            return
        self._seconds_of_trials.append(seconds)
        if len(self._seconds_of_trials) < TRIALS:
            return
        speed = self.size / min(self._seconds_of_trials)
        if speed < REQUIRED_GAIN * self._best_speed:
            self.size = self._best_size
            self.searching = False
            return
        self._best_speed = speed
        self._best_size = self.size
        self._seconds_of_trials.clear()
        self.size = min(2 * self.size, self.largest)
        self.searching = self._best_size < self.largest
