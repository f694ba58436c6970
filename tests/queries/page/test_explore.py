"""The explorer as a process: who may ask what, and what its page does in a real browser."""

import asyncio
import http.client
import json
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from selenium import webdriver
from selenium.webdriver import ActionChains, Keys

from headcount.jobs.upkeep.compaction import compact
from headcount.queries.ask.asking import RunDatabase, open_runs
from headcount.queries.explore.query_engine import Engine
from headcount.queries.explore.server import HEADERS, MOST_BYTES, Guard, make_app
from headcount.schemas.files.run_directory import RunDirectory
from tests import ROOT
from tests.pages.browser import Page, chromium, requested_urls
from tests.queries.page.test_explore_queries import (
    CURVES,
    HEAD,
    SEQUENCES,
    STRIDE,
    let_be_large,
    unpacked,
    write,
)
from tests.tools.processes import DIES_WITH_ITS_PARENT
from tests.toys.commands import ended, error_of

HOSTILE_RUN = "a-b_0.1"
HOSTILE_SUBSET = "<img src=x onerror=document.title='stolen'>"


class Explorer(NamedTuple):
    address: str
    port: int
    token: str
    runs: Path
    files: list[Path]
    """The files of the runs before anybody asked."""


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    sets = [HOSTILE_SUBSET, "ArXiv"]
    runs = write(tmp_path_factory.mktemp("runs"), HOSTILE_RUN, pile_sets=sets, **CURVES)
    # Something in a run's own directory that is not a row.
    (runs / "secret.txt").write_text("secret")
    files = sorted(runs.rglob("*"))
    words = [sys.executable, "-m", "headcount", "explore", str(runs), "--no-open", "--memory=300MB"]
    command, pipe = [*DIES_WITH_ITS_PARENT, *words], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    assert process.stdout
    address = process.stdout.readline().strip()
    parts = urlsplit(address)
    yield Explorer(address, parts.port or 0, parts.fragment, runs, files)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said


class Reply(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]


def request(
    explorer: Explorer,
    method: str = "POST",
    path: str = "/ask",
    body: object = None,
    headers: Mapping[str, str | None] | None = None,
) -> Reply:
    """Send a request as a page sends it, with other headers where some are given."""
    connection = http.client.HTTPConnection("127.0.0.1", explorer.port, timeout=20)
    sent = {
        "Host": f"127.0.0.1:{explorer.port}",
        "Authorization": f"Bearer {explorer.token}",
        "Content-Type": "application/json",
    } | dict(headers or {})
    content = body if isinstance(body, bytes) else json.dumps(body or {"kind": "overview"}).encode()
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    if method == "POST":
        connection.putheader("Content-Length", str(len(content)))
    connection.endheaders(content if method == "POST" else None)
    response = connection.getresponse()
    reply = Reply(response.status, response.read(), dict(response.getheaders()))
    connection.close()
    return reply


HOSTS = "evil.example evil.example:80 127.0.0.1.evil.example 127.0.0.1@evil.example"
HEADERS_OF_OTHERS: dict[tuple[str, int], list[str | None]] = {
    ("Host", 421): [*HOSTS.split(), "evil.example@127.0.0.1", "127.0.0.1:x", ""],
    # Among them our own at another port, and with https.
    ("Origin", 403): ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"],
    ("Sec-Fetch-Site", 403): ["cross-site", "same-site"],
    ("Authorization", 401): [None, "Bearer x", "Bearer \u00e9", "Basic x"],
    ("Content-Type", 415): [None, "text/plain", "application/x-www-form-urlencoded"],
}
"""A header that a page of ours sends otherwise, and the status that it gets."""

PATHS = [
    *("/ask", "/../headcount.py", "/%2e%2e%2fserver.py", "/..%2f..%2fsecret.txt", "//etc/passwd"),
    *("/index.html%00.js", "/server.py"),
]
# `test_queries` has more of them: this is the way there, and what is too large for a page.
STATEMENTS = [
    "DROP VIEW heads", "SELECT 1\n) TO 'out.csv' --", "FROM read_text('/etc/passwd')", "",
    "SELECT repeat('x', 3000000) FROM range(5)", "SELECT list(i) FROM range(100000000000) t(i)",
]  # fmt: skip
REQUESTS: list[tuple[int, dict[str, Any]]] = [
    *(
        (status, {"headers": {name: value}})
        for (name, status), values in HEADERS_OF_OTHERS.items()
        for value in values
    ),
    (421, {"method": "GET", "path": "/", "headers": {"Host": "e.x"}}),
    (403, {"method": "OPTIONS", "headers": {"Origin": "http://evil.example"}}),
    (413, {"body": b" " * (MOST_BYTES + 1)}),
    # No JSON, no text, and too deep.
    *((400, {"body": body}) for body in (b"{", b"\xff\xfe", b"[" * 100_000)),
    *((400, {"body": {"kind": "sql", "text": text}}) for text in STATEMENTS),
    *((404, {"method": "GET", "path": path}) for path in PATHS),
    *((405, {"method": method, "path": "/index.html"}) for method in ("PUT", "DELETE")),
]


@pytest.mark.parametrize(("status", "attack"), REQUESTS, ids=lambda one: str(one)[:60])
def test_an_attack_is_refused(explorer: Explorer, attack: dict[str, Any], status: int) -> None:
    reply = request(explorer, **attack)
    assert reply.status == status, reply.body
    assert not re.search("\n|Traceback", reply.error)
    assert HEADERS.items() <= reply.headers.items()


def test_after_all_attacks_nothing_is_written_and_queries_are_answered(explorer: Explorer) -> None:
    assert sorted(explorer.runs.rglob("*")) == explorer.files
    query = {"kind": "sql", "text": "SELECT count(*) FROM heads"}
    assert unpacked(request(explorer, body=query).body)["rows"] == [[420]]


def test_the_page_is_files_of_ours_alone(explorer: Explorer) -> None:
    page = request(explorer, "GET", "/", headers={"Authorization": None})
    assert page.status == 200
    assert HEADERS.items() <= page.headers.items()
    assert explorer.token.encode() not in page.body
    assert b"http" not in page.body.replace(b"http-equiv", b"")
    for name in ("page.js", "draw.js", "page.css"):
        assert request(explorer, "GET", f"/{name}").status == 200
    # Behind a tunnel the port is another one.
    assert request(explorer, "GET", "/", headers={"Host": "localhost:1"}).status == 200


def test_only_who_opens_the_port_to_others_is_known_by_other_names() -> None:
    assert not Guard("x", "127.0.0.1").is_known_host("192.0.2.7:80")
    opened_guard = Guard("x", "0.0.0.0")
    assert opened_guard.is_known_host("192.0.2.7:80")
    assert opened_guard.is_known_host(f"{socket.gethostname()}:80")
    assert not opened_guard.is_known_host("evil.example:80")


def test_it_listens_on_this_machine_alone(explorer: Explorer) -> None:
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", explorer.port), timeout=2)


def test_a_malformed_request_is_refused_without_a_word_on_the_terminal(explorer: Explorer) -> None:
    with socket.create_connection(("127.0.0.1", explorer.port), timeout=10) as connection:
        connection.sendall(b"POST /ask HTTP/1.1\r\n\r\n")
        assert b" 400 " in connection.recv(100)


def test_a_port_that_is_taken_is_one_line(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = error_of("explore", explorer.runs, "--port", explorer.port, "--no-open")
    assert told == (
        f"--port {explorer.port}: is taken by another program; --port 0 takes a free one"
    )


def test_a_run_of_many_files_says_first_what_it_costs_and_what_merging_would(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    shutil.copytree(explorer.runs, out)
    (run,) = out.glob("run_id=*")
    files = sum(1 for _ in run.rglob("*.parquet"))
    for number in range(10_000 - files):
        (run / f"heads/intervention=none/{number}.parquet").touch()
    # The port is taken: it ends when the runs are open.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    end = ended("explore", out, "--port", explorer.port, "--no-open")
    said, error = end.stderr.splitlines()
    assert said == (
        f"{out}: 10,000 files, which take the page about 15 s of a core and 0.6 GB; headcount "
        f"compact {out} merges them once, in 12 s of a core, and then it opens in seconds"
    )
    assert "is taken by another program" in error


# The page in a browser


SENT = "return document.body.dataset.sent"
"""How many queries the page has asked."""


def count(page: Page, statistic: str) -> int:
    """How many values a histogram shows."""
    return int(page.find(f'[data-hist="{statistic}"]').get_attribute("data-count") or -1)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    yield from chromium(tmp_path_factory.mktemp("chromium"))


@pytest.fixture(scope="module")
def page(browser: webdriver.Chrome, explorer: Explorer) -> Page:
    page = Page(browser)
    page.open(explorer.address)
    return page


@contextmanager
def tab(page: Page, address: str | None = None) -> Iterator[None]:
    page.browser.switch_to.new_window("tab")
    try:
        if address:
            page.open(address)
        yield
    finally:
        page.browser.close()
        page.browser.switch_to.window(page.browser.window_handles[0])


@pytest.fixture(scope="module")
def database(explorer: Explorer) -> RunDatabase:
    """The same runs, asked in SQL."""
    return open_runs(explorer.runs)


def shown(page: Page, query: str, database: RunDatabase) -> None:
    """Hold the heatmap to SQL that gives layer, head and mean."""
    rows = database.rows(query)
    titles = page.run(
        """return Object.fromEntries([...document.querySelectorAll('#heatmap [data-cell]')]
            .map(cell => [cell.dataset.cell, cell.querySelector('title').textContent]))"""
    )
    assert len(rows) == len(titles) == 6
    for layer, head, mean in rows:
        words = titles[f"{layer}.{head}"].split()
        number = float(next(word for word in words if word[:1].isdigit()))
        assert number == pytest.approx(mean, rel=1e-3), (layer, head)


OF_RUN = "FROM heads WHERE intervention = 'none'"


def test_the_page_opens_with_a_heatmap_and_a_click_shows_the_card_of_a_head(
    page: Page, explorer: Explorer, database: RunDatabase
) -> None:
    shown(page, f"SELECT layer, head, avg(sink_mass) {OF_RUN} GROUP BY ALL", database)
    # The token has left the address.
    assert explorer.token not in page.browser.current_url
    assert page.text("#head-name").startswith("Head L")
    assert page.text("#progress").startswith(f"{SEQUENCES} sequences")
    assert len(page.all("[data-hist]")) == 3
    page.click('[data-cell="1.2"]')
    assert page.text("#head-name") == "Head L1H2"
    ((mean,),) = database.rows(f"SELECT avg(entropy) {OF_RUN} AND layer = 1 AND head = 2")
    cells = page.text('[data-statistic="entropy"]').split()
    assert float(cells[1]) == pytest.approx(mean, rel=1e-3)
    # After the means of all heads.
    assert cells[5].isdigit()
    assert "L1H2 has the highest sink_mass" in page.text("#extremes-name")
    assert page.text("[data-text]").startswith("0 1 2 3 4")
    assert page.text("[data-text] mark").strip() == "0"


@pytest.mark.long
def test_sql_behind_a_figure_answers_and_hostile_text_is_text(page: Page) -> None:
    page.click('[data-cell="1.2"]')
    assert len(page.all("#curves [data-series=attention_by_lag] circle")) == 5
    assert page.all("#curves [data-series=attention_received_by_key]")
    page.click("#curves .behind summary")
    page.click("#curves .behind button:nth-of-type(2)")
    page.click("#run-sql")
    assert page.text("#sql-note").startswith("5 rows")
    box = page.find("#sql")
    for sql in ("SELECT layer, count(*) FROM heads GROUP BY ALL ORDER BY 1", "DROP VIEW heads"):
        box.clear()
        box.send_keys(sql, Keys.CONTROL, Keys.ENTER)
        page.wait()
        assert page.text("#sql-rows tbody").split() == ["0", "210", "1", "210"]
    assert "queries are read-only" in page.text("#sql-note")
    # A long name is cut where it is drawn, and whole in the title.
    assert HOSTILE_SUBSET in str(page.find("#subsets").get_attribute("textContent"))
    assert HOSTILE_SUBSET in page.text("#extremes")
    assert page.all("main img") == []
    assert page.browser.title == "headcount explorer"


@pytest.mark.long
def test_a_brush_shows_what_sql_says_and_asks_nothing_while_it_moves(
    page: Page, explorer: Explorer, database: RunDatabase
) -> None:
    histogram = page.find('[data-hist="value_norm"]')
    ActionChains(page.browser).scroll_to_element(histogram).perform()
    # The pointer enters: the page asks for the cube.
    ActionChains(page.browser).move_to_element(histogram).perform()
    page.wait()
    asked = int(page.run(SENT))
    drag = ActionChains(page.browser, duration=0).move_to_element(histogram).click_and_hold()
    for _ in range(30):
        drag.move_by_offset(4, 0)
    drag.perform()
    time.sleep(0.1)
    assert int(page.run(SENT)) == asked
    assert len(page.run("return performance.getEntriesByName('brush')")) > 2
    ActionChains(page.browser).release().perform()
    page.wait()
    grips = page.all('[data-hist="value_norm"] .handle')
    first, end = (int(grip.get_attribute("aria-valuenow") or -1) for grip in grips)
    query = {"kind": "histograms", "scope": {"run_id": HOSTILE_RUN}, "head": HEAD}
    answer = request(explorer, body=query | {"statistics": ["value_norm"]}).body
    low, high = unpacked(answer)["axes"]["value_norm"]
    first_value, end_value = (low + (high - low) * edge / 128 for edge in (first, end))
    in_brush = f"value_norm >= {first_value} AND value_norm < {end_value}"
    picked = f"SELECT sequence {OF_RUN} AND layer = 1 AND head = 2 AND {in_brush}"
    rows = database.rows(picked)
    assert 0 < len(rows) < SEQUENCES
    assert (count(page, "sink_mass"), count(page, "value_norm")) == (len(rows), SEQUENCES)
    of_picked = f"{OF_RUN} AND sequence IN ({picked})"
    shown(page, f"SELECT layer, head, avg(sink_mass) {of_picked} GROUP BY ALL", database)
    table = page.all("#extremes [data-sequence]")
    assert len(table) == min(len(rows), 20)
    assert page.text("#picked") == f"{len(rows)} of {SEQUENCES} sequences picked"
    of_all = "Every statistic of this head\nOver all sequences, not those that are picked"
    assert page.text("#card").startswith(of_all)


@pytest.mark.long
def test_a_brush_moves_with_the_keyboard(page: Page) -> None:
    page.click("#clear")
    handle = page.all('[data-hist="entropy"] .handle')[0]
    for keys, ends in {
        (*[Keys.PAGE_DOWN, Keys.PAGE_UP] * 2, *[Keys.PAGE_UP] * 4, Keys.ARROW_RIGHT): ("33", "41"),
        (Keys.ESCAPE,): ("0",),
    }.items():
        page.run("arguments[0].focus()", handle)
        page.wait()
        ActionChains(page.browser).send_keys(*keys).perform()
        time.sleep(0.4)
        page.wait()
        assert handle.get_attribute("aria-valuenow") in ends
        assert (0 < count(page, "sink_mass") < SEQUENCES) == (len(keys) > 1)


def what_is_chosen(page: Page) -> list[Any]:
    return page.run(
        """const value = (id) => document.getElementById(id).value;
        const texts = (css) => [...document.querySelectorAll(css)].map((node) => node.textContent);
        return [
            ...["run", "intervention", "statistic", "subset"].map(value),
            ...["first-layer", "last-layer"].map(value),
            ...texts("#head-name, #picked, .histogram h3, .histogram .range"),
            ...[...document.querySelectorAll("input:checked")].map((input) => input.value),
            [...document.querySelectorAll("[data-hist]")].map((figure) => figure.dataset.count),
        ]"""
    )


@pytest.mark.long
def test_a_bookmark_opens_all_that_was_chosen_and_back_takes_it_back(page: Page) -> None:
    page.browser.get("about:blank")
    page.browser.back()
    page.wait()
    seen: list[list[Any]] = []

    def note() -> None:
        page.wait()
        seen.append(what_is_chosen(page))

    note()
    page.find('#first-layer option[value="1"]').click()
    note()
    page.find("#shown summary").click()
    page.find("#shown-list label:nth-child(2) input").click()
    note()
    page.find("#shown summary").click()
    page.find('[name=meaning][value="rows"]').click()
    page.find('[name=end][value="lowest"]').click()
    note()
    page.run("document.querySelector('[data-hist] .handle').focus()")
    ActionChains(page.browser).send_keys(*[Keys.PAGE_UP] * 2).perform()
    time.sleep(0.4)
    note()
    assert "rows of all heads picked" in str(seen[-1])
    assert all(one != other for one, other in pairwise(seen))
    with tab(page, page.browser.current_url):
        assert what_is_chosen(page) == seen[-1]
    page.browser.refresh()
    page.wait()
    assert what_is_chosen(page) == seen[-1]
    # A brush is no step of its own.
    page.click('[data-cell="0.0"]')
    for steps, expected in ((1, seen[-1]), (2, seen[2]), (1, seen[1])):
        for _ in range(steps):
            page.browser.back()
        page.wait()
        assert what_is_chosen(page) == expected


@pytest.mark.long
def test_what_only_a_server_has_and_is_not_here_is_said(page: Page) -> None:
    assert not page.find("#absent").is_displayed()
    page.run(
        "location.hash = arguments[0]",
        "run=x&layers=1-7&subset=x&with=a/b&head=L9H0&statistic=s&brush=y:1-3",
    )
    page.wait()
    assert page.text("#absent") == (
        f"run x is not here, {HOSTILE_RUN} is shown; subset x is not here, all of the input is "
        "shown; layers 1 to 7 is not here, every layer is shown; with a/b is not here, no "
        "comparison is shown; head L9H0 is not here, the head with the largest mean is shown; "
        "statistic s is not here, sink_mass is shown; brush y is not here, every value is shown."
    )
    page.run("location.hash = 'head=first'")
    page.wait()
    assert page.text("#absent") == "first cannot be read."
    page.click('[data-cell="1.2"]')
    assert not page.find("#absent").is_displayed()


@pytest.mark.long
def test_the_page_asked_its_host_alone_and_logged_nothing(page: Page, explorer: Explorer) -> None:
    urls = requested_urls(page.browser)
    assert [url for url in urls if explorer.token in url.partition("#")[0]] == []
    hosts = {urlsplit(url).netloc for url in urls if url.startswith("http")}
    assert hosts == {f"127.0.0.1:{explorer.port}"}
    # The refused DROP is logged by the browser itself.
    messages = [entry["message"] for entry in page.browser.get_log("browser")]
    assert [message for message in messages if "400 (Bad Request)" not in message] == []


@pytest.mark.long
def test_refreshing_beside_a_running_scan_shows_more_and_never_an_error(
    page: Page, tmp_path: Path
) -> None:
    scan = write(tmp_path / "scan", "live", per_shard=5)
    run = write(tmp_path / "runs", "live", per_shard=5, commit=[0])
    engine = Engine(str(run), fresh_seconds=0)
    with served(engine) as address, tab(page, address):
        assert page.text("#progress").startswith(f"5 of {SEQUENCES} sequences are in")
        for shard in range(1, SEQUENCES // 5):
            # Data files first and the commit last, as a replica writes them.
            for kind, sequences in (("parquet", 5 * shard), ("json", 5 * shard + 5)):
                for source in (scan / "run_id=live").rglob(f"*{shard:05d}*.{kind}"):
                    shutil.copy(source, run / source.relative_to(scan))
                page.click("#refresh")
                assert not page.find("#trouble").is_displayed()
                assert page.text("#warnings") == ""
                assert page.text("#progress").startswith(f"{sequences} ")
        assert count(page, "sink_mass") == SEQUENCES
        assert page.browser.get_log("browser") == []
    engine.close()


@contextmanager
def served(engine: Engine, token: str = "t" * 24, port: int = 0) -> Iterator[str]:
    """The address of an engine's page, served by a thread."""
    guard = Guard(token, "127.0.0.1")
    addresses: queue.Queue[str] = queue.Queue()
    has_ended = threading.Event()

    async def serve() -> None:
        runner = web.AppRunner(make_app(engine, guard), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, guard.host, port).start()
        addresses.put(f"http://{guard.host}:{runner.addresses[0][1]}/#{guard.token}")
        await asyncio.to_thread(has_ended.wait)
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[serve()], daemon=True)
    thread.start()
    try:
        yield addresses.get(timeout=10)
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.long
def test_a_page_over_a_sample_says_so(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_be_large(monkeypatch)
    write(tmp_path, "large")
    compact(RunDirectory.of(tmp_path, "large"))
    engine = Engine(str(tmp_path))
    with tab(page), served(engine) as address:
        page.open(address)
        assert page.text("#brush-note").endswith(f"1 of {STRIDE} sequences is read.")
        assert count(page, "sink_mass") == len(range(0, SEQUENCES, STRIDE))
    engine.close()


@pytest.mark.long
def test_who_has_no_token_is_told_and_no_address_keeps_a_token(page: Page, tmp_path: Path) -> None:
    engine = Engine(str(write(tmp_path, "again")))
    first, second, wrong = "a" * 24, "b" * 24, "c" * 24
    with served(engine, first) as address:
        page.open(address)
        page.click('[data-cell="0.1"]')
        bookmark = page.browser.current_url
        # An address that another site leads to takes nothing from the reader.
        page.run("location.hash = arguments[0]", wrong)
        page.wait()
        assert "paste the address that headcount explore printed" in page.text("#trouble")
        page.browser.refresh()
        page.wait()
        assert page.browser.current_url == bookmark
        assert page.text("#head-name") == "Head L0H1"
        page.browser.get("about:blank")
    port = urlsplit(address).port
    assert port is not None
    with served(engine, second, port) as address:
        page.open(bookmark)
        assert "paste the address that headcount explore printed" in page.text("#trouble")
        assert not page.find("main").is_displayed()
        # As a paste into the address bar of the open tab.
        page.run("location.href = arguments[0]", address)
        page.wait()
        assert page.text("#head-name") == "Head L0H1"
        assert not page.find("#trouble").is_displayed()
        assert page.browser.current_url == bookmark
        assert page.run("return document.cookie") == ""
        # The refused queries are in the browser's own log.
        assert {"401" in entry["message"] for entry in page.browser.get_log("browser")} == {True}
    engine.close()
