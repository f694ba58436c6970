"""How often a shard is tried, on replicas and in this process alike."""

from __future__ import annotations

from collections import Counter

from headcount.schemas.files.run_directory import RunDirectory

ATTEMPTS = 3
"""How often a command tries a shard before it reports it."""


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
