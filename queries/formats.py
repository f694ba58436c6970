"""Writing an answer as a table, CSV, JSON or Parquet: to a file that appears whole, or to stdout."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import pyarrow.parquet as pq

from queries.answers import Answer
from queries.text_tables import COUNTED_ROWS, TABLE_ROWS, write_table
from schemas.errors import QueryError, printable

Format: TypeAlias = Literal["table", "csv", "json", "jsonl", "parquet"]

SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".txt": "table",
}
"""The format that the name of a file asks for."""

HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What JSON may hold as it is and a terminal obeys: DEL, C1, and marks of direction."""


def format_of(asked: Format | None, output: Path | None, vertical: bool = False) -> Format:
    """The format of an answer: as asked for, or as the name of the file says."""
    suffix = "" if output is None else output.suffix.lower()
    of_name = SUFFIXES.get(suffix)
    if asked is not None and of_name is not None and asked != of_name:
        raise QueryError(
            f"--format {asked} contradicts the name {output}: leave out --format, or name the file "
            f"…{_suffix(asked)}"
        )
    if asked is None and suffix and of_name is None:
        raise QueryError(
            f"{output}: expected a name that ends in {', '.join(SUFFIXES)}; or say --format "
            f"{'|'.join(SUFFIXES.values())}"
        )
    format = asked or of_name or "table"
    if format == "parquet" and output is None:
        raise QueryError("--format parquet writes a file; say which one with -o FILE.parquet")
    if vertical and format != "table":
        raise QueryError(f"--vertical is a form of a table, and this is {format}; leave out one")
    return format


def _suffix(format: Format) -> str:
    return next(suffix for suffix, of_name in SUFFIXES.items() if of_name == format)


def rows_to_read(format: Format, limit: int | None) -> int | None:
    """How many rows to ask for. A table also reads rows that it does not show, to count them.

    The question is asked once, with this limit: DuckDB then sorts and reads no more than it needs.
    """
    if format != "table":
        return limit
    shown = TABLE_ROWS if limit is None else limit
    return shown + COUNTED_ROWS + 1


def write_file(
    answer: Answer, format: Format, path: Path, limit: int | None = None, vertical: bool = False
) -> None:
    """Write an answer to a file. What was there stays until the answer is whole."""
    if format == "parquet":
        write_parquet(answer, path)
        return
    with _appearing(path) as place, place.open("w", encoding="utf-8", newline="") as out:
        write(answer, format, out, limit, vertical)


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Another name to write to, which becomes `path` at the end; a device or a pipe is itself."""
    target = Path(os.path.realpath(path))
    special = target.exists() and not target.is_file()
    place = target if special else target.with_name(f".headcount-{os.getpid()}.part")
    try:
        yield place
        if not special:
            place.replace(target)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise QueryError(f"{path}: cannot be written ({reason})") from None
    finally:
        if not special:
            with suppress(OSError):  # The folder is not there, which the error above says.
                place.unlink(missing_ok=True)


@contextmanager
def writing_to_stdout(lossless: bool = False) -> Iterator[TextIO]:
    """Stdout, whoever reads it: they may leave early, it may have no room or few signs.

    A sign that its encoding lacks is written as its number, or refused where the output is
    `lossless`.
    """
    out = sys.stdout
    reconfigure = getattr(out, "reconfigure", None)  # A stdout that is caught has none.
    if reconfigure is not None:
        reconfigure(errors="strict" if lossless else "backslashreplace")
    try:
        yield out
        out.flush()
    except UnicodeEncodeError as error:
        _close_quietly()
        raise QueryError(
            f"stdout is {error.encoding}, which has no {error.object[error.start]!a}; "
            "-o FILE.csv is UTF-8, and so is stdout with PYTHONIOENCODING=utf-8"
        ) from None
    except BrokenPipeError:
        _close_quietly()
    except OSError as error:
        _close_quietly()
        raise QueryError(f"stdout: cannot be written ({error.strerror or error})") from None


def _close_quietly() -> None:
    """Lead what Python still has to write into nothing: at its end it would fail once more."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _unicode(out: TextIO) -> bool:
    return (out.encoding or "utf-8").lower().replace("-", "").startswith("utf")


def write(
    answer: Answer,
    format: Format,
    out: TextIO,
    limit: int | None = None,
    vertical: bool = False,
) -> None:
    """Write an answer as text; Parquet goes to a file, through `write_parquet`."""
    if format == "table":
        write_table(answer, out, limit, vertical)
    elif format == "csv":
        write_csv(answer, out)
    elif format == "jsonl":
        write_json_lines(answer, out)
    else:
        write_json(answer, out)


def write_csv(answer: Answer, out: TextIO) -> None:
    """Write comma-separated values with a header; NULL is an empty field, a list is JSON. A
    terminal is shown no control characters.
    """
    shown = printable if out.isatty() else str
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(shown, answer.schema.names))
    for row in answer.rows():
        values = [_json_text(v, out) if isinstance(v, list | dict) else v for v in row]
        writer.writerow([shown(v) if isinstance(v, str) else v for v in values])


def write_json(answer: Answer, out: TextIO) -> None:
    """Write an array of objects; NULL, NaN and infinities are null."""
    separator = "[\n"
    for row in answer.rows():
        out.write(separator + _json_text(dict(zip(answer.schema.names, row, strict=True)), out))
        separator = ",\n"
    out.write("[]\n" if separator == "[\n" else "\n]\n")


def write_json_lines(answer: Answer, out: TextIO) -> None:
    """Write an object a line, in the words of `write_json`."""
    for row in answer.rows():
        out.write(_json_text(dict(zip(answer.schema.names, row, strict=True)), out) + "\n")


def write_parquet(answer: Answer, path: Path) -> None:
    """Write a Parquet file; fields say what the columns of the answer's name mean."""
    with _appearing(path) as place:
        schema = answer.described_schema
        with pq.ParquetWriter(place, schema, compression="zstd") as writer:
            for batch in answer.batches():
                writer.write_batch(batch.cast(schema))


def _json_text(value: Any, out: TextIO) -> str:
    """JSON that the encoding of `out` has and no terminal obeys."""
    text = json.dumps(_json(value), ensure_ascii=not _unicode(out), default=str)
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _json(value: Any) -> Any:
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_json(item) for item in value]
    return {key: _json(item) for key, item in value.items()} if isinstance(value, dict) else value
