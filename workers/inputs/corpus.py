"""Documents of a corpus, the index of their lengths, and the sequences they are cut into.

A corpus is a list of sources in a fixed order. The index lists its documents in the order in which
they are cut, with the number of tokens of each; with it, sequence i is a place in the corpus
whatever shard, actor or order it is read in.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from schemas.errors import CorpusError, ScanError, printable
from schemas.parquet import parquet_bytes, read_parquet
from schemas.places import Place, StorePath, place
from schemas.tables import carried_name
from workers.inputs.documents import (
    EVERY_DOCUMENT,
    FROM_THE_BEGINNING,
    Document,
    Reading,
    Record,
    Source,
    Value,
)

BAD = -1
"""Length of a row that cannot be read."""

SKIPPED = -2
"""Length of a document that `skip` leaves out; it is not tokenised."""

WINDOW = 16_000_000
"""Tokens that are read at once where the documents of a shard lie anywhere in files that are read
from their beginning: about 64 MB of text.
"""

SHOWN_PARTS = 50
"""Parts of a corpus that are counted by name; the smaller ones are counted together."""

Condition = Value | list[Value]


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ...

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The same for several texts at once."""
        ...


@dataclass(frozen=True)
class Choice:
    """Which documents of a corpus are taken, in which order, and what is read of them."""

    reading: Reading = EVERY_DOCUMENT
    shuffle: bool | int = False
    """The seed of their order; true means the seed of the scan, false the order of the files."""
    skip: int = 0

    def resolved(self, seed: int) -> Choice:
        """The same for a scan of some seed."""
        return replace(self, shuffle=seed) if self.shuffle is True else self

    @property
    def shuffled(self) -> bool:
        """Whether the order is another one than that of the files."""
        return self.shuffle is not False


def choice(
    *,
    text_field: str | None = None,
    where: dict[str, Condition | dict[str, Condition]] | None = None,
    shuffle: bool | int | None = None,
    skip: int | None = None,
    columns: list[str] | None = None,
) -> Choice:
    """Options that every family of text has.

    * `text_field`: the field or column that holds the text, `text` if it is left out. A dot leads
      into a field: `body.plain`.
    * `where`: takes only documents whose fields have these values, `where = { pile_set_name =
      ["Github", "ArXiv"], lang = "en" }`. A field is looked for in the document, then in its
      `meta`.
    * `shuffle`: takes the documents of the whole corpus in random order, by a seed of its own or,
      if it is true, by the scan's.
    * `skip`: leaves out the first documents of those that are taken, in their order.
    * `columns`: fields that are carried into the table `sequences`, as text: `meta.year` becomes
      the column `doc_meta_year`. NULL where a document has no such field.
    """
    if skip is not None and skip < 0:
        raise ScanError(f"input.skip: expected 0 or more documents, got {skip}")
    if shuffle is not None and shuffle < 0:
        raise ScanError(f"input.shuffle: expected true or a seed, 0 or more, got {shuffle}")
    if text_field == "":
        raise ScanError("input.text_field: expected the name of a field, got ''")
    carried: dict[str, str] = {}
    for name in columns or []:
        other = carried.setdefault(carried_name(name), name)
        if other != name or (columns or []).count(name) > 1:
            raise ScanError(
                f"input.columns: {other!r} and {name!r} are both the column "
                f"{carried_name(name)}; leave out one"
            )
    wanted = tuple(_wanted(where or {}))
    for name, values in wanted:
        if not values:
            raise ScanError(f"input.where.{name}: expected a value or some values, got []")
    reading = Reading(text_field or "text", wanted, tuple(columns or []))
    return Choice(reading, False if shuffle is None else shuffle, skip or 0)


def _wanted(
    where: Mapping[str, Condition | dict[str, Condition]], prefix: str = ""
) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Values by dotted name; TOML makes a table of `where.meta.lang`."""
    for name, condition in where.items():
        if isinstance(condition, dict):
            yield from _wanted(condition, f"{prefix}{name}.")
        else:
            values = condition if isinstance(condition, list) else [condition]
            yield prefix + name, tuple(values)


@dataclass(frozen=True)
class Corpus:
    """What a corpus family returns: sources in order, and how documents become sequences."""

    sources: tuple[Source, ...]
    packing: str
    tokens_shuffled: bool = False
    """Whether the tokens of every sequence are permuted."""
    chunk: int | None = None
    """How many tokens of text are repeated to make a sequence; none means that all of them are
    text.
    """
    repeat_bos: bool = False
    """Whether the beginning-of-sequence token, where there is one, stands before every copy of the
    chunk.
    """
    choice: Choice = field(default_factory=Choice)

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it. Files may grow or be mended: the index says whether
        the sequences are the same.
        """
        sources = [
            {k: v for k, v in asdict(s).items() if k != "bytes"} | {"path": s.file_name}
            for s in self.sources
        ]
        return {"packing": self.packing, "sources": sources}

    @property
    def reading(self) -> Reading:
        """What is read of each document."""
        return self.choice.reading


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
        if not document.chosen:
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
                document = source.document(record, corpus.reading)
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


FATES = ("used", "too short", "empty", "bad", "skipped", "not needed")
"""What becomes of the documents of a corpus."""


@dataclass(frozen=True)
class Fates:
    """How many documents of a corpus were used, and what became of the others."""

    parts: dict[str, dict[str, int]]
    """Documents by part and fate; "" where a document does not say its part."""

    @property
    def all(self) -> dict[str, int]:
        """Documents by fate."""
        total: Counter[str] = Counter()
        for counts in self.parts.values():
            total.update(counts)
        return dict(total)

    @property
    def record(self) -> dict[str, Any]:
        """What lies beside the index of a run, for whoever wants the numbers alone."""
        return {"documents": self.all, "parts": self.parts}


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
        parts: dict[str, Counter[str]] = {}
        for name, row in zip(names, counts.tolist(), strict=True):
            parts[name] = Counter({f: n for f, n in zip(FATES, row, strict=True) if n})
        for name, count in index.other_documents.items():
            parts.setdefault(name, Counter())["other"] += count
        largest = sorted(parts, key=lambda name: (-parts[name].total(), name))
        shown = {name: dict(parts[name]) for name in largest[:SHOWN_PARTS] if parts[name]}
        if rest := largest[SHOWN_PARTS:]:
            others: Counter[str] = Counter()
            for name in rest:
                others.update(parts[name])
            shown[f"{len(rest):,} other parts"] = dict(others)
        return Fates(shown)

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
            read = source.document(record, self.corpus.reading)
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
