"""The report, opened from disk in a real browser: what it draws and says, without a network."""

import base64
import json
import math
import re
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import headcount
from headcount.queries.answers.axes import DRAWN_BINS
from headcount.queries.answers.loss_effects import shown_runs
from headcount.queries.answers.numbers import COUNTS, NUMBERS
from headcount.queries.answers.page_queries import Answer, Heatmap, Histograms, Scope, Subsets
from headcount.queries.answers.page_runs import PageRuns, _input_words
from headcount.queries.answers.run_details import rankings
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.report.head_card import card_html, head_card
from headcount.queries.report.html_page import packed, unpacked
from headcount.queries.report.report import EmbeddedAnswers, detail_of, write_report
from headcount.schemas.errors import QueryError
from headcount.schemas.files.digests import digest_of
from headcount.workers.run_model import RunModels
from tests.pages.browser import Page, chromium, cut_tables, requested_urls
from tests.queries.page.test_explore_queries import Asker
from tests.toys.toy_runs import Cell, Row, data_file, local, one_line, write_run

EVIL = "</script><b>Pile & co"
"""A name that would break the page if it were taken for markup."""

LAYERS, HEADS = 3, 5
LABELS = [f"L{layer}H{head}" for layer in range(LAYERS) for head in range(HEADS)]

NORMS = ["resid_pre_norm", "sink_resid_pre_norm", "resid_post_norm", "sink_resid_post_norm"]


def cells() -> dict[str, Cell]:
    """Values of some statistics.

    Norms of the residual stream and the coverage do not differ between the heads of a layer.
    Duplicates are undefined. Sequences differ by their parity.
    """

    def score(row: Row) -> float:
        return (row.layer * HEADS + row.head) / 16 + (row.sequence % 2) / 64

    norms: dict[str, Cell] = {name: lambda row: 4.0 * 4**row.layer for name in NORMS}
    return {
        "sink_mass": lambda row: score(row) / (2 if row.intervention != "none" else 1),
        "induction_score": score, "sink_logit_margin": lambda row: 3.0 if row.head else -1.0,
        "entropy": lambda row: 1 + score(row), "match_coverage": lambda row: 0.5,
        "duplicate_score": lambda row: None, "value_norm": lambda row: 2.0,
        "sink_value_norm": lambda row: 1.0, **norms,
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    size: dict[str, Any] = {"layers": LAYERS, "heads": HEADS, "model": "a <b>model</b>"}
    write_run(folder, "a-1", cells(), family="pile", pile_sets=[EVIL, "Github"], commit=[0], **size)
    interventions = ("none", "zero_query_bias")
    write_run(folder, "b-2", cells(), family="repeated_random", interventions=interventions, **size)
    write_run(folder, "c-3", cells(), family="uniform_random", commit=[], **size)
    write_run(folder, "d-4", cells(), family="uniform_random", **size)
    return folder


@pytest.fixture(scope="module")
def database(runs: Path) -> RunDatabase:
    return open_runs(runs)


@pytest.fixture(scope="module")
def report(runs: Path, database: RunDatabase) -> Path:
    output = runs / "report.html"
    write_report(database, output)
    return output


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    for browser in chromium(tmp_path_factory.mktemp("chromium")):
        # Chromium's own new tab page asks for many chrome:// files first.
        browser.get("about:blank")
        browser.get_log("performance")
        yield Page(browser)


@pytest.fixture(scope="module")
def opened(tab: Page, report: Path) -> Page:
    tab.open(report.as_uri())
    return tab


@pytest.fixture
def page(opened: Page) -> Page:
    """The report at its first section, with the maps of all statistics unfolded."""
    opened.run("document.getElementById('maps-card').open = true")
    opened.show("run=a-1")
    return opened


@pytest.mark.long
def test_statistics_that_differ_between_heads_are_maps_and_others_are_lines(page: Page) -> None:
    # The induction score is the same as the sink mass, and the entropy one more: they share a map.
    assert page.attributes("[data-map]", "data-map") == ["sink_mass", "sink_logit_margin"]
    assert page.texts("[data-map=sink_mass] .alike div") == ["induction_score", "entropy"]
    for css in ("#heatmap", "[data-map=sink_mass]"):
        labels = page.attributes(f"{css} .cell", "aria-label")
        assert [label.split()[0] for label in labels] == LABELS
        # Two colours at least, and a title on every mark.
        assert len(set(page.attributes(f"{css} .cell", "fill"))) >= 2
        assert page.texts(f"{css} .cell title") == labels
    assert page.attributes("[data-lines]", "data-lines") == ["Residual stream", "Residual peak"]
    titles = page.texts("[data-series='before the layer, others'] circle title")
    assert [title.rpartition(": ")[2] for title in titles] == ["4", "16", "64"]
    # The axis has decades: 5, 10, 20 and 50.
    ticks = page.texts("[data-lines='Residual stream'] text[text-anchor=end]")
    assert ticks == ["5", "10", "20", "50"]
    shared = dict(zip(page.texts("#shared dt"), page.texts("#shared dd"), strict=True))
    assert (shared["duplicate_score"], shared["match_coverage"]) == ("undefined here", "0.5")
    # Signed statistics diverge around zero.
    legend = page.texts("[data-map=sink_logit_margin] .legend text")
    assert sorted(legend) == ["0", "3", "−3"]
    # The same statistic in every run and intervention that has rows.
    names = ["a-1", "b-2", "b-2 · zero_query_bias", "d-4"]
    assert page.attributes("[data-section]", "data-section") == names


@pytest.mark.long
def test_it_says_what_was_scanned_what_leads_and_how_sure_that_is(
    page: Page, database: RunDatabase
) -> None:
    assert page.texts("h1") == ["What the attention heads of a <b>model</b> do"]
    assert page.texts("#progress") == ["2 of 4 sequences are in (50 %) · 30 rows · input pile"]
    warning = "Incomplete: 1 of 2 shards are done, which are 2 of 4 sequences."
    assert page.texts("#warnings .warning") == [warning]
    # The values are 14/16 and 14/16 + 1/64: mean 0.8828, standard error 1/128. sink_alpha is above
    # 0.3 if sink_mass is above 1/8: all but two heads. Of these, q says which pass the baseline.
    sql = "SELECT count(*) FROM sink_heads WHERE run_id = 'a-1' AND is_sink"
    ((passing,),) = database.rows(sql)
    assert 0 < passing < 13
    assert page.texts("#finding") == [
        "L2H4 leads in sink_mass with 0.8828 ± 0.0078, 3.5 times the uniform baseline. "
        f"{passing} of 15 heads pass the threshold of sink_heads, q <= 0.05."
    ]
    assert page.texts("#sentence") == [
        "sink_mass of L2H4 is 0.8828 ± 0.0078 over 2 sequences, 3.5 times the uniform baseline, "
        "larger than in 100 % of the other 14 heads."
    ]
    assert page.texts("#heatmap .legend text") == ["0", "1"]
    page.find("#own").click()
    # Score n/16 for n = 0 … 14, plus 1/128 on average over the two parities.
    assert page.texts("#heatmap .legend text") == ["0.00781", "0.883"]
    assert "range=own" in page.browser.current_url
    page.show("run=c-3")
    assert page.texts("#progress") == ["No rows yet."]
    page.show("run=b-2")
    assert page.texts(".warning:not([hidden])") == []


@pytest.mark.long
def test_a_click_a_key_and_a_name_choose_a_head(page: Page) -> None:
    page.show("run=a-1&statistic=entropy")
    target = page.cell("L1H2")
    page.run("arguments[0].scrollIntoView({block: 'center'})", target)
    ActionChains(page.browser).move_to_element(target).perform()
    assert page.texts("#readout") == ["L1H2: 1.445 ± 0.0078"]
    target.click()
    page.wait()
    marked = page.attributes("[aria-selected=true].cell", "aria-label")
    assert [label.split()[0] for label in marked] == ["L1H2"] * 3
    assert page.texts("#head-name") == ["Head L1H2"]
    assert "run=a-1&intervention=none&statistic=entropy&head=L1H2" in page.browser.current_url
    page.cell("L0H0").send_keys(Keys.ARROW_RIGHT)
    focused = page.browser.switch_to.active_element
    assert str(focused.get_attribute("aria-label")).startswith("L0H1 ")
    focused.send_keys(Keys.ARROW_DOWN)
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.texts("#head-name") == ["Head L1H1"]
    # One cell of a map is reached by Tab, the others by arrows.
    assert page.attributes("#heatmap .cell", "tabindex").count("0") == 1
    page.find("#card [data-statistic=induction_score] button").send_keys(Keys.ENTER)
    page.wait()
    assert page.texts("#sentence")[0].startswith("induction_score of L1H1 is ")
    for name, why in {"l2h1": "", "L9H1": "expected L0H0 to L2H4"}.items():
        search = page.find("#search")
        search.clear()
        search.send_keys(name, Keys.ENTER)
        assert search.get_property("validationMessage") == why
        assert page.texts("#head-name") == ["Head L2H1"]


@pytest.mark.long
def test_one_brush_picks_heads_in_scatter_heatmap_and_table(page: Page) -> None:
    page.show("run=a-1&x=head&y=sink_mass")
    assert len(page.texts("#scatter .point")) == len(LABELS)
    # The upper two of three layers: L1 has 5/16 to 9/16, L2 has 10/16 to 14/16.
    page.show("run=a-1&x=head&y=sink_mass&pick=0,1.5,0.3,1")
    # The key of the colours: all three layers.
    assert page.texts("#scatter .legend text") == ["0", "2"]
    names = [row[0] for row in page.rows("#heads-rows")]
    assert names == ["L2H1", "L2H0", "L1H1", "L1H0"]
    assert page.texts("#picked-heads") == ["4 of 15 heads picked"]
    labels = page.attributes("#heatmap .cell:not(.unpicked)", "aria-label")
    assert sorted(name.split()[0] for name in labels) == sorted(names)
    figure = page.find("#scatter svg")
    figure.send_keys(Keys.ESCAPE)
    assert page.texts("#picked-heads") == [""]
    figure.send_keys(Keys.ARROW_RIGHT)
    assert "pick=" in page.browser.current_url
    drag = ActionChains(page.browser).move_to_element(figure).click_and_hold()
    drag.move_by_offset(300, -300).release().perform()
    assert 0 < len(page.rows("#heads-rows")) < len(LABELS)


@pytest.mark.long
def test_the_numbers_of_a_head_are_those_of_the_rows(page: Page, runs: Path) -> None:
    page.show("run=d-4&head=L1H3&statistic=sink_mass")
    files = f"{runs}/run_id=d-4/heads/**/*.parquet"
    numbers = "avg(sink_mass), stddev_samp(sink_mass) / sqrt(count(*)), count(*)"
    sql = f"SELECT {numbers} FROM read_parquet('{files}') WHERE layer = 1 AND head = 3"
    [(mean, error, count)] = duckdb.execute(sql).fetchall()
    # Eight of the other fourteen heads have a smaller mean.
    percentile = str(round(100 * 8 / 14))
    (row,) = [row for row in page.rows("#card") if row[0] == "sink_mass"]
    assert row == [
        "sink_mass",
        f"{mean:.4g} ± {error:.2g}",
        "0.25",
        percentile,
        "0.5",
        "0.5156",
        "",
    ]
    assert (
        page.attributes("#hist-card [data-hist=sink_mass]", "data-count") == [str(count)] == ["4"]
    )


def test_a_card_in_python_has_the_change_of_a_statistic(database: RunDatabase) -> None:
    card = head_card(database, "L2H0", "b-2", "zero_query_bias")
    assert card.statistic("sink_mass").change == pytest.approx(-(10 / 16 + 1 / 128) / 2)


@pytest.mark.long
def test_an_intervention_or_a_run_beside_another(page: Page, database: RunDatabase) -> None:
    page.show("run=b-2&head=L2H0&with=b-2/zero_query_bias")
    captions = page.texts("#heatmap figcaption")
    assert captions == ["b-2", "b-2 · zero_query_bias", "second minus first"]
    labels = page.attributes("#heatmap figure:nth-child(3) .cell", "aria-label")
    sql = "SELECT change FROM effects WHERE statistic = 'sink_mass' ORDER BY layer, head"
    shown = [float(label.split("  ")[1].replace("−", "-")) for label in labels]
    assert shown == pytest.approx([change for (change,) in database.rows(sql)], rel=1e-3)
    # The table has the largest changes first.
    sql = "SELECT label, q FROM effects WHERE statistic = 'sink_mass' ORDER BY abs(change) DESC"
    most = [label for label, _ in database.rows(sql)][:3]
    assert page.texts("#heads-name") == ["Heads with the largest changes of sink_mass"]
    assert [row[0] for row in page.rows("#heads-rows")][:3] == most
    sql = "SELECT q FROM effects WHERE statistic = 'sink_mass' ORDER BY layer, head"
    q = [q for (q,) in database.rows(sql)]
    pale = page.attributes("#heatmap figure:nth-child(3) .cell", "fill-opacity")
    assert [opacity == "0.3" for opacity in pale] == [one > 0.05 for one in q]
    page.cell("L2H0").send_keys(Keys.ARROW_RIGHT)
    # The numbers of a report have four digits.
    shown = page.texts("#readout")[0].rpartition(", q ")[2]
    assert float(shown.replace("−", "-")) == pytest.approx(q[LABELS.index("L2H1")], rel=0.02)
    row = next(row for row in page.rows("#card") if row[0] == "sink_mass")
    assert row[1:4] == ["0.6328", "0.3164", "−0.3164 ± 0.0023"]
    page.show("run=a-1&with=d-4/none&head=L0H1")
    page.cell("L0H1").send_keys(Keys.ARROW_LEFT)
    # L0H0 has 0 and 1/64 in both. Its error over two sequences is 1/128, over four 1/128 · √(1/3).
    error = math.hypot(1 / 128, 1 / 128 / math.sqrt(3))
    assert page.texts("#readout")[0].endswith(f"difference 0 ± {error:.2g}, q 1")
    pale = page.attributes("#heatmap figure:nth-child(3) .cell", "fill-opacity")
    assert pale == ["0.3"] * len(LABELS)


@pytest.mark.long
def test_parts_of_the_pile_and_names_that_are_never_markup(page: Page, report: Path) -> None:
    page.show("run=a-1&head=L2H0&statistic=sink_mass")
    assert f"{EVIL} (1)" in page.texts("[data-subsets] text title")
    assert page.attributes("#subsets [data-bar]", "data-bar") == ["Github (1)", f"{EVIL} (1)"]
    assert page.all("b") == []
    assert EVIL not in report.read_text(encoding="utf-8")


@pytest.mark.long
def test_every_figure_has_its_sql_which_answers(page: Page, database: RunDatabase) -> None:
    queries: set[str] = set()
    for words in ("run=a-1&head=L2H0", "run=b-2&with=b-2/zero_query_bias", "run=b-2&with=d-4/none"):
        page.show(words)
        script = "document.querySelectorAll('.behind').forEach((one) => { one.open = true; })"
        page.run(script)
        page.wait()
        queries |= set(page.texts("main .behind pre"))
        page.run(script.replace("true", "false"))
    assert len(queries) > 15
    for sql in queries:
        assert database.rows(f"FROM ({sql}) LIMIT 1"), sql


KEEP_FILES = """window.files = []; window.make ??= URL.createObjectURL;
    URL.createObjectURL = (blob) => { files.push(blob); return make(blob); };"""
"""A script that keeps what the page gives to the reader."""


@pytest.mark.long
def test_the_data_of_a_figure_is_a_file(page: Page) -> None:
    page.run(KEEP_FILES)
    button = "[data-subsets] button[data-csv]"
    page.run("document.querySelector(arguments[0]).click()", button)
    content = page.later("files[0].text().then(arguments[0])")
    lines = content.split("\r\n")
    assert lines[0] == "head,pile_set_name,mean,standard_error,documents,count"
    assert lines[1] == f"L0H0,{EVIL},0,,1,1"
    assert len(lines) == 1 + 2 * len(LABELS) + 1


@pytest.mark.long
def test_dormant_heads(page: Page) -> None:
    # Scores are n/16 + 1/128. Those from 0.4 on are n = 7 … 14.
    note = "8 heads pass both thresholds (induction score 0.4, sink mass 0.3), from b-2, d-4, a-1"
    assert note in page.texts("[data-dormant] .note")[0]
    assert len(page.texts("[data-dormant] .point")) == len(LABELS)
    assert len(page.texts("[data-dormant] .point.on")) == 8


@pytest.mark.long
def test_a_figure_is_a_picture_with_plain_colours(page: Page) -> None:
    page.show("run=a-1&head=L2H0")
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.device("Emulation.setEmulatedMedia", **dark)
    page.run(KEEP_FILES)
    card = page.find("#heat-card")
    for kind in ("svg", "png"):
        button = card.find_element(By.CSS_SELECTOR, f"[data-picture={kind}]")
        page.run("arguments[0].click()", button)
    text = page.later("files[0].text().then(arguments[0])")
    for word in ("light-dark", "var(", "class=", "style="):
        assert word not in text
    whole = ElementTree.fromstring(text)
    cells = whole.findall(".//*[@data-cell]")
    assert len(cells) == len(LABELS)
    # The blue of a light page, however dark this one is: the mean of L0H0 is 1/128.
    assert cells[0].get("fill") == "rgb(238, 243, 245)"
    assert whole[0][0].text == "sink_mass by layer and head"
    until = time.monotonic() + 10
    while page.run("return files.length") < 2:
        assert time.monotonic() < until
    head = page.later(
        "files[1].slice(0, 24).arrayBuffer().then((b) => arguments[0]([...new Uint8Array(b)]))"
    )
    signature, *size = struct.unpack(">8s8xII", bytes(head))
    assert signature == b"\x89PNG\r\n\x1a\n"
    assert size == [3 * int(whole.attrib[side]) for side in ("width", "height")]
    page.device("Emulation.setEmulatedMedia", features=[])


BROKEN_NUMBERS = """return [...document.querySelectorAll("#card-rows td")].filter((cell) => {
    const words = document.createRange();
    words.selectNodeContents(cell);
    const lines = new Set([...words.getClientRects()].map((line) => line.top));
    return cell.textContent.includes("±") && lines.size > 1;
}).map((cell) => cell.textContent)"""
"""Numbers of the card whose error stands in another line."""


@pytest.mark.long
def test_wide_narrow_dark_and_printed_no_table_is_cut(page: Page) -> None:
    def ground(theme: str) -> str:
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        page.device("Emulation.setEmulatedMedia", **media)
        return page.run("return getComputedStyle(document.body).backgroundColor")

    assert ground("light") == "rgb(250, 250, 248)"
    assert ground("dark") == "rgb(20, 24, 27)"
    page.device("Emulation.setEmulatedMedia", features=[])
    for head, width in enumerate((390, 768, 1100, 1366, 1920)):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == 390}
        page.device("Emulation.setDeviceMetricsOverride", **size)
        # Figures are drawn for the width of now.
        page.show(f"run=a-1&head=L2H{head}")
        assert cut_tables(page) == [], width
        widths = "return [document.documentElement.scrollWidth <= innerWidth, innerWidth]"
        assert page.run(widths) == [True, width]
        assert page.run(BROKEN_NUMBERS) == [], width
        # The button stands beside the words below the title, and not alone.
        top, bottom = page.find("#copy-link").rect["y"], page.find("#progress").rect
        assert top < bottom["y"] + bottom["height"]
        # Maps are as wide as their card, however few they are.
        maps = [figure.rect for figure in page.all("#sections svg")]
        place = page.find("#sections").rect
        right = max(each["x"] + each["width"] for each in maps)
        assert right > place["x"] + 0.95 * place["width"], width
    page.device("Emulation.clearDeviceMetricsOverride")
    printed = page.device("Page.printToPDF", printBackground=True)
    pages = base64.b64decode(printed["data"]).count(b"/Type /Page\n")
    assert 1 <= pages <= 6


@pytest.mark.long
def test_it_asks_for_nothing_and_complains_about_nothing(page: Page, report: Path) -> None:
    """Runs last: it reads what all tests before it left in the logs."""
    allowed = (report.as_uri(), "about:blank")
    assert [url for url in requested_urls(page.browser) if not url.startswith(allowed)] == []
    assert page.browser.get_log("browser") == []
    text = report.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href|url|action)\s*[=(]\s*["']?(https?:)?//""", markup)
    assert str(report.parent) not in json.dumps(unpacked(text))
    assert str(report.parent) not in markup


# Without a browser


def test_the_data_of_a_model_of_the_size_of_gpt2_is_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    heads, subsets = 12 * 12, 22
    shape = {"layers": 12, "heads": 12, "sequences": 1, "per_shard": 1}
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: 0.0}, **shape)
    answers = EmbeddedAnswers(PageRuns(open_runs(tmp_path)), None)
    # All heads have the same sequences and documents.
    numbers = [np.full(heads, 100_000) if name in COUNTS else rng.random(heads) for name in NUMBERS]
    # A head fills about a quarter of the bins.
    places = np.clip(rng.normal(rng.random((heads, 1)), 0.06, (heads, 500)), 0, 0.999)
    counts = np.stack([(places * 64 // 1 == place).sum(1) for place in range(64)], axis=1)
    columns = {
        **{name: rng.random(heads * subsets).tolist() for name in ("mean", "standard_error")},
        "layer": [head // 12 for head in range(heads) for _ in range(subsets)],
        "head": [head % 12 for head in range(heads) for _ in range(subsets)],
        "subset": [f"Part {part}" for _ in range(heads) for part in range(subsets)],
        "documents": [30_000] * heads * subsets,
    }
    scope = Scope(run_id="a-1")
    answers.add(Heatmap(kind="heatmap", scope=scope), Answer({}, tuple(numbers)))
    histograms = Histograms(kind="histograms", scope=scope, statistics=("sink_mass",))
    answers.add(histograms, Answer({}, (counts,)))
    answers.add(Subsets(kind="subsets", scope=scope), Answer({"table": columns}))
    # 24 statistics of GPT-2 small over 22 subsets of the Pile, beside a page of 60 KB.
    assert len(packed(answers.by_key)) * 24 < 1_400_000


def test_checkpoints_stand_in_the_order_of_training() -> None:
    steps = enumerate([1000, 0, 200])
    rows = [{"run_id": f"ck-{i}", "name": "ck", "step": at, "calibrates": None} for i, at in steps]
    assert [row["step"] for row in shown_runs(rows)] == [0, 200, 1000]


def test_a_page_holds_means_against_the_threshold_of_the_view(database: RunDatabase) -> None:
    of_runs = rankings(database)
    assert {*of_runs} == {"a-1", "b-2", "c-3", "d-4"}
    sinks = "SELECT run_id, sink_mass, sink_alpha > 0.3 FROM sink_heads"
    copies = "SELECT run_id, induction_score, induction_score >= 0.4 FROM induction_heads"
    for statistic, view, sql in (
        ("sink_mass", "sink_heads", sinks), ("induction_score", "induction_heads", copies),
    ):  # fmt: skip
        passing = 0
        for run_id, mean, passes in database.rows(sql):
            about = of_runs[run_id][statistic]
            assert about["view"] == view
            threshold = about["threshold"]
            assert passes == (mean > threshold if about["is_strict"] else mean >= threshold)
            passing += passes
        assert 0 < passing < len(database.rows(sql))


def test_places_of_the_input_are_names() -> None:
    options = json.dumps({"files": ["/home/me/pile/00.jsonl", "s3://mine/b/*.txt", "docs/*.md"]})
    words = _input_words({"input_options": options, "documents": None, "bos": None})
    assert words == "files 00.jsonl *.txt docs/*.md"


@pytest.mark.long
def test_names_of_wide_characters_have_their_room(tab: Page, tmp_path: Path) -> None:
    sets = ["维基百科中文", "Github"]
    write_run(tmp_path, "a-1", cells(), family="pile", pile_sets=sets, layers=1, heads=2)
    write_report(open_runs(tmp_path), tmp_path / "report.html")
    tab.open((tmp_path / "report.html").as_uri())
    # Six characters of 10 pixels, and how many sequences there are.
    starts = [float(x) for x in tab.attributes("#subsets .bar", "x")]
    assert len(starts) == 2
    assert min(starts) > 6 * 10 + 4 * 6


def test_a_head_prints_as_a_table(runs: Path) -> None:
    head = headcount.open(runs / "run_id=d-4").head("L2H4")
    lines = repr(head).splitlines()
    assert lines[0] == "L2H4 of a <b>model</b>, d-4, none"
    assert lines[1].split() == ["statistic", "mean", "standard_error", "percentile"]
    assert lines[2].split() == ["sink_mass", "0.8828", "0.004511", "100"]
    assert len(lines) == 2 + len(cells())


def test_models_are_called_by_their_folder(tmp_path: Path) -> None:
    for run_id, family in (("a-1", "repeated_random"), ("b-2", "uniform_random")):
        write_run(tmp_path, run_id, cells(), family=family, model="/home/me/models/gpt2/")
    write_report(open_runs(tmp_path), tmp_path / "report.html")
    data = json.dumps(unpacked((tmp_path / "report.html").read_text(encoding="utf-8")))
    assert '"model": "gpt2"' in data
    assert "/home/me" not in data


def test_many_runs_leave_out_what_one_file_cannot_hold() -> None:
    lists = {"statistics": ["s"] * 24}
    small, large = ({"n_layers": n, "n_heads": m, **lists} for n, m in ((12, 12), (48, 25)))
    of_one, of_large, of_many = detail_of([small]), detail_of([large]), detail_of([large] * 8)
    assert [one.distributions for one in (of_one, of_large, of_many)] == [True, True, False]
    assert of_one.heads_with_examples == 150
    assert of_many.heads_with_examples < 20


TextRun = tuple[Path, Any, Any]
HOSTILE = "So </script><img src=x onerror=alert(1)> they say. <b>And on</b> it goes, & on. " * 6


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    """A run of a bundled model over a hostile text, with curves, profiles and predictions."""
    from headcount.workers.replica import Replica
    from tests.toys.runs_here import measure_here

    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(HOSTILE, encoding="utf-8")
    fields = {
        "model": "bundled:gpt2-mini", "n_ctx": 40, "sequences": 6,
        "input": {"family": "text", "files": [str(folder / "text.txt")], "packing": "concat"},
        "interventions": ["none", "zero_head(1,6)", "head_to_first(1,0)"],
        "statistics": ["sink_mass", "induction_score"], "predictions": ["loss", "losses"],
        "curves": ["attention_received_by_key"], "profiles": ["attention_by_lag"],
        "out": str(folder),
    }  # fmt: skip
    plan = measure_here(fields, "small")
    return local(plan.run.path), Replica(plan.info, plan.scan), plan.sequences.shard(0)


@pytest.mark.long
def test_the_report_of_a_text(tab: Page, text_run: TextRun, tmp_path: Path) -> None:
    path, replica, shard = text_run
    output = tmp_path / "report.html"
    write_report(open_runs(path), output, RunModels(str(path)))
    tab.open(f"{output.as_uri()}#head=L1H5&statistic=sink_mass")
    # The text of the most active sequence, from its first token on, which is framed.
    (excerpt, *_) = tab.texts(".excerpt .tokens")
    start = excerpt.removeprefix("<|endoftext|>")
    assert start != excerpt
    assert start[:30] in HOSTILE
    assert tab.attributes(".excerpt img, .excerpt b", "src") == []
    assert tab.texts(".excerpt mark") == ["<|endoftext|>"] * len(tab.texts(".excerpt"))
    assert len(tab.texts("#curves [data-series=attention_by_lag] circle")) == 40
    assert len(tab.texts("#curves [data-series=attention_received_by_key] circle")) == 40
    tab.show("intervention=zero_head(1,6)")
    by_name = {str(one): one for one in replica.scan.interventions}
    untouched, changed = (
        replica.measure(shard.tokens, by_name[name]).sequences["loss"].astype(float)
        for name in ("none", "zero_head(1,6)")
    )
    row = tab.texts("[data-predictions] tbody td")
    assert row[:2] == ["loss", "nats"]
    # All sequences are of one document, so the means have no errors.
    assert numbers(row[2]) == pytest.approx([changed.mean()], rel=0.06)
    assert numbers(row[3]) == pytest.approx([(changed - untouched).mean()], rel=0.06)
    assert tab.browser.get_log("browser") == []


def unpacked_page(page: Path) -> Any:
    return unpacked(page.read_text(encoding="utf-8"))


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.replace("−", "-").split(" ± ")]


def test_the_report_of_a_text_has_examples_engines_and_predictions(
    text_run: TextRun, tmp_path: Path
) -> None:
    path, *_ = text_run
    write_report(open_runs(path), tmp_path / "report.html", RunModels(str(path)))
    data = unpacked_page(tmp_path / "report.html")
    (run,) = data["overview"]["runs"]
    of_run = f"details/{run['run_id']}"
    engines = {
        name: data["answers"][f"{of_run}/{name}"]["engines"] for name in run["interventions"]
    }
    assert engines == {
        "none": "fused",
        "zero_head(1,6)": "fused",
        "head_to_first(1,0)": "fused, with built patterns in layers 1",
    }
    # Tokens are words and not their numbers.
    assert '"<|endoftext|>"' in json.dumps(data)


def test_a_card_without_a_tokenizer_has_numbers_and_its_curves(text_run: TextRun) -> None:
    path, *_ = text_run
    card = head_card(open_runs(path), "L1H5")
    assert card.note == "Tokens are shown as numbers: the tokenizer of the run was not at hand."
    assert card.most["sink_mass"][0].tokens[0].strip().isdigit()
    profiles = {curve.profile for curve in card.curves}
    assert profiles == {"attention_by_lag", "attention_received_by_key"}


@pytest.mark.long
def test_one_head_of_each_layer_has_a_map(tab: Page, tmp_path: Path) -> None:
    """Nothing shows whether the heads of a layer share a value."""
    write_run(tmp_path, "a-1", {"sink_mass": lambda row: row.layer / 4}, layers=3, heads=1)
    write_report(open_runs(tmp_path), tmp_path / "report.html")
    tab.open((tmp_path / "report.html").as_uri())
    tab.run("document.getElementById('maps-card').open = true")
    tab.wait()
    assert tab.attributes("[data-map]", "data-map") == ["sink_mass"]


@pytest.mark.long
def test_a_card_as_a_document(tab: Page, text_run: TextRun, tmp_path: Path) -> None:
    path, *_ = text_run
    card = head_card(open_runs(path), "L1H5")
    (tmp_path / "card.html").write_text(card_html(card), encoding="utf-8")
    tab.open((tmp_path / "card.html").as_uri())
    assert tab.find("h2").text == "L1H5"
    tab.find("[data-statistic=induction_score] button").click()
    assert tab.texts(".detail-name") == ["induction_score"]
    assert tab.browser.get_log("browser") == []


# Damage


@pytest.mark.parametrize("table", ["heads", "sequences"])
def test_a_query_that_fails_is_an_error_and_no_empty_place(tmp_path: Path, table: str) -> None:
    run = write_run(tmp_path, "a-1", cells(), family="pile", pile_sets=["Github"])
    # Other data under the same size and footer. The commit is changed to it: otherwise its shard
    # would be left out.
    file = local(data_file(run, table, "none", 0))
    content = file.read_bytes()
    file.write_bytes(content[:4] + bytes(196) + content[200:])
    commit = local(run.commit_file(0))
    committed, other = (digest_of(data) for data in (content, file.read_bytes()))
    commit.write_text(commit.read_text().replace(committed, other))
    with one_line(QueryError, "Invalid data"):
        write_report(open_runs(tmp_path), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_report_has_the_answers_of_the_explorer_for_every_head(runs: Path, report: Path) -> None:
    answers = unpacked_page(report)["answers"]
    with closing(Asker(runs)) as ask:
        ask.run_id = "a-1"
        means = np.array(answers["heatmap/a-1/none"]["arrays"][0], float)
        histograms = answers["histograms/a-1/none"]
        names = histograms["statistics"]
        counts = np.reshape(histograms["arrays"][0], (len(names), len(LABELS), DRAWN_BINS))
        subsets = pa.table(answers["subsets/a-1/none"]["table"]).to_pylist()
        for place, (layer, index) in enumerate(np.ndindex(LAYERS, HEADS)):
            head = {"layer": layer, "head": index}
            (mean, *_) = ask("heatmap", head=head)["arrays"]
            found = means.reshape(len(names), -1)[:, place]
            assert found == pytest.approx(mean.ravel(), rel=1e-5, nan_ok=True)
            own = ask("histograms", head=head, statistics=names[:12])
            assert own["axes"] == {name: histograms["axes"][name] for name in names[:12]}
            assert (counts[:12, place] == own["arrays"][0]).all()
            about = head | {"statistic": "sink_mass"}
            rows = [row for row in subsets if row.items() >= about.items()]
            own_rows = ask("subsets", head=head, statistic="sink_mass")["rows"]
            assert [row["subset"] for row in rows] == [row["subset"] for row in own_rows]
            assert [row["mean"] for row in rows] == pytest.approx(
                [row["mean"] for row in own_rows], rel=1e-5
            )


@pytest.mark.long
def test_a_report_leaves_out_what_was_not_measured(report: Path) -> None:
    for key, answer in unpacked_page(report)["answers"].items():
        assert {*answer.get("statistics", [])} <= {*cells()}
        assert not (key.startswith("curves/") and answer["table"])
