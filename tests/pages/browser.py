"""A real browser for the tests of our pages. If there is none, they are skipped."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1400,1000"
)


class Page:
    """A page of ours in a browser."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns."""
        return self.browser.execute_script(script, *arguments)

    def later(self, script: str) -> Any:
        """What a script gives to its last argument."""
        return self.browser.execute_async_script(script)

    def open(self, address: str) -> None:
        """Open a page from the beginning, also at an address that differs behind its `#` alone."""
        self.browser.get("about:blank")
        self.browser.get(address)
        self.wait()

    def show(self, words: str) -> None:
        """Let the page show what the end of an address says."""
        self.run("location.hash = arguments[0]", words)
        self.wait()

    def wait(self) -> None:
        """Wait until the page has asked for everything, got it and drawn it."""
        until, quiet_looks = time.monotonic() + 30, 0
        quiet = "const p = document.body; return p.dataset.ready === 'yes' && p.ariaBusy !== 'true'"
        while quiet_looks < 3:
            assert time.monotonic() < until, "the page still waits for an answer"
            quiet_looks = quiet_looks + 1 if self.run(quiet) else 0
            time.sleep(0.03)

    def find(self, selector: str) -> WebElement:
        """The first element of a selector."""
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """All elements of a selector."""
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click, and wait for what it shows."""
        self.find(selector).click()
        self.wait()

    def text(self, selector: str) -> str:
        """What can be read of an element."""
        return self.find(selector).text

    def texts(self, selector: str) -> list[str]:
        """The whole text of each element, whether it can be seen or not."""
        of_nodes = "[...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
        return self.run(f"return {of_nodes}", selector)

    def attributes(self, selector: str, name: str) -> list[str]:
        """An attribute of each element."""
        of_nodes = "[...document.querySelectorAll(arguments[0])]"
        return self.run(
            f"return {of_nodes}.map((node) => node.getAttribute(arguments[1]))", selector, name
        )

    def rows(self, selector: str) -> list[list[str]]:
        """The cells of a table, by row."""
        script = """return [...document.querySelectorAll(`${arguments[0]} tbody tr`)]
            .map((row) => [...row.cells].map((cell) => cell.textContent))"""
        return self.run(script, selector)

    def cell(self, label: str) -> WebElement:
        """The cell of a head in the heatmap."""
        return self.find(f"#heatmap [aria-label^='{label} ']")

    def device(self, command: str, **values: object) -> Any:
        """A command of Chromium's own protocol."""
        return self.browser.execute_cdp_cmd(command, values)


def requested_urls(driver: webdriver.Chrome) -> list[str]:
    """What the browser asked for since its log was read, but for data inside the page."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if not url.startswith(("data:", "blob:"))]


def cut_tables(page: Page) -> list[list[object]]:
    """Tables that are wider than their place, where nothing says that it scrolls."""
    return page.run(
        """return [...document.querySelectorAll("table")].filter((table) => {
            const box = table.parentElement, looks = getComputedStyle(box);
            const hasShadow = looks.backgroundImage.includes("gradient");
            const scrolls = looks.overflowX === "auto" && hasShadow;
            return Math.max(table.offsetWidth, box.scrollWidth) > box.clientWidth && !scrolls;
        }).map((table) => [table.textContent.slice(0, 60), table.offsetWidth])"""
    )


def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with a profile of its own, which logs its network requests and its console."""
    if not (CHROMIUM and CHROMEDRIVER):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # Two browsers that start at the same moment may refuse each other. Each user has a lock: the
    # lock of another user cannot be opened.
    lock = Path(tempfile.gettempdir()) / f"headcount-browser-{os.getuid()}.lock"
    with FileLock(lock):
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()
