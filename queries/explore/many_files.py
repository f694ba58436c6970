"""What a run of many small files costs the page, said before it is paid for."""

import shlex
from contextlib import suppress

from headcount.schemas.files.run_directory import find_runs
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.places import absolute, names

MANY_FILES = 5000  # from which on the page takes ten seconds, instead of three

SECONDS, GIGABYTES = 1.5e-3, 30e-6
"""What each file takes of a core and of the memory until the page has read it, beside three seconds
and 0.3 GB. Measured with two tables and up to 4,096 shards, and extrapolated.
"""

SECONDS_TO_MERGE = 1.2e-3  # of a core, for each file


def cost_of_many_files(path: str) -> str | None:
    """A line about what the runs at a path cost the page; None if they have few files."""
    files = 0
    # Whoever opens the runs says what cannot be read.
    with suppress(OSError):
        files = sum(
            len(names(run.path / table / folder))
            for run in find_runs(absolute(path))
            for table in TABLES
            for folder in names(run.path / table)
        )
    if files < MANY_FILES:
        return None
    cost = f"{_seconds(files * SECONDS)} of a core and {files * GIGABYTES + 0.3:.1f} GB"
    merging = f"merges them once, in {_seconds(files * SECONDS_TO_MERGE)} of a core"
    return (
        f"{path}: {files:,} files, which take the page about {cost}; headcount compact "
        f"{shlex.quote(path)} {merging}, and then it opens in seconds"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
