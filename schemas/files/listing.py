"""Which of many names a directory holds: a run may have a million files in each directory.

As a set, a million names take 150 MB and a second. But nearly all are names of shards' files, such
as `shard-000003-0a1b2c3d.parquet`: only a number and the eight letters of a digest differ. So these
letters are kept by number, in 8 MB, and a set holds the other names.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MOST_DIGITS = 7  # of a number: an array for longer ones would be too long

NAMES_AT_ONCE = 65_536  # of which the letters are in memory


class Listing:
    """The names in a directory."""

    def __init__(self, names: Sequence[str], at_once: int = NAMES_AT_ONCE) -> None:
        self._digests: dict[int, np.ndarray] = {}  # by the number of digits, then by shard
        self._others: set[str] = set()
        for first in range(0, len(names), at_once):
            batch = names[first : first + at_once]
            # No name has a slash.
            text = np.frombuffer(os.fsencode("/".join(["", *batch, ""])), np.uint8)
            starts = np.flatnonzero(text == ord("/")) + 1
            is_other = np.ones(len(batch), bool)
            for some in _of_shards(text, starts[:-1], np.diff(starts) - 1):
                by_shard = self._digests.setdefault(some.digits, np.zeros(10**some.digits, "u8"))
                # A late attempt may have left a second file of a shard.
                is_first = by_shard[some.shards] == 0
                by_shard[some.shards[is_first]] = some.digests[is_first]
                is_other[some.places] = by_shard[some.shards] != some.digests
            self._others.update(compress(batch, is_other))

    def holds(self, names: pa.Array) -> np.ndarray:
        """For each name, whether the directory has it."""
        is_held = np.zeros(len(names), bool)
        _, offsets, text = names.buffers()
        if text is None:
            return is_held
        offsets = np.frombuffer(offsets, np.int32)[names.offset :][: len(names) + 1]
        text = np.frombuffer(text, np.uint8)
        for some in _of_shards(text, offsets[:-1], np.diff(offsets)):
            if some.digits in self._digests:
                is_held[some.places] = self._digests[some.digits][some.shards] == some.digests
        if self._others and not is_held.all():
            # Each once: thousands of shards share one merged file.
            encoded = names.dictionary_encode()
            is_other = [name in self._others for name in encoded.dictionary.to_pylist()]
            is_held |= np.array(is_other)[encoded.indices.to_numpy()]
        return is_held


class _ShardNames(NamedTuple):
    """Names of shards' files whose numbers have the same number of digits."""

    digits: int
    places: np.ndarray  # among all names
    shards: np.ndarray
    digests: np.ndarray  # the eight letters as one number


def _of_shards(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Iterator[_ShardNames]:
    """Those of shards' files among the names that begin at some places of a text."""
    for length in np.flatnonzero(np.bincount(lengths)).tolist():
        digits = length - len("shard--01234567.parquet")
        if not 0 < digits <= MOST_DIGITS:
            continue
        places = np.flatnonzero(lengths == length)
        letters = np.lib.stride_tricks.sliding_window_view(text, length)[starts[places]]
        parts = [("prefix", "S6"), ("number", f"S{digits}"), ("dash", "S1")]
        names = letters.view([*parts, ("digest", "u8"), ("suffix", "S8")])[:, 0]
        is_of_shard = (names["prefix"] == b"shard-") & (names["dash"] == b"-")
        is_of_shard &= names["suffix"] == b".parquet"
        shards = np.zeros(len(names), np.int64)
        for letter in letters[:, 6 : 6 + digits].T:
            is_of_shard &= (ord("0") <= letter) & (letter <= ord("9"))
            shards = 10 * shards + letter - ord("0")
        kept = (column[is_of_shard] for column in (places, shards, names["digest"]))
        yield _ShardNames(digits, *kept)
