"""The page of one system of the literature: what was published beside what was measured, and its
figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from queries.asking import Record, Row, RunDatabase
from queries.html_page import Figures, write_html
from reproduce.system import Figure
from reproduce.verdicts import Finding
from schemas.errors import QueryError, RunError


@dataclass(frozen=True)
class Heading:
    """What stands above the findings of a page."""

    system: str
    """Name of the system."""
    title: str
    source: str
    model: str
    runs: str
    """Name of the directory that the runs lie in."""
    warning: str = ""
    """What a reader must know before the numbers; often nothing."""


class _NothingToDrawError(Exception):
    """A figure's query is right, and these runs have nothing for it."""


def write_page(
    output: Path,
    heading: Heading,
    findings: Sequence[Finding],
    figures: Iterable[Figure],
    database: RunDatabase,
) -> None:
    """Write the page of one system: its findings, and its figures drawn from the runs."""
    drawn = Figures()
    comparable = [finding for finding in findings if finding.verdict != "not comparable"]
    incomparable = [finding for finding in findings if finding.verdict == "not comparable"]
    content = {
        "title": f"{heading.system}: {heading.title}",
        "facts": {"source": heading.source, "model": heading.model, "runs": heading.runs},
        "banner": heading.warning,
        "judged": comparable,
        "incomparable": incomparable,
        "counts": Counter(finding.verdict for finding in findings),
        "cards": [_card(heading.system, figure, database, drawn) for figure in figures],
    }
    write_html(Path(__file__).with_suffix(""), output, content, drawn)


def _card(system: str, figure: Figure, database: RunDatabase, drawn: Figures) -> Record:
    """A figure, or why these runs have nothing for it. A mistake in its SQL is an error."""
    try:
        rows = database.rows(figure.sql)
        content = _content(figure, rows)
    except _NothingToDrawError as reason:
        return {"title": figure.title, "missing": str(reason)}
    except QueryError as error:
        raise RunError(f"{system}, figure {figure.title!r}: {error}") from None
    axes = {"kind": figure.kind, "x": figure.x, "y": figure.y}
    return {"title": figure.title} | drawn.add(**axes, **content)


def _content(figure: Figure, rows: Sequence[Row]) -> Record:
    if not rows:
        raise _NothingToDrawError("its query gives no rows")
    if len(rows[0]) != 3:
        raise QueryError(f"expected 3 columns, got {len(rows[0])}")
    first = _labels(row[0] for row in rows)
    second = _labels(row[1] for row in rows)
    values = [_number(row[2]) for row in rows]
    if all(value is None for value in values):
        raise _NothingToDrawError("its query gives no numbers, only undefined values")
    if figure.kind == "heat":
        return _heatmap(first, second, values)
    return {"series": _series(rows, second, values)}


def _series(
    rows: Sequence[Row], labels: Sequence[float | str], values: Sequence[float | None]
) -> list[Record]:
    """Lines or bars by the name in the first column, in the order of the rows."""
    by_name: dict[str, Record] = {}
    for row, label, value in zip(rows, labels, values, strict=True):
        name = "" if row[0] is None else str(row[0])
        series = by_name.setdefault(name, {"name": name, "labels": [], "values": []})
        series["labels"].append(label)
        series["values"].append(value)
    return list(by_name.values())


def _heatmap(
    across: list[float | str], down: list[float | str], values: list[float | None]
) -> Record:
    """Cells by column and row; the colours are even around 0 if a value is negative."""
    columns, rows = _order(across), _order(down)
    z: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for column, row, value in zip(across, down, values, strict=True):
        z[rows.index(row)][columns.index(column)] = value
    numbers = [value for value in values if value is not None]
    low, high, scale = min(numbers), max(numbers), "sequential"
    if low < 0:
        far = max(-low, high)
        low, high, scale = -far, far, "diverging"
    return {"z": z, "columns": columns, "rows": rows, "low": low, "high": high, "scale": scale}


def _number(value: Any) -> float | None:
    """A number that can be drawn; what is undefined or infinite cannot."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise QueryError(f"expected a number in its third column, got {value!r}") from None
    return number if math.isfinite(number) else None


def _labels(values: Iterable[Any]) -> list[float | str]:
    """Numbers if all are numbers, else texts."""
    labels = [float(value) if isinstance(value, Decimal) else value for value in values]
    if all(isinstance(label, int | float) and not isinstance(label, bool) for label in labels):
        return labels
    return ["–" if label is None else str(label) for label in labels]


def _order(labels: list[float | str]) -> list[float | str]:
    """Each label once: numbers by size, texts in the order they come."""
    numbers = {label for label in labels if not isinstance(label, str)}
    if numbers:
        return [*sorted(numbers)]
    return list(dict.fromkeys(labels))
