"""How soon the explorer shows something: `python -m benchmarks.at_scale.explorer_speed RUNS`.

`python -m benchmarks.at_scale.rollup_speed --files 5 --out RUNS` generates ten million rows; 72
files are the rows of 10^9 tokens. The page is opened in Chromium, with a new server each time.

* How long after its address is opened is the heatmap there?
* How long after a click on a head are its histograms drawn? At once after the heatmap, when the
  sample of a large run is read, and later.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver

from tests.pages.browser import chromium

FIRST_HEADS = ("7.2", "3.8")
"""Layer and head of the cells that are clicked as soon as the heatmap is there."""

HEADS = ("5.3", "2.7", "9.1", "0.4", "11.11")
"""Cells that are clicked one after another when the page has come to rest."""

SETTLED_SECONDS = 6
"""What the page draws by itself after the heatmap is over by then."""

TROUBLE = (
    "const line = document.getElementById('trouble'); return line.hidden ? '' : line.textContent"
)

HEATMAP_IS_THERE = "return document.querySelectorAll('[data-cell]').length > 0"

# The histograms are drawn when nothing has changed in them for a second and a half.
CLICK = """
const [cell, done] = arguments;
const histograms = document.querySelector("[data-hist]").parentElement.parentElement;
let quiet = null;
const began = performance.now();
const observer = new MutationObserver(() => {
  const milliseconds = performance.now() - began;
  clearTimeout(quiet);
  quiet = setTimeout(() => { observer.disconnect(); done(milliseconds); }, 1500);
});
observer.observe(histograms, { subtree: true, childList: true, attributes: true });
document.querySelector(`[data-cell="${cell}"]`).dispatchEvent(new MouseEvent("click", { bubbles: true }));
"""  # noqa: E501


@contextmanager
def explorer(runs: Path) -> Iterator[str]:
    """A server of the explorer; yields the address of its page."""
    command = [sys.executable, "-m", "headcount", "explore", str(runs), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        addresses = (re.search(r"http\S+", line) for line in process.stdout)
        address = next((match[0] for match in addresses if match), None)
        if address is None:
            raise SystemExit(f"headcount explore {runs} gave no address")
        yield address
        process.terminate()


def seconds_to_heatmap(driver: webdriver.Chrome, address: str) -> float:
    """Open the page, and wait for its heatmap."""
    began = time.perf_counter()
    driver.get(address)
    while not driver.execute_script(HEATMAP_IS_THERE):
        time.sleep(0.01)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    to_heatmap: list[float] = []
    to_first_histograms: list[float] = []
    to_histograms: list[float] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as profile, explorer(options.runs) as address:
            for driver in chromium(Path(profile)):
                driver.set_script_timeout(60)
                # The server answers what a page asks first before it is asked.
                time.sleep(1)
                to_heatmap.append(1000 * seconds_to_heatmap(driver, address))
                to_first_histograms += [
                    driver.execute_async_script(CLICK, head) for head in FIRST_HEADS
                ]
                time.sleep(SETTLED_SECONDS)
                to_histograms += [driver.execute_async_script(CLICK, head) for head in HEADS]
                if trouble := driver.execute_script(TROUBLE):
                    raise SystemExit(f"the page says: {trouble}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    measured = {
        "heatmap": to_heatmap,
        "first clicks": to_first_histograms,
        "click": to_histograms,
    }
    for name, times in measured.items():
        each = ", ".join(f"{milliseconds:.0f}" for milliseconds in times)
        print(f"{name}: {statistics.median(times):.0f} ms ({each})")


if __name__ == "__main__":
    main()
