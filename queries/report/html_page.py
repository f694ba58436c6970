"""What our pages share: one HTML file with its style, its scripts and its data, and no network."""

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headcount.queries.ask.asking import Record
from headcount.queries.ask.formats import check_suffix
from headcount.queries.ask.text_tables import value_text
from headcount.schemas.errors import QueryError
from headcount.schemas.packages import PACKAGE

PAGE = PACKAGE / "queries" / "page" / "shared"  # what pages share with the explorer
TEMPLATES = PACKAGE / "queries" / "page" / "report"  # layouts and scripts of report and card

DRAWING = ("colours.js", "draw.js", "data.js")
CARD = (*DRAWING, "behind.js", "histogram.js", "pattern.js", "card.js")
STATE = (
    "source.js", "cube.js", "significance.js", "state.js", "asking.js", "address.js", "numbers.js",
)  # fmt: skip
PANELS = (
    "sql", "heatmap", "heads", "scatter", "sequences", "histograms", "effects", "head", "menus",
    "more", "sections",
)  # fmt: skip
REPORT = (*CARD, *STATE, *(f"panels/{panel}.js" for panel in PANELS), "page.js")
"""Modules of `queries/page`, each after those that it imports."""

SIX_DIGITS: Mapping[str, int] = {}


class Figures:
    """The figures of a page. Its script draws each where the markup gives the figure's number."""

    def __init__(self) -> None:
        self.contents: list[Record] = []

    def add(self, **content: object) -> Record:
        """Keep a figure, and return its number for the markup."""
        self.contents.append(content)
        return {"figure": len(self.contents) - 1}


def html_text(
    template: Path, content: Record, data: object, modules: Sequence[str] = DRAWING
) -> str:
    """A page as text: `TEMPLATE.html.j2` lays it out; `TEMPLATE.js`, if there, draws `data`."""
    # Others read numbers alone from this file, and exports wait for every import.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, TEMPLATES, PAGE]),
        # Names and texts of others stand on the page: none of them is markup.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    own = template.with_suffix(".js")
    files = [*(PAGE / module for module in modules), *([own] if own.exists() else [])]
    # Line breaks around the script belong to its element, and so to its digest.
    script = f"\n{joined(file.read_text(encoding='utf-8') for file in files)}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "script": script,
        "script_digest": digest,
        "data": packed(data),
    }
    return environment.get_template(f"{template.name}.html.j2").render(content | parts)


def check_writable(output: Path) -> None:
    """Refuse what is no HTML file, or cannot be written, before the work and not after it."""
    check_suffix(output, ".html", ".htm")
    exists = output.exists()
    try:
        with output.open("ab"):
            pass
    except OSError as error:
        raise QueryError(f"{output}: cannot be written ({error.strerror})") from None
    if not exists:
        output.unlink()


def write_html(
    template: Path, output: Path, content: Record, data: object, modules: Sequence[str] = DRAWING
) -> None:
    """Write a page into one file."""
    page = html_text(template, content, data, modules)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise QueryError(f"{output}: cannot be written ({error.strerror})") from None


def joined(modules: Iterable[str]) -> str:
    """Modules as one script: without `export`, and without imports of one another.

    >>> joined(['export const one = 1;', 'import { one } from "./one.js";\\nexport let two = one;'])
    'const one = 1;\\nlet two = one;'
    """
    text = "\n".join(modules)
    text = re.sub(r'^import \{[^}]*\} from "\.{1,2}/[^"]+";\n', "", text, flags=re.MULTILINE)
    return re.sub(r"^export (?=function|const|let|class|async)", "", text, flags=re.MULTILINE)


def packed(data: object) -> str:
    """Data as compressed JSON in base64: it has no character that markup would read."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # Without a time, the same data gives the same page.
    # The best level would take eight times as long and save a twentieth.
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def unpacked(page: str) -> object:
    """The data of a page."""
    match = re.search(r'<script id="data" type="[^"]+">([^<]*)</script>', page)
    if match is None:
        raise QueryError("the page has no data")
    return json.loads(gzip.decompress(base64.b64decode(match[1])))


def json_value(value: Any, digits: Mapping[str, int] = SIX_DIGITS, name: str = "") -> Any:  # noqa: ANN401
    """The value as JSON has it: no NaN, no infinities. Numbers have six digits, or as many as
    `digits` says of the name that they stand under.
    """
    match value:
        case float():
            return float(f"{value:.{digits.get(name, 6)}g}") if math.isfinite(value) else None
        case dict():
            return {key: json_value(item, digits, key) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item, digits, name) for item in value]
    return value


def number(value: object) -> str:
    """A number of a page as a terminal has it; a dash if it is undefined."""
    is_undefined = isinstance(value, float) and not math.isfinite(value)
    return value_text(None if is_undefined else value)
