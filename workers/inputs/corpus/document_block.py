"""Documents that a scan takes, in the order in which they become sequences, and their tokens.

A block holds the documents of one portion of the token store, or, if they are shuffled, those of
all portions. With packing by document a sequence is the first tokens of one document. With packing
by concatenation the documents of a block, each followed by a separator, make one long text, which
is cut every `length` tokens; what is left at its end is not measured. So the lengths of the
documents alone say where a sequence lies.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
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
    Portion,
    TokenStore,
    field_column,
    read_documents,
    read_tokens,
    values_of,
)

SKIPPED = -2
"""Number of tokens of a document that `skip` leaves out."""

MOST_READ_PER_TOKEN = 16
"""Tokens that are read at most for each one that is wanted, if documents are read together."""

SHUFFLE_STREAM = zlib.crc32(b"shuffle")
"""Keeps the order of shuffled documents apart from what else is drawn with the seed of a scan."""


class PortionPlace(NamedTuple):
    """Where a portion lies in its corpus: what the portions before it hold."""

    first_source: int
    """Number in the corpus of its extent's first source."""
    rows_before: int
    """Rows of that source in earlier extents."""
    taken_before: int
    """Documents that `where` selects, bad and skipped ones included."""
    documents_before: int
    """All documents; tokens and bad documents are counted likewise."""
    tokens_before: int
    bad_before: int


@dataclass(frozen=True)
class DocumentBlock:
    """Documents that a scan takes. The arrays have one entry for each."""

    packing: str
    length: int
    """Text tokens of a sequence."""
    store: TokenStore
    portions: tuple[Portion, ...]
    portion: np.ndarray
    """The number of its portion in `portions`."""
    position: np.ndarray
    """Its number among all documents of the corpus, in the order of the files."""
    first_token: np.ndarray
    """Where its tokens begin in its portion."""
    source: np.ndarray
    """The number of its source in the corpus."""
    row: np.ndarray
    """Its row in the source."""
    n_tokens: np.ndarray
    """`BAD` if the row cannot be read, `SKIPPED` if it is left out, 0 if the text is empty."""
    labels: pa.Table
    """Its `pile_set_name`, its `problem` and the fields that are kept."""
    others: dict[str, int]
    """By part: how many documents of the portions `where` does not select."""

    def __len__(self) -> int:
        return len(self.row)

    # Sequences

    @property
    def sequences(self) -> int:
        """How many sequences the block has."""
        if self.packing == "document":
            return len(self.long_documents)
        return self.joined_length // self.length

    @property
    def unmeasured(self) -> int:
        """Tokens and separators at the end of joined documents that make no sequence."""
        return 0 if self.packing == "document" else self.joined_length % self.length

    @cached_property
    def long_documents(self) -> np.ndarray:
        """The documents that are long enough for a sequence."""
        return np.flatnonzero(self.n_tokens >= self.length)

    @cached_property
    def joined_ends(self) -> np.ndarray:
        """Where each document ends in the joined text.

        Every document that has tokens is followed by one separator; one without tokens ends where
        it begins.
        """
        return np.cumsum(np.where(self.n_tokens > 0, self.n_tokens.astype(np.int64) + 1, 0))

    @property
    def joined_length(self) -> int:
        """Tokens and separators of the joined text."""
        return int(self.joined_ends[-1]) if len(self) else 0

    def documents_at(self, tokens: np.ndarray) -> np.ndarray:
        """The documents that hold some tokens of the joined text."""
        # side="right" finds the first document that ends behind a token, which is the one that
        # holds it, never one without tokens.
        return np.searchsorted(self.joined_ends, tokens, side="right")

    def begins_of(self, documents: np.ndarray) -> np.ndarray:
        """Where documents with tokens begin in the joined text."""
        return self.joined_ends[documents] - self.n_tokens[documents] - 1

    def beginnings(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the sequences `first .. end-1`: the document, and its token, that each begins with."""
        if self.packing == "document":
            documents = self.long_documents[first:end]
            return documents, np.zeros_like(documents)
        starts = np.arange(first, end) * self.length
        documents = self.documents_at(starts)
        return documents, starts - self.begins_of(documents)

    def last_document(self, sequence: int) -> int:
        """The document in which a sequence ends."""
        if self.packing == "document":
            return int(self.long_documents[sequence])
        return int(self.documents_at(np.array([(sequence + 1) * self.length - 1]))[0])

    def main_documents(self, first: int, end: int) -> np.ndarray:
        """The document with most tokens of each of the sequences `first .. end-1`."""
        if self.packing == "document":
            return self.long_documents[first:end]
        start, stop = first * self.length, end * self.length
        of_first, of_last = self.documents_at(np.array([start, stop - 1])).tolist()
        documents = of_first + np.flatnonzero(self.n_tokens[of_first : of_last + 1] > 0)
        begins = self.begins_of(documents)
        ends = begins + self.n_tokens[documents]
        # Cut where a document or a sequence begins: each cut is of one document and one sequence.
        starts = np.arange(start, stop, self.length)
        cuts = np.union1d(np.maximum(begins, start), starts)  # sorted, each once
        document = np.searchsorted(begins, cuts, side="right") - 1
        # A separator behind a document belongs to none, so a cut ends with its document.
        n_tokens = np.minimum(ends[document], np.append(cuts[1:], stop)) - cuts
        sequence = (cuts - start) // self.length
        # Of each sequence the longest cut comes first, of equal ones the earliest.
        order = np.lexsort((cuts, -n_tokens, sequence))
        _, firsts = np.unique(sequence[order], return_index=True)
        return documents[document[order[firsts]]]

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

    # Tokens

    def tokens(self, first: int, end: int, separator: int | None) -> np.ndarray:
        """The tokens of the sequences `first .. end-1`, `[sequence length]`."""
        if self.packing == "document":
            return self._first_tokens(self.long_documents[first:end])
        assert separator is not None
        start, stop = first * self.length, end * self.length
        of_first, of_last = self.documents_at(np.array([start, stop - 1])).tolist()
        documents = of_first + np.flatnonzero(self.n_tokens[of_first : of_last + 1] > 0)
        begins = self.first_token[documents]
        ends = begins + self.n_tokens[documents]
        # A document may be far longer than what is wanted of it.
        begin_of_first, begin_of_last = self.begins_of(documents[[0, -1]]).tolist()
        # The end first: `begins[-1]` changes below if the first document is also the last.
        ends[-1] = min(ends[-1], begins[-1] + stop - begin_of_last)
        begins[0] += start - begin_of_first
        tokens = self._tokens_between(self.portion[documents], begins, ends)
        # Numbers of `insert` count in the array before it, so each separator lands behind its
        # document. Behind the last document stands one that may not be wanted.
        joined = np.insert(tokens, np.cumsum(ends - begins), separator)
        return joined[: stop - start].reshape(end - first, self.length)

    def _first_tokens(self, documents: np.ndarray) -> np.ndarray:
        """The first tokens of some documents, `[document length]`."""
        portions = self.portion[documents]
        begins = self.first_token[documents]
        lowest, end = int(begins.min()), int(begins.max()) + self.length
        is_near = end - lowest <= MOST_READ_PER_TOKEN * self.length * len(documents)
        if is_near and (portions == portions[0]).all():
            # Short sequences lie close together. Reading what is between them costs less than a
            # reading for each.
            tokens = self._tokens_of(int(portions[0]), lowest, end)
            return tokens[(begins - lowest)[:, None] + np.arange(self.length)]  # [document length]
        rows = [
            self._tokens_of(portion, begin, begin + self.length)
            for portion, begin in zip(portions.tolist(), begins.tolist(), strict=True)
        ]
        return np.array(rows)

    def token_counts(self, d_vocab: int) -> np.ndarray:
        """How often the documents of the block hold each token: `[token]`."""
        documents = np.flatnonzero(self.n_tokens > 0)
        if not len(documents):
            return np.zeros(d_vocab, np.int64)
        begins = self.first_token[documents]
        ends = begins + self.n_tokens[documents]
        tokens = self._tokens_between(self.portion[documents], begins, ends)
        return np.bincount(tokens, minlength=d_vocab)

    def _tokens_between(
        self, portions: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Ranges of tokens of portions, one after the other."""
        # Documents whose tokens follow one another are read at once.
        is_gap = (begins[1:] != ends[:-1]) | (portions[1:] != portions[:-1])
        bounds = [0, *(np.flatnonzero(is_gap) + 1).tolist(), len(portions)]
        parts = [
            self._tokens_of(int(portions[first]), int(begins[first]), int(ends[last - 1]))
            for first, last in pairwise(bounds)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tokens_of(self, portion: int, start: int, stop: int) -> np.ndarray:
        return read_tokens(self.store, self.portions[portion], start, stop).astype(np.int32)


def block_of_portion(
    store: TokenStore,
    portion: Portion,
    where: PortionPlace,
    corpus: Corpus,
    length: int,
    documents: int | None = None,
) -> DocumentBlock:
    """The documents that a scan takes from one portion, in the order of the files.

    `length` is that of the text of a sequence. Only the first `documents` of the portion count, if
    that is given.
    """
    table = read_documents(store, portion).slice(0, documents)
    is_taken = _is_taken(table, corpus.choice)
    all_lengths = values_of(table["n_tokens"])
    first_token = np.cumsum(np.maximum(all_lengths, 0), dtype=np.int64) - np.maximum(all_lengths, 0)
    source_in_extent = values_of(table["source"])
    row = values_of(table["row"]) + np.where(source_in_extent == 0, where.rows_before, 0)
    n_tokens = all_lengths[is_taken]
    if not corpus.choice.shuffled:
        numbers = where.taken_before + np.arange(len(n_tokens))
        n_tokens = _with_skipped(n_tokens, numbers < corpus.choice.skip)
    others = table.filter(pa.array(~is_taken))[PART].to_pylist()
    columns = ["source", "row", "offset", "n_tokens", "content"]
    return DocumentBlock(
        packing=corpus.packing,
        length=length,
        store=store,
        portions=(portion,),
        portion=np.zeros(len(n_tokens), np.int32),
        position=where.documents_before + np.flatnonzero(is_taken),
        first_token=first_token[is_taken],
        source=(source_in_extent + where.first_source)[is_taken],
        row=row[is_taken],
        n_tokens=n_tokens,
        labels=table.filter(pa.array(is_taken)).drop_columns(columns).combine_chunks(),
        # Documents without a part count under the empty name.
        others=Counter(name or "" for name in others),
    )


def shuffled_block(blocks: list[DocumentBlock], choice: Choice) -> DocumentBlock:
    """The documents of all portions in random order, which depends on the seed alone."""
    rng = np.random.default_rng([int(choice.shuffle), SHUFFLE_STREAM])
    order = rng.permutation(sum(len(block) for block in blocks))

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(block, name) for block in blocks])[order]

    portions = [np.full(len(block), i, np.int32) for i, block in enumerate(blocks)]
    labels = pa.concat_tables([block.labels for block in blocks])
    return replace(
        blocks[0],
        portions=tuple(block.portions[0] for block in blocks),
        portion=np.concatenate(portions)[order],
        position=joined("position"),
        first_token=joined("first_token"),
        source=joined("source"),
        row=joined("row"),
        # `skip` leaves out the first documents of the shuffled order.
        n_tokens=_with_skipped(joined("n_tokens"), np.arange(len(order)) < choice.skip),
        labels=labels.take(pa.array(order)).combine_chunks(),
        others=sum((Counter(block.others) for block in blocks), Counter()),
    )


def _is_taken(table: pa.Table, choice: Choice) -> np.ndarray:
    """Which documents `where` selects. A row that cannot be read has no fields, and is selected."""
    is_taken = np.ones(len(table), bool)
    for name, allowed in choice.where:
        is_part = name == PART
        # Many documents have few different values, so each value is looked at once.
        values = table[name if is_part else field_column(name)].combine_chunks().dictionary_encode()
        fits = [
            value is not None and is_one_of(value if is_part else json.loads(value), allowed)
            for value in values.dictionary.to_pylist()
        ]
        # The last entry stands for documents that do not have the field.
        codes = values.indices.fill_null(len(fits)).to_numpy()
        is_taken &= np.array([*fits, False])[codes]
    return is_taken | table["problem"].is_valid().to_numpy()


def _with_skipped(n_tokens: np.ndarray, is_skipped: np.ndarray) -> np.ndarray:
    """Lengths of documents, those of skipped ones replaced. Bad documents stay bad."""
    return np.where(is_skipped & (n_tokens != BAD), SKIPPED, n_tokens).astype(np.int32)
