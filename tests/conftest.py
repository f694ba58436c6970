"""The order of files: the longest come first, so that two workers end together. And commands that
can be interrupted.
"""

from __future__ import annotations

import signal

import pytest

# A shell starts what runs in the background deaf to interrupts, and commands inherit that; those
# that tests start must hear them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_reproduce.py",
    "test_faults.py",
    "test_remote.py",
    "test_bench.py",
    "test_runs.py",
    "test_dispatch.py",
    "test_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files before all others."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
