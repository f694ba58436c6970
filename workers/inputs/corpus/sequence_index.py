"""The index of a corpus: which sequences lie in which portion of the token store.

It has a few numbers for each portion and none for a document, so a corpus of any size has a small
index. The index says where to look; the documents of a portion are read when a sequence in it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.document_block import (
    DocumentBlock,
    PortionPlace,
    block_of_portion,
    shuffled_block,
)
from headcount.workers.inputs.store.extents import Extent
from headcount.workers.inputs.store.token_store import BAD, Portion, TokenStore, open_portion


@dataclass(frozen=True)
class SequenceIndex:
    """The portions of a corpus that a scan reads, and where its sequences lie in them."""

    store: TokenStore
    length: int
    """Text tokens of a sequence."""
    portions: tuple[Portion, ...]
    places: np.ndarray
    """Of each portion: the fields of its `PortionPlace`, in a row. One row more says what comes
    behind the last portion.
    """
    ends: np.ndarray
    """Of each block: how many sequences it has with those before it. A portion is a block, but the
    portions of a shuffled corpus are one block together.
    """
    unmeasured: int = 0
    """Tokens at the ends of portions that are left over when joined documents are cut."""
    last_documents: int | None = None
    """How many documents of the last portion count; None means all."""
    token_counts: np.ndarray | None = None
    """`[token]`, how often the scan's documents have each; None unless tokens are drawn so."""

    @property
    def sequences(self) -> int:
        """How many sequences the portions hold."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def documents(self) -> int:
        """Documents in the portions, those that the scan does not take included."""
        return self.place(len(self.portions)).documents_before

    @property
    def tokens(self) -> int:
        """Tokens of these documents."""
        return self.place(len(self.portions)).tokens_before

    @property
    def bad(self) -> int:
        """How many of these documents are bad."""
        return self.place(len(self.portions)).bad_before

    def place(self, portion: int) -> PortionPlace:
        """Where a portion lies in the corpus."""
        return PortionPlace(*self.places[portion].tolist())

    def in_blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The blocks of some sequences, each with the numbers in it of the first and the last.

        The last is one behind.
        """
        while start < stop:
            number = int(np.searchsorted(self.ends, start, side="right"))
            before = int(self.ends[number - 1]) if number else 0
            stop_here = min(stop, int(self.ends[number]))
            yield number, start - before, stop_here - before
            start = stop_here

    def block(self, number: int, corpus: Corpus) -> DocumentBlock:
        """The documents of a block."""
        if not corpus.choice.shuffled:
            return self._portion_block(number, corpus)
        blocks = [self._portion_block(portion, corpus) for portion in range(len(self.portions))]
        return shuffled_block(blocks, corpus.choice)

    def _portion_block(self, number: int, corpus: Corpus) -> DocumentBlock:
        is_last = number == len(self.portions) - 1
        documents = self.last_documents if is_last else None
        return block_of_portion(
            self.store, self.portions[number], self.place(number), corpus, self.length, documents
        )

    def up_to(self, sequences: int, corpus: Corpus) -> SequenceIndex:
        """The index of the first `sequences`, without the documents behind the last of them.

        Such documents lie in the store because another scan needed them. What a run says of its
        corpus must not depend on that.
        """
        # Of a shuffled corpus every document is needed, because any may come first.
        if corpus.is_read_whole or not 0 < sequences <= self.sequences:
            return self
        ((last, sequence, _),) = self.in_blocks(sequences - 1, sequences)
        block = self.block(last, corpus)
        documents = int(block.position[block.last_document(sequence)]) + 1
        left_over = sum(self.block(i, corpus).unmeasured for i in range(last, len(self.portions)))
        return replace(
            self,
            portions=self.portions[: last + 1],
            places=self.places[: last + 2],
            ends=np.minimum(self.ends[: last + 1], sequences),
            unmeasured=self.unmeasured - left_over,
            last_documents=documents - self.place(last).documents_before,
        )


class IndexBuilder:
    """Makes the index of a corpus while its portions become ready, in their order."""

    def __init__(
        self,
        corpus: Corpus,
        store: TokenStore,
        length: int,
        enough: int | None,
        most_bad_in_a_row: int | None,
    ) -> None:
        """`enough` sequences are needed; None means all. `length` is that of their text."""
        self.corpus = corpus
        self.store = store
        self.length = length
        self.enough = enough
        self.most_bad_in_a_row = most_bad_in_a_row
        self.portions: list[Portion] = []
        self.place = PortionPlace(0, 0, 0, 0, 0, 0)
        """Of the next portion."""
        self.sequences = 0
        """Sequences in the portions so far; unknown and 0 if documents are shuffled."""
        self._places = array("q")
        self._ends = array("q")
        self._unmeasured = 0
        self._token_counts = None if corpus.counted is None else np.zeros(store.d_vocab, np.int64)
        self._bad_run = BadRun()

    def add(self, extent: Extent, portion: Portion) -> None:
        """Add the next portion of the corpus."""
        if not extent.start:
            self.place = self.place._replace(rows_before=0)
        place = self.place = self.place._replace(first_source=extent.first_source)
        block = block_of_portion(self.store, portion, place, self.corpus, self.length)
        record = open_portion(self.store, portion).record
        self.portions.append(portion)
        self._places.extend(place)
        self._bad_run.add(block.position[block.n_tokens == BAD])
        if self._token_counts is not None:
            self._token_counts += block.token_counts(self.store.d_vocab)
        # The sequences of a shuffled corpus are known only when all of it is there.
        if not self.corpus.choice.shuffled:
            self.sequences += block.sequences
            self._unmeasured += block.unmeasured
            self._ends.append(self.sequences)
        self.place = PortionPlace(
            first_source=extent.first_source,
            # Rows are counted from the beginning of an extent, and the next one may go on with the
            # same source.
            rows_before=place.rows_before + (record.rows if portion.is_last else 0),
            taken_before=place.taken_before + len(block),
            documents_before=place.documents_before + record.documents,
            tokens_before=place.tokens_before + record.tokens,
            bad_before=place.bad_before + record.bad,
        )

    @property
    def may_stop(self) -> bool:
        """Whether there are enough sequences, or too many bad documents one after the other."""
        if self.most_bad_in_a_row is not None and self._bad_run.longest > self.most_bad_in_a_row:
            return True
        # Any document of a shuffled corpus may come first, so all are needed.
        if self.corpus.is_read_whole or self.enough is None:
            return False
        return self.sequences >= self.enough

    def index(self) -> SequenceIndex:
        """The index of the portions that were added."""
        places = np.array([*self._places, *self.place], np.int64).reshape(-1, len(self.place))
        index = SequenceIndex(
            store=self.store,
            length=self.length,
            portions=tuple(self.portions),
            places=places,
            ends=np.array(self._ends, np.int64),
            unmeasured=self._unmeasured,
            token_counts=self._token_counts,
        )
        if self.corpus.choice.shuffled and self.portions:
            block = index.block(0, self.corpus)
            ends = np.array([block.sequences], np.int64)
            return replace(index, ends=ends, unmeasured=block.unmeasured)
        return index if self.enough is None else index.up_to(self.enough, self.corpus)


class BadRun:
    """The largest number of bad documents one after the other."""

    def __init__(self) -> None:
        self.longest = 0
        self._current = 0
        self._last_position = -1

    def add(self, positions: np.ndarray) -> None:
        """Count bad documents by their positions, in order."""
        for position in positions.tolist():
            follows = position == self._last_position + 1
            self._current = self._current + 1 if follows else 1
            self._last_position = position
            self.longest = max(self.longest, self._current)
