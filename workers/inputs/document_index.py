"""The index of a corpus: its documents in the order in which they are cut into sequences, with the
number of tokens and a hash of each.

With it, sequence i is a place in the corpus whatever shard, actor or order it is read in.
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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from schemas.errors import CorpusError, printable
from schemas.parquet import parquet_bytes, read_parquet
from schemas.places import Place, StorePath, place
from workers.inputs.corpus import Choice, Corpus, Tokenizer
from workers.inputs.documents import Document, Reading, Record, Source, Value

BAD = -1
"""Length of a row that cannot be read."""

SKIPPED = -2
"""Length of a document that `skip` leaves out; it is not tokenised."""


class FileState(NamedTuple):
    """A source when it was indexed."""

    name: str
    bytes: int
    changed: int
    """When the file was changed last, in nanoseconds; 0 where nothing says so."""

    @classmethod
    def of(cls, source: Source) -> FileState:
        """A source as it is now."""
        if source.kind == "hub":
            return cls(source.file_name, 0, 0)
        where = place(source.path)
        if isinstance(where, StorePath):
            info = where.filesystem.get_file_info(where.key)
            return cls(source.file_name, info.size, info.mtime_ns)
        try:
            info = os.stat(where)
        except OSError:
            return cls(source.file_name, 0, 0)  # Reading it says what is wrong.
        return cls(source.file_name, info.st_size, info.st_mtime_ns)


def same_files(before: Sequence[FileState], sources: Sequence[Source]) -> bool:
    """Whether some files are as they were; others may come after them."""
    now = [FileState.of(source) for source in sources[: len(before)]]
    return len(now) == len(before) and all(
        (was.name, was.bytes) == (is_.name, is_.bytes) and was.changed in (0, is_.changed)
        for was, is_ in zip(before, now, strict=True)
    )


@dataclass(frozen=True)
class Index:
    """The documents of a corpus in the order in which they are cut into sequences."""

    source: np.ndarray
    row: np.ndarray
    n_tokens: np.ndarray
    """`BAD` where a row cannot be read, `SKIPPED` where it is left out; 0 where it is empty."""
    problems: dict[int, str]
    """Problem of every bad document, by its number here."""
    whole_sources: int = 0
    """How many sources of the corpus are indexed to their end."""
    content: np.ndarray | None = None
    """Hash of every document; none in an index that was made without."""
    offset: np.ndarray | None = None
    """Byte of its file at which a record begins, `FROM_THE_BEGINNING` where that is not known."""
    part: np.ndarray | None = None
    """Number of the part of the corpus that a document belongs to, -1 where it does not say."""
    part_names: tuple[str, ...] = ()
    files: tuple[FileState, ...] = ()
    """The sources that were begun, as they were."""
    other_documents: dict[str, int] = field(default_factory=dict[str, int])
    """How many documents are not what `where` asks for, by part."""
    bad_in_a_row: int = 0
    """The longest row of bad documents."""
    carried: tuple[int, ...] = ()
    """How many documents have each of the columns that are carried."""

    def to_parquet(self) -> pa.Buffer:
        """The index as a Parquet file."""
        assert self.part is not None
        names = pa.array(self.part_names, pa.string())
        columns = {
            "source": self.source,
            "row": self.row,
            "n_tokens": self.n_tokens,
            "content": self.content,
            "offset": self.offset,
            "part": names.take(pa.array(self.part, mask=self.part < 0)),
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
        metadata = table.schema.metadata or {}
        source, row, n_tokens = (table[name].to_numpy() for name in ("source", "row", "n_tokens"))
        problems, whole_sources = json.loads(metadata[b"problems"]), metadata.get(b"whole_sources")
        if "content" not in table.column_names:
            # Older indexes named problems by file and row; they are in the order of the bad rows.
            named = zip(np.flatnonzero(n_tokens == BAD).tolist(), problems.values(), strict=False)
            part = np.full(len(row), -1, np.int32)
            return cls(source, row, n_tokens, dict(named), int(whole_sources or 0), part=part)
        part = table["part"].combine_chunks().dictionary_encode()
        return cls(
            source,
            row,
            n_tokens,
            {int(number): problem for number, problem in problems},
            int(whole_sources or 0),
            content=table["content"].to_numpy(),
            offset=table["offset"].to_numpy(),
            part=part.indices.fill_null(-1).to_numpy(),
            part_names=tuple(part.dictionary.to_pylist()),
            files=tuple(FileState(*state) for state in json.loads(metadata[b"files"])),
            other_documents=json.loads(metadata[b"other_documents"]),
            bad_in_a_row=int(metadata[b"bad_in_a_row"]),
            carried=tuple(json.loads(metadata[b"carried"])),
        )

    @property
    def bad(self) -> int:
        """How many documents are bad."""
        return int(np.count_nonzero(self.n_tokens == BAD))

    @property
    def documents(self) -> int:
        """How many documents were read."""
        return len(self.row) + sum(self.other_documents.values())

    def lengths_of(self, content: np.ndarray) -> dict[int, int]:
        """The number of tokens of those of some documents that are known here, by their hash."""
        if self.content is None or not len(self.content):
            return {}
        known, order = self._sorted
        found = np.searchsorted(known, content).clip(max=len(known) - 1)
        same = (known[found] == content) & (self.n_tokens[order[found]] >= 0)
        lengths = self.n_tokens[order[found[same]]]
        return dict(zip(content[same].tolist(), lengths.tolist(), strict=True))

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """The hashes in order, and the documents that have them."""
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
    """Sequences that are needed; none means all that there are."""
    source: int
    """Sources begun, and how many there are."""
    sources: int


Watch = Callable[[IndexProgress], None]


def unwatched(progress: IndexProgress) -> None:
    """Watch a corpus being tokenised and show nothing."""


class _Listing:
    """Documents as they are read."""

    def __init__(self, reading: Reading) -> None:
        self.source, self.row, self.n_tokens = array("i"), array("q"), array("i")
        self.content, self.offset, self.part = array("Q"), array("q"), array("i")
        self.part_names: dict[str, int] = {}
        self.problems: dict[int, str] = {}
        self.other_documents: Counter[str] = Counter()
        self.carried = [0] * len(reading.columns)
        self.bad_now = self.bad_in_a_row = 0

    def __len__(self) -> int:
        return len(self.row)

    def add(self, number: int, record: Record, document: Document) -> bool:
        """List a document, its length unknown; says whether it is one that is taken."""
        self.bad_now = self.bad_now + 1 if document.problem is not None else 0
        self.bad_in_a_row = max(self.bad_in_a_row, self.bad_now)
        name = document.pile_set_name or ""
        if not document.fits_where:
            self.other_documents[name] += 1
            return False
        if document.problem is not None:
            self.problems[len(self)] = document.problem
        for i, value in enumerate(document.carried):
            self.carried[i] += value is not None
        names = self.part_names
        self.part.append(names.setdefault(name, len(names)) if name else -1)
        self.source.append(number)
        self.row.append(record.row)
        self.content.append(document.content_hash)
        self.offset.append(record.offset)
        self.n_tokens.append(BAD)
        return document.problem is None

    def index(self, whole_sources: int, files: list[FileState]) -> Index:
        """All that was listed."""
        return Index(
            np.array(self.source, np.int32),
            np.array(self.row, np.int64),
            np.array(self.n_tokens, np.int32),
            self.problems,
            whole_sources,
            np.array(self.content, np.uint64),
            np.array(self.offset, np.int64),
            np.array(self.part, np.int32),
            tuple(self.part_names),
            tuple(files),
            dict(self.other_documents),
            self.bad_in_a_row,
            tuple(self.carried),
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
    """Tokenise documents, in order, until there are `enough` sequences of `length` tokens (or to
    the end; a shuffled corpus always to its end); `watch` is told now and then how far that is.

    Documents that `known` has are not tokenised again. After more bad documents in a row than
    `most_bad_in_a_row` it stops.
    """
    listing = _Listing(corpus.reading)
    files: list[FileState] = []
    found = all_tokens = whole_sources = 0
    needed = None if corpus.choice.shuffled else enough
    skip = 0 if corpus.choice.shuffled else corpus.choice.skip

    def too_bad() -> bool:
        return most_bad_in_a_row is not None and listing.bad_in_a_row > most_bad_in_a_row

    for number, source in enumerate(corpus.sources):
        here, tokens = 0, 0
        files.append(FileState.of(source))
        for records in _in_batches(source.records(corpus.reading), 512):
            taken: list[tuple[int, str]] = []
            for record in records:
                document = source.document_of(record, corpus.reading)
                if listing.add(number, record, document):
                    taken.append((len(listing) - 1, document.text))
            for i, _ in taken:
                listing.n_tokens[i] = SKIPPED
            taken = [(i, text) for i, text in taken if i >= skip]
            counts = _lengths(taken, listing.content, tokenizer, known)
            for (i, _), count in zip(taken, counts, strict=True):
                listing.n_tokens[i] = count
            tokens += sum(counts) + sum(count > 0 for count in counts)
            all_tokens += sum(counts)
            here = (
                here + sum(c >= length for c in counts)
                if corpus.packing == "document"
                else tokens // length
            )
            progress = IndexProgress(
                documents=len(listing) + listing.other_documents.total(),
                tokens=all_tokens,
                sequences=found + here,
                enough=enough,
                source=number + 1,
                sources=len(corpus.sources),
            )
            watch(progress)
            if too_bad() or (needed is not None and found + here >= needed):
                break
        else:
            whole_sources += 1
        found += here
        if too_bad() or (needed is not None and found >= needed):
            break
    return _in_their_order(listing.index(whole_sources, files), corpus.choice)


def _lengths(
    taken: Sequence[tuple[int, str]],
    content: Sequence[int],
    tokenizer: Tokenizer,
    known: Index | None,
) -> list[int]:
    """The number of tokens of some documents, which are tokenised unless they are known."""
    hashes = [content[i] for i, _ in taken]
    before = {} if known is None else known.lengths_of(np.array(hashes, np.uint64))
    new = [text for hash_, (_, text) in zip(hashes, taken, strict=True) if hash_ not in before]
    counted = iter([len(ids) for ids in tokenizer.encode_many(new)])
    return [before[hash_] if hash_ in before else next(counted) for hash_ in hashes]


def _in_their_order(index: Index, choice: Choice) -> Index:
    """An index of files in the order in which their documents are taken."""
    if not choice.shuffled:
        return index
    rng = np.random.default_rng([int(choice.shuffle), zlib.crc32(b"shuffle")])
    order = rng.permutation(len(index.row))
    columns = ("source", "row", "n_tokens", "content", "offset", "part")
    moved: dict[str, Any] = {name: getattr(index, name)[order] for name in columns}
    skipped = moved["n_tokens"][: choice.skip]
    skipped[skipped != BAD] = SKIPPED
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    problems = {int(places[number]): problem for number, problem in index.problems.items()}
    return replace(index, problems=problems, **moved)


def _in_batches(records: Iterator[Record], size: int) -> Iterator[list[Record]]:
    while batch := list(islice(records, size)):
        yield batch


@dataclass(frozen=True)
class BadRows:
    """How much of a corpus may be bad."""

    share: float
    in_a_row: int

    def check(self, index: Index, corpus: Corpus) -> None:
        """Refuse a corpus of which more is bad."""
        names = named_problems(index, corpus)
        first = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        if index.bad_in_a_row > self.in_a_row:
            raise CorpusError(
                f"input: more than {self.in_a_row:,} documents in a row are bad: {first}; mend or "
                f"remove them, or leave them out: --set bad_rows_in_a_row={10 * self.in_a_row}"
            )
        share = index.bad / max(1, index.documents)
        if share > self.share:
            enough = min(1.0, np.ceil(share * 1000) / 1000)
            raise CorpusError(
                f"input: {index.bad:,} of {index.documents:,} documents are bad, more than "
                f"bad_rows = {self.share:g}: {first}; mend or remove them, or leave them out: "
                f"--set bad_rows={enough:g}"
            )


def named_problems(index: Index, corpus: Corpus) -> list[str]:
    """The bad documents of a corpus, each with its problem, in the order of the files."""
    places = {n: (int(index.source[n]), int(index.row[n])) for n in index.problems}
    return [
        f"{corpus.sources[source].place_of(row)} ({printable(index.problems[number])})"
        for number, (source, row) in sorted(places.items(), key=lambda item: item[1])
    ]


def check_choice(index: Index, corpus: Corpus) -> None:
    """Refuse conditions that no document fits, and columns that none has."""
    wanted = corpus.reading.where
    if wanted and index.other_documents and not (index.n_tokens != BAD).any():
        parts = Counter({name: n for name, n in index.other_documents.items() if name})
        listed = ", ".join(f"{printable(name)} ({n:,})" for name, n in parts.most_common(20))
        raise CorpusError(
            f"input.where: none of {index.documents:,} documents has "
            f"{' and '.join(f'{name} = {_either(values)}' for name, values in wanted)}; "
            f"pile_set_name is {listed or 'nowhere'}; change input.where"
        )
    for column, count in zip(corpus.reading.columns, index.carried, strict=False):
        if not count and len(index.row):
            raise CorpusError(
                f"input.columns: none of {len(index.row):,} documents has a field {column}, nor its "
                "meta; leave it out, or write its name as it is there"
            )


def _either(values: Sequence[Value]) -> str:
    return " or ".join(repr(value) for value in values)
