"""Draw the pictures of the report in docs/images, from the report that `make demo` writes.

`python -m tests.report_pictures report.html`, in the repository's root. It needs Chromium and its
driver.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from queries.html_page import unpacked
from tests.browser import CHROMEDRIVER, CHROMIUM

IMAGES = Path(__file__).parent.parent / "docs" / "images"

TOP_OF_PAGE = (1440, 1180)
"""Width and height of what report.png shows: facts, leading heads, heatmaps, and a card."""

SHOWN = "bundled:gpt2-mini"
"""Model of the run that is shown."""


def draw_pictures(report: Path, profile: str) -> None:
    """Write report.png, the top of the report, and dormant.png, its scatter plot."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or "chromium"
    width, height = TOP_OF_PAGE
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    service = webdriver.ChromeService(CHROMEDRIVER or "chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    try:
        # A window of Chromium is larger than the page that it shows.
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        # Pictures are light, whatever this machine prefers.
        light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
        data = unpacked(report.read_text(encoding="utf-8"))
        driver.get(f"{report.resolve().as_uri()}#run={shown_run(data)}")
        WebDriverWait(driver, 30).until(lambda _: all_plots_drawn(driver))
        driver.save_screenshot(str(IMAGES / "report.png"))
        (figure,) = (
            card
            for card in driver.find_elements(By.CSS_SELECTOR, "[data-dormant]")
            if card.find_element(By.TAG_NAME, "h3").text == SHOWN
        )
        plot = figure.find_element(By.CSS_SELECTOR, ".plot")
        # All that waits to be seen is drawn first: it would move the plot.
        driver.execute_script("dispatchEvent(new Event('beforeprint'))")
        scroll = "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})"
        driver.execute_script(scroll, plot)
        plot.screenshot(str(IMAGES / "dormant.png"))
    finally:
        driver.quit()


def shown_run(data: Any) -> str:
    """The run of the model on text, of the data of a report."""
    return next(
        section["run_id"]
        for section in data["sections"]
        if section["facts"]["model"] == SHOWN and section["facts"]["input_family"] == "text"
    )


def all_plots_drawn(driver: webdriver.Chrome) -> bool:
    """Whether scripts have drawn every plot on the first screen."""
    script = """return [...document.querySelectorAll(".plot")]
        .filter((plot) => plot.getBoundingClientRect().top < innerHeight)
        .every((plot) => plot.querySelector("svg"))"""
    return driver.execute_script(script)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as profile:
        draw_pictures(Path(sys.argv[1]), profile)
