"""Faults at exact moments, for processes that have this folder on PYTHONPATH and a folder of orders
in FAULTS.

An order is a file `ACTION@POINT.NUMBER`; the first process that comes to the point takes the first
of them away and obeys. Points: `data` and `commit`, just before such a file appears under its name.
Actions: `kill` (SIGKILL to itself), `full` (no space left on device), `pass` (nothing), `wait`
(until it is killed).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any

_replace = os.replace


def _obey(order: str) -> None:
    match order:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            time.sleep(3600)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def replace(source: Any, target: Any, **options: Any) -> None:
    """os.replace, unless there is an order for it."""
    name = str(target)
    point = (
        "data"
        if name.endswith(".parquet") and "fold-" not in name
        else "commit"
        if "/commits/" in name
        else ""
    )
    orders = os.environ["FAULTS"]
    for order in sorted(os.listdir(orders)) if point else ():
        if order.partition(".")[0].endswith(f"@{point}"):
            try:
                os.unlink(os.path.join(orders, order))
            except FileNotFoundError:
                continue
            _obey(order.partition("@")[0])
            break
    _replace(source, target, **options)


if "FAULTS" in os.environ:
    os.replace = replace
