"""Files of a run that no query has read before, compared with their commits."""

import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from headcount.queries.open.run import Run
from headcount.schemas.files.content_check import (
    CommittedFile,
    committed_files,
    declared_bounds,
    problem,
)
from headcount.schemas.files.damage import Damage

SECONDS_BEFORE_NOTICE = 2.0  # seconds of reading after which the user is told what takes so long


def compared(
    run: Run, home: Path, paths: set[str], whole: list[str], tell: Callable[[str], None]
) -> list[Damage]:
    """Damage among some files of a run on a disk. The whole ones are noted as they are found."""
    bounds = declared_bounds(run.manifest)
    files = [file for file in committed_files(run.done) if file.path in paths]
    damaged: list[Damage] = []

    def examine(file: CommittedFile) -> None:
        why = problem(home, file, bounds)
        if why is None:
            whole.append(file.path)
        else:
            damaged.append(Damage(file.path, file.shards, why))

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        examinations = [pool.submit(examine, file) for file in files]
        wait(examinations, SECONDS_BEFORE_NOTICE, FIRST_EXCEPTION)
        if not all(examination.done() for examination in examinations):
            byte_count = sum(file.bytes for file in files)
            tell(f"checking {byte_count / 1e9:,.1f} GB against the commits, once")
        # Waits for each, and raises what went wrong in it.
        for examination in examinations:
            examination.result()
    finally:
        # After Ctrl-C the rest is not read.
        pool.shutdown(cancel_futures=True)
    return damaged
