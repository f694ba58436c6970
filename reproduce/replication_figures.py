"""The page of one replication: what was published, what was measured, and figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, SupportsFloat

from headcount.queries.ask.asking import Record, Row, RunDatabase
from headcount.queries.report.html_page import TEMPLATES, Figures, json_value, write_html
from headcount.reproduce.replication import Figure
from headcount.reproduce.verdicts import Result
from headcount.schemas.errors import QueryError, RunError


@dataclass(frozen=True)
class Heading:
    """What stands above the results of a page."""

    replication: str
    """Name of the replication."""
    title: str
    source: str
    model: str
    runs: str
    """Name of the directory that the runs lie in."""
    warning: str = ""
    """What a reader must know before the numbers. Empty if there is nothing."""


Label = float | str
"""Where a value stands on an axis."""


class _NothingToDrawError(Exception):
    """A figure's query is right, but these runs have nothing to draw."""


def write_page(
    output: Path,
    heading: Heading,
    results: Sequence[Result],
    figures: Iterable[Figure],
    database: RunDatabase,
) -> None:
    """Write the page of one replication: its results, and its figures drawn from the runs."""
    page_figures = Figures()
    judged = [result for result in results if result.verdict != "not comparable"]
    incomparable = [result for result in results if result.verdict == "not comparable"]
    content = {
        "title": f"{heading.replication}: {heading.title}",
        "facts": {"source": heading.source, "model": heading.model, "runs": heading.runs},
        "banner": heading.warning,
        "judged": judged,
        "incomparable": incomparable,
        "counts": Counter(result.verdict for result in results),
        "cards": [_card(heading.replication, figure, database, page_figures) for figure in figures],
    }
    write_html(
        TEMPLATES / "replication_figures", output, content, json_value(page_figures.contents)
    )


def _card(replication: str, figure: Figure, database: RunDatabase, page_figures: Figures) -> Record:
    """A figure, or why these runs have nothing for it. A mistake in its SQL is an error."""
    try:
        rows = database.rows(figure.sql)
        content = _figure_content(figure, rows)
    except _NothingToDrawError as reason:
        return {"title": figure.title, "missing": str(reason)}
    except QueryError as error:
        raise RunError(f"{replication}, figure {figure.title!r}: {error}") from None
    axes = {"kind": figure.kind, "square": figure.square, "x": figure.x, "y": figure.y}
    return {"title": figure.title} | page_figures.add(title=figure.title, **axes, **content)


def _figure_content(figure: Figure, rows: Sequence[Row]) -> Record:
    """What the page's script draws, from rows of three columns."""
    if not rows:
        raise _NothingToDrawError("its query gives no rows")
    if len(rows[0]) != 3:
        raise QueryError(f"expected 3 columns, got {len(rows[0])}")
    second_labels = _labels(row[1] for row in rows)
    values = [_finite_number(row[2]) for row in rows]
    if all(value is None for value in values):
        raise _NothingToDrawError("its query gives no numbers, only undefined values")
    if figure.kind == "heat":
        first_labels = _labels(row[0] for row in rows)
        return _heatmap(first_labels, second_labels, values)
    series_names = ["" if row[0] is None else str(row[0]) for row in rows]
    return {"series": _series(series_names, second_labels, values)}


def _series(
    names: Sequence[str], labels: Sequence[Label], values: Sequence[float | None]
) -> list[Record]:
    """Lines or bars, one for each name, in the order of the rows."""
    series_by_name: dict[str, Record] = {}
    for name, label, value in zip(names, labels, values, strict=True):
        series = series_by_name.setdefault(name, {"name": name, "labels": [], "values": []})
        series["labels"].append(label)
        series["values"].append(value)
    return list(series_by_name.values())


def _heatmap(
    column_labels: list[Label], row_labels: list[Label], values: list[float | None]
) -> Record:
    """Cells by column and row. The colours are even around 0 if a value is negative."""
    columns = _distinct(column_labels)
    rows = _distinct(row_labels)
    # A cell that no row of the query names stays empty.
    cells: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for column, row, value in zip(column_labels, row_labels, values, strict=True):
        cells[rows.index(row)][columns.index(column)] = value
    numbers = [value for value in values if value is not None]
    low = min(numbers)
    high = max(numbers)
    scale = "sequential"
    if low < 0:
        largest = max(-low, high)
        low, high, scale = -largest, largest, "diverging"
    return {"z": cells, "columns": columns, "rows": rows, "low": low, "high": high, "scale": scale}


def _finite_number(value: SupportsFloat | str | None) -> float | None:
    """A number that can be drawn. None if it is undefined or infinite."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise QueryError(f"expected a number in its third column, got {value!r}") from None
    return number if math.isfinite(number) else None


def _labels(values: Iterable[Any]) -> list[Label]:
    """Numbers if all are numbers, else texts: an axis is either linear or has categories."""
    # DuckDB gives a literal such as 0.5 as a Decimal.
    labels = [float(value) if isinstance(value, Decimal) else value for value in values]
    # bool is an int in Python, but true and false are categories.
    if all(isinstance(label, int | float) and not isinstance(label, bool) for label in labels):
        return labels
    return ["–" if label is None else str(label) for label in labels]


def _distinct(labels: list[Label]) -> list[Label]:
    """Each label once: numbers by size, texts in the order they come."""
    numbers = {label for label in labels if not isinstance(label, str)}
    if numbers:
        return [*sorted(numbers)]
    return list(dict.fromkeys(labels))
