"""Documents that a scan takes, in the order in which they become sequences, and their tokens.

A block holds the documents of one piece of the token store, or, if they are shuffled, those of all
pieces. With packing by document a sequence is the first tokens of one document. With packing by
concatenation all documents of a source, each followed by a separator, make one long text, which is
cut every `length` tokens. So the lengths of the documents alone say where a sequence lies.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headcount.workers.inputs.corpus.corpus import PART, Choice, Corpus
from headcount.workers.inputs.corpus.documents import as_text, is_one_of
from headcount.workers.inputs.store.token_store import (
    BAD,
    Piece,
    TokenStore,
    field_column,
    read_documents,
    read_tokens,
)

SKIPPED = -2
"""Number of tokens of a document that `skip` leaves out."""

MOST_READ_PER_TOKEN = 16
"""Tokens that are read at most for each one that is wanted, if documents are read together."""

SHUFFLE_STREAM = zlib.crc32(b"shuffle")
"""Keeps the order of shuffled documents apart from what else is drawn with the seed of a scan."""


class PiecePlace(NamedTuple):
    """Where a piece lies in its corpus: what the pieces before it hold."""

    first_source: int
    """Number in the corpus of its portion's first source."""
    rows_before: int
    """Rows of that source in earlier portions."""
    documents_before: int
    """All documents of earlier pieces."""
    taken_before: int
    """Those of them that `where` selects, bad and skipped ones included."""
    joined_source: int
    """The source that the last document before this piece belongs to; -1 if there is none."""
    joined_before: int
    """Tokens and separators of that source in earlier pieces."""


class JoinedText(NamedTuple):
    """What a block holds of one joined text: documents of one source, or shuffled ones."""

    source: int
    begin: int
    """The first of its documents in the block."""
    end: int
    """One behind the last."""
    joined_before: int
    """Tokens and separators of the joined text that lie in earlier blocks."""
    joined_end: int
    """Tokens and separators of the joined text up to the end of this block."""


@dataclass(frozen=True)
class DocumentBlock:
    """Documents that a scan takes. The arrays have one entry for each."""

    packing: str
    length: int
    """Text tokens of a sequence."""
    store: TokenStore
    pieces: tuple[Piece, ...]
    piece: np.ndarray
    """The number of its piece in `pieces`."""
    position: np.ndarray
    """Its number among all documents of the corpus, in the order of the files."""
    first_token: np.ndarray
    """Where its tokens begin in its piece."""
    source: np.ndarray
    """The number of its source in the corpus."""
    row: np.ndarray
    """Its row in the source."""
    n_tokens: np.ndarray
    """`BAD` if the row cannot be read, `SKIPPED` if it is left out, 0 if the text is empty."""
    content: np.ndarray
    """The hash of its content."""
    labels: pa.Table
    """Its `pile_set_name`, its `problem` and the fields that are kept."""
    texts: tuple[JoinedText, ...]
    """Joined texts that the documents belong to, in order."""
    others: dict[str, int]
    """By part: how many documents of the pieces `where` does not select."""

    def __len__(self) -> int:
        return len(self.row)

    # Sequences

    @property
    def sequences(self) -> int:
        """How many sequences end in this block."""
        if self.packing == "document":
            return len(self.long_documents)
        return int(self.sequence_ends[-1]) if len(self.sequence_ends) else 0

    @cached_property
    def long_documents(self) -> np.ndarray:
        """The documents that are long enough for a sequence."""
        return np.flatnonzero(self.n_tokens >= self.length)

    @cached_property
    def sequence_ends(self) -> np.ndarray:
        """Of each joined text: how many sequences end in it and in those before it.

        A sequence may begin in an earlier block. It is counted where it ends, because there it is
        certain that it is whole.
        """
        before = np.array([text.joined_before for text in self.texts], np.int64)
        end = np.array([text.joined_end for text in self.texts], np.int64)
        return np.cumsum(end // self.length - before // self.length)

    def joined_place(self, number: int) -> tuple[JoinedText, int]:
        """The joined text in which sequence `number` of the block ends, and its first token."""
        i = int(np.searchsorted(self.sequence_ends, number, side="right"))
        text = self.texts[i]
        number_in_part = number - (int(self.sequence_ends[i - 1]) if i else 0)
        # A sequence that ends in an earlier block comes before those of this one.
        number_in_text = text.joined_before // self.length + number_in_part
        return text, number_in_text * self.length

    def last_document(self, number: int) -> int:
        """The document in which sequence `number` of the block ends."""
        if self.packing == "document":
            return int(self.long_documents[number])
        text, start = self.joined_place(number)
        last_token = np.array([start + self.length - 1])
        return int(self.documents_at(text, last_token)[0])

    # Labels of documents

    def pile_set_names(self, documents: np.ndarray) -> list[str | None]:
        """The subset of the Pile that each document says it belongs to."""
        return self.labels[PART].take(pa.array(documents)).to_pylist()

    def problem(self, document: int) -> str:
        """What is wrong with a bad document."""
        return self.labels["problem"][document].as_py() or ""

    def carried(self, documents: np.ndarray, column: str) -> list[str | None]:
        """A field of some documents as a run keeps it."""
        values = self.labels[field_column(column)].take(pa.array(documents)).to_pylist()
        return [None if value is None else as_text(json.loads(value)) for value in values]

    # Joined texts

    @cached_property
    def joined_ends(self) -> np.ndarray:
        """Where each document ends in the joined text of its source.

        Every document that has tokens is followed by one separator; one without tokens ends where
        it begins.
        """
        ends = np.cumsum(_joined_lengths(self.n_tokens))  # [document]
        # The sum runs over all texts of the block, so each text has a shift of its own.
        shifts = [
            text.joined_before - int(ends[text.begin - 1] if text.begin else 0)
            for text in self.texts
        ]
        lengths = [text.end - text.begin for text in self.texts]
        return ends + np.repeat(np.array(shifts, np.int64), lengths)

    def begins_of(self, documents: np.ndarray) -> np.ndarray:
        """Where documents begin in the joined text of their source."""
        return self.joined_ends[documents] - _joined_lengths(self.n_tokens[documents])

    def documents_at(self, text: JoinedText, tokens: np.ndarray) -> np.ndarray:
        """The documents that hold some tokens of a joined text."""
        ends = self.joined_ends[text.begin : text.end]
        # side="right" finds the first document that ends behind a token, which is the one that
        # holds it, never one without tokens.
        return text.begin + np.searchsorted(ends, tokens, side="right")

    def joined_tokens(self, text: JoinedText, start: int, stop: int, separator: int) -> np.ndarray:
        """The tokens `start .. stop-1` of a joined text, all of which lie in this block."""
        first, last = self.documents_at(text, np.array([start, stop - 1])).tolist()
        documents = np.arange(first, last + 1)
        documents = documents[self.n_tokens[documents] > 0]
        begins = self.first_token[documents]
        ends = begins + self.n_tokens[documents]
        # A document may be far longer than what is wanted of it.
        begin_of_first, begin_of_last = self.begins_of(documents[[0, -1]]).tolist()
        # The end first: `begins[-1]` changes below if the first document is also the last.
        ends[-1] = min(ends[-1], begins[-1] + stop - begin_of_last)
        begins[0] += start - begin_of_first
        tokens = self._tokens_between(self.piece[documents], begins, ends)
        # Numbers of `insert` count in the array before it, so each separator lands behind its
        # document.
        joined = np.insert(tokens, np.cumsum(ends - begins), separator)
        # Behind the last document stands a separator that may not be wanted.
        return joined[: stop - start]

    def _tokens_between(
        self, pieces: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Ranges of tokens of pieces, one after the other."""
        # Documents whose tokens follow one another are read at once.
        is_gap = (begins[1:] != ends[:-1]) | (pieces[1:] != pieces[:-1])
        bounds = [0, *(np.flatnonzero(is_gap) + 1).tolist(), len(pieces)]
        parts = [
            self._tokens_of_piece(int(pieces[first]), int(begins[first]), int(ends[last - 1]))
            for first, last in pairwise(bounds)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # The beginnings of documents

    def first_tokens(self, documents: np.ndarray, count: int) -> np.ndarray:
        """The first tokens of some documents, `[document count]`."""
        pieces = self.piece[documents]
        begins = self.first_token[documents]
        lowest, end = int(begins.min()), int(begins.max()) + count
        is_near = end - lowest <= MOST_READ_PER_TOKEN * count * len(documents)
        if is_near and (pieces == pieces[0]).all():
            # Short sequences lie close together. Reading what is between them costs less than a
            # reading for each.
            tokens = self._tokens_of_piece(int(pieces[0]), lowest, end)
            return tokens[(begins - lowest)[:, None] + np.arange(count)]  # [document count]
        rows = [
            self._tokens_of_piece(piece, begin, begin + count)
            for piece, begin in zip(pieces.tolist(), begins.tolist(), strict=True)
        ]
        return np.array(rows)

    def token_counts(self, d_vocab: int) -> np.ndarray:
        """How often the documents of the block hold each token: `[token]`."""
        has_tokens = self.n_tokens > 0
        if not has_tokens.any():
            return np.zeros(d_vocab, np.int64)
        begins = self.first_token[has_tokens]
        ends = begins + self.n_tokens[has_tokens]
        tokens = self._tokens_between(self.piece[has_tokens], begins, ends)
        return np.bincount(tokens, minlength=d_vocab)

    def _tokens_of_piece(self, number: int, start: int, stop: int) -> np.ndarray:
        """Tokens of one of the pieces."""
        return read_tokens(self.store, self.pieces[number], start, stop).astype(np.int32)


def _joined_lengths(n_tokens: np.ndarray) -> np.ndarray:
    """Tokens of each document and its separator in a joined text."""
    return np.where(n_tokens > 0, n_tokens.astype(np.int64) + 1, 0)


def block_of_piece(
    store: TokenStore,
    piece: Piece,
    where: PiecePlace,
    corpus: Corpus,
    length: int,
    documents: int | None = None,
) -> DocumentBlock:
    """The documents that a scan takes from one piece, in the order of the files.

    `length` is that of the text of a sequence. Only the first `documents` of the piece count, if
    that is given.
    """
    table = read_documents(store, piece).slice(0, documents)
    is_taken = _is_taken(table, corpus.choice)
    all_lengths = table["n_tokens"].to_numpy()
    token_ends = np.cumsum(np.maximum(all_lengths, 0), dtype=np.int64)
    first_token = token_ends - np.maximum(all_lengths, 0)
    source_in_portion = table["source"].to_numpy()
    row = table["row"].to_numpy() + np.where(source_in_portion == 0, where.rows_before, 0)

    n_tokens = all_lengths[is_taken]
    if not corpus.choice.shuffled:
        numbers = where.taken_before + np.arange(len(n_tokens))
        n_tokens = _with_skipped(n_tokens, numbers < corpus.choice.skip)
    source = (source_in_portion + where.first_source)[is_taken]
    taken_table = table.filter(pa.array(is_taken))
    others = table.filter(pa.array(~is_taken))["pile_set_name"].combine_chunks().value_counts()
    return DocumentBlock(
        packing=corpus.packing,
        length=length,
        store=store,
        pieces=(piece,),
        piece=np.zeros(len(n_tokens), np.int32),
        position=where.documents_before + np.flatnonzero(is_taken),
        first_token=first_token[is_taken],
        source=source,
        row=row[is_taken],
        n_tokens=n_tokens,
        content=taken_table["content"].to_numpy(),
        labels=taken_table.drop_columns(["source", "row", "n_tokens", "content"]).combine_chunks(),
        texts=tuple(_joined_texts(source, n_tokens, where)),
        # Documents without a part count under the empty name.
        others={entry["values"] or "": entry["counts"] for entry in others.to_pylist()},
    )


def shuffled_block(blocks: list[DocumentBlock], choice: Choice) -> DocumentBlock:
    """The documents of all pieces in random order, which depends on the seed alone."""
    rng = np.random.default_rng([int(choice.shuffle), SHUFFLE_STREAM])
    order = rng.permutation(sum(len(block) for block in blocks))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(block, name) for block in blocks])[order]

    # `skip` leaves out the first documents of the shuffled order.
    n_tokens = _with_skipped(joined("n_tokens"), np.arange(len(order)) < choice.skip)
    piece_numbers = [np.full(len(block), i, np.int32) for i, block in enumerate(blocks)]
    total = int(_joined_lengths(n_tokens).sum())
    others: dict[str, int] = {}
    for block in blocks:
        for part, count in block.others.items():
            others[part] = others.get(part, 0) + count
    # Each piece numbers its parts by itself.
    labels = pa.concat_tables([block.labels for block in blocks]).unify_dictionaries()
    return replace(
        blocks[0],
        pieces=tuple(block.pieces[0] for block in blocks),
        piece=np.concatenate(piece_numbers)[order],
        position=joined("position"),
        first_token=joined("first_token"),
        source=joined("source"),
        row=joined("row"),
        n_tokens=n_tokens,
        content=joined("content"),
        labels=labels.take(pa.array(order)).combine_chunks(),
        texts=(JoinedText(-1, 0, len(order), 0, total),),
        others=others,
    )


def _is_taken(table: pa.Table, choice: Choice) -> np.ndarray:
    """Which documents `where` selects. A row that cannot be read has no fields, and is selected."""
    is_taken = np.ones(len(table), bool)
    is_bad = table["problem"].is_valid().to_numpy()
    for name, allowed in choice.where:
        is_part = name == PART
        column = table[name if is_part else field_column(name)].combine_chunks()
        values = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        # Many documents have few different values, so each value is looked at once.
        fits = [
            value is not None and is_one_of(value if is_part else json.loads(value), allowed)
            for value in values.dictionary.to_pylist()
        ]
        # The last entry stands for documents that do not have the field.
        codes = values.indices.fill_null(len(fits)).to_numpy()
        is_taken &= np.array([*fits, False])[codes]
    return is_taken | is_bad


def _with_skipped(n_tokens: np.ndarray, is_skipped: np.ndarray) -> np.ndarray:
    """Lengths of documents, those of skipped ones replaced. Bad documents stay bad."""
    return np.where(is_skipped & (n_tokens != BAD), SKIPPED, n_tokens).astype(np.int32)


def _joined_texts(
    source: np.ndarray, n_tokens: np.ndarray, where: PiecePlace
) -> Iterator[JoinedText]:
    """The joined text of each source that documents of a piece belong to."""
    if not len(source):
        return
    bounds = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist(), len(source)]
    lengths = np.concatenate([[0], np.cumsum(_joined_lengths(n_tokens))])
    for begin, end in pairwise(bounds):
        number = int(source[begin])
        before = where.joined_before if number == where.joined_source else 0
        yield JoinedText(number, begin, end, before, before + int(lengths[end] - lengths[begin]))
