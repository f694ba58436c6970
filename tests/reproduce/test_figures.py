"""The page of a replication: its table word for word, data that is never markup, figures that
fail, and a real browser.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import duckdb
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from headcount.queries.ask.asking import open_runs
from headcount.queries.report.html_page import unpacked
from headcount.reproduce.replication import Figure
from headcount.reproduce.replication_figures import write_page
from headcount.reproduce.replication_runs import plan_replication
from headcount.reproduce.reproduction import Attempt
from headcount.reproduce.verdicts import Result
from headcount.schemas.errors import QueryError, RunError
from tests.pages.browser import chromium, requested_urls
from tests.toys.toy_replications import REPLICATIONS, toy_replication
from tests.toys.toy_runs import one_line, without_runs, write_run

EVIL = "</script><b>Eve & co"
result = partial(Result, "toy", model="m")
"""A result: its name, what was published and measured, a tolerance and a verdict."""


def figure(title: str, sql: str, kind: Literal["line", "bar", "heat", "points"] = "line") -> Figure:
    return Figure(title=title, sql=sql, kind=kind, x="key", y="attention")


def written_page(
    folder: Path,
    *figures: Figure,
    results: Sequence[Result] = (),
    warning: str = "",
    text: str = "toy",
) -> str:
    """A page whose figures ask an empty database; EVIL is its parameter `evil()`."""
    connection = duckdb.connect()
    connection.execute(f"CREATE MACRO evil() AS '{EVIL}'")
    output = folder / "1234abcd.html"
    replication = toy_replication(title=text, source=text, figure=figures)
    write_page(output, text, replication, text, results, without_runs(connection), warning)
    return output.read_text(encoding="utf-8")


def markup(page: str) -> str:
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def drawn_figures(page: str) -> list[Any]:
    return cast(list[Any], unpacked(page))


def test_what_is_not_comparable_comes_last_word_for_word(tmp_path: Path) -> None:
    results = [
        result("L0H3 to 7", 0.5026, 0.49876, 0.015, "pass"),
        result("loss", 200.0, float("nan"), 20.0, "fail"),
        result("P(B)", 7.26e-06, None, 1.452e-06, "not comparable"),
        result("it is so", "holds", 124.1, None, "pass"),
    ]
    page = markup(written_page(tmp_path, results=results))
    judged, others = re.findall(r"<tbody>\n(.*?)</tbody>", page, flags=re.DOTALL)
    assert judged.splitlines() == [
        "<tr><td>L0H3 to 7</td><td>0.5026</td><td>0.4988</td><td>0.015</td>"
        '<td class="pass">pass</td></tr>',
        '<tr><td>loss</td><td>200</td><td>–</td><td>20</td><td class="fail">fail</td></tr>',
        "<tr><td>it is so</td><td>holds</td><td>124.1</td><td>–</td>"
        '<td class="pass">pass</td></tr>',
    ]
    assert others.splitlines() == [
        "<tr><td>P(B)</td><td>7.26e-06</td><td>–</td><td>1.452e-06</td>"
        '<td class="not-comparable">not comparable</td></tr>'
    ]
    assert "<details><summary>1 not comparable</summary>" in page
    assert "2 pass, 1 fail, 1 not comparable" in page
    assert markup(written_page(tmp_path, results=results[2:3])).count("<tbody>") == 1
    assert re.findall(r"<h1>(.*)</h1>|<dd>(.*)</dd>", page) == [
        ("toy: toy", ""), ("", "toy"), ("", "toy"), ("", "1234abcd"),
        ("", "headcount reproduce toy.toml --model m"), ("", "less than 1 s"),
    ]  # fmt: skip
    assert "warning" not in page
    warned = written_page(tmp_path, warning="a miniature")
    assert '<p class="warning"><strong>a miniature</strong></p>' in warned


def test_names_are_data_and_never_markup(tmp_path: Path) -> None:
    page = written_page(
        tmp_path,
        figure(EVIL, "SELECT evil(), evil(), 1.0"),
        figure(EVIL, "SELECT 1, 2, 3 WHERE false"),
        results=[result(EVIL, EVIL, None, None, "fail")],
        warning=EVIL,
        text=EVIL,
    )
    assert EVIL not in page
    assert "<b>" not in markup(page)
    assert drawn_figures(page)[0]["series"] == [{"name": EVIL, "labels": [EVIL], "values": [1.0]}]


def test_figures_without_numbers_say_so(tmp_path: Path) -> None:
    page = written_page(
        tmp_path,
        figure("none", "SELECT 1, 2, 3 WHERE false"),
        figure("undefined", "VALUES ('a', 0, NULL), ('a', 1, 'NaN'::FLOAT)"),
        figure("good", "VALUES ('a', 1, 0.5)"),
    )
    assert re.findall(r'<h3>(.*?)</h3>\n<p class="missing">Not drawn: (.*?)</p>', page) == [
        ("none", "its query gives no rows"),
        ("undefined", "its query gives no numbers, only undefined values"),
    ]
    assert len(drawn_figures(page)) == 1


def test_a_mistake_in_the_sql_of_a_figure_is_an_error_that_names_it(tmp_path: Path) -> None:
    for sql, problem in (
        ("SELECT 'a', 1", "expected 3 columns, got 2"),
        ("SELECT 'a', 1, 'many'", "expected a number in its third column, got 'many'"),
        ("SELECT 1, heigth FROM (SELECT 1 AS height)", "unknown column 'heigth': did you mean"),
        ("SELECT 'a', 1, 1 // 0", "Division by zero in expression (1 // 0)"),
        ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"'),
    ):
        with one_line(RunError, re.escape(f"toy, figure 'by key': {problem}")):
            written_page(tmp_path, figure("by key", sql))
    assert not (tmp_path / "1234abcd.html").exists()
    with pytest.raises(QueryError, match="cannot be written"):
        written_page(tmp_path / "no")


def test_rows_become_series_and_cells(tmp_path: Path) -> None:
    lines_sql = """VALUES ('b', 2::DECIMAL(9, 1), 0.25::DECIMAL(9, 2)::DOUBLE), ('a', 1, 1),
        ('b', 3.5, 'inf'::DOUBLE), (NULL, 0, 2.0)"""
    lines, bars, cells = drawn_figures(
        written_page(
            tmp_path,
            figure("lines", lines_sql),
            figure("bars", "VALUES ('', 'x', 1.0::DECIMAL(9, 1)), ('', NULL, 2.0)", "bar"),
            figure("cells", "VALUES (1, 'q', 0.5), (0, 'q', 0.25), (1, 'p', -2.0)", "heat"),
        )
    )
    assert lines["series"] == [
        {"name": "b", "labels": [2, 3.5], "values": [0.25, None]},
        {"name": "a", "labels": [1], "values": [1.0]},
        {"name": "", "labels": [0], "values": [2.0]},
    ]
    assert bars["series"] == [{"name": "", "labels": ["x", "–"], "values": [1.0, 2.0]}]
    places = {"columns": [0, 1], "rows": ["q", "p"], "z": [[0.25, 0.5], [None, -2.0]]}
    assert cells == cells | places | {"low": -2.0, "high": 2.0, "scale": "diverging"}


def test_only_runs_on_a_disk_have_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing = {"view": {}, "check": (), "claim": (), "figure": ()}
    replication = REPLICATIONS["previous_token"].model_copy(update=nothing)
    write_run(tmp_path / "1234abcd", "a-1", {"sink_mass": lambda row: 1.0})
    database = open_runs(tmp_path / "1234abcd")
    monkeypatch.setattr("headcount.reproduce.replication_runs.open_runs", lambda *_, **__: database)
    (plan, *_) = plan_replication(replication, replication.bundled_model, str(tmp_path / "plans"))
    for home in (str(tmp_path / "1234abcd"), "s3://bucket/previous_token/1234abcd"):
        moved = replace(plan, scan=plan.scan.model_copy(update={"out": home}))
        attempt = Attempt("t", replication, replication.bundled_model, plans=[moved])
        attempt.judge()
        assert attempt.results == []
    assert [path.name for path in tmp_path.glob("*.html")] == ["1234abcd.html"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    yield from chromium(tmp_path_factory.mktemp("chromium"))


@pytest.mark.long
def test_every_kind_is_drawn_and_reads_names_as_they_are(browser: Chrome, tmp_path: Path) -> None:
    three_lines = (
        "SELECT i || ' ' || evil(), x, i + x FROM range(3) a(i), range(2) b(x) ORDER BY ALL"
    )
    bars_by_name = (
        "SELECT s, n, 1.0 FROM (VALUES ('a'), ('b')) a(s), (VALUES (evil()), ('10'), ('2')) b(n)"
    )
    written_page(
        tmp_path,
        figure("lines", three_lines),
        figure("bars", bars_by_name, "bar"),
        figure("one", "VALUES ('a', 1, 1.0), ('a', 2, 2.0)", "bar"),
        figure("cells", "SELECT x, evil(), 0.5 * x FROM range(3) b(x)", "heat"),
        figure("points", "SELECT evil() || x, x, 2 * x FROM range(3) b(x)", "points"),
        figure("beside", "VALUES ('a', 0, 1.0), ('a', 1, 2.0), ('a, published', 0, 3.0)"),
        figure("upright", "SELECT 'a long name ' || x, 'row', x FROM range(20) b(x)", "heat"),
    )
    address = (tmp_path / "1234abcd.html").as_uri()
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get(address)
    assert requested_urls(browser) == [address]
    assert browser.get_log("browser") == []
    plots = browser.find_elements(By.CSS_SELECTOR, ".plot")

    def attributes(plot: int, css: str, name: str) -> list[str | None]:
        found = plots[plot].find_elements(By.CSS_SELECTOR, css)
        return [mark.get_attribute(name) for mark in found]

    # Each figure has marks of its own kind, and of no other.
    marks = [".line", "[data-bar]", "[data-bar]", "[data-cell]", ".point", ".line", "[data-cell]"]
    for plot, own in zip(plots, marks, strict=True):
        drawn = {mark for mark in marks if plot.find_elements(By.CSS_SELECTOR, mark)}
        assert drawn == {own}
    assert len({*attributes(0, ".line", "stroke")}) == 3
    assert attributes(4, ".point", "data-point") == [f"{EVIL}{x}" for x in range(3)]
    # What was published has the colour of what was measured, and dashes.
    assert len({*attributes(5, ".line", "stroke")}) == 1
    assert attributes(5, ".line", "stroke-dasharray") == [None, "5 3"]
    # Long names of columns do not lie on one another.
    upright = plots[6].find_elements(By.CSS_SELECTOR, "text[transform]")
    assert [name.text for name in upright] == [f"a long name {x}" for x in range(20)]
    boxes = [name.rect for name in upright]
    assert all(b["x"] >= a["x"] + a["width"] - 1 for a, b in pairwise(boxes))
    assert attributes(1, "[data-bar]", "data-bar") == [EVIL, EVIL, "10", "10", "2", "2"]
    assert attributes(2, "[data-bar]", "data-bar") == ["key 1", "key 2"]
    assert attributes(3, ".cell", "aria-label") == [
        f"key {x}, attention {EVIL}  {value}" for x, value in enumerate(("0", "0.5", "1"))
    ]
    shown = browser.find_element(By.TAG_NAME, "body").get_property("textContent")
    assert all(f"{i} {EVIL}" in str(shown) for i in range(3))
    assert browser.find_elements(By.TAG_NAME, "b") == []
