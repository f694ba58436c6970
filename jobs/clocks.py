"""When files were changed, by the clock here: a disk and a store have clocks of their own."""

import os
import tempfile
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from headcount.schemas.object_stores import (
    PROBE_SECONDS,
    address_of,
    listed,
    region_and_endpoint,
)
from headcount.schemas.places import READINGS, Place, StorePath

CLOCK_TICK_SECONDS = 2.0  # a store tells its time in whole seconds


def changed(file: Place) -> float | None:
    """When a file was changed, in seconds since 1970 by the clock here; None if there is none.

    The disk or the store says when, by a clock of its own, and what that shows now.
    """
    if isinstance(file, StorePath):
        times = [info.mtime_ns for info in listed(file.parent) if info.base_name == file.name]
        then = times[0] / 1e9 if times and times[0] is not None else None
    else:
        try:
            then = file.stat().st_mtime
        except FileNotFoundError:
            then = None
    return None if then is None else then - _seconds_ahead(file)


def _seconds_ahead(file: Place) -> float:
    """How far the clock of a file's disk or store is ahead of the one here; 0 if it does not say.

    Within a tick of either clock they are one.
    """
    there: float | None = None
    if isinstance(file, StorePath):
        scheme = file.url.partition("://")[0]
        there = _date_of(address_of(scheme, *region_and_endpoint()))
    else:
        with suppress(OSError), tempfile.TemporaryFile(dir=file.parent) as probe:
            probe.write(b"1")
            probe.flush()
            os.fsync(probe.fileno())
            there = os.fstat(probe.fileno()).st_mtime
    ahead = 0.0 if there is None else there - time.time()
    return ahead if abs(ahead) > CLOCK_TICK_SECONDS else 0.0


def _date_of(address: str) -> float | None:
    """The time that two answers of a store agree on: one that is cut has none, or any."""
    url = address if "://" in address else f"http://{address}"
    before: float | None = None
    for _ in range(READINGS):
        date = _date_in_answer(url)
        if date is not None and before is not None and 0 <= date - before <= PROBE_SECONDS:
            return date
        before = date
    return None


def _date_in_answer(url: str) -> float | None:
    """The time in an answer of a store, of which any will do."""
    try:
        with urlopen(Request(url, method="HEAD"), timeout=PROBE_SECONDS) as answer:
            date = answer.headers["Date"]
    except HTTPError as refusal:
        date = refusal.headers["Date"]
    except (OSError, HTTPException):
        return None
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(date).timestamp()
    return None
