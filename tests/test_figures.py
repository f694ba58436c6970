"""The page of a system: its table word for word, data that is never markup, figures that fail, and
a real browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from typer.testing import CliRunner

from headcount import app
from reproduce.reproduce_commands import _judge
from reproduce.system import systems
from reproduce.system_figures import write_page
from reproduce.verdicts import warning
from schemas.errors import QueryError
from tests import toy_models as toy
from tests.browser import chromium
from tests.toy_runs import write_run

EVIL = "</script><b>Eve & co"
HEADING = {"title": "toy: A toy", "source": "Someone 2020", "model": "m"}
FEW = ("--set", "sequences=40", "--set", "sequences_per_shard=40")


def finding(
    name: str, published: Any, measured: float | None, tolerance: float | None, verdict: str
) -> dict[str, Any]:
    return {
        "name": name,
        "published": published,
        "measured": measured,
        "tolerance": tolerance,
        "verdict": verdict,
    }


def figure(title: str, kind: str = "line") -> dict[str, str]:
    return {"title": title, "sql": title, "kind": kind, "x": "key", "y": "attention"}


def written(
    folder: Path, banner: str = "", answers: dict[str, Any] | None = None, **more: Any
) -> str:
    """A page whose figures are called as what they ask; an answer that is an error is raised."""
    answers = answers or {}

    def ask(sql: str) -> Any:
        if isinstance(answers[sql], Exception):
            raise answers[sql]
        return answers[sql]

    output = folder / "page.html"
    figures = more.get("figures", [figure(title) for title in answers])
    write_page(output, more.get("heading", HEADING), banner, more.get("findings", []), figures, ask)
    return output.read_text(encoding="utf-8")


def markup(page: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def drawn(page: str) -> list[dict[str, Any]]:
    found = re.search(
        r'<script id="figures" type="application/json">(.*?)</script>', page, flags=re.DOTALL
    )
    assert found
    return json.loads(found[1])


def test_what_is_not_comparable_comes_last_word_for_word(tmp_path: Path) -> None:
    findings = [
        finding("L0H3 to 7", 0.5026, 0.49876, 0.015, "pass"),
        finding("loss", 200.0, float("nan"), 20.0, "fail"),
        finding("P(B)", 7.26e-06, None, 1.452e-06, "not comparable"),
        finding("it is so", "holds", 124.1, None, "pass"),
    ]
    page = markup(written(tmp_path, findings=findings))
    judged, others = re.findall(r"<tbody>\n(.*?)</tbody>", page, flags=re.DOTALL)
    assert judged.splitlines() == [
        '<tr><td>L0H3 to 7</td><td>0.5026</td><td>0.4988</td><td>0.015</td><td class="pass">pass</td></tr>',
        '<tr><td>loss</td><td>200</td><td>–</td><td>20</td><td class="fail">fail</td></tr>',
        '<tr><td>it is so</td><td>holds</td><td>124.1</td><td>–</td><td class="pass">pass</td></tr>',
    ]
    assert others.splitlines() == [
        "<tr><td>P(B)</td><td>7.26e-06</td><td>–</td><td>1.452e-06</td>"
        '<td class="not-comparable">not comparable</td></tr>',
    ]
    assert "<details><summary>1 not comparable</summary>" in page
    assert "2 pass, 1 fail, 1 not comparable" in page
    assert markup(written(tmp_path, findings=findings[2:3])).count("<tbody>") == 1
    for text in HEADING.values():
        assert f">{text}<" in page


def test_the_banner(tmp_path: Path) -> None:
    assert '<p class="warning"><strong>a miniature</strong></p>' in written(tmp_path, "a miniature")
    assert "warning" not in markup(written(tmp_path))


def test_what_the_banner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    system = systems()["previous_token"]
    sizes = dict(system.published_sizes)
    monkeypatch.setattr("reproduce.verdicts.find_model", lambda model: Path(model))
    monkeypatch.setattr(
        "reproduce.verdicts.describe",
        lambda path: toy.toy_info(**sizes if str(path) == "same" else {"n_layers": 99}),
    )
    assert warning(system, system.published_model) == ""
    other = "its numbers are not comparable with the published ones"
    assert warning(system, system.bundled_model) == f"a miniature: {other}"
    assert warning(system, "else") == f"another model: {other}"
    assert warning(system, "same").startswith("a model of the sizes of a published one: ")


def test_names_are_data_and_never_markup(tmp_path: Path) -> None:
    rows = [(EVIL, EVIL, 1.0)]
    page = written(
        tmp_path,
        EVIL,
        {EVIL: rows, "no": QueryError(EVIL)},
        heading=dict.fromkeys(["title", EVIL], EVIL),
        findings=[finding(EVIL, EVIL, None, None, EVIL)],
    )
    assert EVIL not in page
    assert "<b>" not in markup(page)
    assert drawn(page)[0]["series"] == [{"name": EVIL, "labels": [EVIL], "values": [1.0]}]


def test_figures_that_cannot_be_drawn_say_why(tmp_path: Path) -> None:
    answers = {
        "none": [],
        "undefined": [("a", 0, None), ("a", 1, float("nan"))],
        "narrow": [("a", 1)],
        "text": [("a", 1, "many")],
        "wrong": ValueError("no such column\nLINE 1"),
        "good": [("a", 1, 0.5)],
    }
    page = written(tmp_path, answers=answers)
    assert re.findall(r'<h4>(.*?)</h4>\n<p class="missing">Not drawn: (.*?)</p>', page) == [
        ("none", "its query gives no rows"),
        ("undefined", "its query gives no numbers, only undefined values"),
        ("narrow", "its query gives 2 columns instead of three"),
        ("text", "could not convert string to float: &#39;many&#39;"),
        ("wrong", "no such column"),
    ]
    assert len(drawn(page)) == 1


def test_rows_become_series_and_cells(tmp_path: Path) -> None:
    answers = {
        "lines": [
            ("b", 2, Decimal("0.25")),
            ("a", 1, 1),
            ("b", Decimal("3.5"), float("inf")),
            (None, 0, 2.0),
        ],
        "bars": [("", "x", 1.0), ("", None, 2.0)],
        "cells": [(1, "q", 0.5), (0, "q", 0.25), (1, "p", -2.0)],
    }
    figures = [figure("lines"), figure("bars", "bar"), figure("cells", "heat")]
    lines, bars, cells = drawn(written(tmp_path, answers=answers, figures=figures))
    assert lines["series"] == [
        {"name": "b", "labels": [2, 3.5], "values": [0.25, None]},
        {"name": "a", "labels": [1], "values": [1.0]},
        {"name": "", "labels": [0], "values": [2.0]},
    ]
    assert bars["series"] == [{"name": "", "labels": ["x", "–"], "values": [1.0, 2.0]}]
    assert (cells["columns"], cells["rows"], cells["z"]) == (
        [0, 1],
        ["q", "p"],
        [[0.25, 0.5], [None, -2.0]],
    )
    assert (cells["low"], cells["high"], cells["scale"]) == (-2.0, 2.0, "diverging")


def test_runs_in_a_store_have_no_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("reproduce.verdicts.judge", lambda *_: [])
    system = systems()["previous_token"].model_copy(update={"view": {}})
    pages: list[Path] = []
    monkeypatch.setattr("queries.query_commands.open_runs", lambda *_: lambda _: [])
    monkeypatch.setattr("reproduce.system_figures.write_page", lambda page, *_: pages.append(page))
    write_run(tmp_path / "1234abcd", "a-1", {"sink_mass": lambda row: 1.0})
    for home in (str(tmp_path / "1234abcd"), "s3://bucket/previous_token/1234abcd"):
        assert _judge("t", system, system.bundled_model, home) == []
    assert pages == [tmp_path / "1234abcd.html"]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="cannot be written"):
        write_page(tmp_path / "no" / "page.html", HEADING, "", [], [], lambda sql: [])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    yield from chromium(tmp_path_factory.mktemp("chromium"))


def opened(browser: webdriver.Chrome, page: Path) -> list[Any]:
    """Show a page that must ask for nothing and complain about nothing; its figures as Plotly has
    them.
    """
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get(page.as_uri())
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in urls if not url.startswith(("data:", "blob:"))] == [page.as_uri()]
    assert browser.get_log("browser") == []
    script = "return JSON.stringify([...document.querySelectorAll('.plot')].map((p) => p.data))"
    return json.loads(browser.execute_script(script))


def test_a_system_writes_a_page_with_its_figures(browser: webdriver.Chrome, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "previous_token", "--out", str(tmp_path), *FEW])
    (page,) = tmp_path.rglob("*.html")
    (home,) = (path for path in (tmp_path / "previous_token").iterdir() if path.is_dir())
    assert page == home.with_suffix(".html")
    assert f"figures in {page}" in done.output
    figures = opened(browser, page)
    system = systems()["previous_token"]
    titles = [heading.text for heading in browser.find_elements(By.CSS_SELECTOR, "figure h4")]
    assert titles == [figure.title for figure in system.figure]
    assert len(figures) == len(titles)
    assert [(line["name"], line["x"]) for line in figures[0]] == [
        (name, list(range(9))) for name in ("none", "zero_positions", "zero_tokens")
    ]
    assert len(browser.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace")) == sum(
        map(len, figures)
    )
    assert browser.find_element(By.CSS_SELECTOR, ".warning").text == (
        "a miniature: its numbers are not comparable with the published ones"
    )
    assert str(tmp_path) not in markup(page.read_text(encoding="utf-8"))


def test_every_kind_is_drawn_and_reads_names_as_they_are(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    answers = {
        "lines": [(f"{i} {EVIL}", x, i + x) for i in range(3) for x in range(2)],
        "bars": [(series, name, 1.0) for series in "ab" for name in (EVIL, "10", "2")],
        "upright": [("a", 1, 1.0), ("a", 2, 2.0)],
        "cells": [(x, EVIL, 0.5 * x) for x in range(3)],
    }
    kinds = ("line", "bar", "bar", "heat")
    written(
        tmp_path,
        answers=answers,
        figures=[figure(*pair) for pair in zip(answers, kinds, strict=True)],
    )
    lines, bars, upright, cells = opened(browser, tmp_path / "page.html")
    assert len({line["line"]["color"] for line in lines}) == 3
    assert [bar["orientation"] for bar in (bars[0], upright[0])] == ["h", "v"]
    assert cells[0]["z"] == [[0, 0.5, 1]]
    assert [
        len(browser.find_elements(By.CSS_SELECTOR, css)) for css in (".point path", ".hm image")
    ] == [8, 1]
    shown = [text.text for text in browser.find_elements(By.CSS_SELECTOR, ".legendtext")]
    assert shown == [f"{i} {EVIL}" for i in range(3)] + ["a", "b"]
    places = browser.find_elements(By.CSS_SELECTOR, ".plot")
    ticks = [place.find_elements(By.CSS_SELECTOR, ".ytick text") for place in places]
    names = [
        [tick.text for tick in sorted(found, key=lambda tick: tick.location["y"])]
        for found in ticks
    ]
    assert names[1] == [EVIL, "10", "2"]
    assert names[3] == [EVIL]
