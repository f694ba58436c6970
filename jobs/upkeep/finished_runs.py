"""What a scan does with a large run once all its shards are done: it merges them."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headcount.jobs.upkeep.compaction import ROWS, compact
from headcount.jobs.upkeep.merged_files import MergeGroups
from headcount.schemas.errors import HeadcountError
from headcount.schemas.files.run_directory import RunDirectory, pc

LARGE_ROWS = ROWS // 2
"""Rows from which on a run is merged. The rows of a smaller one answer as quickly as roll-ups."""

Tell = Callable[[str], None]
"""Takes a line for the user."""


def merge_finished(run: RunDirectory, merge_groups: MergeGroups, tell: Tell) -> None:
    """Merge the shards of a large run that is complete, so that dashboards read its roll-ups.

    The rows are committed already, so a failure is a warning. What is merged is left alone.
    """
    # Nothing locks a run in a store: somebody else may be extending it.
    if not isinstance(run.path, Path):
        return
    commit_log = run.commit_log()
    # A run without any commit has no sum.
    rows = pc.sum(commit_log["rows"]).as_py() or 0
    if len(commit_log) < run.manifest().shards or rows < LARGE_ROWS:
        return
    try:
        problems = compact(run, tell=tell, merge_groups=merge_groups).problems
    except HeadcountError as error:
        problems = [str(error)]
    for problem in problems:
        tell(
            f"warning: {run.run_id} is complete, but not all of it is merged: {problem}; "
            f"headcount compact {run.path} tries again"
        )
