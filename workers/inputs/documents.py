"""Documents out of files: .jsonl, .jsonl.zst, .parquet, .csv, plain text, and data sets on the Hub."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from schemas.errors import CorpusError
from schemas.places import open_whole, place


@dataclass(frozen=True)
class Document:
    """One row of a source: its text, or the problem that it has instead."""

    row: int
    text: str = ""
    pile_set_name: str | None = None
    problem: str | None = None


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

    def documents(self) -> Iterator[Document]:
        """The documents in order; a problem of the whole file raises `CorpusError`."""
        readers = {
            "jsonl": _read_jsonl, "parquet": _read_parquet, "csv": _read_csv, "text": _read_text, "hub": _read_hub,
        }  # fmt: skip
        try:
            yield from readers[self.kind](self)
        except (OSError, zstandard.ZstdError, pa.ArrowException) as error:
            raise CorpusError(
                f"{self.path}: cannot be read ({error}); is the file complete?"
            ) from None


def _read_jsonl(source: Source) -> Iterator[Document]:
    for row, line in enumerate(_lines(source.path)):
        if line.strip():
            yield _from_json(row, line)


def _lines(path: str) -> Iterator[bytes]:
    if not path.endswith(".zst"):
        with open_whole(place(path)) as file:
            yield from io.BufferedReader(file) if isinstance(file, pa.NativeFile) else file
        return
    rest = b""
    for chunk in _decompressed(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _decompressed(path: str) -> Iterator[bytes]:
    """The content of a .zst file of one or more frames; a file that ends inside a frame is an
    error, not an end.
    """
    frame = zstandard.ZstdDecompressor().decompressobj()
    whole = True
    with open_whole(place(path)) as file:
        while compressed := file.read(1 << 18):
            while compressed:
                whole = False
                yield frame.decompress(compressed)
                compressed = b""
                if frame.eof:
                    whole, compressed = True, frame.unused_data
                    frame = zstandard.ZstdDecompressor().decompressobj()
    if not whole:
        raise CorpusError(f"{path}: the zstd stream ends in the middle; fetch the file again")


def _from_json(row: int, line: bytes) -> Document:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Document(row, problem="not UTF-8")
    except (ValueError, RecursionError):
        return Document(row, problem="invalid JSON")
    if not isinstance(fields, dict):
        return Document(row, problem=f"expected a JSON object, got {type(fields).__name__}")
    return _from_fields(row, fields.get("text"), fields.get("meta"))


def _from_fields(row: int, text: Any, meta: Any) -> Document:
    if not isinstance(text, str):
        return Document(
            row,
            problem=f"text is {'null' if text is None else type(text).__name__}, expected a string",
        )
    if not text:
        return Document(row, problem="text is empty")
    if not _encodable(text):
        return Document(row, problem="text has lone surrogates, which are not UTF-8")
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except (ValueError, RecursionError):
            meta = None
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    return Document(row, text, name if isinstance(name, str) and _encodable(name) else None)


def _encodable(text: str) -> bool:
    """Whether a string from JSON is Unicode text: an escape such as \\ud800 makes one that is not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_parquet(source: Source) -> Iterator[Document]:
    with open_whole(place(source.path)) as content, pq.ParquetFile(content) as file:
        names = file.schema_arrow.names
        if "text" not in names:
            raise CorpusError(f"{source.path}: expected a column text, found {', '.join(names)}")
        row = 0
        for batch in file.iter_batches(
            batch_size=256, columns=[n for n in ("text", "meta") if n in names]
        ):
            for fields in _rows(batch):
                yield (
                    Document(row, problem="not UTF-8") if fields is None else _from_row(row, fields)
                )
                row += 1


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any] | None]:
    """The rows of a batch; none in the place of one that is not UTF-8, which Parquet does not
    check.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return (
            [None]
            if len(batch) == 1
            else [row for i in range(len(batch)) for row in _rows(batch.slice(i, 1))]
        )


def _from_row(row: int, fields: dict[str, Any]) -> Document:
    return _from_fields(row, fields["text"], fields.get("meta"))


def _read_csv(source: Source) -> Iterator[Document]:
    with open_whole(place(source.path)) as content:
        buffer = io.BufferedReader(content) if isinstance(content, pa.NativeFile) else content
        # A row that is not UTF-8 is a bad row, not a bad file.
        lines = io.TextIOWrapper(buffer, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.DictReader(lines, strict=True)
        try:
            if "text" not in (rows.fieldnames or ()):
                raise CorpusError(
                    f"{source.path}: expected a column text, found "
                    f"{', '.join(rows.fieldnames or ()) or 'nothing'}"
                )
            for row, fields in enumerate(rows):
                yield _from_csv(row, fields)
        except csv.Error as error:
            raise CorpusError(
                f"{source.path}, line {rows.reader.line_num}: not CSV ({error})"
            ) from None


def _from_csv(row: int, fields: dict[str, Any]) -> Document:
    if None in fields:
        return Document(row, problem="more fields than the header names")
    if not _encodable(fields["text"] or ""):
        return Document(row, problem="not UTF-8")
    return _from_fields(row, fields["text"], {"pile_set_name": fields.get("dataset") or None})


def _read_text(source: Source) -> Iterator[Document]:
    try:
        yield _from_fields(0, place(source.path).read_bytes().decode("utf-8"), None)
    except UnicodeDecodeError as error:
        yield Document(0, problem=f"not UTF-8 (byte {error.start})")


def _read_hub(source: Source) -> Iterator[Document]:
    rows = open_hub(source.path, source.split)
    if source.parts > 1:
        rows = rows.shard(source.parts, source.part, contiguous=True)
    try:
        for row, fields in enumerate(rows):
            if "text" not in fields:
                raise CorpusError(
                    f"data set {source.name!r}: expected a column text, found {', '.join(fields)}"
                )
            yield _from_row(row, fields)
    except CorpusError:
        raise
    except Exception as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise CorpusError(
            f"data set {source.name!r}, split {source.split!r}: cannot be read ({reason})"
        ) from None


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
