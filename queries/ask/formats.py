"""Writing an answer as a table, CSV, JSON, Markdown or Parquet.

It goes to stdout, or to a file that appears whole.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Literal, TextIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from headcount.queries.ask.answers import Answer
from headcount.queries.ask.text_tables import COUNTED_ROWS, TABLE_ROWS, write_table
from headcount.schemas.errors import QueryError, printable

Format: TypeAlias = Literal["table", "csv", "json", "jsonl", "parquet", "markdown"]

SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".md": "markdown",
    ".parquet": "parquet",
    ".txt": "table",
}
"""The format that the name of a file asks for."""

UNSAFE_IN_TERMINALS = re.compile(
    "[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""What JSON may hold as it is and a terminal obeys: DEL, C1, and marks of direction."""


def format_of(requested: Format | None, output: Path | None, vertical: bool = False) -> Format:
    """The format of an answer: the requested one, or the one that the file's name says."""
    suffix = "" if output is None else output.suffix.lower()
    suffix_format = SUFFIXES.get(suffix)
    if requested is not None and suffix_format is not None and requested != suffix_format:
        suffixes = {known_format: known for known, known_format in SUFFIXES.items()}
        raise QueryError(
            f"--format {requested} contradicts the name {output}: leave out --format, or name the "
            f"file …{suffixes[requested]}"
        )
    if requested is None and suffix and suffix_format is None:
        raise QueryError(
            f"{output}: expected a name that ends in {', '.join(SUFFIXES)}; or say --format "
            f"{'|'.join(SUFFIXES.values())}"
        )
    answer_format = requested or suffix_format or "table"
    if answer_format == "parquet" and output is None:
        raise QueryError("--format parquet writes a file; say which one with -o FILE.parquet")
    if vertical and answer_format != "table":
        raise QueryError(
            f"--vertical is a form of a table, and this is {answer_format}; leave out one"
        )
    return answer_format


def check_suffix(path: PurePath, *suffixes: str) -> None:
    """Refuse a name that promises another form of file than the one that is written."""
    if path.suffix.lower() not in suffixes:
        raise QueryError(f"{path}: expected a name that ends in {' or '.join(suffixes)}")


def rows_to_read(answer_format: Format, limit: int | None) -> int | None:
    """How many rows to ask for. A table also reads rows that it does not show, to count them.

    The query is asked once, with this limit: DuckDB then sorts and reads no more than it needs.
    """
    if answer_format != "table":
        return limit
    shown_rows = TABLE_ROWS if limit is None else limit
    # One row more than are counted shows that there are even more.
    return shown_rows + COUNTED_ROWS + 1


def write_file(
    answer: Answer,
    answer_format: Format,
    path: Path,
    limit: int | None = None,
    vertical: bool = False,
) -> None:
    """Write an answer to a file. An older file stays until the answer is whole."""
    if answer_format == "parquet":
        write_parquet(answer, path)
        return
    # The lines end as the format says, and not as the system does.
    with appearing(path) as partial, partial.open("w", encoding="utf-8", newline="") as out:
        write(answer, answer_format, out, limit, vertical)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Another file to write to, which becomes `path` at the end. A device or a pipe is itself."""
    # A link stays a link: what it points at is replaced.
    target = Path(os.path.realpath(path))
    is_special = target.exists() and not target.is_file()
    # In the same folder, so that it can be renamed: another folder may be on another disk.
    partial = target if is_special else target.with_name(f".headcount-{os.getpid()}.part")
    try:
        yield partial
        if not is_special:
            partial.replace(target)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise QueryError(f"{path}: cannot be written ({reason})") from None
    finally:
        if not is_special:
            # It may fail for the reason that writing did, which the error above says already.
            with suppress(OSError):
                partial.unlink(missing_ok=True)


@contextmanager
def writing_to_stdout(lossless: bool = False) -> Iterator[TextIO]:
    """Stdout, whatever becomes of it: a reader may leave early, a disk may be full.

    A character that its encoding lacks is written as its number, or refused if the output is
    `lossless`.
    """
    out = sys.stdout
    # A stdout that a test has replaced may not have this.
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="strict" if lossless else "backslashreplace")
    try:
        yield out
        out.flush()
    except UnicodeEncodeError as error:
        _discard_stdout()
        raise QueryError(
            f"stdout is {error.encoding}, which has no {error.object[error.start]!a}; "
            "-o FILE.csv is UTF-8, and so is stdout with PYTHONIOENCODING=utf-8"
        ) from None
    except BrokenPipeError:
        # The reader has what it wanted, as `| head` does: that is no error.
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        raise QueryError(f"stdout: cannot be written ({error.strerror or error})") from None


def _discard_stdout() -> None:
    """Lead what Python still has to write into nothing: when it ends, it would fail once more."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def write(
    answer: Answer,
    answer_format: Format,
    out: TextIO,
    limit: int | None = None,
    vertical: bool = False,
) -> None:
    """Write an answer as text. Parquet goes to a file, through `write_parquet`."""
    if answer_format == "table":
        write_table(answer, out, limit, vertical)
    elif answer_format == "csv":
        write_csv(answer, out)
    elif answer_format == "jsonl":
        write_json_lines(answer, out)
    elif answer_format == "markdown":
        write_markdown(answer, out)
    else:
        write_json(answer, out)


def write_csv(answer: Answer, out: TextIO) -> None:
    """Write comma-separated values with a header. NULL is an empty field, a list is JSON.

    A terminal is shown no control characters. A file or a pipe gets them as they are.
    """
    shown = printable if out.isatty() else str
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(shown, answer.schema.names))
    for row in answer.rows():
        cells: list[object] = []
        for value in row:
            cell = _json_text(value, out) if isinstance(value, list | dict) else value
            cells.append(shown(cell) if isinstance(cell, str) else cell)
        writer.writerow(cells)


def write_markdown(answer: Answer, out: TextIO) -> None:
    """Write a table as pages on GitHub and notebooks show it. Numbers have all their digits.

    NULL is a dash, as in a table.
    """
    out.write(_markdown_row(answer.schema.names))
    is_number = [pa.types.is_floating(c.type) or pa.types.is_integer(c.type) for c in answer.schema]
    out.write("|" + "|".join("---:" if right else "---" for right in is_number) + "|\n")
    for row in answer.rows():
        texts = [
            _json_text(value, out) if isinstance(value, list | dict) else str(value)
            for value in ("–" if value is None else value for value in row)
        ]
        out.write(_markdown_row(texts))


def _markdown_row(cells: Iterable[str]) -> str:
    """A line of a table, in which no cell can end its cell or line, or begin HTML."""
    escaped = [re.sub(r"[\\|`*_<>\[\]]", r"\\\g<0>", printable(cell)) for cell in cells]
    return f"| {' | '.join(escaped)} |\n"


def write_json(answer: Answer, out: TextIO) -> None:
    """Write an array of objects. NULL, NaN and infinities are null."""
    # Row by row: the answer may be larger than the memory.
    separator = "[\n"
    for line in _json_objects(answer, out):
        out.write(separator + line)
        separator = ",\n"
    has_rows = separator != "[\n"
    out.write("\n]\n" if has_rows else "[]\n")


def write_json_lines(answer: Answer, out: TextIO) -> None:
    """Write one object a line, each as `write_json` writes it."""
    for line in _json_objects(answer, out):
        out.write(f"{line}\n")


def _json_objects(answer: Answer, out: TextIO) -> Iterator[str]:
    """Each row as a JSON object."""
    names = answer.schema.names
    for row in answer.rows():
        yield _json_text(dict(zip(names, row, strict=True)), out)


def write_parquet(answer: Answer, path: Path) -> None:
    """Write a Parquet file whose metadata says what the columns mean."""
    with appearing(path) as partial:
        schema = pa.schema(
            column.with_metadata(dict(answer.facts.get(column.name, {})))
            for column in answer.schema
        )
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for batch in answer.batches():
                # The cast changes no value. It adds the metadata.
                writer.write_batch(batch.cast(schema))


def _json_text(value: object, out: TextIO) -> str:
    """JSON that the encoding of `out` can write and no terminal obeys."""
    is_unicode = (out.encoding or "utf-8").lower().replace("-", "").startswith("utf")
    text = json.dumps(json_value(value), ensure_ascii=not is_unicode, default=str)
    return UNSAFE_IN_TERMINALS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def json_value(value: object) -> object:
    """The value as JSON has it: no decimals, no NaN, no infinities."""
    # DuckDB adds integers up in 128 bits, which Arrow has only as a decimal.
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    return value
