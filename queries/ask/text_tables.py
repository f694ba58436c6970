"""Tables for people: four digits, and one column a line if a row is too wide.

Columns and rows that do not fit are named or counted in a line below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

import pyarrow as pa
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headcount.queries.ask.answers import Answer, rows_of
from headcount.schemas.errors import printable

TABLE_ROWS = 40
"""Rows that a table shows if no limit is given."""

COUNTED_ROWS = 10_000
"""Rows beyond those shown that a table reads only to count them. It counts no more than these."""

CELL_CHARACTERS = 60
"""Characters that a table shows of a cell."""

VALUE_CHARACTERS = 2_000
"""Characters that are shown of a value which has lines of its own."""

VERTICAL_LINES = 60
"""A table wider than its terminal is written one column a line if that makes no more lines."""

NAMED_COLUMNS = 12
"""Columns that are named if they do not fit."""

SEPARATOR_WIDTH = 3
"""Characters between two columns."""


@dataclass(frozen=True)
class Marks:
    """The signs that an encoding has."""

    encoding: str
    null: str
    more: str

    @classmethod
    def of(cls, out: TextIO) -> Marks:
        """The signs that this stream can write."""
        encoding = out.encoding or "utf-8"
        try:
            "–…".encode(encoding)
        except UnicodeEncodeError:
            return cls(encoding, "-", "...")
        return cls(encoding, "–", "…")

    def written(self, text: str) -> str:
        """A text that can be written: other characters, and those a terminal obeys, as numbers."""
        return printable(text).encode(self.encoding, "backslashreplace").decode(self.encoding)


class _Console(Console):
    """A console that lets the command decide what it means that a reader has left."""

    def on_broken_pipe(self) -> None:
        """Raise the error again that is being handled: rich would end the process here."""
        raise


@dataclass(frozen=True)
class _TableContent:
    """What a table shows of an answer."""

    names: list[str]
    is_numeric: list[bool]
    rows: list[tuple[object, ...]]
    hidden_rows: int
    """Rows that are not shown, counted up to a bound."""


@dataclass(frozen=True)
class _Target:
    """Where a table is written to."""

    console: Console
    marks: Marks

    @property
    def width(self) -> int | None:
        """Characters of a line. None in a pipe or a file, where lines have no width."""
        return self.console.width if self.console.is_terminal else None

    def print(self, line: str) -> None:
        """Write a line as it is: data may look like rich's markup."""
        self.console.print(line, markup=False, soft_wrap=True)

    def print_wrapped(self, line: str) -> None:
        """Write a line of ours, broken between words if it is too long."""
        self.console.print(line, markup=False)


def write_table(
    answer: Answer, out: TextIO, limit: int | None = None, vertical: bool = False
) -> None:
    """Write a table. `vertical` writes one column a line."""
    target = _Target(_Console(file=out, highlight=False), Marks.of(out))
    if answer.schema.names[:1] == ["explain_key"]:
        # The plan of an EXPLAIN is a drawing of many lines: a table would cut it.
        target.print("\n".join(str(row[1]) for row in answer.rows()))
        return
    row_limit = TABLE_ROWS if limit is None else limit
    content = _read(answer, row_limit, target.marks)
    if vertical:
        _write_vertically(content, target)
    else:
        _write_across(content, target)
    hidden_rows = content.hidden_rows
    if not content.rows and not hidden_rows:
        target.print_wrapped("no rows")
    if hidden_rows:
        is_bound = hidden_rows > COUNTED_ROWS
        count = f"more than {COUNTED_ROWS:,}" if is_bound else f"{hidden_rows:,}"
        target.print_wrapped(f"{target.marks.more} {count} more rows (--limit {row_limit})")


def _read(answer: Answer, row_limit: int, marks: Marks) -> _TableContent:
    """The first rows of an answer, and how many more there are."""
    rows: list[tuple[object, ...]] = []
    hidden_rows = 0
    for batch in answer.batches():
        shown = batch.slice(0, row_limit - len(rows))
        rows += rows_of(shown)
        hidden_rows += batch.num_rows - shown.num_rows
        # A query may have billions of rows, and DuckDB computes only those that are read.
        if hidden_rows > COUNTED_ROWS:
            break
    names = [marks.written(name) for name in answer.schema.names]
    is_numeric = [
        pa.types.is_integer(each) or pa.types.is_floating(each) or pa.types.is_decimal(each)
        for each in answer.schema.types
    ]
    return _TableContent(names, is_numeric, rows, hidden_rows)


def _write_across(content: _TableContent, target: _Target) -> None:
    """Write a row a line, as many columns as fit."""
    names = content.names
    cells = [[_cell(value, target.marks) for value in row] for row in content.rows]
    widths = [
        # Without rows there is only the name, and `max` needs a second number.
        max(cell_len(name), *(cell_len(row[column]) for row in cells), 0) + SEPARATOR_WIDTH
        for column, name in enumerate(names)
    ]
    columns = list(range(len(names)))
    width = target.width
    # First choice: one column a line, if that stays short or not even one column would fit.
    # Second choice: constant columns above the table, and then as many columns as fit.
    if width is not None and sum(widths) > width:
        vertical_lines = len(cells) * (len(names) + 1)
        is_short = len(cells) == 1 or vertical_lines <= VERTICAL_LINES
        if cells and (is_short or min(widths) > width):
            _write_vertically(content, target)
            return
        columns = _write_constants(cells, names, target)
    fitting: list[int] = []
    used_width = 0
    for column in columns:
        used_width += widths[column]
        if width is not None and used_width > width:
            break
        fitting.append(column)
    if fitting:
        _print_table(content, cells, fitting, sum(widths[column] for column in fitting), target)
    left_out = [names[column] for column in columns if column not in fitting]
    if left_out:
        more = target.marks.more
        count = f"{len(left_out)} more column{'s' if len(left_out) > 1 else ''}"
        named = left_out[:NAMED_COLUMNS]
        if len(left_out) > NAMED_COLUMNS:
            named.append(more)
        target.print_wrapped(
            f"{more} {count}: {', '.join(named)} (--vertical or -o FILE.csv has all)"
        )


def _write_constants(cells: list[list[str]], names: list[str], target: _Target) -> list[int]:
    """Write the columns that are the same in all rows once, above the table.

    Returns the other columns. If all are the same, or there is only one row, the table has all.
    """
    everything = list(range(len(names)))
    # In a single row every column would be constant.
    if len(cells) < 2:
        return everything
    constant = [column for column in everything if len({row[column] for row in cells}) == 1]
    if len(constant) == len(names):
        return everything
    for column in constant:
        target.print_wrapped(f"{names[column]}: {cells[0][column]}")
    return [column for column in everything if column not in constant]


def _print_table(
    content: _TableContent,
    cells: list[list[str]],
    columns: list[int],
    table_width: int,
    target: _Target,
) -> None:
    """Print some columns side by side."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for column in columns:
        justify = "right" if content.is_numeric[column] else "left"
        table.add_column(Text(content.names[column]), justify=justify, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(row[column]) for column in columns))
    # rich squeezes a table that is wider than its console. A pipe has a console of 80 characters,
    # so one as wide as the table prints it.
    console_width = max(table_width, target.console.width)
    _Console(file=target.console.file, highlight=False, width=console_width).print(table)


def _write_vertically(content: _TableContent, target: _Target) -> None:
    """Write a column a line, every value whole."""
    width = target.width
    name_width = max(map(cell_len, content.names), default=0) + 2
    # If names leave too little room for values, each value begins on a line of its own.
    is_narrow = width is not None and width - name_width < 12
    indent = 2 if is_narrow else name_width
    value_width = None if width is None else max(width - indent, 8)
    for number, row in enumerate(content.rows, 1):
        if len(content.rows) > 1:
            target.print(f"row {number}")
        for name, value in zip(content.names, row, strict=True):
            text = _text(value, target.marks)
            if len(text) > VALUE_CHARACTERS:
                text = f"{text[:VALUE_CHARACTERS]}{target.marks.more}"
            pieces = _folded(text, value_width)
            if is_narrow:
                target.print(name)
            else:
                padding = " " * (name_width - cell_len(name))
                target.print(f"{name}{padding}{pieces.pop(0)}")
            for piece in pieces:
                target.print(" " * indent + piece)


def _folded(text: str, width: int | None) -> list[str]:
    """A text in pieces of at most `width` cells of a terminal."""
    pieces: list[str] = []
    while width is not None and cell_len(text) > width:
        piece = set_cell_size(text, width)
        # rich cuts a character of two cells into a space, which is not part of the text.
        length = len(piece) if text.startswith(piece) else len(piece) - 1
        pieces.append(text[:length])
        text = text[length:]
    return [*pieces, text]


def _cell(value: object, marks: Marks) -> str:
    """A value as a table shows it, cut to a cell."""
    text = _text(value, marks)
    if len(text) <= CELL_CHARACTERS:
        return text
    return f"{text[: CELL_CHARACTERS - len(marks.more)]}{marks.more}"


def _text(value: object, marks: Marks) -> str:
    """A value for people: four digits, thousands with commas, one line."""
    if value is None:
        return marks.null
    if isinstance(value, list):
        return f"[{', '.join(_text(item, marks) for item in value)}]"
    if isinstance(value, float):
        has_large_integer = 1e4 <= abs(value) < 1e15
        return f"{value:,.0f}" if has_large_integer else f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 1e5:
        return f"{value:,}"
    # A line break inside a text would break the table.
    if isinstance(value, str):
        value = " ".join(value.split())
    return marks.written(str(value))
