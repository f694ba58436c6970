"""Tables for people: four digits, what does not fit named in a line, and one column a line where a
row is too wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

import pyarrow as pa
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from queries.answers import Answer, rows_of
from schemas.errors import printable

TABLE_ROWS = 40
"""Rows that a table shows if no limit is given."""

COUNTED_ROWS = 10_000
"""Rows beyond those shown that a table reads only to count them; beyond that it does not count."""

CELL = 60
"""Characters of a cell that a table shows."""

VALUE = 2_000
"""Characters of a value that has lines of its own."""

VERTICAL_LINES = 60
"""A table wider than its terminal is written one column a line if that makes no more lines."""

NAMED = 12
"""Columns that are named where they do not fit."""

SEPARATOR = 3
"""Characters between two columns."""


@dataclass(frozen=True)
class Marks:
    """The signs that an encoding has."""

    encoding: str
    null: str
    more: str

    @classmethod
    def of(cls, out: TextIO) -> Marks:
        """Those that can be written."""
        encoding = out.encoding or "utf-8"
        try:
            "–…".encode(encoding)
        except UnicodeEncodeError:
            return cls(encoding, "-", "...")
        return cls(encoding, "–", "…")

    def written(self, text: str) -> str:
        """A text with the number of every sign that the encoding lacks or a terminal obeys."""
        return printable(text).encode(self.encoding, "backslashreplace").decode(self.encoding)


class _Console(Console):
    """Leaves it to the command what a reader who has left means."""

    def on_broken_pipe(self) -> None:
        """Called while the error is being handled."""
        raise


@dataclass(frozen=True)
class _Shown:
    """What a table shows of an answer."""

    names: list[str]
    numeric: list[bool]
    rows: list[tuple[Any, ...]]
    rest: int
    """Rows that are not shown, counted up to a bound."""


def write_table(
    answer: Answer, out: TextIO, limit: int | None = None, vertical: bool = False
) -> None:
    """Write a table; `vertical` writes one column a line."""
    console = _Console(file=out, highlight=False)
    marks = Marks.of(out)
    if answer.schema.names[:1] == ["explain_key"]:
        console.print("\n".join(str(row[1]) for row in answer.rows()), markup=False, soft_wrap=True)
        return
    shown = _read(answer, TABLE_ROWS if limit is None else limit, marks)
    width = console.width if console.is_terminal else None
    if vertical:
        _write_vertically(shown, console, width, marks)
    else:
        _write_across(shown, console, width, marks)
    _write_rest(shown, console, limit, marks)


def _read(answer: Answer, most: int, marks: Marks) -> _Shown:
    """The first rows of an answer, and how many more there are."""
    rows: list[tuple[Any, ...]] = []
    rest = 0
    for batch in answer.batches():
        head = batch.slice(0, most - len(rows))
        rows += rows_of(head)
        rest += batch.num_rows - head.num_rows
        if rest > COUNTED_ROWS:
            break
    names = [marks.written(name) for name in answer.schema.names]
    return _Shown(names, [_is_number(type_) for type_ in answer.schema.types], rows, rest)


def _write_across(shown: _Shown, console: Console, width: int | None, marks: Marks) -> None:
    """Write a row a line, as many columns as fit."""
    names = shown.names
    cells = [[_cell(value, marks) for value in row] for row in shown.rows]
    widths = [
        max(cell_len(name), *(cell_len(row[i]) for row in cells), 0) + SEPARATOR
        for i, name in enumerate(names)
    ]
    columns = list(range(len(names)))
    if width is not None and sum(widths) > width:
        lines = len(cells) * (len(names) + 1)
        if cells and (len(cells) == 1 or lines <= VERTICAL_LINES or min(widths) > width):
            _write_vertically(shown, console, width, marks)
            return
        columns = _without_constants(cells, names, console)
    fitting: list[int] = []
    for i in columns:
        if width is not None and sum(widths[j] for j in (*fitting, i)) > width:
            break
        fitting.append(i)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for i in fitting:
        justify = "right" if shown.numeric[i] else "left"
        table.add_column(Text(names[i]), justify=justify, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(row[i]) for i in fitting))
    # rich squeezes what is wider than its console; a pipe or a file has no width.
    room = max(sum(widths[i] for i in fitting), console.width)
    if fitting:
        _Console(file=console.file, highlight=False, width=room).print(table)
    left = [names[i] for i in columns if i not in fitting]
    if left:
        count = f"{len(left)} more column{'s' if len(left) > 1 else ''}"
        some = [*left[:NAMED], *([marks.more] if len(left) > NAMED else [])]
        console.print(
            f"{marks.more} {count}: {', '.join(some)} (--vertical or -o FILE.csv has all)",
            markup=False,
        )


def _without_constants(cells: list[list[str]], names: list[str], console: Console) -> list[int]:
    """The columns that differ between rows; the others are said once, in lines before the table."""
    constant = [
        i for i in range(len(names)) if len(cells) > 1 and len({row[i] for row in cells}) == 1
    ]
    if len(constant) == len(names):
        return list(range(len(names)))
    for i in constant:
        console.print(f"{names[i]}: {cells[0][i]}", markup=False)
    return [i for i in range(len(names)) if i not in constant]


def _write_vertically(shown: _Shown, console: Console, width: int | None, marks: Marks) -> None:
    """Write a column a line, every value whole."""
    edge = max(map(cell_len, shown.names), default=0) + 2
    narrow = width is not None and width - edge < 12
    for number, row in enumerate(shown.rows, 1):
        if len(shown.rows) > 1:
            _print(console, f"row {number}")
        for name, value in zip(shown.names, row, strict=True):
            text = _value(value, marks)
            indent = 2 if narrow else edge
            pieces = _folded(text, None if width is None else max(width - indent, 8))
            if narrow:
                _print(console, name)
            else:
                _print(console, name + " " * (edge - cell_len(name)) + pieces.pop(0))
            for piece in pieces:
                _print(console, " " * indent + piece)


def _folded(text: str, width: int | None) -> list[str]:
    """A text in pieces of at most `width` cells."""
    pieces: list[str] = []
    while width is not None and cell_len(text) > width:
        piece = set_cell_size(text, width)
        # A character of two cells that is cut in two becomes a space.
        count = len(piece) if text.startswith(piece) else len(piece) - 1
        pieces.append(text[:count])
        text = text[count:]
    return [*pieces, text]


def _write_rest(shown: _Shown, console: Console, limit: int | None, marks: Marks) -> None:
    """Say how many rows are not shown."""
    if not shown.rows and not shown.rest:
        console.print("no rows")
    if shown.rest:
        many = shown.rest > COUNTED_ROWS
        count = f"more than {COUNTED_ROWS:,}" if many else f"{shown.rest:,}"
        most = TABLE_ROWS if limit is None else limit
        console.print(f"{marks.more} {count} more rows (--limit {most})", markup=False)


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def _cell(value: Any, marks: Marks) -> str:
    """A value as a table shows it."""
    text = _text(value, marks)
    return text if len(text) <= CELL else f"{text[: CELL - len(marks.more)]}{marks.more}"


def _value(value: Any, marks: Marks) -> str:
    """A value that has lines of its own."""
    text = _text(value, marks)
    return text if len(text) <= VALUE else f"{text[:VALUE]}{marks.more}"


def _text(value: Any, marks: Marks) -> str:
    if value is None:
        return marks.null
    if isinstance(value, list):
        return f"[{', '.join(_text(item, marks) for item in value)}]"
    if isinstance(value, float):
        return f"{value:.4g}" if not 1e4 <= abs(value) < 1e15 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1e5:
        return f"{value:,}"
    if isinstance(value, str):
        value = " ".join(value.split())
    return marks.written(str(value))


def _is_number(type_: pa.DataType) -> bool:
    return pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_)
