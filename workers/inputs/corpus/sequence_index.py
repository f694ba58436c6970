"""The index of a corpus: which sequences lie in which piece of the token store.

It has a few numbers for each piece and none for a document, so a corpus of any size has a small
index. The index says where to look; the documents of a piece are read when a sequence in it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.document_block import (
    DocumentBlock,
    PiecePlace,
    block_of_piece,
    shuffled_block,
)
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.inputs.store.token_store import BAD, Piece, TokenStore

NO_SOURCE = -1
"""Stands for the source of the last document if there was no document yet."""


@dataclass(frozen=True)
class SequenceIndex:
    """The pieces of a corpus that a scan reads, and where its sequences lie in them."""

    store: TokenStore
    length: int
    """Text tokens of a sequence."""
    pieces: tuple[Piece, ...]
    places: np.ndarray
    """Of each piece: the fields of its `PiecePlace`, in a row. One row more says what comes behind
    the last piece.
    """
    ends: np.ndarray
    """Of each block: how many sequences end in it and in those before it. A piece is a block, but
    the pieces of a shuffled corpus are one block together.
    """
    last_documents: int | None = None
    """How many documents of the last piece count; None means all."""
    token_counts: np.ndarray | None = None
    """`[token]`, how often the scan's documents have each; None unless tokens are drawn so."""

    @property
    def sequences(self) -> int:
        """How many sequences the pieces hold."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def documents(self) -> int:
        """Documents in the pieces, those that the scan does not take included."""
        return sum(piece.documents for piece in self.pieces)

    @property
    def tokens(self) -> int:
        """Tokens of these documents."""
        return sum(piece.tokens for piece in self.pieces)

    def place(self, piece: int) -> PiecePlace:
        """Where a piece lies in the corpus."""
        return PiecePlace(*self.places[piece].tolist())

    def block_of(self, sequence: int) -> int:
        """The number of the block in which a sequence ends."""
        return int(np.searchsorted(self.ends, sequence, side="right"))

    def block(self, number: int, corpus: Corpus) -> DocumentBlock:
        """The documents of a block."""
        if not corpus.choice.shuffled:
            return self._piece_block(number, corpus)
        blocks = [self._piece_block(piece, corpus) for piece in range(len(self.pieces))]
        return shuffled_block(blocks, corpus.choice)

    def _piece_block(self, number: int, corpus: Corpus) -> DocumentBlock:
        is_last = number == len(self.pieces) - 1
        documents = self.last_documents if is_last else None
        return block_of_piece(
            self.store, self.pieces[number], self.place(number), corpus, self.length, documents
        )

    def blocks(self, corpus: Corpus) -> Iterator[DocumentBlock]:
        """The documents of all blocks, one block after the other."""
        for number in range(len(self.ends)):
            yield self.block(number, corpus)

    def up_to(self, sequences: int, corpus: Corpus) -> SequenceIndex:
        """The index of the first `sequences`, without the documents behind the last of them.

        Such documents lie in the store because another scan needed them. What a run says of its
        corpus must not depend on that.
        """
        # Of a shuffled corpus every document is needed, because any may come first.
        if corpus.is_read_whole or not 0 < sequences <= self.sequences:
            return self
        last = self.block_of(sequences - 1)
        block = self.block(last, corpus)
        sequences_before = int(self.ends[last - 1]) if last else 0
        last_document = block.last_document(sequences - 1 - sequences_before)
        end = int(block.position[last_document]) + 1
        return replace(
            self,
            pieces=self.pieces[: last + 1],
            places=self.places[: last + 2],
            ends=np.minimum(self.ends[: last + 1], sequences),
            last_documents=end - self.place(last).documents_before,
        )


class IndexBuilder:
    """Makes the index of a corpus while its pieces become ready, in their order."""

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
        self.pieces: list[Piece] = []
        self.places = array("q")
        self.ends = array("q")
        self.sequences = 0
        """Sequences in the pieces so far; unknown and 0 if documents are shuffled."""
        self.documents = 0
        self.tokens = 0
        self.bad = 0
        self._token_counts = None if corpus.counted is None else np.zeros(store.d_vocab, np.int64)
        self._place = PiecePlace(0, 0, 0, 0, NO_SOURCE, 0)
        self._bad_run = BadRun()

    def add(self, portion: Portion, pieces: Sequence[Piece]) -> None:
        """Add pieces of a portion that were not added before."""
        for piece in pieces:
            self._place = self._place._replace(first_source=portion.first_source)
            if portion.begins_source:
                self._place = self._place._replace(rows_before=0)
            block = block_of_piece(self.store, piece, self._place, self.corpus, self.length)
            self.pieces.append(piece)
            self.places.extend(self._place)
            self.documents += piece.documents
            self.tokens += piece.tokens
            self.bad += piece.bad
            self._bad_run.add(block.position[block.n_tokens == BAD])
            if self._token_counts is not None:
                self._token_counts += block.token_counts(self.store.d_vocab)
            # The sequences of a shuffled corpus are known only when all of it is there.
            if not self.corpus.choice.shuffled:
                self.sequences += block.sequences
                self.ends.append(self.sequences)
            self._place = self._place_behind(piece, block)

    def _place_behind(self, piece: Piece, block: DocumentBlock) -> PiecePlace:
        """The place of whatever comes behind a piece."""
        place = self._place
        source, joined = place.joined_source, place.joined_before
        if block.texts:
            source, joined = block.texts[-1].source, block.texts[-1].joined_end
        rows_before = place.rows_before
        if piece.ended:
            # Rows are counted from the beginning of a portion, and the next one may go on with the
            # same source.
            rows_before += piece.stop.row
        return PiecePlace(
            first_source=place.first_source,
            rows_before=rows_before,
            documents_before=place.documents_before + piece.documents,
            taken_before=place.taken_before + len(block),
            joined_source=source,
            joined_before=joined,
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
        """The index of the pieces that were added."""
        # One row more than pieces: the last says what comes behind them.
        places = np.array([*self.places, *self._place], np.int64).reshape(-1, len(self._place))
        index = SequenceIndex(
            store=self.store,
            length=self.length,
            pieces=tuple(self.pieces),
            places=places,
            ends=np.array(self.ends, np.int64),
            token_counts=self._token_counts,
        )
        if self.corpus.choice.shuffled:
            sequences = index.block(0, self.corpus).sequences if self.pieces else 0
            return replace(index, ends=np.array([sequences], np.int64))
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
