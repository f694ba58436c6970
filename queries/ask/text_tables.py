"""Tables for people, in a terminal and in a notebook: four digits.

In a terminal, one column a line if a row is too wide; columns and rows that do not fit are named or
counted in a line below.
"""

import html
import shutil
from collections.abc import Sequence
from typing import TextIO

import pyarrow as pa

from headcount.queries.ask.answers import Answer, rows_of
from headcount.schemas.errors import printable
from headcount.schemas.text_columns import in_columns, padded, widths_of

TABLE_ROWS = 40  # rows that a table shows if no limit is given

COUNTED_ROWS = 10_000  # rows that a table reads only to count them, at most

CELL_CHARACTERS = 60  # characters that a table shows of a cell
VALUE_CHARACTERS = 2_000  # characters that are shown of a value which has a line of its own

VERTICAL_LINES = 60  # a table too wide is written vertically if in no more lines

NAMED_COLUMNS = 12  # columns that are named if they do not fit
GAP = "   "  # what stands between two columns


def write_table(
    answer: Answer, out: TextIO, limit: int | None = None, vertical: bool = False
) -> None:
    """Write a table. `vertical` writes one column a line, every value whole."""
    if answer.schema.names[:1] == ["explain_key"]:
        # The plan of an EXPLAIN is a drawing of many lines: a table would cut it.
        for _, plan in answer.rows():
            out.write(f"{plan}\n")
        return
    row_limit = TABLE_ROWS if limit is None else limit
    rows: list[tuple[object, ...]] = []
    hidden_rows = 0
    for batch in answer.batches():
        shown = batch.slice(0, row_limit - len(rows))
        rows += rows_of(shown)
        hidden_rows += batch.num_rows - shown.num_rows
        # A query may have billions of rows, and DuckDB computes only those that are read.
        if hidden_rows > COUNTED_ROWS:
            break
    # Signs that the stream can write.
    is_unicode = (out.encoding or "utf-8").lower().startswith("utf")
    null, more, rule = "–…─" if is_unicode else ("-", "...", "-")
    names = [printable(name) for name in answer.schema.names]
    texts = [[value_text(value, null) for value in row] for row in rows]
    is_numeric = [
        pa.types.is_integer(each) or pa.types.is_floating(each) or pa.types.is_decimal(each)
        for each in answer.schema.types
    ]
    # In a pipe or a file, lines have no width.
    width = shutil.get_terminal_size().columns if out.isatty() else None
    if vertical or not _write_across(names, texts, is_numeric, width, (more, rule), out):
        _write_vertically(names, texts, more, out)
    if not rows and not hidden_rows:
        out.write("no rows\n")
    if hidden_rows:
        is_bound = hidden_rows > COUNTED_ROWS
        count = f"more than {COUNTED_ROWS:,}" if is_bound else f"{hidden_rows:,}"
        out.write(f"{more} {count} more rows (--limit {row_limit})\n")


def _write_across(
    names: list[str],
    texts: list[list[str]],
    is_numeric: list[bool],
    width: int | None,
    signs: tuple[str, str],
    out: TextIO,
) -> bool:
    """Write a row a line, as many columns as fit. False if one column a line is better."""
    more, rule = signs
    cells = [
        [
            text if len(text) <= CELL_CHARACTERS else text[: CELL_CHARACTERS - len(more)] + more
            for text in row
        ]
        for row in texts
    ]
    widths = widths_of([names, *cells])
    columns = list(range(len(names)))
    if width is not None and sum(widths) + len(GAP) * (len(names) - 1) > width:
        is_short = len(cells) == 1 or len(cells) * (len(names) + 1) <= VERTICAL_LINES
        if cells and (is_short or min(widths) > width):
            return False
        # Columns that are the same in all rows are written once, above the table.
        varying = [column for column in columns if len({row[column] for row in cells}) != 1]
        if len(cells) > 1 and varying:
            for column in sorted({*columns} - {*varying}):
                out.write(f"{names[column]}: {cells[0][column]}\n")
            columns = varying
    fitting: list[int] = []
    used_width = -len(GAP)
    for column in columns:
        if width is not None and used_width + len(GAP) + widths[column] > width:
            break
        used_width += len(GAP) + widths[column]
        fitting.append(column)

    def line(row: list[str]) -> str:
        pieces = (padded(row[each], widths[each], is_numeric[each]) for each in fitting)
        return GAP.join(pieces).rstrip()

    if fitting:
        out.writelines(f"{text}\n" for text in (line(names), rule * used_width, *map(line, cells)))
    left_out = [names[column] for column in columns if column not in fitting]
    if left_out:
        count = f"{len(left_out)} more column{'s' if len(left_out) > 1 else ''}"
        named = [*left_out[:NAMED_COLUMNS], *([more] if len(left_out) > NAMED_COLUMNS else [])]
        out.write(f"{more} {count}: {', '.join(named)} (--vertical or -o FILE.csv has all)\n")
    return True


def _write_vertically(names: list[str], texts: list[list[str]], more: str, out: TextIO) -> None:
    """Write a column a line. A terminal breaks lines that are too long for it."""
    (name_width,) = widths_of([[name] for name in names]) or [0]
    for number, row in enumerate(texts, 1):
        if len(texts) > 1:
            out.write(f"row {number}\n")
        for name, text in zip(names, row, strict=True):
            shown = text if len(text) <= VALUE_CHARACTERS else text[:VALUE_CHARACTERS] + more
            out.write(f"{padded(name, name_width)}  {shown}\n")


def text_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as lines of text, in columns."""
    cells = [[printable(name) for name in names]]
    cells += [[value_text(value) for value in row] for row in rows]
    return "\n".join(in_columns(cells))


def html_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as an HTML table."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = ("".join(f"<td>{html.escape(value_text(value))}</td>" for value in row) for row in rows)
    body = "".join(f"<tr>{of_row}</tr>" for of_row in cells)
    # Not every notebook has a style for tables.
    style = "border-collapse: separate; border-spacing: 12px 2px; text-align: left"
    return f'<table style="{style}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def value_text(value: object, null: str = "–") -> str:
    """A value for people: four digits, thousands with commas, one line."""
    if value is None:
        return null
    if isinstance(value, list):
        return f"[{', '.join(value_text(item, null) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{key}: {value_text(item, null)}" for key, item in value.items())
        return printable(f"{{{', '.join(items)}}}")
    # An entry of a map. An interval is a tuple of another type.
    if type(value) is tuple:
        return f"({', '.join(value_text(item, null) for item in value)})"
    if isinstance(value, float):
        has_large_integer = 1e4 <= abs(value) < 1e15
        return f"{value:,.0f}" if has_large_integer else f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 1e5:
        return f"{value:,}"
    # A line break inside a text would break the table.
    return printable(" ".join(value.split()) if isinstance(value, str) else str(value))
