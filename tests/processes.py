"""Processes that a test has started, children of Ray's included, known by a word in their
environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

MARK = "HEADCOUNT_TEST"


def marked(mark: str, word: str = "") -> Iterator[psutil.Process]:
    """The processes that have MARK=mark in their environment and `word` in their command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and word in " ".join(process.cmdline()):
                yield process


def kill(mark: str) -> None:
    """End them all: a driver that was killed leaves its Ray behind."""
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
