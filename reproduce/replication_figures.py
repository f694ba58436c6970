"""The page of one replication: what was published, what was measured, and figures."""

from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, SupportsFloat

from headcount.queries.ask.asking import Record, Row, RunDatabase
from headcount.queries.report.html_page import TEMPLATES, Figures, json_value, write_html
from headcount.reproduce.published_run import estimated_time, published_command
from headcount.reproduce.replication import Figure, Replication
from headcount.reproduce.verdicts import Result, finite_number
from headcount.schemas.errors import QueryError, RunError


class _NothingToDrawError(Exception):
    """A figure's query is right, but these runs have nothing to draw."""


def write_page(
    output: Path,
    name: str,
    replication: Replication,
    model: str,
    results: Sequence[Result],
    database: RunDatabase,
    warning: str = "",
) -> None:
    """Write the page of one replication: its results, and its figures drawn from the runs.

    The file has the name of the directory of the runs. `warning` is what a reader must know before
    the numbers.
    """
    page_figures = Figures()
    content = {
        "title": f"{name}: {replication.title}",
        "facts": {
            "source": replication.source,
            "model": model,
            "runs": output.stem,
            "with the published weights": published_command(name, replication),
            "time of that on one GPU, an estimate": estimated_time(replication),
        },
        "banner": warning,
        "judged": [result for result in results if result.verdict != "not comparable"],
        "incomparable": [result for result in results if result.verdict == "not comparable"],
        "counts": Counter(result.verdict for result in results),
        "cards": [_card(name, figure, database, page_figures) for figure in replication.figure],
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
    values = [_finite_number(row[2]) for row in rows]
    numbers = [value for value in values if value is not None]
    if not numbers:
        raise _NothingToDrawError("its query gives no numbers, only undefined values")
    labels = _labels(row[1] for row in rows)
    if figure.kind != "heat":
        # Lines, bars or points, one for each name, in the order of the rows.
        series_by_name: dict[str, Record] = {}
        for (name, _, _), label, value in zip(rows, labels, values, strict=True):
            text = "" if name is None else str(name)
            series = series_by_name.setdefault(text, {"name": text, "labels": [], "values": []})
            series["labels"].append(label)
            series["values"].append(value)
        return {"series": list(series_by_name.values())}

    column_labels = _labels(row[0] for row in rows)
    columns, row_names = _distinct(column_labels), _distinct(labels)
    # A cell that no row of the query names stays empty.
    cells: list[list[float | None]] = [[None] * len(columns) for _ in row_names]
    for column, label, value in zip(column_labels, labels, values, strict=True):
        cells[row_names.index(label)][columns.index(column)] = value
    low, high, scale = min(numbers), max(numbers), "sequential"
    if low < 0:
        # The colours are even around 0.
        largest = max(-low, high)
        low, high, scale = -largest, largest, "diverging"
    ends = {"low": low, "high": high, "scale": scale}
    return {"z": cells, "columns": columns, "rows": row_names} | ends


def _finite_number(value: SupportsFloat | str | None) -> float | None:
    """A number that can be drawn. None if it is undefined or infinite."""
    try:
        return finite_number(value)
    except RunError:
        raise QueryError(f"expected a number in its third column, got {value!r}") from None


def _labels(values: Iterable[Any]) -> list[float | str]:
    """Numbers if all are numbers, else texts: an axis is either linear or has categories."""
    # DuckDB gives a literal such as 0.5 as a Decimal.
    labels = [float(value) if isinstance(value, Decimal) else value for value in values]
    # bool is an int in Python, but true and false are categories.
    if all(isinstance(label, int | float) and not isinstance(label, bool) for label in labels):
        return labels
    return ["–" if label is None else str(label) for label in labels]


def _distinct(labels: list[float | str]) -> list[float | str]:
    """Each label once: numbers by size, texts in the order they come."""
    numbers = {label for label in labels if not isinstance(label, str)}
    return [*sorted(numbers)] or list(dict.fromkeys(labels))
