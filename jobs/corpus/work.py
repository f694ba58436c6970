"""How far the tokens of a corpus are prepared, and what is to be prepared next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from headcount.jobs.upkeep import metrics
from headcount.schemas.files.places import Place
from headcount.workers.inputs.corpus.documents import content_bytes_of
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.extents import Extent, extents_of
from headcount.workers.inputs.store.preparation import PORTION_LETTERS, is_whole, prepare_extent
from headcount.workers.inputs.store.token_store import Portion, open_portion

LETTERS_PER_TOKEN = 4
"""About how long a token is."""


@dataclass(frozen=True)
class CorpusProgress:
    """How far the preparation of a corpus is, what was there before included."""

    documents: int
    tokens: int
    bad: int
    share: float | None
    """Share of what the scan needs; None if nobody knows how much that is."""
    tokens_per_second: float | None
    """None until something was prepared."""
    seconds_left: float | None


Watch = Callable[[CorpusProgress], None]
"""Is called with every portion that is prepared."""


_content_bytes = lru_cache(content_bytes_of)
"""A sample of a compressed file is read once."""


def unwatched(progress: CorpusProgress) -> None:
    """Watch a corpus being prepared and show nothing."""


class CorpusWork:
    """What is there of a corpus, and what is still to be prepared.

    Portions are added to the index in the order of the corpus, up to the first that is missing.
    """

    def __init__(self, sequences: Sequences, corpora: Place, watch: Watch = unwatched) -> None:
        assert sequences.corpus is not None
        self.sequences = sequences
        self.watch = watch
        self.store = sequences.store(corpora)
        self.extents = extents_of(sequences.corpus.sources)
        self.total_bytes = sum(extent.bytes for extent in self.extents)
        self.began = time.monotonic()
        self.start_again()
        self.tokens_before = self.index.tokens
        """Tokens that earlier preparations left."""

    def start_again(self) -> None:
        """Add what the store has, from the beginning of the corpus on."""
        self.index = self.sequences.new_index(self.store)
        self.frontier = 0
        """The number of the first extent that is not in the index with all its portions."""
        self.added = 0
        """Portions of that extent that are in the index."""
        self.portions = self.store.portions()
        """The committed portions, by the keys of their extents and by number."""
        self._add_in_order()

    def look(self, committed: Portion | None = None) -> None:
        """Take in a portion that was committed now, or all that are in the store."""
        if committed is None:
            self.portions = self.store.portions()
        else:
            self.portions[committed.extent][committed.number] = committed
        tokens_before = self.index.tokens
        self._add_in_order()
        metrics.tokens_prepared(self.index.tokens - tokens_before)
        self.show()

    def _add_in_order(self) -> None:
        while not self.is_done:
            extent = self.extents[self.frontier]
            portion = self.portions[extent.key].get(self.added)
            if portion is None:
                return
            self.index.add(extent.first_source, portion)
            self.added += 1
            if portion.is_last:
                self.frontier += 1
                self.added = 0

    @property
    def is_done(self) -> bool:
        """Whether the index has all that the scan needs, or so many bad rows that it ends."""
        return self.index.may_stop or self.frontier == len(self.extents)

    def missing(self) -> list[Extent]:
        """The extents that are not prepared to their ends, from the frontier on."""
        return [e for e in self.extents[self.frontier :] if not is_whole(self.portions[e.key])]

    def letters_wanted(self) -> float:
        """About how many letters of text the scan still needs, if it takes every document."""
        index = self.index
        if index.enough is None or index.corpus.is_read_whole:
            return math.inf
        return (index.enough - len(index)) * index.length * LETTERS_PER_TOKEN

    def covered_bytes(self) -> float:
        """About how many stored bytes the portions in the index are made of."""
        covered = float(sum(extent.bytes for extent in self.extents[: self.frontier]))
        if self.added:
            extent = self.extents[self.frontier]
            documents = open_portion(self.store, self.index.portions[-1]).documents()
            # The offset counts bytes of lines, and rows of other sources, which are fewer than
            # their letters.
            last_offset = documents["offset"][-1].as_py() - extent.start
            content = max(self.added * PORTION_LETTERS, last_offset)
            stored = _content_bytes(extent.sources[0].path, extent.bytes)
            covered += extent.bytes * min(1.0, content / max(1, stored))
        return covered

    def show(self) -> None:
        """Tell how far the preparation is."""
        index = self.index
        share = speed = left = None
        if index.enough is not None and not index.corpus.is_read_whole:
            share = min(1.0, len(index) / index.enough)
        elif self.total_bytes:
            share = self.covered_bytes() / self.total_bytes
        if prepared := index.tokens - self.tokens_before:
            speed = prepared / (time.monotonic() - self.began)
            left = index.tokens * (1 - share) / share / speed if share else None
        self.watch(CorpusProgress(index.documents, index.tokens, index.bad, share, speed, left))


def prepare_here(work: CorpusWork, most: int | None = None) -> None:
    """Prepare portions until there is enough, `most` at most; the tokenizer takes all cores."""
    prepared = 0
    for extent in work.missing():
        for portion in prepare_extent(work.store, extent, work.sequences.tokenizer):
            work.look(portion)
            prepared += 1
            if work.is_done or prepared == most:
                return
        if not is_whole(work.portions[extent.key]):
            # Somebody else has prepared a part of it meanwhile.
            work.look()
