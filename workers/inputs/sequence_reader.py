"""Sequences of a corpus by its index, and what became of the corpus's documents.

A sequence is cut in one of two ways. With packing by document it is the first tokens of one
document. With packing by concatenation all documents, each followed by a separator, make one long
text, which is cut every `length` tokens. Either way the lengths of the documents alone say in which
document, and at which of its tokens, a sequence begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from schemas.document_fates import FATES, OTHER, Fates
from schemas.errors import CorpusError, printable
from schemas.tables import carried_name
from workers.inputs.corpus import Corpus, Tokenizer
from workers.inputs.document_index import BAD, SKIPPED, Index
from workers.inputs.documents import FROM_THE_BEGINNING, Document, Record

TOKENS_IN_MEMORY = 16_000_000
"""Tokens that are read at once if the documents of a shard lie anywhere in files that must be read
from their beginning: about 64 MB of text.
"""

Origin = dict[str, list[Any]]
"""Where sequences came from: columns of the table `sequences`, by name."""


class Cuts(NamedTuple):
    """Where sequences lie in a corpus: arrays with one entry for each sequence."""

    first_document: np.ndarray
    """The document that the sequence begins in."""
    first_token: np.ndarray
    """The token of that document at which it begins."""
    last_document: np.ndarray
    """The document that it ends in."""


class _OpenSource(NamedTuple):
    """A source that was read forward up to some row and stays open."""

    number: int
    next_row: int
    records: Iterator[Record]


class SequenceReader:
    """Reads sequences by their index.

    It is fast if they are read in order, because compressed files are read forward only.
    """

    def __init__(
        self, corpus: Corpus, index: Index, tokenizer: Tokenizer, length: int, separator: int | None
    ) -> None:
        """`length` is the number of text tokens in a sequence, `separator` the token that joins
        documents.
        """
        self.corpus = corpus
        self.index = index
        self.tokenizer = tokenizer
        self.length = length
        self.separator = separator
        self.cuts = self._cut_corpus()
        self._open_source: _OpenSource | None = None
        self._documents: dict[int, Document] = {}
        """Documents that were read and are still needed, by their number in the index."""
        self._tokens: dict[int, list[int]] = {}
        """Their tokens, as far as they were tokenised."""

    def __len__(self) -> int:
        """The number of sequences in the indexed part of the corpus."""
        return len(self.cuts.first_document)

    def place_of(self, document: int) -> str:
        """Where a document of the index lies."""
        source = self.corpus.sources[self.index.source[document]]
        return source.place_of(int(self.index.row[document]))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, Origin]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and their origin."""
        self._load(start, stop)
        tokens = np.empty((stop - start, self.length), np.int32)
        carried_columns = [carried_name(column) for column in self.corpus.reading.columns]
        names = ("file", "row", "offset", "pile_set_name", *carried_columns)
        origin: Origin = {name: [] for name in names}
        for sequence in range(start, stop):
            tokens[sequence - start] = self._tokens_of_sequence(sequence)
            first_document = int(self.cuts.first_document[sequence])
            document = self._documents[first_document]
            values = (
                self.corpus.sources[self.index.source[first_document]].name,
                int(self.index.row[first_document]),
                int(self.cuts.first_token[sequence]),
                document.pile_set_name,
                *document.carried,
            )
            for name, value in zip(names, values, strict=True):
                origin[name].append(value)
        return tokens, origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows between the beginning of sequence `start` and that of sequence `stop`."""
        # The first sequence also answers for bad rows before it, the last for those after it.
        first_documents = self.cuts.first_document
        first = int(first_documents[start]) if start else 0
        last = int(first_documents[stop]) if stop < len(self) else len(self.index.row)
        bad_documents = first + np.flatnonzero(self.index.n_tokens[first:last] == BAD)
        return [
            f"{self.place_of(document)} ({printable(self.index.problems[document])})"
            for document in bad_documents.tolist()
        ]

    def fates(self, sequences: int) -> Fates:
        """What became of the documents, in a run of the first `sequences` sequences."""
        assert self.index.part is not None
        fate = self._fate_of_each_document(sequences)
        # Part -1, of documents that do not say their part, is counted under the empty name.
        part_names = ("", *self.index.part_names)
        counts = np.zeros((len(part_names), len(FATES)), np.int64)
        np.add.at(counts, (self.index.part + 1, fate), 1)
        parts: dict[str, Counter[str]] = {}
        for part_name, counts_of_part in zip(part_names, counts.tolist(), strict=True):
            by_fate = zip(FATES, counts_of_part, strict=True)
            if any(counts_of_part):
                parts[part_name] = Counter({name: count for name, count in by_fate if count})
        for part_name, count in self.index.other_documents.items():
            parts.setdefault(part_name, Counter())[OTHER] += count
        return Fates.of_parts(parts)

    def _fate_of_each_document(self, sequences: int) -> np.ndarray:
        """For each document of the index, the position of its fate in `FATES`.

        Later lines overrule earlier ones: an empty document between two used ones is empty.
        """
        n_tokens = self.index.n_tokens
        # +1 where a sequence begins and -1 behind its end: the running sum is above 0 exactly in
        # documents that lie in a sequence.
        sequence_edges = np.zeros(len(n_tokens) + 1, np.int64)
        np.add.at(sequence_edges, self.cuts.first_document[:sequences], 1)
        np.add.at(sequence_edges, self.cuts.last_document[:sequences] + 1, -1)
        is_used = np.cumsum(sequence_edges)[:-1] > 0
        fate = np.full(len(n_tokens), FATES.index("not needed"))
        if self.corpus.packing == "document":
            fate[n_tokens < self.length] = FATES.index("too short")
        fate[is_used] = FATES.index("used")
        fate[n_tokens == 0] = FATES.index("empty")
        fate[n_tokens == BAD] = FATES.index("bad")
        fate[n_tokens == SKIPPED] = FATES.index("skipped")
        return fate

    # Where sequences lie

    def _cut_corpus(self) -> Cuts:
        """The sequences of the whole index."""
        n_documents = len(self.index.row)
        if self.corpus.choice.shuffled:
            bounds = [0, n_documents]
        else:
            # Documents of two files are never joined, so each file is cut alone.
            numbers = range(len(self.corpus.sources) + 1)
            bounds = [int(np.searchsorted(self.index.source, number)) for number in numbers]
        cuts = [self._cut(begin, end) for begin, end in pairwise(bounds)]
        if not cuts:
            empty = np.empty(0, np.int64)
            return Cuts(empty, empty, empty)
        return Cuts(
            np.concatenate([cut.first_document for cut in cuts]),
            np.concatenate([cut.first_token for cut in cuts]),
            np.concatenate([cut.last_document for cut in cuts]),
        )

    def _cut(self, begin: int, end: int) -> Cuts:
        """The sequences of the documents `begin .. end-1`."""
        n_tokens = self.index.n_tokens[begin:end]
        if self.corpus.packing == "document":
            long_enough = begin + np.flatnonzero(n_tokens >= self.length)
            return Cuts(long_enough, np.zeros_like(long_enough), long_enough)
        # Every document that has tokens is followed by one separator. `ends` is where each document
        # ends in the joined text; one without tokens ends where it begins.
        lengths_with_separator = np.where(n_tokens > 0, n_tokens.astype(np.int64) + 1, 0)
        ends = np.cumsum(lengths_with_separator)
        total = int(ends[-1]) if len(ends) else 0
        starts = np.arange(0, total - self.length + 1, self.length)
        # side="right" finds the first document that ends behind a token, which is the one that
        # holds it, never one without tokens.
        first = np.searchsorted(ends, starts, side="right")
        last = np.searchsorted(ends, starts + self.length - 1, side="right")
        begin_of_first = np.where(first > 0, ends[first - 1], 0)
        return Cuts(begin + first, starts - begin_of_first, begin + last)

    def spanned(self, start: int, stop: int) -> np.ndarray:
        """The documents whose tokens are in the sequences `start .. stop-1`."""
        if self.corpus.packing == "document":
            return self.cuts.first_document[start:stop]
        first, last = self.cuts.first_document[start], self.cuts.last_document[stop - 1]
        documents = np.arange(first, last + 1)
        return documents[self.index.n_tokens[documents] > 0]

    # Reading

    def _tokens_of_sequence(self, sequence: int) -> list[int]:
        """The tokens of a sequence, taken from all the documents that it spans."""
        sequence_tokens: list[int] = []
        first_token = int(self.cuts.first_token[sequence])
        for document in self.spanned(sequence, sequence + 1).tolist():
            missing = self.length - len(sequence_tokens)
            sequence_tokens += self._tokens_of(document)[first_token : first_token + missing]
            # Only the first document is entered in its middle.
            first_token = 0
        return sequence_tokens

    def _tokens_of(self, document: int) -> list[int]:
        """The tokens of a document, followed by the separator if documents are joined."""
        if document not in self._tokens:
            tokens = self.tokenizer.encode(self._documents[document].text)
            if len(tokens) != self.index.n_tokens[document]:
                raise self._changed_error(document)
            if self.corpus.packing == "concat":
                assert self.separator is not None
                tokens.append(self.separator)
            self._tokens[document] = tokens
        return self._tokens[document]

    def _load(self, start: int, stop: int) -> None:
        """Hold the documents of the sequences `start .. stop-1` in memory, and let others go."""
        needed = set(self.spanned(start, stop).tolist())
        self._tokens = {number: self._tokens[number] for number in self._tokens.keys() & needed}
        if needed <= self._documents.keys():
            return
        wanted = set(self.spanned(start, self._last_to_load(start, stop)).tolist())
        self._documents = {
            number: document for number, document in self._documents.items() if number in wanted
        }
        missing = sorted(wanted - self._documents.keys())
        # By file and row, because most files are read forward only.
        file_order = np.lexsort((self.index.row[missing], self.index.source[missing]))
        in_file_order = np.array(missing)[file_order].tolist()
        by_source = groupby(in_file_order, lambda document: int(self.index.source[document]))
        for source_number, documents in by_source:
            self._read_from(source_number, list(documents))

    def _last_to_load(self, start: int, stop: int) -> int:
        """The sequence up to which documents are read at once.

        That is the end of the shard if its documents can be reached directly or lie together. If
        not, every reading goes through all files, so it takes as much as memory allows.
        """
        offset = self.index.offset
        if not self.corpus.choice.shuffled or offset is None or (offset >= 0).all():
            return stop
        return min(len(self), max(stop, start + TOKENS_IN_MEMORY // self._tokens_per_sequence))

    @property
    def _tokens_per_sequence(self) -> int:
        """Tokens of the documents that a sequence needs, on average."""
        if self.corpus.packing == "concat":
            return self.length
        lengths = self.index.n_tokens[self.cuts.first_document]
        return max(self.length, int(lengths.mean()))

    def _read_from(self, source_number: int, documents: list[int]) -> None:
        """Read some documents of one source, in the order of their rows."""
        source = self.corpus.sources[source_number]
        rows: list[int] = self.index.row[documents].tolist()
        offsets: list[int] = []
        if self.index.offset is not None:
            offsets = self.index.offset[documents].tolist()
        if offsets and FROM_THE_BEGINNING not in offsets:
            records = source.records_at(rows, offsets)
        else:
            records = self._records_forward(source_number, rows)
        for number, row in zip(documents, rows, strict=True):
            record = next(records, None)
            document = None
            if record is not None and record.row == row:
                document = source.document_of(record, self.corpus.reading)
            if document is None or self._is_changed(number, document):
                # Once the file is repaired, it must not be served from the one that is open now.
                self._open_source = None
                raise self._changed_error(number)
            self._documents[number] = document

    def _is_changed(self, number: int, document: Document) -> bool:
        """Whether a document is not the one that was indexed, as far as the index can tell."""
        hashes = self.index.content
        is_other_text = hashes is not None and document.content_hash != int(hashes[number])
        return document.problem is not None or is_other_text

    def _records_forward(self, source_number: int, rows: list[int]) -> Iterator[Record]:
        """The records of some rows of a source, in ascending order.

        Reading continues where the last one stopped if the rows lie behind that place.
        """
        opened = self._open_source
        if opened and opened.number == source_number and opened.next_row <= rows[0]:
            records = opened.records
        else:
            source = self.corpus.sources[source_number]
            records = source.records(self.corpus.reading, rows[0])
        for row in rows:
            # The source counts as closed while it is read: after an error it is opened anew.
            self._open_source = None
            record = next((record for record in records if record.row >= row), None)
            if record is None:
                return
            self._open_source = _OpenSource(source_number, row + 1, records)
            yield record

    def _changed_error(self, document: int) -> CorpusError:
        return CorpusError(
            f"{self.place_of(document)}: changed since the run began; run the same command again, "
            "which looks at the whole corpus anew"
        )


def moved_sequence(
    before: SequenceReader, now: SequenceReader, sequences: Iterable[int]
) -> str | None:
    """Why a sequence is not the same by another index of the corpus; None if all are the same.

    The first sequence that differs is named.
    """
    for sequence in sequences:
        if sequence >= len(now):
            return f"it held {len(before):,} sequences and holds {len(now):,}"
        difference = _difference_of_sequence(before, now, sequence)
        if difference is not None:
            return difference
    return None


def _difference_of_sequence(
    before: SequenceReader, now: SequenceReader, sequence: int
) -> str | None:
    """How the documents of one sequence differ between two indexes of a corpus; None if not."""
    # An older index has no hashes. Then the same number of tokens must do.
    both_have_hashes = before.index.content is not None and now.index.content is not None
    old_content = before.index.content if both_have_hashes else before.index.n_tokens
    new_content = now.index.content if both_have_hashes else now.index.n_tokens
    assert old_content is not None
    assert new_content is not None
    old_documents = before.spanned(sequence, sequence + 1).tolist()
    new_documents = now.spanned(sequence, sequence + 1).tolist()
    for old_document, new_document in zip(old_documents, new_documents, strict=False):
        old_place, new_place = before.place_of(old_document), now.place_of(new_document)
        if old_place != new_place:
            return f"sequence {sequence:,} came from {old_place} and would come from {new_place}"
        if old_content[old_document] != new_content[new_document]:
            return f"{new_place} is another text, which sequence {sequence:,} was made of"
    same_length = len(old_documents) == len(new_documents)
    if not same_length or before.cuts.first_token[sequence] != now.cuts.first_token[sequence]:
        return f"sequence {sequence:,} would not be the same"
    return None
