"""Draw the pictures in docs/images, from the runs and the report of `make demo`.

`python -m tests.pages.report_pictures runs/demo report.html`, in the repository's root. It needs
Chromium and its driver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from headcount.queries.report.html_page import unpacked
from tests import ROOT
from tests.pages.browser import chromium

IMAGES = ROOT / "docs" / "images"

TOP_OF_PAGE = (1440, 1260)
"""Width and height of report.png and explorer.png, the tops of both pages."""

SHOWN = "bundled:gpt2-mini"
"""Model of the run that is shown."""

CHOSEN = "head=L1H5&statistic=sink_mass&brush=sink_mass:0-82"
"""What is chosen in the explorer: a head, and the sequences on which it rests least."""


def draw_pictures(driver: webdriver.Chrome, runs: str, report: Path) -> None:
    """Write report.png, dormant.png (its scatter plot) and explorer.png."""
    width, height = TOP_OF_PAGE
    # A window of Chromium is larger than the page that it shows.
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # Pictures are light, whatever this machine prefers.
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", light)

    run_id = shown_run(unpacked(report.read_text(encoding="utf-8")))
    driver.get(f"{report.resolve().as_uri()}#run={run_id}")
    WebDriverWait(driver, 30).until(lambda _: all_plots_drawn(driver))
    driver.save_screenshot(str(IMAGES / "report.png"))
    draw_dormant_heads(driver)

    with explorer(runs) as address:
        page, _, _ = address.partition("#")
        driver.get(address)
        WebDriverWait(driver, 30).until(lambda _: asked(driver))
        # The first address only brings the token. The browser keeps it for this one.
        driver.get("about:blank")
        driver.get(f"{page}#run={run_id}&{CHOSEN}")
        WebDriverWait(driver, 30).until(lambda _: asked(driver, "brush"))
        # The texts come last.
        driver.execute_async_script("setTimeout(arguments[0], 2000)")
        driver.save_screenshot(str(IMAGES / "explorer.png"))


def draw_dormant_heads(driver: webdriver.Chrome) -> None:
    """Write dormant.png, of the report that is open."""
    (figure,) = (
        card
        for card in driver.find_elements(By.CSS_SELECTOR, "[data-dormant]")
        if card.find_element(By.TAG_NAME, "h3").text == SHOWN
    )
    plot = figure.find_element(By.CSS_SELECTOR, ".plot svg")
    # All that waits to be seen is drawn first: it would move the plot.
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    plot.screenshot(str(IMAGES / "dormant.png"))


@contextmanager
def explorer(runs: str) -> Iterator[str]:
    """The address of an explorer that runs meanwhile."""
    command = [sys.executable, "-m", "headcount", "explore", runs, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.terminate()


def shown_run(data: Any) -> str:
    """The run of the model on text, of the data of a report."""
    return next(
        section["run_id"]
        for section in data["sections"]
        if section["facts"]["model"] == SHOWN and section["facts"]["input_family"] == "text"
    )


def all_plots_drawn(driver: webdriver.Chrome) -> bool:
    """Whether scripts have drawn every plot on the first screen of the report."""
    script = """return [...document.querySelectorAll(".plot")]
        .filter((plot) => plot.getBoundingClientRect().top < innerHeight)
        .every((plot) => plot.querySelector("svg"))"""
    return driver.execute_script(script)


def asked(driver: webdriver.Chrome, name: str = "heatmap") -> bool:
    """Whether the explorer has drawn what it measures the time of."""
    return driver.execute_script(f"return performance.getEntriesByName('{name}').length > 0")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as profile:
        for browser in chromium(Path(profile)):
            draw_pictures(browser, sys.argv[1], Path(sys.argv[2]))
