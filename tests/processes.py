"""Processes that a test has started, children of Ray's included, known by a word in their
environment.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "HEADCOUNT_TEST"


def marked(mark: str, word: str = "") -> Iterator[psutil.Process]:
    """The processes that have MARK=mark in their environment and `word` in their command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and word in " ".join(process.cmdline()):
                yield process


def programs_without_spaces(directory: Path) -> Path:
    """The folder of this Python and its programs, under a path without spaces.

    Ray starts some of its processes through a shell, which splits their paths at spaces. `directory`
    has none; it holds a link to the virtual environment, if one is needed.
    """
    programs = Path(sys.executable).parent
    if " " not in str(programs):
        return programs
    link = directory / "environment"
    link.symlink_to(programs.parent)
    return link / programs.name


def kill(mark: str) -> None:
    """End them all: a driver that was killed leaves its Ray behind."""
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
