"""What our pages share: one HTML file with Plotly in it, whose data is text and never markup."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jinja2

from queries.asking import Record
from queries.shipped_views import QUERIES
from schemas.errors import QueryError


class Figures:
    """The figures of a page. Its script draws each where the markup gives the figure's number."""

    def __init__(self) -> None:
        self.contents: list[Record] = []

    def add(self, **content: object) -> Record:
        """Keep a figure, and return its number for the markup."""
        self.contents.append(content)
        return {"figure": len(self.contents) - 1}


def write_html(template: Path, output: Path, content: Record, figures: Figures) -> None:
    """Write a page that needs no network.

    `TEMPLATE.html.j2` lays it out, `TEMPLATE.js` draws its figures.
    """
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, QUERIES]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    figures_json = json.dumps(json_value(figures.contents), allow_nan=False)
    script_files = [QUERIES / "html.js", template.with_suffix(".js")]
    scripts = {
        "plotly": get_plotlyjs(),
        # "</script>" inside data would end the script element.
        "figures": figures_json.replace("<", "\\u003c"),
        # The shared script comes first: the page's own uses its functions.
        "script": "\n".join(file.read_text(encoding="utf-8") for file in script_files),
    }
    page = environment.get_template(f"{template.name}.html.j2").stream(content | scripts)
    try:
        page.dump(str(output), encoding="utf-8")
    except OSError as error:
        raise QueryError(f"{output}: cannot be written ({error.strerror})") from None


def json_value(value: object) -> object:
    """The value as JSON has it: no NaN, no infinities, six digits."""
    match value:
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case dict():
            return {key: json_value(item) for key, item in value.items()}
        case list():
            return [json_value(item) for item in value]
    return value


def number(value: object) -> str:
    """A number for people: four digits, a dash if it is undefined."""
    match value:
        case None:
            return "–"
        # Before int, which a bool is too.
        case bool():
            return "yes" if value else "no"
        case float() if not math.isfinite(value):
            return "–"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
        case int():
            return f"{value:,}"
    return str(value)
