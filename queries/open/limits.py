"""What a query may take and reach: memory, a temporary directory, and its runs alone.

DuckDB's own limit on memory counts buffers, not what a function returns. So a process that asks is
held to a limit, too, where Linux can do that.
"""

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from headcount.queries.open.sql_text import text_literal
from headcount.queries.open.table_sql import path_pattern
from headcount.schemas.errors import QueryError

MEMORY = "50%"  # Memory that a query may take. What needs more goes to the temporary directory.

MEMORY_SIZE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)", re.IGNORECASE)
"""A size that is not zero, and its unit."""

OUT_OF_MEMORY = (duckdb.OutOfMemoryException, MemoryError)
"""What DuckDB, Arrow and Python raise."""

NEEDS_MEMORY = (
    "the query needs more memory than it may take, or more disk than is free for what does not "
    "fit; --memory 8GB gives it more, fewer columns or runs need less"
)

BESIDE_DUCKDB = 256 * 2**20
"""Bytes that a query may take beyond DuckDB's limit: for the rows that it returns, and threads."""

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

STATUS = Path("/proc/self/status")


def check_memory(size: str) -> str:
    """A size of memory as DuckDB reads it."""
    match = MEMORY_SIZE.fullmatch(size.strip())
    if match is None or (match[2] == "%" and float(match[1]) > 100):
        raise QueryError(f"--memory: expected a size such as 4GB or 50%, got {size!r}")
    return size.strip()


def share_of(memory: str, parts: int) -> str:
    """An equal part of some memory.

    >>> share_of("300MB", 4), share_of("50%", 2)
    ('75MB', '25%')
    """
    match = MEMORY_SIZE.fullmatch(memory)
    assert match is not None
    return f"{float(match[1]) / parts:g}{match[2]}"


def spill_directory(process_id: int) -> Path:
    """Where a process puts what does not fit into memory. DuckDB removes it at a regular end."""
    return Path(tempfile.gettempdir()) / f"headcount-{process_id}"


def lock_down(connection: duckdb.DuckDBPyConnection, paths: Iterable[str], memory: str) -> None:
    """Leave some paths readable and nothing else."""
    # A query too big for its memory may fill half of what is free there.
    spills = spill_directory(os.getpid())
    free_mebibytes = shutil.disk_usage(spills.parent).free // 2**20
    # DuckDB compares a path with these as the SQL writes it, so the escaped form is allowed too.
    paths = list(paths)
    allowed = dict.fromkeys([*map(text_literal, paths), *map(path_pattern, paths)])
    # The order matters: directories cannot be allowed once access is closed, and no setting can
    # change once the configuration is locked.
    for setting in (
        "parquet_metadata_cache = true",
        f"memory_limit = {text_literal(memory)}",
        f"temp_directory = {text_literal(str(spills))}",
        f"max_temp_directory_size = '{free_mebibytes // 2}MiB'",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        f"allowed_directories = [{', '.join(allowed)}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


@contextmanager
def held_to_memory(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Let this process take little more than DuckDB may, in a block."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with memory_errors_in_one_line():
            hold_to_memory(connection)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def hold_to_memory(connection: duckdb.DuckDBPyConnection) -> None:
    """Let this process take little more than DuckDB may, beside what it has now."""
    limit = _limit(connection)
    if limit is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [each for each in (limit, soft, hard) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))


def allow_all_memory() -> None:
    """Take the limit back."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextmanager
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


def _limit(connection: duckdb.DuckDBPyConnection) -> int | None:
    """What the process has now and what a query may take besides. None if Linux does not say."""
    if not STATUS.exists():
        return None
    match = re.search(r"^VmData:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE)
    if match is None:
        return None
    ((setting,),) = connection.execute("SELECT current_setting('memory_limit')").fetchall()
    number, unit = setting.split()
    return int(match[1]) * 1024 + int(float(number) * UNITS[unit]) + BESIDE_DUCKDB
