"""Sequences of a corpus by its index, and what became of the corpus's documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from schemas.document_fates import FATES, OTHER, Fates
from schemas.errors import CorpusError, printable
from schemas.tables import carried_name
from workers.inputs.corpus import Corpus, Tokenizer
from workers.inputs.document_index import BAD, SKIPPED, Index
from workers.inputs.documents import FROM_THE_BEGINNING, Document, Record

WINDOW = 16_000_000
"""Tokens that are read at once where the documents of a shard lie anywhere in files that are read
from their beginning: about 64 MB of text.
"""


class SequenceReader:
    """Reads sequences by their index; fast where they are asked for in order, since files that are
    compressed are read forward only.
    """

    def __init__(
        self, corpus: Corpus, index: Index, tokenizer: Tokenizer, length: int, separator: int | None
    ) -> None:
        """`length` is the number of text tokens in a sequence, `separator` the token that joins
        documents.
        """
        self.corpus, self.index, self.tokenizer = corpus, index, tokenizer
        self.length, self.separator = length, separator
        # Documents of two files are never joined, unless all are shuffled.
        bounds = (
            [0, len(index.row)]
            if corpus.choice.shuffled
            else [int(np.searchsorted(index.source, n)) for n in range(len(corpus.sources) + 1)]
        )
        cuts = [self._cut(a, b) for a, b in pairwise(bounds)]
        empty = np.empty(0, np.int64)
        self.first, self.offset, self.last = (
            np.concatenate([cut[i] for cut in cuts] or [empty]) for i in range(3)
        )
        """Of every sequence: the document it begins in, the token there, the document it ends in."""
        self._forward: tuple[int, int, Iterator[Record]] | None = None
        self._documents: dict[int, Document] = {}
        self._tokens: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """The number of sequences in the indexed part of the corpus."""
        return len(self.first)

    def place_of(self, document: int) -> str:
        """Where a document of the index lies."""
        source = self.corpus.sources[self.index.source[document]]
        return source.place_of(int(self.index.row[document]))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and where each one came
        from.
        """
        self._load(start, stop)
        tokens = np.empty((stop - start, self.length), np.int32)
        carried = [carried_name(column) for column in self.corpus.reading.columns]
        names = ("file", "row", "offset", "pile_set_name", *carried)
        origin: dict[str, list[Any]] = {name: [] for name in names}
        for i in range(start, stop):
            first, offset = int(self.first[i]), int(self.offset[i])
            document = self._documents[first]
            values = (
                self.corpus.sources[self.index.source[first]].name,
                int(self.index.row[first]),
                offset,
                document.pile_set_name,
                *document.carried,
            )
            for name, value in zip(names, values, strict=True):
                origin[name].append(value)
            tokens[i - start] = self._take(i)
        return tokens, origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows among those the sequences `start .. stop-1` span."""
        first = int(self.first[start]) if start else 0
        last = int(self.first[stop]) if stop < len(self) else len(self.index.row)
        lengths = self.index.n_tokens[first:last]
        return [
            f"{self.place_of(i)} ({printable(self.index.problems[i])})"
            for i in (first + np.flatnonzero(lengths == BAD)).tolist()
        ]

    def fates(self, sequences: int) -> Fates:
        """What became of the documents, in a run of so many sequences."""
        index = self.index
        n_tokens = index.n_tokens
        used = np.zeros(len(n_tokens) + 1, np.int64)
        np.add.at(used, self.first[:sequences], 1)
        np.add.at(used, self.last[:sequences] + 1, -1)
        fate = np.full(len(n_tokens), FATES.index("not needed"))
        if self.corpus.packing == "document":
            fate[n_tokens < self.length] = FATES.index("too short")
        fate[np.cumsum(used)[:-1] > 0] = FATES.index("used")
        fate[n_tokens == 0] = FATES.index("empty")
        fate[n_tokens == BAD] = FATES.index("bad")
        fate[n_tokens == SKIPPED] = FATES.index("skipped")
        assert index.part is not None
        names = ("", *index.part_names)
        counts = np.zeros((len(names), len(FATES)), np.int64)
        np.add.at(counts, (index.part + 1, fate), 1)
        parts = {
            name: Counter({fate: n for fate, n in zip(FATES, row, strict=True) if n})
            for name, row in zip(names, counts.tolist(), strict=True)
            if any(row)
        }
        for name, count in index.other_documents.items():
            parts.setdefault(name, Counter())[OTHER] += count
        return Fates.of_parts(parts)

    def _cut(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sequences of the documents `begin .. end-1`: where each begins, at which token of
        that document, and where it ends.
        """
        n_tokens = self.index.n_tokens[begin:end]
        if self.corpus.packing == "document":
            long_enough = begin + np.flatnonzero(n_tokens >= self.length)
            return long_enough, np.zeros_like(long_enough), long_enough
        # Every document that has tokens is followed by one separator.
        ends = np.cumsum(np.where(n_tokens > 0, n_tokens.astype(np.int64) + 1, 0))
        total = int(ends[-1]) if len(ends) else 0
        starts = np.arange(0, total - self.length + 1, self.length)
        first = np.searchsorted(ends, starts, side="right")
        last = np.searchsorted(ends, starts + self.length - 1, side="right")
        return begin + first, starts - np.where(first > 0, ends[first - 1], 0), begin + last

    def spanned(self, start: int, stop: int) -> np.ndarray:
        """The documents whose tokens are in the sequences `start .. stop-1`."""
        if self.corpus.packing == "document":
            return self.first[start:stop]
        numbers = np.arange(self.first[start], self.last[stop - 1] + 1)
        return numbers[self.index.n_tokens[numbers] > 0]

    def _take(self, sequence: int) -> list[int]:
        """The tokens of a sequence, over as many documents as it takes."""
        taken: list[int] = []
        offset = int(self.offset[sequence])
        for document in self.spanned(sequence, sequence + 1).tolist():
            tokens = self._tokens_of(document)
            taken += tokens[offset : offset + self.length - len(taken)]
            offset = 0
        return taken

    def _tokens_of(self, number: int) -> list[int]:
        """The tokens of a document, with the separator behind them where documents are joined."""
        if number not in self._tokens:
            tokens = self.tokenizer.encode(self._documents[number].text)
            if len(tokens) != self.index.n_tokens[number]:
                raise self._changed(number)
            if self.corpus.packing == "concat":
                assert self.separator is not None
                tokens.append(self.separator)
            self._tokens[number] = tokens
        return self._tokens[number]

    def _load(self, start: int, stop: int) -> None:
        """Have the documents of some sequences at hand."""
        needed = set(self.spanned(start, stop).tolist())
        self._tokens = {n: tokens for n, tokens in self._tokens.items() if n in needed}
        if not needed <= self._documents.keys():
            wanted = set(self.spanned(start, self._window(start, stop)).tolist())
            self._documents = {n: d for n, d in self._documents.items() if n in wanted}
            missing = sorted(wanted - self._documents.keys())
            rows, sources = self.index.row[missing], self.index.source[missing]
            in_files = np.array(missing)[np.lexsort((rows, sources))].tolist()
            for source, numbers in groupby(in_files, lambda n: int(self.index.source[n])):
                self._read_from(source, list(numbers))

    def _window(self, start: int, stop: int) -> int:
        """How far to read at once: to the end of a shard where its documents lie together, else as
        far as memory allows, since every reading goes through all files.
        """
        offset = self.index.offset
        if not self.corpus.choice.shuffled or offset is None or (offset >= 0).all():
            return stop
        return min(len(self), max(stop, start + WINDOW // self._tokens_per_sequence))

    @property
    def _tokens_per_sequence(self) -> int:
        """Tokens of the documents that a sequence needs, on average."""
        if self.corpus.packing == "concat":
            return self.length
        lengths = self.index.n_tokens[self.first]
        return max(self.length, int(lengths.mean()))

    def _read_from(self, number: int, documents: list[int]) -> None:
        """Read some documents of one source, in the order of their rows."""
        source, index = self.corpus.sources[number], self.index
        rows: list[int] = index.row[documents].tolist()
        offsets: list[int] = [] if index.offset is None else index.offset[documents].tolist()
        seekable = bool(offsets) and FROM_THE_BEGINNING not in offsets
        records = source.records_at(rows, offsets) if seekable else self._ahead(number, rows)
        for document, row in zip(documents, rows, strict=True):
            record = next(records, None)
            if record is None or record.row != row:
                self._forward = None
                raise self._changed(document)
            read = source.document_of(record, self.corpus.reading)
            if read.problem is not None or (
                index.content is not None and read.content_hash != int(index.content[document])
            ):
                self._forward = None
                raise self._changed(document)
            self._documents[document] = read

    def _ahead(self, number: int, rows: list[int]) -> Iterator[Record]:
        """The records of some rows of a source, from where it was last read on if they lie there."""
        # Where reading fails, the file is opened anew the next time.
        opened, self._forward = self._forward, None
        if opened is None or opened[0] != number or opened[1] > rows[0]:
            records = self.corpus.sources[number].records(self.corpus.reading, rows[0])
        else:
            records = opened[2]
        for row in rows:
            self._forward = None
            found = next((record for record in records if record.row >= row), None)
            if found is None:
                return
            self._forward = (number, row + 1, records)
            yield found

    def _changed(self, document: int) -> CorpusError:
        return CorpusError(
            f"{self.place_of(document)}: changed since the run began; run the same command again, "
            "which looks at the whole corpus anew"
        )


def moved_sequence(
    before: SequenceReader, now: SequenceReader, sequences: Iterable[int]
) -> str | None:
    """Which of some sequences would not be the same by another index of the corpus, and why; none
    if all are.
    """
    hashed = before.index.content is not None and now.index.content is not None
    old, new = (r.index.content if hashed else r.index.n_tokens for r in (before, now))
    assert old is not None
    assert new is not None
    for i in sequences:
        if i >= len(now):
            return f"it held {len(before):,} sequences and holds {len(now):,}"
        were, are = before.spanned(i, i + 1), now.spanned(i, i + 1)
        for a, b in zip(were.tolist(), are.tolist(), strict=False):
            if before.place_of(a) != now.place_of(b):
                return (
                    f"sequence {i:,} came from {before.place_of(a)} and would come from "
                    f"{now.place_of(b)}"
                )
            if old[a] != new[b]:
                return f"{now.place_of(b)} is another text, which sequence {i:,} was made of"
        if len(were) != len(are) or before.offset[i] != now.offset[i]:
            return f"sequence {i:,} would not be the same"
    return None
