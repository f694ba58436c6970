"""The page of one system of the literature: what was published beside what was measured, and its
figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from queries.html_page import Record, add_figure, write_html
from schemas.errors import QueryError

INCOMPARABLE = "not comparable"
"""The verdict on a figure of another model, which is shown last."""

Row = Sequence[Any]
Ask = Callable[[str], Sequence[Row]]
"""Puts SQL to the runs of the system; the rows of the answer."""


def write_page(
    output: Path,
    heading: Mapping[str, str],
    banner: str,
    findings: Sequence[Mapping[str, Any]],
    figures: Iterable[Mapping[str, Any]],
    ask: Ask,
) -> None:
    """Write one system's page: a heading (`title`, and facts by name), a banner or none, findings,
    and figures.
    """
    drawn: list[Record] = []
    content = {
        "title": heading["title"],
        "facts": {name: text for name, text in heading.items() if name != "title"},
        "banner": banner,
        "judged": [finding for finding in findings if finding["verdict"] != INCOMPARABLE],
        "incomparable": [finding for finding in findings if finding["verdict"] == INCOMPARABLE],
        "counts": Counter(finding["verdict"] for finding in findings),
        "cards": [_card(figure, ask, drawn) for figure in figures],
    }
    write_html(Path(__file__).with_suffix(""), output, content, drawn)


def _card(figure: Mapping[str, Any], ask: Ask, drawn: list[Record]) -> Record:
    """A figure, or why there is none."""
    try:
        content = _content(figure, ask(figure["sql"]))
    except Exception as error:
        return {"title": figure["title"], "missing": str(error).strip().partition("\n")[0]}
    axes = {"kind": figure["kind"], "x": figure["x"], "y": figure["y"]}
    return {"title": figure["title"]} | add_figure(drawn, **axes, **content)


def _content(figure: Mapping[str, Any], rows: Sequence[Row]) -> Record:
    if not rows:
        raise QueryError("its query gives no rows")
    if len(rows[0]) != 3:
        raise QueryError(f"its query gives {len(rows[0])} columns instead of three")
    values = [_value(row[2]) for row in rows]
    if all(value is None for value in values):
        raise QueryError("its query gives no numbers, only undefined values")
    first, second = _labels(row[0] for row in rows), _labels(row[1] for row in rows)
    if figure["kind"] == "heat":
        return _heat(first, second, values)
    series: dict[str, Record] = {}
    for row, label, value in zip(rows, second, values, strict=True):
        name = "" if row[0] is None else str(row[0])
        line = series.setdefault(name, {"name": name, "labels": [], "values": []})
        line["labels"].append(label)
        line["values"].append(value)
    return {"series": list(series.values())}


def _heat(across: list[float | str], down: list[float | str], values: list[float | None]) -> Record:
    """Cells by column and row; the colours are even around 0 where a value is negative."""
    columns, rows = _order(across), _order(down)
    z: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for column, row, value in zip(across, down, values, strict=True):
        z[rows.index(row)][columns.index(column)] = value
    known = [value for value in values if value is not None]
    low, high, scale = min(known), max(known), "sequential"
    if low < 0:
        far = max(-low, high)
        low, high, scale = -far, far, "diverging"
    return {"z": z, "columns": columns, "rows": rows, "low": low, "high": high, "scale": scale}


def _value(value: Any) -> float | None:
    """A number that can be drawn; what is undefined or infinite cannot."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None


def _labels(values: Iterable[Any]) -> list[float | str]:
    """Numbers where all are, else texts."""
    found = [float(value) if isinstance(value, Decimal) else value for value in values]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in found):
        return found
    return ["–" if value is None else str(value) for value in found]


def _order(labels: list[float | str]) -> list[float | str]:
    """Each label once: numbers by size, texts as they come."""
    numbers = [label for label in labels if not isinstance(label, str)]
    return [*sorted(set(numbers))] or list(dict.fromkeys(labels))
