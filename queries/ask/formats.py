"""Writing an answer as a table, CSV, JSON, Markdown or Parquet.

It goes to stdout, or to a file that appears whole.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from headcount.queries.ask.answers import Answer
from headcount.queries.ask.text_tables import COUNTED_ROWS, TABLE_ROWS, write_table
from headcount.schemas.errors import QueryError, printable

if TYPE_CHECKING:
    from headcount.workers.run_model import RunModels

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

TOKENS_COLUMN = "tokens"  # the column that `write_tokens_as_text` writes as text

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
    """How many rows to ask for, as DuckDB reads no more: a table also counts rows that it hides."""
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
    """Write an answer to a file. An older file stays until the answer is whole.

    The metadata of a Parquet file says what its columns mean.
    """
    with appearing(path) as partial:
        if answer_format == "parquet":
            schema = pa.schema(
                column.with_metadata(dict(answer.facts.get(column.name, {})))
                for column in answer.schema
            )
            with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
                for batch in answer.batches():
                    # The cast changes no value. It adds the metadata.
                    writer.write_batch(batch.cast(schema))
            return
        # The lines end as the format says, and not as the system does.
        with partial.open("w", encoding="utf-8", newline="") as out:
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


def write(
    answer: Answer,
    answer_format: Format,
    out: TextIO,
    limit: int | None = None,
    vertical: bool = False,
) -> None:
    """Write an answer as text, row by row: it may be larger than the memory."""
    names = answer.schema.names
    if answer_format == "table":
        write_table(answer, out, limit, vertical)
    elif answer_format == "csv":
        # A file or a pipe gets control characters as they are. NULL is an empty field.
        shown = printable if out.isatty() else str
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(map(shown, names))
        for row in answer.rows():
            cells = (
                _json_text(cell, out) if isinstance(cell, list | dict) else cell for cell in row
            )
            writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])
    elif answer_format == "markdown":
        out.write(_markdown_row(names))
        is_number = [
            pa.types.is_floating(c.type) or pa.types.is_integer(c.type) for c in answer.schema
        ]
        out.write("|" + "|".join("---:" if right else "---" for right in is_number) + "|\n")
        for row in answer.rows():
            values = ("–" if value is None else value for value in row)
            out.write(
                _markdown_row(
                    _json_text(value, out) if isinstance(value, list | dict) else str(value)
                    for value in values
                )
            )
    else:
        # JSON is an array of objects, and JSON lines have one object a line.
        objects = (_json_text(dict(zip(names, row, strict=True)), out) for row in answer.rows())
        if answer_format == "jsonl":
            out.writelines(f"{text}\n" for text in objects)
        else:
            number = -1
            for number, text in enumerate(objects):
                out.write(f",\n{text}" if number else f"[\n{text}")
            out.write("[]\n" if number < 0 else "\n]\n")


def write_tokens_as_text(answer: Answer, models: RunModels, run_ids: list[str]) -> None:
    """Have an answer give text in place of tokens. `run_ids` are all runs that were opened."""
    schema = answer.schema
    if TOKENS_COLUMN not in schema.names or not pa.types.is_list(schema.field(TOKENS_COLUMN).type):
        raise QueryError(
            f"--text writes the column {TOKENS_COLUMN} as text, and the answer has none; select "
            "it, for instance: SELECT run_id, sequence, tokens FROM sequences"
        )
    # Without run_id a row does not say which model's tokenizer reads it.
    has_run_ids = "run_id" in schema.names
    if not has_run_ids and len(run_ids) != 1:
        raise QueryError(
            f"--text: these are {len(run_ids)} runs, whose models may read tokens differently; "
            "select run_id beside tokens"
        )
    place = schema.get_field_index(TOKENS_COLUMN)
    field = pa.field(TOKENS_COLUMN, pa.string())

    def with_text(batch: pa.RecordBatch) -> pa.RecordBatch:
        token_lists = batch.column(place).to_pylist()
        runs = batch.column("run_id").to_pylist() if has_run_ids else run_ids * len(token_lists)
        # Both may be NULL, for example after an outer join in the query. So is the text then.
        texts = [
            None if run_id is None or tokens is None else models[run_id].text(tokens)
            for run_id, tokens in zip(runs, token_lists, strict=True)
        ]
        return batch.set_column(place, field, pa.array(texts, pa.string()))

    answer.schema = schema.set(place, field)
    answer.change = with_text


def _markdown_row(cells: Iterable[str]) -> str:
    """A line of a table, in which no cell can end its cell or line, or begin HTML."""
    escaped = [re.sub(r"[\\|`*_<>\[\]]", r"\\\g<0>", printable(cell)) for cell in cells]
    return f"| {' | '.join(escaped)} |\n"


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
