"""Run `headcount …`, and afterwards print the libraries that were imported for it."""

from __future__ import annotations

import sys

import headcount.command_line


def main() -> None:
    """Be the command, and print the top-level name of every module on stdout."""
    try:
        headcount.command_line.main()
    finally:
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
