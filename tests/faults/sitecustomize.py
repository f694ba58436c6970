"""Faults at exact moments, in every process that has this folder on PYTHONPATH and a folder of
orders in FAULTS. Python imports a module of this name when it starts.

An order is a file `ACTION@POINT.NUMBER`. The first process that comes to the point takes away the
first order for it, by name, and obeys. Points: `data` and `commit`, just before such a file appears
under its name. Actions: `kill` (SIGKILL to itself), `full` (no space left on device), `pass`
(nothing), `wait` (until it is killed).
"""

import errno
import os
import signal
import time
from typing import Any

_replace, _link = os.replace, os.link


def _obey(action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            time.sleep(3600)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _point_of(path: str) -> str | None:
    """The point that a process has come to that renames a file to this path."""
    # Merged commits are Parquet too, and are no data.
    if path.endswith(".parquet") and "segment-" not in path:
        return "data"
    return "commit" if "/commits/" in path else None


def _take_order(point: str) -> str | None:
    """Take away the first order for a point; returns its action."""
    folder = os.environ["FAULTS"]
    for order in sorted(os.listdir(folder)):
        action, _, ordered_point = order.partition(".")[0].partition("@")
        if ordered_point != point:
            continue
        try:
            os.unlink(os.path.join(folder, order))
        except FileNotFoundError:
            continue  # Another process was faster.
        return action
    return None


def _meet_order(target: str) -> None:
    """Obey the order for the point that a process has come to, if there is one."""
    point = _point_of(target)
    action = _take_order(point) if point is not None else None
    if action is not None:
        _obey(action)


def replace(source: Any, target: Any, **options: Any) -> None:
    """os.replace, unless there is an order for it: every file appears by a rename or a link."""
    _meet_order(str(target))
    _replace(source, target, **options)


def link(source: Any, target: Any, **options: Any) -> None:
    """os.link, likewise."""
    _meet_order(str(target))
    _link(source, target, **options)


if "FAULTS" in os.environ:
    os.replace, os.link = replace, link
