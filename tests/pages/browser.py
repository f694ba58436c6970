"""A real browser for the tests of our pages. If there is none, they are skipped."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from selenium import webdriver

CHROMIUM = shutil.which("chromium")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--window-size=1400,1000"
)


def requested_urls(driver: webdriver.Chrome) -> list[str]:
    """What the browser asked for since its log was read, but for data inside the page."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [url for url in urls if not url.startswith(("data:", "blob:"))]


def cut_tables(driver: webdriver.Chrome) -> list[list[object]]:
    """Tables that are wider than their place, where nothing says that it scrolls."""
    return driver.execute_script(
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
