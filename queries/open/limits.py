"""What a connection may take and reach: its memory, its temporary directory, and its runs alone."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import duckdb

from headcount.queries.open.sql_text import text_literal
from headcount.queries.open.table_sql import path_pattern
from headcount.schemas.errors import QueryError

MEMORY = "50%"  # Memory that a query may take. What needs more goes to the temporary directory.

MEMORY_SIZE = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)", re.IGNORECASE)
"""A size that is not zero, and its unit."""


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
        try:
            connection.execute(f"SET {setting}")
        except duckdb.OutOfMemoryException:
            raise QueryError(
                f"--memory {memory}: is less than the runs themselves need; try 1GB"
            ) from None
