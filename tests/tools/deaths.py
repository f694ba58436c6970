"""The death of this process between two changes of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headcount.schemas.files import places


class Killed(BaseException):
    """The process is gone; no handler of Exception catches it."""


def killed_after(changes: int, action: Callable[[], object]) -> bool:
    """Do something, and die at the next change of the disk after so many; False if it has ended.

    A change is a file that appears whole or disappears.
    """
    remaining = changes
    replace, unlink = os.replace, Path.unlink

    def change() -> None:
        nonlocal remaining
        if remaining == 0:
            raise Killed
        remaining -= 1

    def counted_replace(source: Path, target: Path) -> None:
        change()
        replace(source, target)

    def counted_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists() and not path.name.endswith((".tmp", ".lock")):
            change()
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places.os, "replace", counted_replace)
        patch.setattr(Path, "unlink", counted_unlink)
        try:
            action()
        except Killed:
            return True
    return False
