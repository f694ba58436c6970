"""The index of a corpus: its documents in the order in which they are cut into sequences, with the
number of tokens and a hash of each.

With an index, sequence i is a place in the corpus, whichever shard, actor or order reads it. The
index is built once, by tokenising every document as far as the scan needs them. Afterwards any
shard is read without tokenising what lies before it.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas.errors import CorpusError, printable
from schemas.parquet import parquet_bytes, read_parquet
from schemas.places import Place, StorePath, place
from workers.inputs.corpus import Choice, Corpus, Tokenizer
from workers.inputs.documents import Document, Reading, Record, Source, Value

BAD = -1
"""Number of tokens of a row that cannot be read."""

SKIPPED = -2
"""Number of tokens of a document that `skip` leaves out; it is not tokenised."""

RECORDS_AT_ONCE = 512
"""Records that are tokenised together, on all cores."""

LISTED_PARTS = 20
"""Parts of a corpus that an error message lists."""


class FileState(NamedTuple):
    """What a source was like when it was indexed."""

    name: str
    bytes: int
    changed: int
    """When the file was changed last, in nanoseconds; 0 if that is not known."""

    @classmethod
    def of(cls, source: Source) -> FileState:
        """A source as it is now."""
        if source.kind == "hub":
            return cls(source.file_name, 0, 0)
        path = place(source.path)
        if isinstance(path, StorePath):
            info = path.filesystem.get_file_info(path.key)
            return cls(source.file_name, info.size, info.mtime_ns)
        try:
            status = os.stat(path)
        except OSError:
            # Whoever reads the file next says what is wrong with it.
            return cls(source.file_name, 0, 0)
        return cls(source.file_name, status.st_size, status.st_mtime_ns)

    def is_same_file(self, now: FileState) -> bool:
        """Whether nothing tells a file from what it was; an unknown time fits every time."""
        same_content = (self.name, self.bytes) == (now.name, now.bytes)
        return same_content and self.changed in (0, now.changed)


def same_files(before: Sequence[FileState], sources: Sequence[Source]) -> bool:
    """Whether the first sources are the files of `before`, unchanged; more may come after them."""
    now = [FileState.of(source) for source in sources[: len(before)]]
    return len(now) == len(before) and all(
        old_state.is_same_file(new_state) for old_state, new_state in zip(before, now, strict=True)
    )


@dataclass(frozen=True)
class Index:
    """The documents of a corpus in the order in which they are cut into sequences.

    The arrays have one entry for each document.
    """

    source: np.ndarray
    """The number of its source in the corpus."""
    row: np.ndarray
    """Its row in the source."""
    n_tokens: np.ndarray
    """`BAD` if the row cannot be read, `SKIPPED` if it is left out, 0 if the text is empty."""
    problems: dict[int, str]
    """The problem of every bad document, by its number in this index."""
    whole_sources: int = 0
    """How many sources of the corpus are indexed to their end."""
    content: np.ndarray | None = None
    """Hash of every document. None in an index of an older version, which had no hashes."""
    offset: np.ndarray | None = None
    """Byte of its file at which a record begins, or `FROM_THE_BEGINNING`."""
    part: np.ndarray | None = None
    """Number of the part of the corpus that a document belongs to, -1 if it does not say."""
    part_names: tuple[str, ...] = ()
    files: tuple[FileState, ...] = ()
    """The state of every source of which at least the beginning is indexed."""
    other_documents: dict[str, int] = field(default_factory=dict[str, int])
    """By part: how many documents do not fit `where`."""
    bad_in_a_row: int = 0
    """The largest number of bad documents one after the other."""
    carried: tuple[int, ...] = ()
    """For each field that is carried into `sequences`: how many documents have it."""

    def to_parquet(self) -> pa.Buffer:
        """The index as a Parquet file."""
        assert self.part is not None
        # Parts are stored by name, so the file explains itself.
        part_names = pa.array(self.part_names, pa.string())
        columns = {
            "source": self.source,
            "row": self.row,
            "n_tokens": self.n_tokens,
            "content": self.content,
            "offset": self.offset,
            "part": part_names.take(pa.array(self.part, mask=self.part < 0)),
        }
        table = pa.table({name: values for name, values in columns.items() if values is not None})
        metadata = {
            "problems": json.dumps(list(self.problems.items())),
            "whole_sources": str(self.whole_sources),
            "files": json.dumps(self.files),
            "other_documents": json.dumps(self.other_documents),
            "bad_in_a_row": str(self.bad_in_a_row),
            "carried": json.dumps(self.carried),
        }
        return parquet_bytes(table.replace_schema_metadata(metadata))

    @classmethod
    def read(cls, file: Place) -> Index:
        """Read an index from its Parquet file."""
        table = read_parquet(file)
        if "content" not in table.column_names:
            return cls._from_older_table(table)
        metadata = table.schema.metadata or {}
        part = table["part"].combine_chunks().dictionary_encode()
        # JSON has no integer keys, so problems are stored as pairs.
        problems = {int(number): problem for number, problem in json.loads(metadata[b"problems"])}
        return cls(
            source=table["source"].to_numpy(),
            row=table["row"].to_numpy(),
            n_tokens=table["n_tokens"].to_numpy(),
            problems=problems,
            whole_sources=int(metadata.get(b"whole_sources") or 0),
            content=table["content"].to_numpy(),
            offset=table["offset"].to_numpy(),
            part=part.indices.fill_null(-1).to_numpy(),
            part_names=tuple(part.dictionary.to_pylist()),
            files=tuple(FileState(*state) for state in json.loads(metadata[b"files"])),
            other_documents=json.loads(metadata[b"other_documents"]),
            bad_in_a_row=int(metadata[b"bad_in_a_row"]),
            carried=tuple(json.loads(metadata[b"carried"])),
        )

    @classmethod
    def _from_older_table(cls, table: pa.Table) -> Index:
        """An index of an older version, which has neither hashes nor offsets nor parts."""
        metadata = table.schema.metadata or {}
        n_tokens = table["n_tokens"].to_numpy()
        # Older indexes named problems by file and row. They are in the order of the bad rows.
        problems = json.loads(metadata[b"problems"]).values()
        bad_documents = np.flatnonzero(n_tokens == BAD).tolist()
        return cls(
            source=table["source"].to_numpy(),
            row=table["row"].to_numpy(),
            n_tokens=n_tokens,
            problems=dict(zip(bad_documents, problems, strict=False)),
            whole_sources=int(metadata.get(b"whole_sources") or 0),
            part=np.full(len(n_tokens), -1, np.int32),
        )

    @property
    def bad(self) -> int:
        """How many documents are bad."""
        return int(np.count_nonzero(self.n_tokens == BAD))

    @property
    def documents(self) -> int:
        """How many documents were read, those that do not fit `where` included."""
        return len(self.row) + sum(self.other_documents.values())

    def lengths_of(self, content: np.ndarray) -> dict[int, int]:
        """The number of tokens by hash, for those of the hashes that this index holds."""
        if self.content is None or not len(self.content):
            return {}
        sorted_hashes, order = self._documents_by_hash
        # `clip`: a hash above all others would be found one place behind the end.
        positions = np.searchsorted(sorted_hashes, content).clip(max=len(order) - 1)
        documents = order[positions]
        # A bad or skipped document has no length to give.
        is_known = (sorted_hashes[positions] == content) & (self.n_tokens[documents] >= 0)
        lengths = self.n_tokens[documents[is_known]]
        return dict(zip(content[is_known].tolist(), lengths.tolist(), strict=True))

    @cached_property
    def _documents_by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes in ascending order, and the document of each."""
        assert self.content is not None
        order = np.argsort(self.content, kind="stable")
        return self.content[order], order


@dataclass(frozen=True)
class IndexProgress:
    """How far the tokenising of a corpus is."""

    documents: int
    tokens: int
    sequences: int
    enough: int | None
    """Sequences that are needed. None means as many as there are."""
    source: int
    """Sources begun."""
    sources: int
    """Sources of the corpus."""


Watch = Callable[[IndexProgress], None]
"""Is called after every batch of documents."""


def unwatched(progress: IndexProgress) -> None:
    """Watch a corpus being tokenised and show nothing."""


class _Listing:
    """Collects the documents of an index in the order of their files.

    Compact arrays, because a corpus may have many millions of documents.
    """

    def __init__(self, reading: Reading) -> None:
        self.source = array("i")
        self.row = array("q")
        self.n_tokens = array("i")
        self.content = array("Q")
        self.offset = array("q")
        self.part = array("i")
        self.part_numbers: dict[str, int] = {}
        self.problems: dict[int, str] = {}
        self.other_documents: Counter[str] = Counter()
        self.carried = [0] * len(reading.columns)
        self.bad_up_to_here = 0
        """Bad documents one after the other, up to the last document."""
        self.bad_in_a_row = 0
        """The largest value that `bad_up_to_here` had."""

    def __len__(self) -> int:
        return len(self.row)

    def add(self, source_number: int, record: Record, document: Document) -> bool:
        """List a document as bad for now, and return whether it has a text to be counted.

        A document that does not fit `where` is only counted by its part.
        """
        self._count_bad_in_a_row(document)
        part_name = document.pile_set_name or ""
        if not document.fits_where:
            self.other_documents[part_name] += 1
            return False
        if document.problem is not None:
            self.problems[len(self)] = document.problem
        for i, value in enumerate(document.carried):
            self.carried[i] += value is not None
        self.part.append(self._part_number(part_name))
        self.source.append(source_number)
        self.row.append(record.row)
        self.content.append(document.content_hash)
        self.offset.append(record.offset)
        self.n_tokens.append(BAD)
        return document.problem is None

    def _count_bad_in_a_row(self, document: Document) -> None:
        is_bad = document.problem is not None
        self.bad_up_to_here = self.bad_up_to_here + 1 if is_bad else 0
        self.bad_in_a_row = max(self.bad_in_a_row, self.bad_up_to_here)

    def _part_number(self, part_name: str) -> int:
        """Parts are numbered in the order in which they are met; -1 is no part."""
        if not part_name:
            return -1
        return self.part_numbers.setdefault(part_name, len(self.part_numbers))

    def index(self, whole_sources: int, files: list[FileState]) -> Index:
        """Everything that was listed, as an index in the order of the files."""
        return Index(
            source=np.array(self.source, np.int32),
            row=np.array(self.row, np.int64),
            n_tokens=np.array(self.n_tokens, np.int32),
            problems=self.problems,
            whole_sources=whole_sources,
            content=np.array(self.content, np.uint64),
            offset=np.array(self.offset, np.int64),
            part=np.array(self.part, np.int32),
            part_names=tuple(self.part_numbers),
            files=tuple(files),
            other_documents=dict(self.other_documents),
            bad_in_a_row=self.bad_in_a_row,
            carried=tuple(self.carried),
        )


def build_index(
    corpus: Corpus,
    tokenizer: Tokenizer,
    length: int,
    enough: int | None = None,
    watch: Watch = unwatched,
    known: Index | None = None,
    most_bad_in_a_row: int | None = None,
) -> Index:
    """Tokenise documents in order until there are `enough` sequences of `length` tokens.

    None for `enough` means all documents. A shuffled corpus is always indexed to its end. A
    document that `known` has is not tokenised again. Indexing stops after more than
    `most_bad_in_a_row` bad documents one after the other. `watch` hears of the progress.
    """
    builder = _IndexBuilder(corpus, tokenizer, length, enough, watch, known, most_bad_in_a_row)
    return _in_order_of_choice(builder.build(), corpus.choice)


@dataclass
class _IndexBuilder:
    """Lists and tokenises the documents of a corpus in the order of their files.

    The fields are the parameters of `build_index`, and the state.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    length: int
    enough: int | None
    watch: Watch
    known: Index | None
    most_bad_in_a_row: int | None
    n_tokens: int = 0
    """Tokens of all documents so far, separators not counted."""

    def __post_init__(self) -> None:
        self.listing = _Listing(self.corpus.reading)
        # Any document of a shuffled corpus may come first. All must be listed before it is known
        # which ones are skipped and which ones are enough.
        choice = self.corpus.choice
        self.needed = None if choice.shuffled else self.enough
        self.skip = 0 if choice.shuffled else choice.skip

    def build(self) -> Index:
        """The index in the order of the files."""
        files: list[FileState] = []
        sequences = whole_sources = 0
        for number, source in enumerate(self.corpus.sources):
            # Before it is read: a file that changes meanwhile will then not look unchanged.
            files.append(FileState.of(source))
            new_sequences, reached_end = self._add_source(number, source, sequences)
            sequences += new_sequences
            whole_sources += reached_end
            if self._may_stop(sequences):
                break
        return self.listing.index(whole_sources, files)

    def _add_source(self, number: int, source: Source, sequences_before: int) -> tuple[int, bool]:
        """List a source; return its number of sequences and whether it was read to its end."""
        sequences = 0
        tokens_with_separators = 0
        for records in _in_batches(source.records(self.corpus.reading), RECORDS_AT_ONCE):
            lengths = self._add_records(number, source, records)
            self.n_tokens += sum(lengths)
            if self.corpus.packing == "document":
                sequences += sum(length >= self.length for length in lengths)
            else:
                # One separator follows every document that has tokens.
                tokens_with_separators += sum(lengths) + sum(length > 0 for length in lengths)
                sequences = tokens_with_separators // self.length
            self._report(number, sequences_before + sequences)
            if self._may_stop(sequences_before + sequences):
                return sequences, False
        return sequences, True

    def _add_records(self, number: int, source: Source, records: list[Record]) -> list[int]:
        """List records, and return the lengths of those documents that were counted."""
        listing = self.listing
        documents: list[int] = []
        texts: list[str] = []
        for record in records:
            document = source.document_of(record, self.corpus.reading)
            if not listing.add(number, record, document):
                continue
            index_number = len(listing) - 1
            if index_number < self.skip:
                listing.n_tokens[index_number] = SKIPPED
            else:
                documents.append(index_number)
                texts.append(document.text)
        lengths = self._lengths_of(documents, texts)
        for index_number, length in zip(documents, lengths, strict=True):
            listing.n_tokens[index_number] = length
        return lengths

    def _lengths_of(self, documents: list[int], texts: list[str]) -> list[int]:
        """The number of tokens of each document. Only unknown documents are tokenised."""
        # Equal hashes mean equal texts, so the number of tokens is the same, too.
        hashes = [self.listing.content[number] for number in documents]
        known_lengths: dict[int, int] = {}
        if self.known is not None:
            known_lengths = self.known.lengths_of(np.array(hashes, np.uint64))
        new_texts = [
            text
            for content_hash, text in zip(hashes, texts, strict=True)
            if content_hash not in known_lengths
        ]
        new_lengths = iter([len(tokens) for tokens in self.tokenizer.encode_many(new_texts)])
        return [
            known_lengths[content_hash] if content_hash in known_lengths else next(new_lengths)
            for content_hash in hashes
        ]

    def _may_stop(self, sequences: int) -> bool:
        """Whether there are enough sequences, or too many bad documents one after the other."""
        bad_in_a_row = self.listing.bad_in_a_row
        if self.most_bad_in_a_row is not None and bad_in_a_row > self.most_bad_in_a_row:
            return True
        return self.needed is not None and sequences >= self.needed

    def _report(self, source_number: int, sequences: int) -> None:
        progress = IndexProgress(
            documents=len(self.listing) + self.listing.other_documents.total(),
            tokens=self.n_tokens,
            sequences=sequences,
            enough=self.enough,
            source=source_number + 1,
            sources=len(self.corpus.sources),
        )
        self.watch(progress)


def _in_batches(records: Iterator[Record], size: int) -> Iterator[list[Record]]:
    while batch := list(islice(records, size)):
        yield batch


def _in_order_of_choice(index: Index, choice: Choice) -> Index:
    """An index in the order of the files, put into the order in which documents are taken."""
    if not choice.shuffled:
        return index
    # The second number keeps this stream apart from those that draw sequences with the same seed.
    rng = np.random.default_rng([int(choice.shuffle), zlib.crc32(b"shuffle")])
    order = rng.permutation(len(index.row))
    assert index.content is not None
    assert index.offset is not None
    assert index.part is not None
    n_tokens = index.n_tokens[order]
    # `skip` leaves out the first documents of the shuffled order, and bad ones stay bad.
    skipped = n_tokens[: choice.skip]
    skipped[skipped != BAD] = SKIPPED
    new_numbers = np.empty_like(order)
    new_numbers[order] = np.arange(len(order))
    return replace(
        index,
        source=index.source[order],
        row=index.row[order],
        n_tokens=n_tokens,
        content=index.content[order],
        offset=index.offset[order],
        part=index.part[order],
        problems={int(new_numbers[old]): problem for old, problem in index.problems.items()},
    )


@dataclass(frozen=True)
class BadRows:
    """How much of a corpus may be bad."""

    share: float
    """Share of all documents."""
    in_a_row: int
    """Documents one after the other."""

    def check(self, index: Index, corpus: Corpus) -> None:
        """Refuse a corpus of which more is bad."""
        names = named_problems(index, corpus)
        first_names = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        if index.bad_in_a_row > self.in_a_row:
            raise CorpusError(
                f"input: more than {self.in_a_row:,} documents in a row are bad: {first_names}; "
                "mend or remove them, or leave them out: "
                f"--set bad_rows_in_a_row={10 * self.in_a_row}"
            )
        share = index.bad / max(1, index.documents)
        if share > self.share:
            # Rounded up, so that the advised value is large enough.
            sufficient_share = min(1.0, np.ceil(share * 1000) / 1000)
            raise CorpusError(
                f"input: {index.bad:,} of {index.documents:,} documents are bad, more than "
                f"bad_rows = {self.share:g}: {first_names}; mend or remove them, or leave them "
                f"out: --set bad_rows={sufficient_share:g}"
            )


def named_problems(index: Index, corpus: Corpus) -> list[str]:
    """The bad documents of a corpus, each with its problem, in the order of the files."""
    places = {
        number: (int(index.source[number]), int(index.row[number])) for number in index.problems
    }
    return [
        f"{corpus.sources[source].place_of(row)} ({printable(index.problems[number])})"
        for number, (source, row) in sorted(places.items(), key=lambda item: item[1])
    ]


def check_choice(index: Index, corpus: Corpus) -> None:
    """Refuse conditions that no document fits, and fields to carry that no document has."""
    conditions = corpus.reading.where
    has_readable_document = bool((index.n_tokens != BAD).any())
    if conditions and index.other_documents and not has_readable_document:
        counts = Counter({name: count for name, count in index.other_documents.items() if name})
        parts = ", ".join(
            f"{printable(name)} ({count:,})" for name, count in counts.most_common(LISTED_PARTS)
        )
        described = " and ".join(f"{name} = {_alternatives(values)}" for name, values in conditions)
        raise CorpusError(
            f"input.where: none of {index.documents:,} documents has {described}; "
            f"pile_set_name is {parts or 'nowhere'}; change input.where"
        )
    # An index of an older version has no counts, so the lists may differ in length.
    for column, count in zip(corpus.reading.columns, index.carried, strict=False):
        if not count and len(index.row):
            raise CorpusError(
                f"input.columns: none of {len(index.row):,} documents has a field {column}, nor "
                "its meta; leave it out, or write its name as it is there"
            )


def _alternatives(values: Sequence[Value]) -> str:
    return " or ".join(repr(value) for value in values)
