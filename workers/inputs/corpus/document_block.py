"""Documents that a scan takes, in the order in which they become sequences, and their tokens.

A block holds the documents of one portion of the token store, or, if they are shuffled, those of
all portions. With packing by document a sequence is the first tokens of one document. With packing
by concatenation the documents of a block, each followed by a separator, make one long text, which
is cut every `length` tokens; what is left at its end is not measured. So the lengths of the
documents alone say where a sequence lies.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
import zlib
from collections import Counter
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headcount.workers.inputs.corpus.corpus import PART, Corpus
from headcount.workers.inputs.corpus.documents import is_one_of
from headcount.workers.inputs.store.token_store import (
    BAD,
    Portion,
    TokenStore,
    field_column,
    open_portion,
    values_of,
)

SKIPPED = -2
"""Number of tokens of a document that `skip` leaves out."""

SHUFFLE_STREAM = zlib.crc32(b"shuffle")
"""Keeps the order of shuffled documents apart from what else is drawn with the seed of a scan."""


class PortionPlace(NamedTuple):
    """Where a portion lies in its corpus: what the portions before it hold."""

    first_source: int = 0
    """Number in the corpus of its extent's first source."""
    rows_before: int = 0
    """Rows of that source in earlier extents."""
    taken_before: int = 0
    """Documents that `where` selects, bad and skipped ones included."""
    documents_before: int = 0
    """All documents; tokens and bad documents are counted likewise."""
    tokens_before: int = 0
    bad_before: int = 0


class DocumentBlock:
    """Documents that a scan takes. `table` has a row for each, with the numbers that are arrays
    here, its `pile_set_name`, its `problem` and the fields that are kept.
    """

    def __init__(
        self,
        store: TokenStore,
        corpus: Corpus,
        length: int,
        portions: list[Portion],
        table: pa.Table,
        others: Counter[str],
    ) -> None:
        self.store = store
        self.corpus = corpus
        self.length = length
        """Text tokens of a sequence."""
        self.portions = portions
        self.table = table
        self.others = others
        """By part: how many documents of the portions `where` does not select."""
        # The number of its portion in `portions`; its own among all documents of the corpus, in the
        # order of the files; where its tokens begin in its portion.
        self.portion = values_of(table["portion"])
        self.position = values_of(table["position"])
        self.first_token = values_of(table["first_token"])
        # The number of its source in the corpus, and its row there.
        self.source = values_of(table["source"])
        self.row = values_of(table["row"])
        # `BAD` if the row cannot be read, `SKIPPED` if it is left out, 0 if the text is empty.
        self.n_tokens = values_of(table["n_tokens"])

    @classmethod
    def of_portion(
        cls,
        store: TokenStore,
        portion: Portion,
        where: PortionPlace,
        corpus: Corpus,
        length: int,
        documents: int | None = None,
    ) -> DocumentBlock:
        """The documents that a scan takes from one portion, in the order of the files.

        Only the first `documents` of the portion count, if that is given.
        """
        table = open_portion(store, portion).documents().slice(0, documents)
        is_taken = np.ones(len(table), bool)
        for name, allowed in corpus.choice.where:
            column = table[name if name == PART else field_column(name)]
            # Many documents have few different values, so each value is looked at once.
            codes = column.combine_chunks().dictionary_encode()
            fits = [
                value is not None
                and is_one_of(value if name == PART else json.loads(value), allowed)
                for value in codes.dictionary.to_pylist()
            ]
            # The last entry stands for documents that do not have the field.
            is_taken &= np.array([*fits, False])[codes.indices.fill_null(len(fits)).to_numpy()]
        # A row that cannot be read has no fields, and is taken.
        is_taken |= table["problem"].is_valid().to_numpy()
        n_tokens = values_of(table["n_tokens"])
        if not corpus.choice.shuffled:
            numbers = where.taken_before + np.cumsum(is_taken) - 1
            n_tokens = _with_skipped(n_tokens, numbers < corpus.choice.skip)
        lengths = np.maximum(values_of(table["n_tokens"]), 0)
        source = values_of(table["source"])
        numbers = {
            "portion": np.zeros(len(table), np.int32),
            "position": where.documents_before + np.arange(len(table)),
            "first_token": np.cumsum(lengths, dtype=np.int64) - lengths,
            "source": where.first_source + source,
            "row": values_of(table["row"]) + np.where(source == 0, where.rows_before, 0),
            "n_tokens": n_tokens,
        }
        labels = table.drop_columns(["source", "row", "offset", "n_tokens", "content"])
        mask = pa.array(is_taken)
        # Documents without a part count under the empty name.
        others = table[PART].filter(pa.array(~is_taken)).to_pylist()
        columns = numbers | dict(zip(labels.column_names, labels.columns, strict=True))
        taken = pa.table(columns).filter(mask).combine_chunks()
        return cls(store, corpus, length, [portion], taken, Counter(name or "" for name in others))

    @classmethod
    def shuffled(cls, blocks: list[DocumentBlock]) -> DocumentBlock:
        """The documents of all portions in random order, which depends on the seed alone."""
        corpus = blocks[0].corpus
        tables = [
            _with_column(block.table, "portion", np.full(len(block), i, np.int32))
            for i, block in enumerate(blocks)
        ]
        table = pa.concat_tables(tables)
        rng = np.random.default_rng([int(corpus.choice.shuffle), SHUFFLE_STREAM])
        table = table.take(pa.array(rng.permutation(len(table)))).combine_chunks()
        # `skip` leaves out the first documents of the shuffled order.
        is_skipped = np.arange(len(table)) < corpus.choice.skip
        n_tokens = _with_skipped(values_of(table["n_tokens"]), is_skipped)
        return cls(
            blocks[0].store,
            corpus,
            blocks[0].length,
            [block.portions[0] for block in blocks],
            _with_column(table, "n_tokens", n_tokens),
            sum((block.others for block in blocks), Counter()),
        )

    def __len__(self) -> int:
        return len(self.row)

    # Sequences

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
    def sequences(self) -> int:
        """How many sequences the block has."""
        if self.corpus.packing == "document":
            return len(self.long_documents)
        return int(self.joined_ends[-1]) // self.length if len(self) else 0

    @property
    def unmeasured(self) -> int:
        """Tokens and separators at the end of joined documents that make no sequence."""
        if self.corpus.packing == "document" or not len(self):
            return 0
        return int(self.joined_ends[-1]) % self.length

    def begins_of(self, documents: np.ndarray) -> np.ndarray:
        """Where documents with tokens begin in the joined text."""
        return self.joined_ends[documents] - self.n_tokens[documents] - 1

    def beginnings(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the sequences `first .. end-1`: the document, and its token, that each begins with."""
        if self.corpus.packing == "document":
            documents = self.long_documents[first:end]
            return documents, np.zeros_like(documents)
        starts = np.arange(first, end) * self.length
        # side="right" finds the first document that ends behind a token, which is the one that
        # holds it, never one without tokens.
        documents = np.searchsorted(self.joined_ends, starts, side="right")
        return documents, starts - self.begins_of(documents)

    def last_document(self, sequence: int) -> int:
        """The document in which a sequence ends."""
        if self.corpus.packing == "document":
            return int(self.long_documents[sequence])
        return int(self._joined(sequence, sequence + 1)[-1])

    def _joined(self, first: int, end: int) -> np.ndarray:
        """The documents with tokens in the sequences `first .. end-1` of the joined text."""
        ends = [first * self.length, end * self.length - 1]
        of_first, of_last = np.searchsorted(self.joined_ends, ends, side="right").tolist()
        return of_first + np.flatnonzero(self.n_tokens[of_first : of_last + 1] > 0)

    def main_documents(self, first: int, end: int) -> np.ndarray:
        """The document with most tokens of each of the sequences `first .. end-1`."""
        if self.corpus.packing == "document":
            return self.long_documents[first:end]
        start, stop = first * self.length, end * self.length
        documents = self._joined(first, end)
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

    # Tokens

    def tokens(self, first: int, end: int, separator: int | None) -> np.ndarray:
        """The tokens of the sequences `first .. end-1`, `[sequence length]`."""
        if self.corpus.packing == "document":
            documents = self.long_documents[first:end]
            begins = self.first_token[documents]
            tokens = self._tokens_between(documents, begins, begins + self.length)
            return tokens.reshape(-1, self.length)
        assert separator is not None
        start, stop = first * self.length, end * self.length
        documents = self._joined(first, end)
        begins = self.first_token[documents]
        ends = begins + self.n_tokens[documents]
        # A document may be far longer than what is wanted of it.
        begin_of_first, begin_of_last = self.begins_of(documents[[0, -1]]).tolist()
        # The end first: `begins[-1]` changes below if the first document is also the last.
        ends[-1] = min(ends[-1], begins[-1] + stop - begin_of_last)
        begins[0] += start - begin_of_first
        tokens = self._tokens_between(documents, begins, ends)
        # Numbers of `insert` count in the array before it, so each separator lands behind its
        # document. Behind the last document stands one that may not be wanted.
        joined = np.insert(tokens, np.cumsum(ends - begins), separator)
        return joined[: stop - start].reshape(end - first, self.length)

    def token_counts(self, d_vocab: int) -> np.ndarray:
        """How often the documents of the block hold each token: `[token]`."""
        documents = np.flatnonzero(self.n_tokens > 0)
        begins = self.first_token[documents]
        tokens = self._tokens_between(documents, begins, begins + self.n_tokens[documents])
        return np.bincount(tokens, minlength=d_vocab)

    def _tokens_between(
        self, documents: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        """Ranges of tokens in the portions of some documents, one after the other."""
        portions = self.portion[documents]
        stops = np.cumsum(ends - begins)
        tokens = np.empty(stops[-1] if len(stops) else 0, np.int32)
        # Tokens that follow one another are read at once.
        is_first = np.ones(len(documents), bool)
        is_first[1:] = (begins[1:] != ends[:-1]) | (portions[1:] != portions[:-1])
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(documents)) - 1
        # In the order of the files, so that each is opened, and each of its parts decoded, once.
        order = np.lexsort((begins[firsts], portions[firsts]))
        for first, last in zip(firsts[order].tolist(), lasts[order].tolist(), strict=True):
            file = open_portion(self.store, self.portions[portions[first]])
            begin, end, stop = int(begins[first]), int(ends[last]), int(stops[last])
            tokens[stop - (end - begin) : stop] = file.tokens(begin, end)
        return tokens


def _with_skipped(n_tokens: np.ndarray, is_skipped: np.ndarray) -> np.ndarray:
    """Lengths of documents, those of skipped ones replaced. Bad documents stay bad."""
    return np.where(is_skipped & (n_tokens != BAD), SKIPPED, n_tokens).astype(np.int32)


def _with_column(table: pa.Table, name: str, values: np.ndarray) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values))
