"""Documents out of files: JSON lines, JSON, Parquet, Arrow, CSV and plain text, also compressed,
and data sets on the Hub.

A file is read as records, in order. A record is a document as its file holds it, for example a line
of bytes. It is made into a `Document` apart: parsing a record costs more than reading it.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.errors import (
    CorpusError,
    HeadcountError,
    ScanError,
    counted,
    printable,
)
from headcount.schemas.files import beginnings
from headcount.schemas.files.arrow_values import values_of
from headcount.schemas.files.beginnings import form_of, wide_encoding_of
from headcount.schemas.files.input_files import check_real_path, open_input
from headcount.schemas.places import place
from headcount.schemas.reasons import reason

COMPRESSED = {".zst": "zstd", ".gz": "gzip", ".bz2": "bzip2", ".xz": "xz"}
"""How a file is compressed, by its last ending; the one before says what the file contains."""


CONTENT_BUFFER = 1 << 20  # bytes of a compressed file's content that are held at once
SAMPLE_BYTES = 1 << 20  # compressed bytes that are read to see how well a file is compressed

LARGEST_RECORD = 32 << 20
"""Bytes of the largest line or text that is read. Tokenising takes 120 to 135 bytes of memory for
each byte of text, so 4 GB for this one: what a cluster's machine has for each core.
"""

TOO_LARGE = (
    f"has more than {LARGEST_RECORD >> 20} MiB, which take too much memory to tokenise; split it "
    "into several documents"
)

LARGEST_ARRAY = 1 << 30  # bytes of JSON; parsing takes 3 bytes of memory for each

PIECE_BYTES = 1 << 20  # bytes of a line too long that are dropped at once
PARQUET_BATCH = 256  # rows of a Parquet file that are held at once at most

BATCH_BYTES = 16 << 20  # held at once of a Parquet file whose rows are alike

LISTED_NAMES = 8  # fields of a document that an error message lists
LISTED_LETTERS = 40  # of the name of each

REMOTE = ("hf", "http", "https", "s3", "gs", "gcs")
"""How addresses begin from which a data set may take files that are not on this machine."""

CHATS = ("messages", "conversations", "conversation")
"""Fields that hold a chat in lists of turns, as data sets call them."""

CHANGED = "changed while it was read; run the same command again"
"""What is said of a file that is no longer as it was when it was listed."""

Value = str | int | float | bool  # a value that `where` may ask for


@dataclass(frozen=True)
class Reading:
    """What is read of each document."""

    text_field: str = "text"
    fields: tuple[str, ...] = ()  # further fields that are kept of each document, sorted
    before: str = ""  # what is put before every text


EVERY_DOCUMENT = Reading()


class Problem(str):
    """What is wrong with a record. It takes the place of the record's content."""


BLANK = Problem("blank line")  # counts as a row and holds no document

PART = "pile_set_name"  # The field that names the subset of the Pile. It is kept of every document.


class Record(NamedTuple):
    """A document as its file holds it."""

    row: int  # its number in what is read of the source
    content: object  # a line of bytes, the parsed fields, or the `Problem` that the reader met
    stop: int  # where the next record begins: a byte of lines, or a row


@dataclass(frozen=True)
class Document:
    """One row of a source: its text, or the problem that it has instead."""

    row: int
    text: str = ""
    pile_set_name: str | None = None
    problem: str | None = None
    fields: tuple[str | None, ...] = ()
    """The fields that a `Reading` names, as JSON; None if it does not have one."""

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

    kind: str  # `jsonl`, `json`, `parquet`, `arrow`, `csv`, `text`, `flowing text` or `hub`
    path: str
    bytes: int  # this, `changed` and `version` are as of the last look
    split: str = "train"
    part: int = 0
    parts: int = 1
    changed: int = 0  # when the file was changed last, in nanoseconds; 0 if that is not known
    version: str = ""  # identifies what a data set holds; empty for files

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

    @property
    def has_lines(self) -> bool:
        """Whether it holds an object in each line. A .json file is opened to see it."""
        if self.kind == "json":
            with refusing_unreadable(self), open_content(self.path) as file:
                # A byte order mark may stand before the array.
                beginning = file.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()
                return not beginning.startswith(b"[")
        return self.kind == "jsonl"

    @property
    def can_be_entered(self) -> bool:
        """Whether a range is read without what lies before it. It must then end in the source."""
        if self.kind == "parquet":
            return True
        return compression_of(self.path) is None and self.has_lines

    def documents(self, reading: Reading = EVERY_DOCUMENT) -> Iterator[Document]:
        """The documents in order. A problem of the whole file raises `CorpusError`."""
        for record in self.records(reading):
            if record.content is not BLANK:
                yield document_of(record, reading)

    def records(
        self, reading: Reading = EVERY_DOCUMENT, start: int = 0, stop: int | None = None
    ) -> Iterator[Record]:
        """The records in order, and a record for each blank line.

        A source that can be entered has ranges: of rows, or of bytes of lines. A line belongs to
        the range that its first byte lies in.
        """
        with refusing_unreadable(self):
            if self.has_lines:
                yield from _read_lines(self, start, stop)
                return
            if self.kind == "parquet":
                rows = _read_parquet(self, reading, start, stop)
                rows = islice(rows, None if stop is None else stop - start)
            else:
                readers = {
                    "hub": _read_hub, "json": _read_array, "csv": _read_csv, "arrow": _read_arrow
                }  # fmt: skip
                rows = readers.get(self.kind, _read_text)(self, reading)
            for row, content in enumerate(rows):
                yield Record(row, content, start + row + 1)


@contextmanager
def refusing_unreadable(source: Source) -> Iterator[None]:
    """Turn what a library raises about a broken file into a `CorpusError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        why = reason(error)
        advice = "is the file complete?"
        if "requires too much memory" in why:
            advice = "its window has more than 128 MiB; compress it without --long and --ultra"
        elif isinstance(error, PermissionError):
            advice = "allow it to be read"
        raise CorpusError(
            f"{printable(source.path)}: cannot be read ({printable(why)}); {advice}"
        ) from None


def compression_of(path: str) -> str | None:
    """How a file is compressed, by its ending, in capital letters or not; None if it is not."""
    return COMPRESSED.get(f".{path.rpartition('.')[2].lower()}")


@contextmanager
def open_content(path: str, start: int = 0) -> Iterator[io.BufferedReader]:
    """A file's content from a byte on, as a stream; a compressed one is read from its beginning."""
    compression = compression_of(path)
    with open_input(place(path)) as stored:
        if not start:
            _check_form(path, stored.peek(beginnings.BYTES), compression)
        if compression is not None:
            stream = _decompressed(compression, stored)
            yield io.BufferedReader(stream, CONTENT_BUFFER)
        else:
            stored.seek(start)
            yield stored


def _check_form(path: str, beginning: bytes, expected: str | None) -> None:
    """Refuse a file that is not what its name says."""
    form = form_of(beginning)
    if form == expected:
        return
    if form == "Git LFS":
        problem = beginnings.LFS_POINTER
    elif form is None:
        problem = f"is {'not' if beginning else 'empty, not'} {expected}, as its name says; "
        problem += "is the file complete, or its name wrong?"
    else:
        ending = next((end for end, name in COMPRESSED.items() if name == form), None)
        advice = "unpack it" if ending is None else f"let its name end in {ending}"
        if form in ("Parquet", "Arrow"):
            advice = f"let its name end in .{form.lower()}"
        problem = f"is {form}, and its name does not say so; {advice}"
    raise CorpusError(f"{printable(path)}: {problem}")


def _decompressed(compression: str, stored: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """The content of a compressed file, in however many parts: members, streams or frames."""
    if compression == "zstd":
        # Arrow's stream goes on behind the first frame of a file, holds one window and one block
        # however large a frame is, and raises where a file ends inside a frame, which the library
        # zstandard does not all do.
        return pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
    # These read what Arrow does not: zero bytes behind the last member of a gzip file.
    libraries: dict[str, Callable[[Any], Any]] = {
        "gzip": lambda file: gzip.GzipFile(fileobj=file),
        "bzip2": bz2.BZ2File,
        "xz": lzma.LZMAFile,
    }
    return libraries[compression](stored)


def content_bytes_of(path: str, stored_bytes: int) -> int:
    """About how many bytes a file holds when it is decompressed, by a sample of its beginning."""
    compression = compression_of(path)
    if compression is None:
        return stored_bytes
    with open_input(place(path)) as file:
        sample = file.read(SAMPLE_BYTES)
    content_bytes = 0
    # A broken file is refused by whoever reads it.
    with suppress(OSError, EOFError, zlib.error, lzma.LZMAError):
        stream = _decompressed(compression, io.BytesIO(sample))
        # In small pieces, because the last one, which the end of the sample cuts, is lost.
        while piece := stream.read(1 << 14):
            content_bytes += len(piece)
    return stored_bytes * content_bytes // max(1, len(sample))


def _refuse_wide(source: Source, file: io.BufferedReader) -> None:
    """Refuse a file in UTF-16 or UTF-32, of which no line can be read."""
    if encoding := wide_encoding_of(file.peek(beginnings.BYTES)[: beginnings.BYTES]):
        raise CorpusError(f"{printable(source.path)}: {_as_utf8(encoding)}")


def _as_utf8(encoding: str) -> str:
    """How a file in another encoding is converted."""
    return f"looks like {encoding}, expected UTF-8; iconv -f {encoding} -t UTF-8 FILE converts it"


def not_utf8(error: UnicodeDecodeError) -> Problem:
    """What is said of bytes that are not UTF-8: where, and in which encoding they may be."""
    return Problem(
        f"not UTF-8 (byte {error.start}); if the file is Windows-1252 or Latin-1, iconv -f "
        "WINDOWS-1252 -t UTF-8 FILE converts it"
    )


# Readers: of lines, and of rows


def _read_lines(source: Source, start: int, end: int | None) -> Iterator[Record]:
    """The lines that begin in a range of a file.

    pyarrow.json is not used: it refuses a block of lines for a broken one, counts no blank lines,
    and gives one type to all values of a field.
    """
    # The line that holds the byte before a range began in the range before it, or ends there.
    offset = max(0, start - 1)
    row = 0
    with open_content(source.path, offset) as file:
        if not offset:
            _refuse_wide(source, file)
        if start:
            _, offset = _next_line(file, offset)
        while end is None or offset < end:
            line, stop = _next_line(file, offset)
            if stop == offset:
                if end is not None:
                    raise CorpusError(
                        f"{printable(source.path)}: ends at byte {offset:,}, expected {end:,} or "
                        f"more; {CHANGED}"
                    )
                return
            offset = stop
            yield Record(row, line, offset)
            row += 1


def _next_line(file: io.BufferedReader, offset: int) -> tuple[bytes | Problem, int]:
    """A line and the byte behind it; a problem if it is blank, or too long to be held whole."""
    line = file.readline(LARGEST_RECORD + 1)
    offset += len(line)
    if len(line) <= LARGEST_RECORD:
        return line if line.strip() else BLANK, offset
    while line and not line.endswith(b"\n"):
        line = file.readline(PIECE_BYTES)
        offset += len(line)
    return Problem(TOO_LARGE), offset


def _read_array(source: Source, reading: Reading) -> Iterator[object]:
    """The objects of an array, which is read whole."""
    with open_content(source.path) as file:
        _refuse_wide(source, file)
        content = file.read(LARGEST_ARRAY + 1)
    if len(content) > LARGEST_ARRAY:
        raise CorpusError(
            f"{printable(source.path)}: an array of more than {LARGEST_ARRAY >> 20:,} MiB, which "
            "take too much memory to parse; write an object in each line (.jsonl)"
        )
    try:
        yield from parsed_json(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{printable(source.path)}: not JSON ({reason(error)}); expected an array of objects, "
            "or an object in each line"
        ) from None


def _read_parquet(
    source: Source, reading: Reading, start: int, stop: int | None
) -> Iterator[object]:
    """The rows of a range of a Parquet file, and perhaps some behind it."""
    with open_table(source, pq.ParquetFile) as file:
        _check_text_column(source.path, reading, file.schema_arrow.names)
        paths = [file.schema.column(i).path for i in range(len(file.schema))]
        if stop is not None and stop > file.metadata.num_rows:
            raise CorpusError(
                f"{printable(source.path)}: has {file.metadata.num_rows:,} rows, expected "
                f"{stop:,} or more; {CHANGED}"
            )
        group_start = 0
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            to_drop = max(0, start - group_start)
            group_start += group.num_rows
            if to_drop >= group.num_rows:
                continue
            # Fewer rows at once if they are long.
            row_bytes = max(1, group.total_byte_size // group.num_rows)
            for batch in file.iter_batches(
                batch_size=min(PARQUET_BATCH, max(1, BATCH_BYTES // row_bytes)),
                row_groups=[number],
                columns=[path for path in paths if _is_wanted(path, reading)],
            ):
                yield from _rows_of(batch.slice(min(to_drop, len(batch))))
                to_drop = max(0, to_drop - len(batch))


def _read_arrow(source: Source, reading: Reading) -> Iterator[object]:
    """The rows of an Arrow file or stream, such as the library datasets saves to a disk."""
    with open_table(source, _arrow_batches) as reader:
        _check_text_column(source.path, reading, reader.schema.names)
        wanted = [name for name in reader.schema.names if _is_wanted(name, reading)]
        batches = getattr(reader, "num_record_batches", None)
        for batch in reader if batches is None else map(reader.get_batch, range(batches)):
            chosen = batch.select(wanted)
            # Nothing in the file has been looked at yet, and a wrong offset would end this process.
            chosen.validate(full=True)
            for begin in range(0, len(chosen), PARQUET_BATCH):
                yield from _rows_of(chosen.slice(begin, PARQUET_BATCH))


def _arrow_batches(content: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
    """A reader of an Arrow file, which has an index at its end, or of a stream."""
    is_file = content.read(6) == b"ARROW1"
    content.seek(0)
    return pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)


@contextmanager
def open_table(source: Source, reader: Callable[[Any], Any]) -> Iterator[Any]:
    """A Parquet or an Arrow file, opened by its reader."""
    with open_input(place(source.path)) as content:
        try:
            table = reader(content)
        except pa.ArrowException:
            # The reader does not say what the file is instead.
            content.seek(0)
            beginning = content.read(beginnings.BYTES)
            if form_of(beginning) is not None:
                _check_form(source.path, beginning, source.kind.capitalize())
            raise
        with table:
            yield table


def _is_wanted(path: str, reading: Reading) -> bool:
    """Whether a column is read, or a field within one: it is asked for, holds what is, or lies in
    it.
    """
    fields = (PART, *reading.fields)
    # A field of a document may also lie in its `meta`.
    names = (reading.text_field, *fields, *(f"meta.{name}" for name in fields))
    return any(
        f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}.") for name in names
    )


def _rows_of(batch: pa.RecordBatch) -> list[dict[str, Any] | Problem]:
    names = batch.schema.names
    try:
        columns = [values_of(column) for column in batch.columns]
    except UnicodeDecodeError:
        # Parquet does not check that its strings are UTF-8, and the error does not name the row.
        if len(batch) == 1:
            return [Problem("not UTF-8")]
        return [row for i in range(len(batch)) for row in _rows_of(batch.slice(i, 1))]
    if not columns:
        return [{} for _ in range(len(batch))]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _read_csv(source: Source, reading: Reading) -> Iterator[object]:
    """The rows of a CSV file with a header.

    pyarrow.csv is not used: a row that is larger than a block ends the file, and a row that is
    broken is left out and not counted.
    """
    with open_content(source.path) as content:
        _refuse_wide(source, content)
        # With "surrogateescape" a row that is not UTF-8 is a bad row, not a bad file.
        text = io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.DictReader(text, strict=True)
        try:
            _check_text_column(source.path, reading, rows.fieldnames or ())
            for fields in rows:
                # csv.DictReader puts the fields beyond the header under the key None.
                if None in fields:
                    yield Problem("more fields than the header names")
                elif not _is_unicode(fields.get(reading.text_field) or ""):
                    yield Problem("not UTF-8")
                else:
                    yield {"pile_set_name": fields.get("dataset") or None, **fields}
        except csv.Error as error:
            raise CorpusError(
                f"{printable(source.path)}, line {rows.reader.line_num}: not CSV ({error})"
            ) from None


def _read_text(source: Source, reading: Reading) -> Iterator[object]:
    """A file of plain text, perhaps with its lines joined: one document."""
    with open_content(source.path) as file:
        content = file.read(LARGEST_RECORD + 1)
    if len(content) > LARGEST_RECORD:
        yield Problem(TOO_LARGE)
        return
    if encoding := wide_encoding_of(content[: beginnings.BYTES]):
        yield Problem(_as_utf8(encoding))
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield not_utf8(error)
        return
    # The text is put under the name that the scan uses, because the file has no field names.
    yield {reading.text_field: flowing(text) if source.kind == "flowing text" else text}


def flowing(text: str) -> str:
    """A text with one space in the place of all white space, as running text has.

    >>> flowing("  1. Definitions.\\n\\n      License shall mean")
    '1. Definitions. License shall mean'
    """
    return " ".join(text.split())


def _read_hub(source: Source, reading: Reading) -> Iterator[object]:
    """The rows of one part of a Hub data set."""
    rows = open_hub(source.path, source.split)
    if source.parts > 1:
        rows = rows.shard(source.parts, source.part, contiguous=True)
    row = 0
    try:
        for fields in rows:
            _check_text_column(f"data set {source.name!r}", reading, list(fields))
            yield fields
            row += 1
    except HeadcountError:
        raise
    except Exception as error:
        why = reason(ValueError(str(error.__cause__ or error).strip().split("\n")[0]))
        advice = "run the same command again"
        if os.path.isdir(source.path):
            advice = (
                "name its files in files in place of dataset, for instance files = "
                f"'{source.path.rstrip('/')}/*': each is then read by itself, whatever its columns"
            )
        raise CorpusError(
            f"data set {source.name!r}, split {source.split!r}: cannot be read further than "
            f"{counted(row, 'row')} ({why}); {advice}"
        ) from None


def open_hub(name: str, split: str) -> Any:  # noqa: ANN401 (datasets has few types)
    """A Hub data set (or a local directory of one) as a stream of rows: an `IterableDataset`."""
    with _refusing_to_open(name, split):
        return checked_builder(name, split).as_streaming_dataset(split=split)


def hub_version(name: str, split: str) -> str:
    """What identifies a data set unread: how it is read, and its commit or its files' times."""
    with _refusing_to_open(name, split):
        builder = checked_builder(name, split)
    files = {
        str(split_name): [list(files), [list(origin) for origin in files.origin_metadata]]
        for split_name, files in (builder.config.data_files or {}).items()
    }
    version = json.dumps([builder.hash, builder.config_id, files], sort_keys=True)
    return hashlib.sha256(version.encode()).hexdigest()[:16]


def checked_builder(name: str, split: str, configuration: str | None = None) -> Any:  # noqa: ANN401 (datasets has few types)
    """What reads a data set. Its card may name any file, so each of them is checked."""
    if os.path.exists(name):
        check_real_path(name, os.path.realpath(name))
    for folder in (name, os.path.join(name, split)):
        if os.path.isfile(os.path.join(folder, "state.json")):
            raise CorpusError(
                f"data set {name!r}, split {split!r}: was saved by save_to_disk; name its files in "
                f"files in place of dataset: files = '{folder.rstrip('/')}/*.arrow'"
            )
    from datasets import load_dataset_builder

    builder: Any = load_dataset_builder(name, configuration)
    for files in (builder.config.data_files or {}).values():
        for file in files:
            _check_data_file(str(file))
    return builder


def _check_data_file(file: str) -> None:
    """Refuse a file of a data set that is no input; what stands before :: unpacks it."""
    packed = file.rpartition("::")[2]
    scheme, separator, path = packed.partition("://")
    if separator and scheme in REMOTE:
        return
    if separator and scheme not in ("file", "local"):
        raise ScanError(f"{printable(file)}: expected a path, {', '.join(REMOTE)} or file")
    path = path if separator else packed
    check_real_path(file, os.path.realpath(path))


@contextmanager
def _refusing_to_open(name: str, split: str) -> Iterator[None]:
    """Turn what the library datasets raises into a `CorpusError` that names the data set."""
    try:
        yield
    except HeadcountError:
        raise
    except Exception as error:
        why = reason(ValueError(str(error).strip().split("\n")[0]))
        raise CorpusError(f"data set {name!r}, split {split!r}: cannot be opened ({why})") from None


def _check_text_column(source: str, reading: Reading, columns: Sequence[str]) -> None:
    """Refuse a file in which no row can have a text."""
    if not {reading.text_field, reading.text_field.partition(".")[0]} & set(columns):
        raise CorpusError(
            f"{printable(source)}: expected a column {reading.text_field}, found "
            f"{_listed(columns)}; {_advice(reading, columns)}"
        )


def _advice(reading: Reading, names: Iterable[str]) -> str:
    """What to do about documents without a text."""
    chat = next((name for name in CHATS if name in names), None)
    if chat is None:
        return "set input.text_field"
    return (
        f"{chat} holds chats, and no template is applied to them: write each chat as one text into "
        f"a field {reading.text_field}"
    )


# Fields of a record


def document_of(record: Record, reading: Reading) -> Document:
    """The document that a record holds, or a document that names the record's problem."""
    row, fields, _ = record
    if isinstance(fields, bytes):
        fields = _parse_line(fields)
    if isinstance(fields, Problem):
        return Document(row, problem=fields)
    if not isinstance(fields, dict):
        return Document(row, problem=f"expected a JSON object, got {type(fields).__name__}")
    fields = cast("dict[str, Any]", fields)
    name = reading.text_field
    text = _look_up(fields, name)
    if text is MISSING:
        problem = f"has no field {name}; found {_listed(fields)}; {_advice(reading, fields)}"
        return Document(row, problem=problem)
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        chat = f"; {_advice(Reading(), [name])}" if name in CHATS else ""
        return Document(row, problem=f"{name} is {kind}, expected a string{chat}")
    if not _is_unicode(text):
        return Document(row, problem=f"{name} has lone surrogates, which are not UTF-8")
    # A letter has four bytes at most, so most texts need not be encoded to know it.
    if len(text) > LARGEST_RECORD // 4 and len(text.encode()) > LARGEST_RECORD:
        return Document(row, problem=TOO_LARGE)
    # `meta` is parsed once here rather than by every look-up below.
    if "meta" in fields:
        fields = fields | {"meta": _parse_embedded_json(fields["meta"])}
    part = field_of(fields, PART)
    try:
        found = (field_of(fields, field) for field in reading.fields)
        # As JSON in ASCII.
        kept = tuple(
            None if value is MISSING else json.dumps(value, default=str) for value in found
        )
    except RecursionError:
        return Document(row, problem="has a field that is nested too deeply")
    part = part if isinstance(part, str) and _is_unicode(part) else None
    return Document(row, reading.before + text, part, fields=kept)


def _parse_line(line: bytes) -> object:
    try:
        return parsed_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except RecursionError:
        return Problem("has a field that is nested too deeply")
    except ValueError:
        if not line.strip(b"\0\r\n"):
            return Problem("zero bytes; was the file written to its end?")
        return Problem("invalid JSON")


def parsed_json(text: str) -> Any:  # noqa: ANN401
    """What a JSON text holds. Of an integer too long for Python, its digits."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


def _listed(names: Iterable[str]) -> str:
    """The first few names, for an error message."""
    all_names = list(names)
    listed = ", ".join(_excerpt(name) for name in all_names[:LISTED_NAMES]) or "nothing"
    return listed + (" …" if len(all_names) > LISTED_NAMES else "")


def _excerpt(text: str) -> str:
    """The beginning of a text from a file, for an error message."""
    shown = printable(text[: LISTED_LETTERS + 1])
    return shown if len(shown) <= LISTED_LETTERS else f"{shown[:LISTED_LETTERS]}…"


MISSING = object()  # The value of a field that a document does not have. None would be JSON's null.


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
        return parsed_json(value)
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
