"""Asking a question, and writing the answer as a table, CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TextIO, TypeAlias

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from queries.connection import hold_to_commits, view_descriptions
from schemas.errors import QueryError, unknown

Format: TypeAlias = Literal["table", "csv", "json", "parquet"]

BATCH_ROWS = 10_000
TABLE_ROWS = 40
"""Rows that a table shows if no limit is given."""

COUNTED_ROWS = 10_000
"""Rows beyond those shown that a table reads only to count them; beyond that it does not count."""


@dataclass
class Answer:
    """The rows of an answer, read once, batch by batch."""

    cursor: duckdb.DuckDBPyConnection
    """Kept as long as its rows are read."""
    reader: pa.RecordBatchReader

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        return self.reader.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as Arrow batches."""
        try:
            yield from self.reader
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise query_error(error) from None

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows, as Python values."""
        for batch in self.batches():
            yield from rows_of(batch)


def rows_of(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """The rows of a batch, as Python values."""
    columns = [_values(column) for column in batch.columns]
    return zip(*columns, strict=True)


def rows_to_read(format: Format, limit: int | None) -> int | None:
    """How many rows to ask for. A table also reads rows that it does not show, to count them.

    The question is asked once, with this limit: DuckDB then sorts and reads no more than it needs.
    """
    if format != "table":
        return limit
    shown = TABLE_ROWS if limit is None else limit
    return shown + COUNTED_ROWS + 1


def run_query(connection: duckdb.DuckDBPyConnection, text: str, limit: int | None = None) -> Answer:
    """Ask for a view by name, or in SQL; nothing is computed twice and nothing can be written.

    The question runs as a subquery, in which DuckDB itself allows no statement that writes.
    """
    views = view_descriptions(connection)
    is_view = text.strip().lower() in views
    if not is_view and re.fullmatch(r"\s*\w+\s*", text):
        raise QueryError(unknown("view", text.strip(), views))
    prefix, sql = _one_question(f"FROM {text}" if is_view else text)
    # The rows of an EXPLAIN are the plan, not the answer.
    ending = f" LIMIT {limit}" if limit is not None and not prefix else ""
    hold_to_commits(connection, f"FROM (\n{sql}\n)")
    cursor = connection.cursor()
    try:
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        reader = cursor.sql(f"{prefix}FROM (\n{sql}\n){ending}").to_arrow_reader(BATCH_ROWS)
    except duckdb.Error as error:
        raise query_error(error, views) from None
    return Answer(cursor, reader)


def _one_question(text: str) -> tuple[str, str]:
    """Split a single SELECT-like statement into its EXPLAIN, if any, and the rest."""
    try:
        statements = duckdb.extract_statements(text)
    except duckdb.Error as error:
        raise query_error(error) from None
    if len(statements) != 1:
        raise QueryError(
            f"expected the name of a view or one SQL statement, got {len(statements)} statements"
        )
    sql, kind = _without_semicolons(text), statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        prefix = re.match(r"(?:\s|--.*\n|/\*.*?\*/)*EXPLAIN(?:\s+ANALYZE)?\b", sql, re.IGNORECASE)
        inner = sql[prefix.end() :] if prefix else ""
        return (prefix.group() + " " if prefix else "", _one_question(inner)[1])
    # PIVOT without an IN list counts as several statements.
    if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.MULTI):
        word = kind.name.replace("_", " ")
        raise QueryError(
            f"{word} is refused: queries are read-only; ask with SELECT, FROM, DESCRIBE or "
            "SUMMARIZE"
        )
    return "", sql


def _without_semicolons(text: str) -> str:
    """The one statement in `text` as it can stand in parentheses; inside strings and comments
    nothing changes.
    """
    content = bytearray(text.encode())
    for position, kind in duckdb.tokenize(text):
        if kind == duckdb.token_type.operator and content[position] == ord(";"):
            content[position] = ord(" ")
    return content.decode()


def query_error(error: Exception, views: dict[str, str] | None = None) -> QueryError:
    """Say in one line what DuckDB says in many, with the name that was probably meant."""
    message = str(error).replace("Invalid Input Error: view ", "view ")
    if views and (name := re.search(r"Table with name (\S+) does not exist", message)):
        return QueryError(unknown("view", name[1], views))
    column = re.search(r'[Cc]olumn (?:named )?"([^"]+)"', message)
    candidates = re.search(r"Candidate bindings: (.*)", message)
    if column and candidates:
        names = [name.rpartition(".")[2] for name in re.findall(r'"([^"]+)"', candidates[1])]
        near = difflib.get_close_matches(column[1], names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return QueryError(f"unknown column {column[1]!r}: {hint}Nearest: {', '.join(names)}")
    if "data-modifying" in message or "containing a COPY" in message:
        return QueryError("queries are read-only: a WITH clause cannot write")
    return QueryError(" ".join(message.partition("\n\n")[0].split()))


def write(answer: Answer, format: Format, out: TextIO, limit: int | None = None) -> None:
    """Write an answer as text; Parquet goes to a file, through `write_parquet`."""
    {"table": write_table, "csv": write_csv, "json": write_json}[format](answer, out, limit)


def write_csv(answer: Answer, out: TextIO, limit: int | None = None) -> None:
    """Write comma-separated values with a header; NULL is an empty field, a list is JSON."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(answer.schema.names)
    writer.writerows(
        [_json_text(v) if isinstance(v, list | dict) else v for v in row] for row in answer.rows()
    )


def write_json(answer: Answer, out: TextIO, limit: int | None = None) -> None:
    """Write an array of objects; NULL, NaN and infinities are null."""
    separator = "[\n"
    for row in answer.rows():
        out.write(separator + _json_text(dict(zip(answer.schema.names, row, strict=True))))
        separator = ",\n"
    out.write("[]\n" if separator == "[\n" else "\n]\n")


def write_parquet(answer: Answer, path: Path) -> None:
    """Write a Parquet file."""
    try:
        with pq.ParquetWriter(path, answer.schema, compression="zstd") as writer:
            for batch in answer.batches():
                writer.write_batch(batch)
    except OSError as error:
        raise QueryError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_table(answer: Answer, out: TextIO, limit: int | None = None) -> None:
    """Write a table for people: four digits, and a line for every row or column that does not fit."""
    console = Console(file=out, highlight=False)
    if answer.schema.names[:1] == ["explain_key"]:
        console.print("\n".join(str(row[1]) for row in answer.rows()), markup=False, soft_wrap=True)
        return
    shown = TABLE_ROWS if limit is None else limit
    cells, rest = _cells(answer, shown)
    names = answer.schema.names
    widths = [
        max(len(name), *(cell_len(row[i]) for row in cells), 0) + 3 for i, name in enumerate(names)
    ]
    fitting, room = len(names), sum(widths)
    if console.is_terminal:
        while fitting > 1 and room > console.width:
            fitting -= 1
            room -= widths[fitting]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name, type_ in list(zip(names, answer.schema.types, strict=True))[:fitting]:
        table.add_column(Text(name), justify="right" if _is_number(type_) else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row[:fitting]))
    # rich squeezes what is wider than its console; a pipe or a file has no width.
    Console(file=out, highlight=False, width=max(room, console.width)).print(table)
    if fitting < len(names):
        console.print(
            f"… {len(names) - fitting} more columns: {', '.join(names[fitting:])}", markup=False
        )
    if not cells and not rest:
        console.print("no rows")
    if rest:
        count = f"{rest:,}" if rest <= COUNTED_ROWS else f"more than {COUNTED_ROWS:,}"
        console.print(f"… {count} more rows (--limit {shown})", markup=False)


def _cells(answer: Answer, shown: int) -> tuple[list[list[str]], int]:
    """The first rows of an answer as text, and how many more there are, counted up to a bound."""
    cells: list[list[str]] = []
    rest = 0
    for batch in answer.batches():
        head = batch.slice(0, shown - len(cells))
        cells += [[_cell(value) for value in row] for row in rows_of(head)]
        rest += batch.num_rows - head.num_rows
        if rest > COUNTED_ROWS:
            break
    return cells, rest


def _values(column: pa.Array) -> list[Any]:
    """Python values; a float32 becomes the shortest number that means it, 0.1 and not
    0.10000000149011612.
    """
    if pa.types.is_float32(column.type):
        return [
            None if text is None else float(text) for text in column.cast(pa.string()).to_pylist()
        ]
    if pa.types.is_list(column.type) and pa.types.is_float32(column.type.value_type):
        rows = column.cast(pa.list_(pa.string())).to_pylist()
        return [row and [None if text is None else float(text) for text in row] for row in rows]
    return column.to_pylist()


def _json_text(value: Any) -> str:
    return json.dumps(_json(value), ensure_ascii=False, default=str)


def _json(value: Any) -> Any:
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_json(item) for item in value]
    return {key: _json(item) for key, item in value.items()} if isinstance(value, dict) else value


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        value = f"[{', '.join(map(_cell, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}" if not 1e4 <= abs(value) < 1e15 else f"{value:,.0f}"
    text = f"{value:,}" if isinstance(value, int) and abs(value) >= 1e5 else str(value)
    text = " ".join(text.split()) if isinstance(value, str) else text
    return text if len(text) <= 60 else f"{text[:59]}…"


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_)
