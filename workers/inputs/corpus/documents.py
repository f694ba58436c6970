"""Documents out of files: JSON lines, JSON, Parquet, CSV and plain text, plain or compressed, and
data sets on the Hub.

A file is read as records, in order. A record is a document as its file holds it, for example a line
of bytes. It is made into a `Document` apart: parsing a record costs more than reading it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from headcount.schemas.errors import CorpusError, counted, printable
from headcount.schemas.files.places import open_whole, place, reason
from headcount.workers.inputs.corpus.file_content import COMPRESSED, open_content

LARGEST_RECORD = 32 << 20
"""Bytes of the largest line or text that is read. Tokenising takes 120 to 135 bytes of memory for
each byte of text, so 4 GB for this one: what a cluster's machine has for each core.
"""

TOO_LARGE = (
    f"has more than {LARGEST_RECORD >> 20} MiB, which take too much memory to tokenise; split it "
    "into several documents"
)

LARGEST_ARRAY = 1 << 30
"""Bytes of the largest array of JSON that is read. Parsing takes 3 bytes of memory for each."""

PIECE_BYTES = 1 << 20
"""Bytes of a file that are read at once, or dropped if they are a part of a line too long."""

PARQUET_BATCH = 256
"""Rows of a Parquet file that are held at once at most."""

BATCH_BYTES = 16 << 20
"""Bytes of a Parquet file's content that are held at once, if its rows are alike."""

LISTED_NAMES = 8
"""Fields of a document that an error message lists."""

UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

CHANGED = "changed while it was read; run the same command again"
"""What is said of a file that is no longer as it was when it was listed."""

Value = str | int | float | bool
"""A value that `where` may ask for."""


@dataclass(frozen=True)
class Reading:
    """What is read of each document."""

    text_field: str = "text"
    fields: tuple[str, ...] = ()
    """Further fields that are kept of each document, sorted."""
    before: str = ""
    """What is put before every text."""

    @property
    def column_names(self) -> set[str]:
        """Columns of a Parquet file that are read if the file has them."""
        fields = [self.text_field, *self.fields]
        # `body.plain` may be a column of that name, or a field of the column `body`.
        outer_fields = [name.partition(".")[0] for name in fields]
        return {"meta", "pile_set_name", *fields, *outer_fields}


EVERY_DOCUMENT = Reading()


class Problem(str):
    """What is wrong with a record. It takes the place of the record's content."""


BLANK = Problem("blank line")
"""The content of a blank line, which counts as a row and holds no document."""


class Record(NamedTuple):
    """A document as its file holds it."""

    row: int
    """Its number in what is read of the source."""
    content: object
    """A line of bytes, the parsed fields, or the `Problem` that the reader met."""
    stop: int
    """Where the next record begins: a byte of the content of lines, or a row of the source."""


@dataclass(frozen=True)
class Stretch:
    """What is read of a source: a range of it, and the place in the range where reading begins."""

    start: int = 0
    """A byte of the content of lines, or a row of other sources."""
    stop: int | None = None
    """None is the end of the source. Lines belong to the range that their first byte lies in."""
    offset: int = 0
    """The byte or the row at which reading begins; before `start` it means `start`."""
    row: int = 0
    """Rows of the range that lie before `offset`."""

    @property
    def first(self) -> int:
        """The byte or the row from which on records are wanted."""
        return max(self.start, self.offset)

    def holds(self, index: int) -> bool:
        """Whether a byte or a row lies before the end of the range."""
        return self.stop is None or index < self.stop


EVERYTHING = Stretch()


@dataclass(frozen=True)
class Document:
    """One row of a source: its text, or the problem that it has instead."""

    row: int
    text: str = ""
    pile_set_name: str | None = None
    problem: str | None = None
    fields: tuple[str | None, ...] = ()
    """The fields that a `Reading` names, as JSON; None if it does not have one, or it is null."""

    @property
    def content_hash(self) -> int:
        """64 bits that identify everything that is kept of the document."""
        labels = [self.pile_set_name, *self.fields]
        # A document that has none of the labels is known by its text alone, whichever are read.
        content = f"{self.text}\0{json.dumps(labels)}" if any(labels) else self.text
        digest = hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class Source:
    """A file of documents, or one shard of a Hub data set."""

    kind: str
    """A key of `READERS`."""
    path: str
    bytes: int
    split: str = "train"
    part: int = 0
    parts: int = 1

    @property
    def name(self) -> str:
        """The file, or the data set and the number of its part: unique within a corpus."""
        return self.path if self.parts == 1 else f"{self.path}#{self.part}"

    @property
    def file_name(self) -> str:
        """The name without the source's place on this machine."""
        return self.name if self.kind == "hub" else self.path.rpartition("/")[2]

    def place_of(self, row: int) -> str:
        """Where a row is, for people: counted from 1, as a line if the file consists of lines."""
        if self.kind in ("text", "flowing text"):
            return printable(self.name)
        unit = "line" if self.kind == "jsonl" else "row"
        return f"{printable(self.name)}, {unit} {row + 1:,}"

    def documents(self, reading: Reading = EVERY_DOCUMENT) -> Iterator[Document]:
        """The documents in order. A problem of the whole file raises `CorpusError`."""
        for record in self.records(reading):
            if record.content is not BLANK:
                yield self.document_of(record, reading)

    def records(
        self, reading: Reading = EVERY_DOCUMENT, stretch: Stretch = EVERYTHING
    ) -> Iterator[Record]:
        """The records of a stretch in order, and a record for each blank line."""
        with refusing_unreadable(self):
            for record in READERS[self.kind](self, reading, stretch):
                # A reader may start earlier, at a place where its file can be entered.
                if record.row >= stretch.row:
                    yield record

    def document_of(self, record: Record, reading: Reading) -> Document:
        """The document that a record holds, or a document that names the record's problem."""
        content = record.content
        fields = _parse_line(content) if isinstance(content, bytes) else content
        if isinstance(fields, Problem):
            return Document(record.row, problem=fields)
        if not isinstance(fields, dict):
            problem = f"expected a JSON object, got {type(fields).__name__}"
            return Document(record.row, problem=problem)
        return _document_from_fields(record.row, cast("dict[str, Any]", fields), reading)


@contextmanager
def refusing_unreadable(source: Source) -> Iterator[None]:
    """Turn what a library raises about a broken file into a `CorpusError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException) as error:
        raise CorpusError(
            f"{printable(source.path)}: cannot be read ({printable(reason(error))}); is the file "
            "complete?"
        ) from None


# Readers: one for each kind of source


def _read_lines(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """The lines that begin in a stretch of a file."""
    goes_on = stretch.offset > stretch.start
    # The line that holds the byte before a range began in the range before it, or ends there.
    entry = stretch.offset if goes_on else max(0, stretch.start - 1)
    offset = entry
    row = stretch.row
    with open_content(source.path, entry) as file:
        if stretch.start and not goes_on:
            _, offset = _next_line(file, entry)
        while stretch.holds(offset):
            line, stop = _next_line(file, offset)
            if stop == offset:
                # How much a compressed file holds is an estimate, so its ranges may lie behind its
                # end. Any other file has become shorter.
                if stretch.stop is not None and not source.path.endswith(COMPRESSED):
                    raise CorpusError(
                        f"{printable(source.path)}: ends at byte {offset:,}, expected "
                        f"{stretch.stop:,} or more; {CHANGED}"
                    )
                return
            offset = stop
            yield Record(row, line, offset)
            row += 1


def _next_line(file: io.BufferedReader, offset: int) -> tuple[bytes | Problem, int]:
    """A line and the byte behind it; a problem if it is blank or too long.

    A line that is too long is never held whole.
    """
    line = file.readline(LARGEST_RECORD + 1)
    offset += len(line)
    if len(line) <= LARGEST_RECORD:
        return line if line.strip() else BLANK, offset
    while line and not line.endswith(b"\n"):
        line = file.readline(PIECE_BYTES)
        offset += len(line)
    return Problem(TOO_LARGE), offset


def _read_json(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """The objects of an array, which is read whole, or the lines of a file of objects."""
    with open_content(source.path) as file:
        is_array = begins_an_array(file)
        content = _read_at_most(file, LARGEST_ARRAY) if is_array else b""
    if not is_array:
        yield from _read_lines(source, reading, stretch)
        return
    if content is None:
        raise CorpusError(
            f"{printable(source.path)}: an array of more than {LARGEST_ARRAY >> 20:,} MiB, which "
            "take too much memory to parse; write an object in each line (.jsonl)"
        )
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{printable(source.path)}: not JSON ({reason(error)}); expected an array of objects, "
            "or an object in each line"
        ) from None
    for row, fields in enumerate(rows):
        yield Record(row, fields, row + 1)


def _read_at_most(file: io.BufferedReader, most: int) -> bytes | None:
    """The rest of a file; None if it has more bytes than that."""
    # Reading all at once would allocate `most` for the smallest file.
    pieces: list[bytes] = []
    length = 0
    while piece := file.read(PIECE_BYTES):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            return None
    return b"".join(pieces)


def begins_an_array(file: io.BufferedReader) -> bool:
    """Whether an open file of JSON holds an array rather than lines."""
    beginning = file.peek(1).removeprefix(UTF8_BYTE_ORDER_MARK).lstrip()
    return beginning[:1] == b"["


def _read_parquet(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """The rows of a stretch of a Parquet file."""
    with open_whole(place(source.path)) as content, pq.ParquetFile(content) as file:
        names: list[str] = file.schema_arrow.names
        _check_text_column(source.path, reading, names)
        row_groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        ends = np.cumsum([group.num_rows for group in row_groups])
        stop = file.metadata.num_rows if stretch.stop is None else stretch.stop
        if stop > file.metadata.num_rows:
            raise CorpusError(
                f"{printable(source.path)}: has {file.metadata.num_rows:,} rows, expected "
                f"{stop:,} or more; {CHANGED}"
            )
        # The groups that hold the first and the last row; empty groups before them are left out.
        first_group = int(np.searchsorted(ends, stretch.first, side="right"))
        last_group = int(np.searchsorted(ends, stop - 1, side="right"))
        # Fewer rows at once if they are long.
        row_bytes = [
            group.total_byte_size // max(1, group.num_rows)
            for group in row_groups[first_group : last_group + 1]
        ]
        batches = file.iter_batches(
            batch_size=min(PARQUET_BATCH, max(1, BATCH_BYTES // max([1, *row_bytes]))),
            row_groups=list(range(first_group, min(last_group + 1, len(row_groups)))),
            columns=[name for name in names if name in reading.column_names],
        )
        row = int(ends[first_group - 1]) if first_group else 0
        for batch in batches:
            rows_before = max(0, stretch.first - row)
            wanted = batch.slice(rows_before, max(0, stop - row - rows_before))
            for i, fields in enumerate(_rows_of(wanted, reading.text_field), row + rows_before):
                yield Record(i - stretch.start, fields, i + 1)
            row += len(batch)


def _rows_of(batch: pa.RecordBatch, text_field: str) -> list[dict[str, Any] | Problem]:
    """The rows of a batch, with a problem in the place of each row that cannot be converted."""
    has_text_column = text_field in batch.schema.names
    if not has_text_column or batch.column(text_field).nbytes <= LARGEST_RECORD:
        try:
            return batch.to_pylist()
        except UnicodeDecodeError:
            # Parquet does not check that its strings are UTF-8. The error does not name the row.
            pass
    rows: list[dict[str, Any] | Problem] = []
    for i in range(len(batch)):
        text = batch.column(text_field)[i] if has_text_column else pa.scalar(None)
        is_string = pa.types.is_string(text.type) or pa.types.is_large_string(text.type)
        # By its bytes: a text that is too large is not made a Python string.
        if is_string and text.is_valid and len(text.as_buffer()) > LARGEST_RECORD:
            rows.append(Problem(TOO_LARGE))
            continue
        try:
            rows += batch.slice(i, 1).to_pylist()
        except UnicodeDecodeError:
            rows.append(Problem("not UTF-8"))
    return rows


def _read_csv(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """The rows of a CSV file with a header."""
    with open_content(source.path) as content:
        # With "surrogateescape" a row that is not UTF-8 is a bad row, not a bad file.
        text = io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")
        lines = _CsvLines(text)
        rows = csv.DictReader(lines, strict=True)
        try:
            _check_text_column(source.path, reading, rows.fieldnames or ())
            row = 0
            while (fields := _next_csv_row(rows, lines, reading.text_field)) is not None:
                yield Record(row, fields, row + 1)
                row += 1
        except (csv.Error, _TooLargeRowError) as error:
            raise CorpusError(
                f"{printable(source.path)}, line {rows.reader.line_num}: not CSV ({error})"
            ) from None


class _TooLargeRowError(Exception):
    """A row of a CSV file that is too large. Its lines have been read."""


class _CsvLines:
    """The lines of a CSV file, of which no row holds more than `LARGEST_RECORD` letters."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self.file = file
        self.begin_row()

    def begin_row(self) -> None:
        """The next line begins a row."""
        self.row_letters = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next line. The csv module asks for a row's second line only within quotes."""
        within_quotes = self.row_letters > 0
        line = self.file.readline(LARGEST_RECORD + 1 - self.row_letters)
        # The csv module takes no notice of blank lines between rows.
        if within_quotes or line.strip("\r\n"):
            self.row_letters += len(line)
        if self.row_letters > LARGEST_RECORD:
            self._drop_row(line, within_quotes)
            raise _TooLargeRowError(TOO_LARGE)
        if not line:
            raise StopIteration
        return line

    def _drop_row(self, piece: str, within_quotes: bool) -> None:
        """Read on to the end of a row, which is a line end outside quotes."""
        while piece:
            within_quotes ^= piece.count('"') % 2 == 1
            if piece.endswith(("\n", "\r")) and not within_quotes:
                return
            piece = self.file.readline(PIECE_BYTES)


def _next_csv_row(
    rows: csv.DictReader[str], lines: _CsvLines, text_field: str
) -> dict[str, Any] | Problem | None:
    """The fields of the next row, its column `dataset` also as `pile_set_name`; None at the end."""
    lines.begin_row()
    try:
        fields = next(rows, None)
    except _TooLargeRowError:
        return Problem(TOO_LARGE)
    if fields is None:
        return None
    # csv.DictReader puts the fields beyond the header under the key None.
    if None in fields:
        return Problem("more fields than the header names")
    if not _is_unicode(fields.get(text_field) or ""):
        return Problem("not UTF-8")
    return {"pile_set_name": fields.get("dataset") or None, **fields}


def _read_text(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """A file of plain text: one document."""
    try:
        with open_content(source.path) as file:
            content = _read_at_most(file, LARGEST_RECORD)
        if content is None:
            yield Record(0, Problem(TOO_LARGE), 1)
            return
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Record(0, Problem(f"not UTF-8 (byte {error.start})"), 1)
    else:
        # The text is put under the name that the scan uses, because the file has no field names.
        yield Record(0, {reading.text_field: text}, 1)


def _read_flowing_text(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """A file of plain text whose lines are joined: one document."""
    for record in _read_text(source, reading, stretch):
        content = record.content
        if isinstance(content, dict):
            text: str = content[reading.text_field]
            content = {reading.text_field: flowing(text)}
        yield record._replace(content=content)


def flowing(text: str) -> str:
    """A text with one space in the place of all white space, as running text has.

    >>> flowing("  1. Definitions.\\n\\n      License shall mean")
    '1. Definitions. License shall mean'
    """
    return " ".join(text.split())


def _read_hub(source: Source, reading: Reading, stretch: Stretch) -> Iterator[Record]:
    """The rows of one part of a Hub data set."""
    rows = open_hub(source.path, source.split)
    if source.parts > 1:
        rows = rows.shard(source.parts, source.part, contiguous=True)
    row = stretch.first
    try:
        # Whole tables are skipped, without making Python objects of their rows.
        for fields in rows.skip(stretch.first):
            _check_text_column(f"data set {source.name!r}", reading, list(fields))
            yield Record(row, fields, row + 1)
            row += 1
    except CorpusError:
        raise
    except Exception as error:
        why = str(error.__cause__ or error).strip().split("\n")[0]
        raise CorpusError(
            f"data set {source.name!r}, split {source.split!r}: cannot be read further than "
            f"{counted(row, 'row')} ({why}); run the same command again"
        ) from None


READERS = {
    "jsonl": _read_lines,
    "json": _read_json,
    "parquet": _read_parquet,
    "csv": _read_csv,
    "text": _read_text,
    "flowing text": _read_flowing_text,
    "hub": _read_hub,
}
"""Reader of each kind of source: the records of a stretch, or from an earlier row on."""


class HubRows(Protocol):
    """What we use of the `IterableDataset` of the library datasets."""

    num_shards: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows in order."""
        ...

    def shard(self, num_shards: int, index: int, contiguous: bool) -> HubRows:
        """One part of the rows."""
        ...

    def skip(self, n: int) -> HubRows:
        """All but the first rows."""
        ...


def open_hub(name: str, split: str) -> HubRows:
    """A Hub data set (or a local directory of one) as a stream of rows."""
    from datasets import load_dataset

    with _refusing_to_open(name, split):
        return cast("HubRows", load_dataset(name, split=split, streaming=True))


def hub_version(name: str, split: str) -> str:
    """Identifies what a data set holds, without reading it.

    It covers how the data set is read and every file: its commit on the Hub, or when a local file
    was changed.
    """
    from datasets import load_dataset_builder

    with _refusing_to_open(name, split):
        builder: Any = load_dataset_builder(name)
    files = {
        str(split_name): [list(files), [list(origin) for origin in files.origin_metadata]]
        for split_name, files in (builder.config.data_files or {}).items()
    }
    version = json.dumps([builder.hash, builder.config_id, files], sort_keys=True)
    return hashlib.sha256(version.encode()).hexdigest()[:16]


@contextmanager
def _refusing_to_open(name: str, split: str) -> Iterator[None]:
    """Turn what the library datasets raises into a `CorpusError` that names the data set."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(
            f"data set {name!r}, split {split!r}: cannot be opened ({reason})"
        ) from None


def _check_text_column(source: str, reading: Reading, columns: Sequence[str]) -> None:
    """Refuse a file in which no row can have a text."""
    if not {reading.text_field, reading.text_field.partition(".")[0]} & set(columns):
        raise CorpusError(
            f"{printable(source)}: expected a column {reading.text_field}, found "
            f"{_listed(columns)}; set input.text_field"
        )


# Fields of a record


def _parse_line(line: bytes) -> object:
    """The value of a line of JSON, or the problem that the line has."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Problem("not UTF-8")
    except (ValueError, RecursionError):
        return Problem("invalid JSON")


def _document_from_fields(row: int, fields: dict[str, Any], reading: Reading) -> Document:
    text = _look_up(fields, reading.text_field)
    if text is MISSING:
        problem = f"has no field {reading.text_field}; found {_listed(fields)}; "
        return Document(row, problem=problem + "set input.text_field")
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        return Document(row, problem=f"{reading.text_field} is {kind}, expected a string")
    if not _is_unicode(text):
        problem = f"{reading.text_field} has lone surrogates, which are not UTF-8"
        return Document(row, problem=problem)
    # A letter has four bytes at most, so most texts need not be encoded to know it.
    if len(text) > LARGEST_RECORD // 4 and len(text.encode()) > LARGEST_RECORD:
        return Document(row, problem=TOO_LARGE)
    # `meta` is parsed once here rather than by every look-up below.
    fields_with_meta = fields | {"meta": _parse_embedded_json(fields.get("meta"))}
    name = field_of(fields_with_meta, "pile_set_name")
    try:
        kept = tuple(_as_json(field_of(fields_with_meta, field)) for field in reading.fields)
    except RecursionError:
        return Document(row, problem="has a field that is nested too deeply")
    return Document(
        row,
        reading.before + text,
        name if isinstance(name, str) and _is_unicode(name) else None,
        fields=kept,
    )


def _as_json(value: object) -> str | None:
    """A field of a document as JSON in ASCII; None if it is missing or null."""
    if value is MISSING or value is None:
        return None
    return json.dumps(value, default=str)


def _listed(names: Iterable[str]) -> str:
    """The first few names, for an error message."""
    all_names = list(names)
    listed = ", ".join(printable(name) for name in all_names[:LISTED_NAMES]) or "nothing"
    return listed + (" …" if len(all_names) > LISTED_NAMES else "")


MISSING = object()
"""The value of a field that a document does not have. None would be JSON's null."""


def field_of(fields: Mapping[str, object], name: str) -> object:
    """The field of that name, of the document or else of its `meta`; a dot leads into a field."""
    value = _look_up(fields, name)
    meta = fields.get("meta")
    if value is MISSING and isinstance(meta, dict):
        return _look_up(cast("dict[str, object]", meta), name)
    return value


def _look_up(fields: Mapping[str, object], name: str) -> object:
    """The field of that name, or the one that the dots in the name lead to; else `MISSING`."""
    # A field whose own name has a dot comes before a field within a field.
    if name in fields:
        return fields[name]
    outer, dot, inner = name.partition(".")
    if not dot:
        return MISSING
    inner_fields = _parse_embedded_json(fields.get(outer))
    if not isinstance(inner_fields, dict):
        return MISSING
    return _look_up(cast("dict[str, object]", inner_fields), inner)


def _parse_embedded_json(value: object) -> object:
    """A value, parsed if it is a string that holds a JSON object, as `meta` is in some files."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def is_one_of(value: object, allowed: tuple[Value, ...]) -> bool:
    """Whether a field has one of the values that `where` allows."""
    # 2 and 2.0 are the same number, though their texts differ. Python takes True for 1; JSON does
    # not.
    if isinstance(value, int | float) and not isinstance(value, bool):
        allowed_numbers = [number for number in allowed if not isinstance(number, str | bool)]
        if value in allowed_numbers:
            return True
    # CSV knows only text, so a number in `where` also fits its text.
    allowed_texts = [as_text(allowed_value) for allowed_value in allowed]
    return value is not MISSING and as_text(value) in allowed_texts


def as_text(value: object) -> str | None:
    """A field of a document as a run keeps it: a string unchanged, other JSON values as JSON."""
    if value is MISSING or value is None:
        return None
    if isinstance(value, bool | int | float | list | dict):
        text = json.dumps(value, ensure_ascii=False, default=str)
    else:
        text = str(value)
    return text if _is_unicode(text) else text.encode("utf-8", "backslashreplace").decode()


def _is_unicode(text: str) -> bool:
    """Whether a string is Unicode text. An escape such as \\ud800 in JSON makes one that is not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
