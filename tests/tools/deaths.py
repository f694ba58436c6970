"""The death of this process just before or just after a change of the disk."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest


class Killed(BaseException):
    """The process is gone; no handler of Exception catches it."""


@contextmanager
def death_at_change(
    changes: int, die: Callable[[], NoReturn], after: bool = False
) -> Iterator[None]:
    """Within this context, the process dies at the next change of the disk after so many.

    A change is a file that appears whole or disappears.
    """
    remaining = changes

    def fatal(change: Callable[..., Any]) -> Callable[..., Any]:
        def changing(path: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal remaining
            # Nobody looks at unfinished files or locks.
            target = str(arguments[0] if change.__name__ != "unlink" else path)
            is_seen = os.path.exists(path) and not target.endswith((".tmp", ".lock"))
            remaining -= is_seen
            dies = is_seen and remaining < 0
            if dies and not after:
                die()
            result = change(path, *arguments, **options)
            if dies:
                die()
            return result

        return changing

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "rename"), (os, "link"), (Path, "unlink")):
            patch.setattr(owner, name, fatal(getattr(owner, name)))
        yield


def killed_after(changes: int, action: Callable[[], object]) -> bool:
    """Do something, and die at the next change of the disk after so many; False if it has ended."""

    def die() -> NoReturn:
        raise Killed

    try:
        with death_at_change(changes, die):
            action()
    except Killed:
        return True
    return False
