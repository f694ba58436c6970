"""Draw the pictures in docs/images, from the runs and the report of `make demo`.

`python -m tests.pages.report_pictures runs/demo report.html`, in the repository's root. It needs
Chromium and its driver.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from headcount.queries.report.html_page import unpacked
from tests import ROOT
from tests.pages.browser import chromium

IMAGES = ROOT / "docs" / "images"

TOP_OF_PAGE = {"width": 1440, "height": 1260, "deviceScaleFactor": 1, "mobile": False}
"""Size of report.png and explorer.png, the tops of both pages. The browser's window is larger."""

SHOWN = "bundled:gpt2-mini"
"""Model of the run on text that is shown."""

CHOSEN = "head=L1H5&statistic=sink_mass&brush=sink_mass:0-82"
"""What is chosen in the explorer: a head, and the sequences on which it rests least."""

IS_DRAWN = "return document.querySelector('#sections svg') !== null"
"""Small multiples come last."""


def draw_pictures(driver: webdriver.Chrome, runs: str, report: Path) -> None:
    """Write report.png, dormant.png (its scatter plot) and explorer.png."""

    def wait(script: str) -> None:
        WebDriverWait(driver, 30).until(lambda _: driver.execute_script(script))

    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", TOP_OF_PAGE)
    # Pictures are light, whatever this machine prefers.
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", light)

    data: Any = unpacked(report.read_text(encoding="utf-8"))
    run_id = next(
        run["run_id"]
        for run in data["overview"]["runs"]
        if run["model"] == SHOWN and run["input_family"] == "text"
    )
    driver.get(f"{report.resolve().as_uri()}#run={run_id}")
    wait(IS_DRAWN)
    driver.save_screenshot(str(IMAGES / "report.png"))
    (figure,) = (
        card
        for card in driver.find_elements(By.CSS_SELECTOR, "[data-dormant]")
        if card.find_element(By.TAG_NAME, "h3").text.endswith(SHOWN)
    )
    plot = figure.find_element(By.CSS_SELECTOR, ".plot svg")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    plot.screenshot(str(IMAGES / "dormant.png"))

    command = [sys.executable, "-m", "headcount", "explore", runs, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        driver.get(address)
        wait("return performance.getEntriesByName('heatmap').length > 0")
        # The first address only brings the token. The browser keeps it for this one.
        driver.get("about:blank")
        driver.get(f"{address.partition('#')[0]}#run={run_id}&{CHOSEN}")
        wait("return performance.getEntriesByName('brush').length > 0")
        wait(IS_DRAWN)
        # The texts come last.
        driver.execute_async_script("setTimeout(arguments[0], 2000)")
        driver.save_screenshot(str(IMAGES / "explorer.png"))
        process.terminate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as profile:
        for browser in chromium(Path(profile)):
            draw_pictures(browser, sys.argv[1], Path(sys.argv[2]))
