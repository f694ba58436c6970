"""Answers as CSV, JSON and Markdown, row by row."""

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import TextIO

import pyarrow as pa

from headcount.queries.ask.answers import Answer
from headcount.schemas.errors import printable

UNSAFE_IN_TERMINALS = re.compile(
    "[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""What JSON may hold as it is and a terminal obeys: DEL, C1, and marks of direction."""


def write_csv(answer: Answer, out: TextIO) -> None:
    """Write an answer as CSV, in which NULL is an empty field."""
    # A file or a pipe gets control characters as they are.
    shown = printable if out.isatty() else str
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(shown, answer.schema.names))
    for row in answer.rows():
        cells = (_json_text(cell, out) if isinstance(cell, list | dict) else cell for cell in row)
        writer.writerow([shown(cell) if isinstance(cell, str) else cell for cell in cells])


def write_markdown(answer: Answer, out: TextIO) -> None:
    """Write an answer as a table in Markdown."""
    out.write(_markdown_row(answer.schema.names))
    is_number = [
        pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
        for column in answer.schema
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


def write_json(answer: Answer, out: TextIO) -> None:
    """Write an answer as a JSON array of objects."""
    number = -1
    for number, text in enumerate(_objects(answer, out)):
        out.write(f",\n{text}" if number else f"[\n{text}")
    out.write("[]\n" if number < 0 else "\n]\n")


def write_json_lines(answer: Answer, out: TextIO) -> None:
    """Write an answer as JSON lines, an object a line."""
    out.writelines(f"{text}\n" for text in _objects(answer, out))


def _objects(answer: Answer, out: TextIO) -> Iterator[str]:
    names = answer.schema.names
    return (_json_text(dict(zip(names, row, strict=True)), out) for row in answer.rows())


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
