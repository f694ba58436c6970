"""What holds for every process that tests: how it computes, and how it ends."""

import os
import sys
from datetime import date
from typing import Any

import pytest

# Before all libraries that have something to do at the end.
from tests.tools.end_at_once import END_AT_ONCE
from tests.tools.forked_tests import CAN_FORK, Tests

# No test reaches for the network. Libraries read this once, when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# If two tests run at a time, each has a core. With more threads they would wait for one another.
# PyTorch reads this when the first test needs it: many files need none.
os.environ["OMP_NUM_THREADS"] = "1"

# All processes that test collect the same cells, at midnight too.
os.environ["HEADCOUNT_SEED"] = os.environ.get("HEADCOUNT_SEED") or str(date.today().toordinal())


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process, and end it as soon as everything is reported."""
    config.pluginmanager.register(END_AT_ONCE)
    # The process that hands out tests to others runs none. The others wait while it imports.
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", 0):
        from headcount.workers.process import prepare_process

        prepare_process()
    elif CAN_FORK:
        tests = Tests(len(config.option.tx))
        config.add_cleanup(tests.end)
        config.option.tx = [f"popen//python={tests.python}"] * len(config.option.tx)


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        from headcount.workers.doctest_names import NAMES

        doctest_namespace |= NAMES


@pytest.fixture(autouse=True)
def _no_bar_before() -> None:
    """What a test tells does not go on with what another one told."""
    if bars := sys.modules.get("headcount.jobs.bars"):
        bars._Lines.last_end = 0.0
