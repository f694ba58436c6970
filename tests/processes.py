"""Processes that tests start: how they are found, named and ended."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "HEADCOUNT_TEST"
"""A variable that marks processes: children, those of Ray too, inherit it."""

DIES_WITH_ITS_PARENT = (
    ("setpriv", "--pdeathsig", "KILL")
    if sys.platform.startswith("linux") and shutil.which("setpriv")
    else ()
)
"""The beginning of a command that the kernel kills if the test that started it is killed.

Ray starts its own processes in the same way, so those of a driver end with the driver.
"""


def marked(mark: str, part_of_command: str = "") -> Iterator[psutil.Process]:
    """The processes that have MARK=mark in their environment and this in their command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command_line = " ".join(process.cmdline())
            if part_of_command in command_line and process.environ().get(MARK) == mark:
                yield process


def programs_without_spaces(directory: Path) -> Path:
    """The folder of this Python and its programs, under a path without spaces.

    Ray starts some of its processes through a shell, which splits their paths at spaces.
    `directory` has no spaces; it gets a link to the virtual environment, if one is needed.
    """
    programs = Path(sys.executable).parent
    if " " not in str(programs):
        return programs
    link = directory / "environment"
    link.symlink_to(programs.parent)
    return link / programs.name


def kill(mark: str) -> None:
    """End all marked processes. A driver that was killed may leave its Ray behind."""
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
