"""The report, opened from disk in a real browser: what it draws and says, without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from jobs.plan import make_plan, prepare_run
from queries.asking import open_runs
from queries.report import write_report
from schemas.digests import digest_of
from schemas.errors import QueryError
from schemas.scan import parse_scan
from schemas.statistics import STATISTICS
from tests.browser import chromium
from tests.toy_runs import Cell, Row, local, write_run
from workers.replica import Replica
from workers.shard import run_shard

EVIL = "</script><b>Pile & co"
"""A name that would break the page if it were taken for markup."""

LAYERS, HEADS = 3, 5


def cells() -> dict[str, Cell]:
    """A value for every statistic.

    Norms of the residual stream and the coverage do not differ between the heads of a layer.
    Duplicates are undefined.
    """

    def resid_norm(row: Row) -> float:
        return 10.0 * (1 + row.layer)

    def score(row: Row) -> float:
        return (row.layer * HEADS + row.head) / 16

    special_cells: dict[str, Cell] = {
        "match_coverage": lambda row: 0.5,
        "duplicate_score": lambda row: None,
        "sink_logit_margin": lambda row: 3.0 if row.head else -1.0,
    }
    return {
        name: resid_norm if "resid" in name else special_cells.get(name, score)
        for name in STATISTICS
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    size: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "model": "a <b>model</b>"}
    write_run(folder, "a-1", cells(), family="pile", pile_sets=[EVIL, "Github"], commit=[0], **size)
    write_run(
        folder,
        "b-2",
        cells(),
        family="repeated_random",
        interventions=("none", "zero_query_bias"),
        **size,
    )
    write_run(folder, "c-3", cells(), family="uniform_random", commit=[], **size)
    write_run(folder, "d-4", cells(), family="uniform_random", **size)
    output = folder / "report.html"
    write_report(open_runs(folder), output)
    return output


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    yield from chromium(tmp_path_factory.mktemp("chromium"))


@pytest.fixture(scope="module")
def page(browser: webdriver.Chrome, report: Path) -> webdriver.Chrome:
    # Chromium's own new tab page asks for many chrome:// files first.
    browser.get("about:blank")
    browser.get_log("performance")
    browser.get(report.as_uri())
    return browser


def section(page: webdriver.Chrome, index: int) -> WebElement:
    """One section of the page, after a click on its button."""
    page.find_elements(By.CSS_SELECTOR, "nav button")[index].click()
    return page.find_elements(By.CSS_SELECTOR, "section.run")[index]


def text_of(element: WebElement) -> str:
    """What an element shows. The driver's own `text` takes seconds for a whole section."""
    return str(element.get_property("innerText"))


def card(section: WebElement, title: str) -> WebElement:
    """The first card with a title."""
    return next(
        figure
        for figure in section.find_elements(By.CSS_SELECTOR, "figure")
        if title == figure.find_element(By.TAG_NAME, "h4").text
    )


def plotly_figure(page: webdriver.Chrome, card: WebElement) -> dict[str, Any]:
    """What Plotly drew in a card: the data of its first trace, and its layout."""
    script = """
        const plot = arguments[0].querySelector(".plot");
        return JSON.stringify({ data: plot.data[0], layout: plot.layout });
    """
    return json.loads(page.execute_script(script, card))


def test_every_head_statistic_has_a_drawn_heatmap(page: webdriver.Chrome) -> None:
    first_section = section(page, 0)
    residual_norms = {name for name in STATISTICS if "resid" in name and name.endswith("norm")}
    without_card = residual_norms | {"match_coverage", "duplicate_score"}
    headings = first_section.find_elements(By.CSS_SELECTOR, "figure h4")
    titles = [heading.text for heading in headings]
    # Once by head, and once by part of the Pile.
    assert titles.count("sink_mass") == 2
    assert set(titles) == STATISTICS.keys() - without_card | {"Residual stream", "Residual peak"}
    colour_counts = page.execute_script(
        """return Promise.all([...arguments[0].querySelectorAll(".hm image")].map(async (image) => {
          const bitmap = await createImageBitmap(await (await fetch(image.href.baseVal)).blob());
          const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
          const context = canvas.getContext("2d");
          context.drawImage(bitmap, 0, 0);
          const data = context.getImageData(0, 0, bitmap.width, bitmap.height).data;
          return new Set(new Uint32Array(data.buffer)).size;
        }))""",
        first_section,
    )
    by_layer = {name for name in STATISTICS if "resid" in name} - without_card
    # Two more heatmaps are by part of the Pile.
    assert len(colour_counts) == len(STATISTICS) - len(without_card) - len(by_layer) + 2
    # Two colours and the gaps between cells.
    assert min(colour_counts) >= 3
    lines = first_section.find_elements(By.CSS_SELECTOR, ".scatterlayer .trace")
    # The residual stream has four lines, its peak has two.
    assert len(lines) == 6 + len(by_layer)


def test_a_heatmap_says_which_head_is_which(page: webdriver.Chrome) -> None:
    figure = card(section(page, 0), "induction_score")
    drawn = plotly_figure(page, figure)
    assert drawn["data"]["z"] == [
        [(layer * HEADS + head) / 16 for head in range(HEADS)] for layer in range(LAYERS)
    ]
    assert (drawn["data"]["zmin"], drawn["data"]["zmax"]) == (0, 1)
    assert drawn["data"]["hovertemplate"].startswith("L%{y}H%{x}")
    axis_titles = figure.find_elements(By.CSS_SELECTOR, ".xtitle, .ytitle")
    assert [title.text for title in axis_titles] == ["head", "layer"]
    # Layer 0 is at the top.
    assert drawn["layout"]["xaxis"]["range"] == [-0.5, HEADS - 0.5]
    assert drawn["layout"]["yaxis"]["range"] == [LAYERS - 0.5, -0.5]
    # The cells are squares.
    box = figure.find_element(By.CSS_SELECTOR, ".hm image").size
    assert box["width"] / HEADS == pytest.approx(box["height"] / LAYERS, rel=0.02)
    assert "Mean attention to the keys that follow an earlier copy" in figure.text
    assert "Uniform attention: 0.25" in figure.text


def test_hovering_shows_the_head_and_its_value(page: webdriver.Chrome) -> None:
    figure = card(section(page, 0), "sink_mass")
    image = figure.find_element(By.CSS_SELECTOR, ".hm image")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", image)
    cell_width = image.size["width"] / HEADS
    actions = webdriver.ActionChains(page)
    actions.move_to_element_with_offset(image, int(cell_width), 0).pause(0.3).perform()
    # One cell right of the middle, in the middle row: layer 1, head 3.
    assert figure.find_element(By.CSS_SELECTOR, ".hoverlayer").text == "L1H3  0.5"


def test_signed_statistics_diverge_around_zero(page: webdriver.Chrome) -> None:
    data = plotly_figure(page, card(section(page, 0), "sink_logit_margin"))["data"]
    assert (data["zmin"], data["zmax"]) == (-3, 3)


def test_what_heads_share_is_not_a_heatmap(page: webdriver.Chrome) -> None:
    first_section = section(page, 0)
    residual_stream = plotly_figure(page, card(first_section, "Residual stream"))
    assert residual_stream["data"]["y"] == [10, 20, 30]
    assert "duplicate_score\nundefined here" in text_of(first_section)
    assert "match_coverage\n0.5" in text_of(first_section)


def test_it_says_what_was_scanned_and_what_is_missing(page: webdriver.Chrome) -> None:
    first_section = text_of(section(page, 0))
    assert "a <b>model</b> (raw weights)" in first_section
    assert "10 in 2 sequences of 5" in first_section
    warning = "Incomplete. 1 of 2 shards are done: the numbers below cover 2 of 4 sequences."
    assert warning in first_section
    assert "Incomplete" not in text_of(section(page, 1))
    assert "No rows yet." in text_of(section(page, 3))


def test_rankings_and_dormant_heads(page: webdriver.Chrome) -> None:
    rows = [row.text for row in section(page, 0).find_elements(By.CSS_SELECTOR, "tbody tr")]
    assert rows[0] == "L2H4 0.875 0.25 1 1"
    assert rows[10] == "L2H4 0.875 0.25 0.5"
    (dormant,) = page.find_elements(By.CSS_SELECTOR, "body > .grid")
    assert dormant.find_element(By.CSS_SELECTOR, "tbody tr").text == "L2H4 0.875 0.875 0.875 0.875"
    # Scores are n/16 for n = 0 … 14; sixteen times 0.4 is 6.4, so 7 to 14 are induction heads and
    # sinks.
    sentence = (
        "8 of the heads pass both thresholds (induction score 0.4, sink mass 0.3), from b-2, d-4 "
        "and a-1."
    )
    assert sentence in page.find_element(By.TAG_NAME, "body").text
    assert len(dormant.find_elements(By.CSS_SELECTOR, ".point")) == LAYERS * HEADS


def test_names_are_data_and_never_markup(page: webdriver.Chrome, report: Path) -> None:
    figures = section(page, 0).find_elements(By.CSS_SELECTOR, "figure")
    figure = next(figure for figure in figures if "part of the Pile" in figure.text)
    ticks = [tick.text for tick in figure.find_elements(By.CSS_SELECTOR, ".ytick text")]
    assert sorted(ticks) == [f"{EVIL} (1)", "Github (1)"]
    assert EVIL not in report.read_text(encoding="utf-8")


def test_every_section_is_drawn_when_it_is_chosen(page: webdriver.Chrome) -> None:
    buttons = page.find_elements(By.CSS_SELECTOR, "nav button")
    for index, button in enumerate(buttons):
        for plot in section(page, index).find_elements(By.CSS_SELECTOR, ".plot"):
            assert plot.find_elements(By.CSS_SELECTOR, "svg.main-svg"), button.text
    names = ["a-1", "b-2 · none", "b-2 · zero_query_bias", "c-3", "d-4"]
    assert [button.text for button in buttons] == names


def test_it_asks_for_nothing_and_complains_about_nothing(
    page: webdriver.Chrome, report: Path
) -> None:
    for index in range(5):
        section(page, index)
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    requests = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [request["request"]["url"] for request in requests]
    # Figures are data inside the page.
    assert [url for url in urls if not url.startswith(("data:", "blob:"))] == [report.as_uri()]
    assert page.get_log("browser") == []
    markup = re.sub(r"<script.*?</script>", "", report.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search(r"""(src|href|url|action)\s*[=(]\s*["']?(https?:)?//""", markup)
    assert str(report.parent) not in markup


def test_a_report_that_cannot_be_written(report: Path) -> None:
    with pytest.raises(QueryError, match="cannot be written"):
        write_report(open_runs(report.parent), report.parent / "no" / "such" / "folder.html")


def test_the_report_says_which_engine_measured_an_intervention(tmp_path: Path) -> None:
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 5,
        "sequences": 2,
        "input": {"family": "uniform_random"},
        "interventions": ["none", "head_to_first(1,0)"],
        "out": str(tmp_path),
    }
    plan = make_plan(parse_scan(fields), "small")
    prepare_run(plan, "")
    run_shard(Replica(plan.info, plan.scan), plan.run, plan.sequences.shard(0))
    write_report(open_runs(plan.run.path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall("<dt>engine</dt><dd>(.*?), float32</dd>", page) == [
        "fused",
        "fused, with built patterns in layers 1",
    ]


def test_predictions_have_their_change_from_the_untouched_model(tmp_path: Path) -> None:
    fields = {
        "model": "bundled:attn-only-2l-mini",
        "n_ctx": 9,
        "sequences": 6,
        "input": {"family": "repeated_random"},
        "interventions": ["none", "zero_head(1,6)"],
        "predictions": ["loss", "losses"],
        "statistics": ["sink_mass"],
        "out": str(tmp_path),
    }
    plan = make_plan(parse_scan(fields), "small")
    prepare_run(plan, "")
    replica = Replica(plan.info, plan.scan)
    shard = plan.sequences.shard(0)
    run_shard(replica, plan.run, shard)
    untouched, edited = (
        replica.measure(shard.tokens, intervention).sequences["loss"].astype(float)
        for intervention in plan.scan.interventions
    )
    write_report(open_runs(plan.run.path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")

    def mean_and_error(losses: np.ndarray) -> list[str]:
        return [f"{losses.mean():.4g}", f"{losses.std(ddof=1) / 6**0.5:.4g}"]

    rows = re.findall(r"<tr><td title=\"[^\"]+\">loss</td><td>nats</td>(.*?)</tr>", page)
    assert [re.findall("<td>(.*?)</td>", row) for row in rows] == [
        mean_and_error(untouched),
        mean_and_error(edited) + mean_and_error(edited - untouched),
    ]


def test_buttons_name_lengths_and_decades_have_whole_numbers(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    growing_norms = {name: lambda row: 4.0 * 4**row.layer for name in STATISTICS if "resid" in name}
    # Two runs of one scan that differ in length, and a run of another scan.
    for run, n_ctx in (("s-1", 5), ("s-2", 9)):
        write_run(tmp_path, run, cells() | growing_norms, n_ctx=n_ctx, layers=LAYERS, heads=HEADS)
    write_run(tmp_path, "t-3", cells(), n_ctx=7, layers=LAYERS, heads=HEADS)
    write_report(open_runs(tmp_path), tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    buttons = [button.text for button in browser.find_elements(By.CSS_SELECTOR, "nav button")]
    assert buttons == ["s-1 · 5 tokens", "s-2 · 9 tokens", "t-3"]
    ticks = card(section(browser, 0), "Residual stream").find_elements(
        By.CSS_SELECTOR, ".ytick text"
    )
    assert sorted((tick.text for tick in ticks), key=float) == ["5", "10", "20", "50"]


def damage_content(file: Path) -> str:
    """Overwrite the data of a Parquet file, but keep its size and footer. Returns its digest."""
    content = bytearray(file.read_bytes())
    content[4:200] = bytes(196)
    file.write_bytes(content)
    return digest_of(bytes(content))


@pytest.mark.parametrize("table", ["heads", "sequences"])
def test_a_query_that_fails_is_an_error_and_no_empty_place(tmp_path: Path, table: str) -> None:
    run = write_run(tmp_path, "a-1", cells(), family="pile", pile_sets=["Github"])
    # The commit is changed to the damaged content: otherwise its shard would be left out.
    digest = damage_content(local(run.data_file(table, "none", 0)))
    commit = json.loads(run.commit_file(0).read_bytes())
    for file in commit["files"]:
        file["digest"] = digest if file["table"] == table else file["digest"]
    local(run.commit_file(0)).write_text(json.dumps(commit))
    subject = {"heads": "by_head", "sequences": "sink_mass by part of the Pile"}[table]
    with pytest.raises(QueryError, match=rf"^report, {subject}: .*Invalid data") as mistake:
        write_report(open_runs(tmp_path), tmp_path / "report.html")
    assert "\n" not in str(mistake.value)
    assert not (tmp_path / "report.html").exists()


def test_a_report_leaves_out_damaged_shards_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a-1", cells(), family="pile", pile_sets=["Github"])
    damage_content(local(run.data_file("heads", "none", 0)))
    warnings: list[str] = []
    write_report(open_runs(tmp_path, tell=warnings.append), tmp_path / "report.html")
    assert warnings == [
        "warning: run a-1: shard 0: heads/intervention=none/shard-000000.parquet has other content "
        f"than was committed and is left out of every view. headcount resume {run.path} --verify "
        "measures it anew"
    ]


def test_a_report_leaves_out_what_was_not_measured(tmp_path: Path) -> None:
    write_run(tmp_path, "a-1", {"entropy": lambda row: 1.0 + row.head}, pile_sets=["Github"])
    write_report(open_runs(tmp_path), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    markup = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    assert re.findall("<h[34]>(.*?)</h", markup) == ["shape", "entropy"]
