"""Draw the pictures of the report in docs/images, from the report that `make demo` writes.

`python -m tests.report_pictures report.html`, in the repository's root. It needs Chromium and its
driver.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import CHROMEDRIVER, CHROMIUM

IMAGES = Path(__file__).parent.parent / "docs" / "images"

TOP_OF_PAGE = (1280, 1190)
"""Width and height of what report.png shows: facts, rankings and the first row of heatmaps."""


def draw_pictures(report: Path, profile: str) -> None:
    """Write report.png, the top of the report, and dormant.png, its last card."""
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
        driver.get(report.resolve().as_uri())
        WebDriverWait(driver, 30).until(lambda _: all_plots_drawn(driver))
        driver.save_screenshot(str(IMAGES / "report.png"))
        cards = driver.find_elements(By.CSS_SELECTOR, "figure.card")
        card: WebElement = cards[-1]
        card.screenshot(str(IMAGES / "dormant.png"))
    finally:
        driver.quit()


def all_plots_drawn(driver: webdriver.Chrome) -> bool:
    """Whether scripts have drawn every plot that is visible."""
    plots = driver.find_elements(By.CSS_SELECTOR, ".plot")
    visible = [plot for plot in plots if plot.is_displayed()]
    return all(plot.find_elements(By.CSS_SELECTOR, "svg") for plot in visible)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as profile:
        draw_pictures(Path(sys.argv[1]), profile)
