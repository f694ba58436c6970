"""The runs of a directory as rows of a table, also those that begin only now."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from headcount.jobs.upkeep.phases import runs_with_notes
from headcount.jobs.upkeep.status import Row, line_before, list_line, read_status_before
from headcount.schemas.errors import RunError
from headcount.schemas.files.places import Place
from headcount.schemas.files.run_directory import RunDirectory, find_runs

if TYPE_CHECKING:
    from headcount.jobs.cluster.submission import Job

STORE_READERS = 16
"""Runs that are read at a time from a store."""


def runs_in(out: Place) -> list[RunDirectory]:
    """The runs of a directory, and those that are about to begin there."""
    before = _runs_before(out)
    return [*_begun(out, may_be_empty=bool(before)), *before]


def rows_of(out: Place, may_be_empty: bool = False) -> tuple[list[Row], list[str]]:
    """The rows of the runs of a directory, under `HEADINGS`, and what is wrong with runs."""
    rows: list[Row] = []
    problems: list[str] = []
    rows_before: list[Row] = []
    for run in _runs_before(out):
        # Its driver may have begun it, or ended, since it was listed.
        status = read_status_before(run)
        if status is not None:
            rows_before.append(line_before(status.run_id, status.phase))
    runs = _begun(out, may_be_empty or bool(rows_before))
    # A disk answers at once; a store is asked for many runs at a time.
    readers = 1 if isinstance(out, Path) else STORE_READERS
    with ThreadPoolExecutor(readers) as pool:
        for row_or_problem in pool.map(_row_or_problem, runs):
            if isinstance(row_or_problem, str):
                problems.append(row_or_problem)
            else:
                rows.append(row_or_problem)
    return rows + rows_before, problems


def _row_or_problem(run: RunDirectory) -> Row | str:
    """The row of a run, or why it cannot be read."""
    try:
        return list_line(run)
    except RunError as error:
        return str(error)


def row_of_job(job: Job) -> Row:
    """The row of a run of which only its job is known."""
    return line_before(job.run_id, "submitted" if job.state == "PENDING" else "starting")


def _runs_before(out: Place) -> list[RunDirectory]:
    """The runs that have a note and no manifest."""
    return [run for run in runs_with_notes(out) if read_status_before(run) is not None]


def _begun(out: Place, may_be_empty: bool) -> list[RunDirectory]:
    try:
        return find_runs(out)
    except RunError:
        if not may_be_empty:
            raise
        return []
