"""Documents out of files: JSON lines, JSON, Parquet, CSV and plain text, plain or compressed, and
data sets on the Hub.

A file is read as records, in order. A record becomes a document only where it is wanted: taking the
fields out of it costs more than reading it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from schemas.errors import CorpusError, printable
from schemas.places import open_whole, place, reason

COMPRESSED = (".zst", ".gz")
"""Endings of compressed files; what stands before them says what is in the file."""

UNPACKED_AT_ONCE = 1 << 20
"""Bytes of a compressed file's content that are held at once."""

FROM_THE_BEGINNING = -1
"""The offset of a record that can only be found by reading all that stands before it."""

MOST_NAMES = 8
"""Fields of a document that a message lists."""

Value = str | int | float | bool
Wanted = tuple[tuple[str, tuple[Value, ...]], ...]
"""Names of fields, and the values that each may have."""


@dataclass(frozen=True)
class Reading:
    """What is read of each document, and which documents are taken."""

    text_field: str = "text"
    where: Wanted = ()
    columns: tuple[str, ...] = ()
    """Fields that are carried into `sequences`."""

    @property
    def names(self) -> set[str]:
        """Names of the columns of a Parquet file that are read, where the file has them."""
        dotted = [self.text_field, *(name for name, _ in self.where), *self.columns]
        return {"meta", *dotted, *(name.partition(".")[0] for name in dotted)}


EVERY_DOCUMENT = Reading()


class Record(NamedTuple):
    """A document as its file holds it."""

    row: int
    content: Any
    """A line, the fields, or what else the source has in its place."""
    offset: int = FROM_THE_BEGINNING
    """Byte of the file at which it begins, where it can be read from there."""


@dataclass(frozen=True)
class Document:
    """One row of a source: its text, or the problem that it has instead."""

    row: int
    text: str = ""
    pile_set_name: str | None = None
    problem: str | None = None
    chosen: bool = True
    """Whether it is what the corpus asks for in `where`."""
    carried: tuple[str | None, ...] = ()
    """The columns that are carried into `sequences`."""

    @property
    def content_hash(self) -> int:
        """64 bits that identify all that a run keeps of it."""
        rest = [self.pile_set_name, *self.carried]
        kept = self.text if not any(rest) else f"{self.text}\0{json.dumps(rest)}"
        digest = hashlib.blake2b(kept.encode("utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True)
class Source:
    """A file of documents, or one shard of a Hub data set."""

    kind: str
    path: str
    bytes: int
    split: str = "train"
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """What tells this source from the others: the file, or the data set and which of its parts."""
        return self.path if self.parts == 1 else f"{self.path}#{self.part}"

    @property
    def file_name(self) -> str:
        """The same without its place on this machine."""
        return self.name if self.kind == "hub" else Path(self.path).name

    def place_of(self, row: int) -> str:
        """Where a row is, as people count: from 1. Rows of lines are lines of the file."""
        if self.kind == "text":
            return printable(self.name)
        word = "line" if self.kind == "jsonl" else "row"
        return f"{printable(self.name)}, {word} {row + 1:,}"

    def documents(self, reading: Reading = EVERY_DOCUMENT) -> Iterator[Document]:
        """The documents in order; a problem of the whole file raises `CorpusError`."""
        for record in self.records(reading):
            yield self.document(record, reading)

    def records(self, reading: Reading = EVERY_DOCUMENT, first: int = 0) -> Iterator[Record]:
        """The records in order; those before the row `first` may be left out."""
        with _problems_named(self):
            for record in READERS[self.kind](self, reading, first):
                if record.row >= first:
                    yield record

    def records_at(self, rows: Sequence[int], offsets: Sequence[int]) -> Iterator[Record]:
        """The records that begin at some bytes of the file: lines."""
        with _problems_named(self), _open(self.path) as file:
            for row, offset in zip(rows, offsets, strict=True):
                file.seek(offset)
                yield Record(row, file.readline(), offset)

    def document(self, record: Record, reading: Reading) -> Document:
        """What a record holds."""
        row, content = record.row, record.content
        fields = _parsed(content) if isinstance(content, bytes) else content
        if isinstance(fields, Problem):
            return Document(row, problem=fields)
        if not isinstance(fields, dict):
            return Document(row, problem=f"expected a JSON object, got {type(fields).__name__}")
        return _from_fields(row, cast("dict[str, Any]", fields), reading)


class Problem(str):
    """What is wrong with a record, in the place of its content."""


@contextmanager
def _problems_named(source: Source) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException) as error:
        raise CorpusError(
            f"{printable(source.path)}: cannot be read ({printable(reason(error))}); is the file "
            "complete?"
        ) from None


@contextmanager
def _open(path: str) -> Iterator[io.BufferedReader]:
    """The content of a file, whatever it was compressed with."""
    with open_whole(place(path)) as file:
        plain = io.BufferedReader(file, 1 << 17) if isinstance(file, pa.NativeFile) else file
        if path.endswith(".zst"):
            yield io.BufferedReader(_Unpacked(path, plain), UNPACKED_AT_ONCE)
        elif path.endswith(".gz"):
            unpacked: Any = gzip.GzipFile(fileobj=plain)
            yield io.BufferedReader(unpacked, UNPACKED_AT_ONCE)
        else:
            yield plain


class _Unpacked(io.RawIOBase):
    """The content of a .zst file of one or more frames. A file that ends inside a frame is an
    error, not an end.
    """

    def __init__(self, path: str, file: io.BufferedReader) -> None:
        self._chunks = _decompressed(path, file)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _decompressed(path: str, file: io.BufferedReader) -> Iterator[bytes]:
    frame = zstandard.ZstdDecompressor().decompressobj()
    whole = True
    while compressed := file.read(1 << 18):
        while compressed:
            whole = False
            yield frame.decompress(compressed)
            compressed = b""
            if frame.eof:
                whole, compressed = True, frame.unused_data
                frame = zstandard.ZstdDecompressor().decompressobj()
    if not whole:
        raise CorpusError(
            f"{printable(path)}: the zstd stream ends in the middle; fetch the file again"
        )


def _read_lines(source: Source, reading: Reading, first: int) -> Iterator[Record]:
    with _open(source.path) as file:
        yield from _lines(source, file)


def _lines(source: Source, file: io.BufferedReader) -> Iterator[Record]:
    packed = source.path.endswith(COMPRESSED)
    offset = 0
    for row, line in enumerate(file):
        if line.strip():
            yield Record(row, line, FROM_THE_BEGINNING if packed else offset)
        offset += len(line)


def _read_json(source: Source, reading: Reading, first: int) -> Iterator[Record]:
    """The objects of an array, which is read whole, or of the lines of a file."""
    with _open(source.path) as file:
        if file.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
            yield from _lines(source, file)
            return
        content = file.read()
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{printable(source.path)}: not JSON ({reason(error)}); expected an array of objects, or an "
            "object in each line"
        ) from None
    yield from (Record(row, fields) for row, fields in enumerate(rows))


def _parsed(line: bytes) -> Any:
    """What a line of JSON says, or the problem that it has."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Problem("not UTF-8")
    except (ValueError, RecursionError):
        return Problem("invalid JSON")


def _from_fields(row: int, fields: dict[str, Any], reading: Reading) -> Document:
    text = _walk(fields, reading.text_field)
    if text is MISSING:
        return Document(
            row,
            problem=f"has no field {reading.text_field}; found {_listed(fields)}; set "
            "input.text_field",
        )
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        return Document(row, problem=f"{reading.text_field} is {kind}, expected a string")
    if not _encodable(text):
        problem = f"{reading.text_field} has lone surrogates, which are not UTF-8"
        return Document(row, problem=problem)
    fields = fields | {"meta": _unpacked(fields.get("meta"))}
    name = field_of(fields, "pile_set_name")
    return Document(
        row,
        text,
        name if isinstance(name, str) and _encodable(name) else None,
        chosen=all(_fits(field_of(fields, key), values) for key, values in reading.where),
        carried=tuple(as_text(field_of(fields, column)) for column in reading.columns),
    )


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = " …" if len(found) > MOST_NAMES else ""
    return (", ".join(map(printable, found[:MOST_NAMES])) or "nothing") + more


MISSING = object()
"""The value of a field that a document does not have."""


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """The field of that name, of the document or else of its `meta`; a dot leads into a field."""
    found = _walk(fields, name)
    meta = fields.get("meta")
    return _walk(meta, name) if found is MISSING and isinstance(meta, dict) else found


def _walk(fields: Mapping[str, Any], name: str) -> Any:
    if name in fields:
        return fields[name]
    head, dot, rest = name.partition(".")
    inner = _unpacked(fields.get(head)) if dot else None
    return _walk(inner, rest) if isinstance(inner, dict) else MISSING


def _unpacked(value: Any) -> Any:
    """A value, or what it holds where it is JSON in a string, as `meta` is in some files."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _fits(value: Any, wanted: tuple[Value, ...]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and any(value == w for w in wanted if not isinstance(w, str | bool)):
        return True
    return value is not MISSING and as_text(value) in map(as_text, wanted)


def as_text(value: Any) -> str | None:
    """A field of a document as a run keeps it: a string as it is, and what JSON knows as JSON."""
    if value is MISSING or value is None:
        return None
    in_json = isinstance(value, bool | int | float | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if in_json else str(value)
    return text if _encodable(text) else text.encode("utf-8", "backslashreplace").decode()


def _encodable(text: str) -> bool:
    """Whether a string from JSON is Unicode text: an escape such as \\ud800 makes one that is not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_column(source: str, reading: Reading, found: Sequence[str]) -> None:
    """Refuse a file none of whose rows can have a text."""
    if not {reading.text_field, reading.text_field.partition(".")[0]} & set(found):
        raise CorpusError(
            f"{printable(source)}: expected a column {reading.text_field}, found {_listed(found)}; set "
            "input.text_field"
        )


def _read_parquet(source: Source, reading: Reading, first: int) -> Iterator[Record]:
    with open_whole(place(source.path)) as content, pq.ParquetFile(content) as file:
        names: list[str] = file.schema_arrow.names
        _check_column(source.path, reading, names)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = np.cumsum(sizes)
        group = int(np.searchsorted(ends, first, side="right"))
        row = int(ends[group - 1]) if group else 0
        batches = file.iter_batches(
            batch_size=256,
            row_groups=list(range(group, len(sizes))),
            columns=[name for name in names if name in reading.names],
        )
        for batch in batches:
            for fields in _rows(batch):
                yield Record(row, fields)
                row += 1


def _rows(batch: pa.RecordBatch) -> list[Any]:
    """The rows of a batch; a problem in the place of one that is not UTF-8, which Parquet does not
    check.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) == 1:
            return [Problem("not UTF-8")]
        return [row for i in range(len(batch)) for row in _rows(batch.slice(i, 1))]


def _read_csv(source: Source, reading: Reading, first: int) -> Iterator[Record]:
    with _open(source.path) as content:
        # A row that is not UTF-8 is a bad row, not a bad file.
        lines = io.TextIOWrapper(
            content, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        rows = csv.DictReader(lines, strict=True)
        try:
            _check_column(source.path, reading, rows.fieldnames or ())
            for row, fields in enumerate(rows):
                yield Record(row, _from_csv(fields, reading.text_field))
        except csv.Error as error:
            raise CorpusError(
                f"{printable(source.path)}, line {rows.reader.line_num}: not CSV ({error})"
            ) from None


def _from_csv(fields: dict[str, Any], text_field: str) -> dict[str, Any] | Problem:
    if None in fields:
        return Problem("more fields than the header names")
    if not _encodable(fields.get(text_field) or ""):
        return Problem("not UTF-8")
    return {"pile_set_name": fields.get("dataset") or None} | fields


def _read_text(source: Source, reading: Reading, first: int) -> Iterator[Record]:
    try:
        with _open(source.path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Record(0, Problem(f"not UTF-8 (byte {error.start})"))
    else:
        # Whatever a field of text is called elsewhere: a file of text is nothing but text.
        yield Record(0, {reading.text_field: text})


def _read_hub(source: Source, reading: Reading, first: int) -> Iterator[Record]:
    rows = open_hub(source.path, source.split)
    if source.parts > 1:
        rows = rows.shard(source.parts, source.part, contiguous=True)
    try:
        for row, fields in enumerate(rows):
            _check_column(f"data set {source.name!r}", reading, list(fields))
            yield Record(row, fields)
    except CorpusError:
        raise
    except Exception as error:
        why = str(error.__cause__ or error).strip().split("\n")[0]
        raise CorpusError(
            f"data set {source.name!r}, split {source.split!r}: cannot be read ({why})"
        ) from None


READERS = {
    "jsonl": _read_lines,
    "json": _read_json,
    "parquet": _read_parquet,
    "csv": _read_csv,
    "text": _read_text,
    "hub": _read_hub,
}


def open_hub(name: str, split: str) -> Any:
    """A Hub data set (or a local directory of one) as a stream of rows."""
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split, streaming=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(
            f"data set {name!r}, split {split!r}: cannot be opened ({reason})"
        ) from None
