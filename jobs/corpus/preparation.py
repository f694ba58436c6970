"""Prepare the tokens of a corpus as far as a scan needs them, on the cluster or in this process.

The portions that the token store has are taken as they are. The others are prepared in the order of
the corpus until there is enough, by Ray tasks or here. A portion is there if its file is, so nobody
who prepares a corpus need hear of others that do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from headcount.jobs.upkeep import metrics
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.places import Place, absolute, place
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.corpus.file_content import content_bytes_of
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.extents import Extent, extents_of
from headcount.workers.inputs.store.preparation import (
    PORTION_LETTERS,
    damaged_portions,
    is_whole,
    prepare_extent,
)
from headcount.workers.inputs.store.token_store import Portion, TokenStore, read_documents

if TYPE_CHECKING:
    from headcount.jobs.resources import Resources

FOLDER = "corpora"
"""Directory of the token stores, beside the runs."""

LEAST_BYTES_ON_RAY = 1 << 24
"""Fewer stored bytes are prepared in this process: that takes 10 s on a core, and Ray's processes
several to start.
"""

Tell = Callable[[str], None]
"""Is called with a line for the user."""


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


def untold(line: str) -> None:
    """Tell a line to nobody."""


def corpora_of(scan: Scan) -> Place:
    """The directory that holds the token stores of a scan's corpus."""
    if scan.corpora is not None:
        return absolute(place(scan.corpora))
    return absolute(place(scan.out) / FOLDER)


class CorpusWork:
    """What is there of a corpus, and what is still to be prepared.

    Portions are added to the index in the order of the corpus, up to the first that is missing.
    """

    def __init__(self, sequences: Sequences, corpora: Place, watch: Watch = unwatched) -> None:
        assert sequences.corpus is not None
        self.sequences = sequences
        self.watch = watch
        self.store: TokenStore = sequences.store(corpora)
        self.extents = extents_of(sequences.corpus.sources)
        self.total_bytes = sum(extent.bytes for extent in self.extents)
        self.began = time.monotonic()
        self.start_again()
        self.tokens_before = self.builder.place.tokens_before
        """Tokens that earlier preparations left."""

    def start_again(self) -> None:
        """Add what the store has, from the beginning of the corpus on."""
        self.builder = self.sequences.index_builder(self.store)
        self.frontier = 0
        """The number of the first extent that is not in the index with all its portions."""
        self.added = 0
        """Portions of that extent that are in the index."""
        self.portions = self.store.portions()
        """The committed portions, by the keys of their extents and by number."""
        self._add_in_order()

    def look(self) -> None:
        """Take in what is committed."""
        self.portions = self.store.portions()
        tokens_before = self.builder.place.tokens_before
        self._add_in_order()
        metrics.tokens_prepared(self.builder.place.tokens_before - tokens_before)
        self.show()

    @property
    def is_done(self) -> bool:
        """Whether the index has all that the scan needs, or so many bad rows that it ends."""
        return self.builder.may_stop or self.frontier == len(self.extents)

    def missing(self) -> list[Extent]:
        """The extents that are not prepared to their ends, from the frontier on."""
        return [
            extent
            for extent in self.extents[self.frontier :]
            if not is_whole(self.portions.get(extent.key, {}))
        ]

    def covered_bytes(self) -> float:
        """About how many stored bytes the portions in the index are made of."""
        covered = float(sum(extent.bytes for extent in self.extents[: self.frontier]))
        if self.added:
            extent = self.extents[self.frontier]
            documents = read_documents(self.store, self.builder.portions[-1])
            # The offset counts bytes of lines, and rows of other sources, which are fewer than
            # their letters.
            last_offset = documents["offset"][-1].as_py() - extent.start
            content = max(self.added * PORTION_LETTERS, last_offset)
            stored = _content_bytes(extent.sources[0].path, extent.bytes)
            covered += extent.bytes * min(1.0, content / max(1, stored))
        return covered

    def _add_in_order(self) -> None:
        """Add portions to the index, up to the first that is missing."""
        while not self.is_done:
            extent = self.extents[self.frontier]
            portion = self.portions.get(extent.key, {}).get(self.added)
            if portion is None:
                return
            self.builder.add(extent, portion)
            self.added += 1
            if portion.is_last:
                self.frontier += 1
                self.added = 0

    def show(self) -> None:
        """Tell how far the preparation is."""
        place = self.builder.place
        share = None
        if self.builder.enough is not None and not self.builder.corpus.is_read_whole:
            share = min(1.0, self.builder.sequences / self.builder.enough)
        elif self.total_bytes:
            share = self.covered_bytes() / self.total_bytes
        speed = left = None
        if prepared := place.tokens_before - self.tokens_before:
            speed = prepared / (time.monotonic() - self.began)
            left = place.tokens_before * (1 - share) / share / speed if share else None
        self.watch(
            CorpusProgress(
                place.documents_before, place.tokens_before, place.bad_before, share, speed, left
            )
        )


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus whose tokens are ready, as far as a scan needs them."""

    index: SequenceIndex
    extents: list[Extent]
    """All extents of the corpus, as they were listed."""
    changed_texts: frozenset[str] = frozenset()
    """Keys of extents whose texts were others than their portions said, when they were verified."""


@dataclass(frozen=True)
class Preparation:
    """How the tokens of a corpus are made ready: where, and who is told."""

    resources: Resources | None = None
    """Ray tasks prepare a large corpus if these have replicas or `ray_prepares`."""
    watch: Watch = unwatched
    verify: bool = False
    """Whether portions that are there are compared with the texts first."""
    tell: Tell = untold

    def prepared(self, sequences: Sequences, corpora: Place) -> PreparedCorpus:
        """Prepare what the token store lacks for some sequences."""
        work = CorpusWork(sequences, corpora, self.watch)
        changed = self._verify(work) if self.verify else frozenset[str]()
        if not work.is_done:
            work.store.create()
            resources = self.resources
            on_ray = resources is not None and (resources.replicas or resources.ray_prepares)
            if on_ray and sum(extent.bytes for extent in work.missing()) >= LEAST_BYTES_ON_RAY:
                # Ray takes a second to import, and most commands that prepare nothing do without.
                from headcount.jobs.corpus.preparation_on_ray import prepare_on_ray

                assert resources is not None
                prepare_on_ray(work, resources, self.tell)
            else:
                prepare_here(work)
            if not work.is_done:
                raise RunError(
                    f"{work.store.folder}: somebody deletes portions while they are prepared; run "
                    "the same command again"
                )
        return PreparedCorpus(work.builder.index(), work.extents, changed)

    def _verify(self, work: CorpusWork) -> frozenset[str]:
        """Compare what is there with the texts, and forget the portions that differ.

        Returns the keys of the extents whose texts changed.
        """
        damaged: list[Portion] = []
        changed: set[str] = set()
        # Those whose portions are in the index.
        for extent in work.extents[: work.frontier + 1]:
            damages, is_text_changed = damaged_portions(work.store, extent)
            for problem in damages.values():
                self.tell(problem)
            damaged += damages
            if is_text_changed:
                changed.add(extent.key)
        if damaged:
            self.tell(f"{counted(len(damaged), 'portion')} differed and will be prepared again")
            work.store.forget(damaged)
            work.start_again()
        return frozenset(changed)


HERE = Preparation()
"""Prepare in this process, and show nothing."""


def prepare_here(work: CorpusWork, most: int | None = None) -> None:
    """Prepare portions until there is enough, `most` at most; the tokenizer takes all cores."""
    prepared = 0
    for extent in work.missing():
        for _ in prepare_extent(work.store, extent, work.sequences.tokenizer):
            work.look()
            prepared += 1
            if work.is_done or prepared == most:
                return
        if not is_whole(work.portions.get(extent.key, {})):
            # Somebody else has prepared a part of it meanwhile.
            work.look()
