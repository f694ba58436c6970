"""Columns of text, aligned by the cells that a terminal gives to each character."""

from collections.abc import Sequence

from rich.cells import cell_len


def padded(text: str, width: int, right: bool = False) -> str:
    """A text with spaces up to a width in cells: a Chinese character takes two, an accent none.

    >>> padded("头", 4) + "|", padded("e\u0301", 3, right=True) == "  e\u0301"
    ('头  |', True)
    """
    spaces = " " * (width - cell_len(text))
    return spaces + text if right else text + spaces


def widths_of(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column in cells."""
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, two spaces between columns.

    >>> in_columns([("a", "b"), ("头头", "c")])
    ['a     b', '头头  c']
    """
    widths = widths_of(rows)
    return ["  ".join(map(padded, row, widths)).rstrip() for row in rows]
