"""What our pages share: one HTML file with Plotly in it, whose data is text and never markup."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jinja2

from queries.asking import Record
from queries.shipped_views import QUERIES
from schemas.errors import QueryError


class Figures:
    """The figures of a page: the page's script draws them where the markup gives their numbers."""

    def __init__(self) -> None:
        self.contents: list[Record] = []

    def add(self, **content: Any) -> Record:
        """Keep a figure; returns its number, for the markup."""
        self.contents.append(content)
        return {"figure": len(self.contents) - 1}


def write_html(template: Path, output: Path, content: Record, figures: Figures) -> None:
    """Write the page that `TEMPLATE.html.j2` lays out and whose figures `TEMPLATE.js` draws; it
    needs no network.
    """
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, QUERIES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    scripts = {
        "plotly": get_plotlyjs(),
        # "</script>" inside data would end the script element.
        "figures": json.dumps(plain(figures.contents), allow_nan=False).replace("<", "\\u003c"),
        "script": "\n".join(
            script.read_text(encoding="utf-8")
            for script in (QUERIES / "html.js", template.with_suffix(".js"))
        ),
    }
    try:
        environment.get_template(f"{template.name}.html.j2").stream(content | scripts).dump(
            str(output), encoding="utf-8"
        )
    except OSError as error:
        raise QueryError(f"{output}: cannot be written ({error.strerror})") from None


def plain(value: Any) -> Any:
    """The value as JSON has it: no NaN, no infinities, six digits."""
    match value:
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list():
            return [plain(item) for item in value]
    return value


def number(value: Any) -> str:
    """A number for people: four digits, a dash if it is undefined."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float() if not math.isfinite(value):
            return "–"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
        case int():
            return f"{value:,}"
    return str(value)
