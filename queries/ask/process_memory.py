"""A limit on the memory of a process that asks: DuckDB's own counts buffers, not what a function
returns. Only Linux can hold a process to it.
"""

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from headcount.queries.ask.mistakes import NEEDS_MEMORY, OUT_OF_MEMORY
from headcount.queries.open.opened_runs import OpenedRuns
from headcount.schemas.errors import QueryError

BESIDE_DUCKDB = 256 * 2**20
"""Bytes that a query may take beyond DuckDB's limit: for the rows that it returns, and threads."""

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

STATUS = Path("/proc/self/status")


@contextlib.contextmanager
def held_to_memory(opened: OpenedRuns) -> Iterator[None]:
    """Let this process take little more than DuckDB may, in a block."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    hold_to_memory(opened)
    try:
        with memory_errors_in_one_line():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def hold_to_memory(opened: OpenedRuns) -> None:
    """Let this process take little more than DuckDB may, beside what it has now."""
    limit = _limit(opened)
    if limit is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def allow_all_memory() -> None:
    """Take the limit back."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextlib.contextmanager
def memory_errors_in_one_line() -> Iterator[None]:
    """Say what to do if DuckDB, Arrow or Python does not get memory in a block."""
    try:
        yield
    except OUT_OF_MEMORY:
        raise QueryError(NEEDS_MEMORY) from None
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise QueryError(NEEDS_MEMORY) from None


def _limit(opened: OpenedRuns) -> int | None:
    """What the process has now and what a query may take besides. None if Linux does not say."""
    if not STATUS.exists():
        return None
    match = re.search(r"^VmData:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if match is None:
        return None
    ((setting,),) = opened.fetched("SELECT current_setting('memory_limit')")
    number, unit = setting.split()
    return int(match[1]) * 1024 + int(float(number) * UNITS[unit]) + BESIDE_DUCKDB
