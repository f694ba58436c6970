"""Merge the small files of a run into few large ones, by the protocol that commits shards.

A run is merged in groups of shards that follow from the run alone. So two compactions at once merge
the same shards, and write the same bytes under the same names. The order of writes, for one group
after another:

1. The merged files of every table and intervention are written whole, under names with a digest of
   their content. No commit refers to them yet, so no reader sees them. Many groups are at this step
   at once, in other processes or on other machines.
2. One segment says that the group's rows lie there. From that moment they do: a segment counts more
   than commit files, and a later segment more than an earlier one.
3. Commit files that the segment replaces are deleted, and then the data files that no commit names.

If the process is killed before 2, merged files are left that no commit names. If it is killed after
2, small files are left that no commit names. So every row counts once at every moment, and the next
compaction deletes what was left.

The shards of a merged file share all their files. So they count, are damaged and are taken back
together, and a file that is read holds no rows that do not count. The last shard of a run may be
short, and is measured anew when the run grows. It is a group of its own. A damaged roll-up or
sample is written again in the same three steps.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from headcount.jobs.lock import locked
from headcount.jobs.upkeep.cleaning import clean, shard_of
from headcount.jobs.upkeep.merged_files import (
    Group,
    MergeGroups,
    Problems,
    is_merged,
    merged_here,
)
from headcount.schemas.errors import HeadcountError, RunError
from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.commits import (
    COMMITS_PER_SEGMENT,
    Segments,
    delete,
    read_commit_log,
    write_segment,
)
from headcount.schemas.files.content_check import files_damaged_by_content
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, pc
from headcount.schemas.filled_tables import OF_MERGED, TABLES
from headcount.schemas.places import names
from headcount.schemas.reasons import reason

ROWS = 2_000_000  # rows of the largest table in a group; a shard with more is a group
MOST_SHARDS = COMMITS_PER_SEGMENT  # of a group, however small: their files are read at once

LARGE_ROWS = ROWS // 2
"""Rows from which on a complete run is merged without being asked. The rows of a smaller one answer
as quickly as roll-ups.
"""

Tell = Callable[[str], None]  # takes a line for the user


class Size(NamedTuple):
    """How large a run is: the data files that count and the commit log, and the former's bytes."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Compacted:
    """What a compaction did, and what it had to leave alone."""

    before: Size
    after: Size
    seconds: float
    problems: list[str]


def compact(
    run: RunDirectory,
    rows: int = ROWS,
    tell: Tell = lambda line: None,
    merge_groups: MergeGroups = merged_here,
) -> Compacted:
    """Merge the files of a run, `rows` of the largest table into one.

    On a disk a lock refuses it while somebody else is at work on the run. In a store two
    compactions may be at work at once, but no scan. `merge_groups` writes the merged files, perhaps
    in other processes or on other machines.
    """
    began = time.monotonic()
    try:
        with locked(run):
            before = _size(run)
            problems = _merge(run, rows, tell, merge_groups)
            _gather_all(run)
            clean(run, tell)
            return Compacted(before, _size(run), time.monotonic() - began, problems)
    except OSError as error:
        raise RunError(f"{run.path}: {reason(error)}; mend that, then compact again") from None


def merge_finished(
    run: RunDirectory, merge_groups: MergeGroups, tell: Tell, large_rows: int = LARGE_ROWS
) -> None:
    """Merge the shards of a large run that is complete, so that dashboards read its roll-ups."""
    # Nothing locks a run in a store: somebody else may be extending it.
    if not isinstance(run.path, Path):
        return
    commit_log = run.commit_log(["rows"])
    # A run without any commit has no sum.
    rows = pc.sum(commit_log["rows"]).as_py() or 0
    if len(commit_log) < run.manifest().shards or rows < large_rows:
        return
    try:
        problems = compact(run, tell=tell, merge_groups=merge_groups).problems
    except HeadcountError as error:
        problems = [str(error)]
    # The rows are committed already.
    for problem in problems:
        tell(
            f"warning: {run.run_id} is complete, but not all of it is merged: {problem}; "
            f"headcount compact {run.path} tries again"
        )


def _merge(run: RunDirectory, rows: int, tell: Tell, merge_groups: MergeGroups) -> list[str]:
    """Merge what can be merged; returns what is wrong with the shards that were left alone."""
    manifest = run.manifest()
    commit_log = run.commit_log().combine_chunks()
    run.check_complete(commit_log)
    # All roll-ups and samples are read: they take 5 to 10 % of the rows' space.
    damages = files_damaged_by_content(run.path, manifest, commit_log, OF_MERGED)
    damaged_rollups = frozenset(damage.path for damage in damages)

    def group_of(positions: pa.Array) -> Group:
        commits = commit_log.take(positions).select(COMMITS.names)
        return Group(run, commits, damaged_rollups)

    unmerged = [one for one in _groups(commit_log, manifest, rows) if not is_merged(group_of(one))]
    if len(unmerged) < 2:
        # Most runs have one group, and then nothing else is worth its start.
        merge_groups = merged_here
    problems: Problems = {}
    for number, merged in enumerate(merge_groups(map(group_of, unmerged)), start=1):
        problems |= merged.problems
        if len(merged.commits):
            # The numbers are those of the order of writes in the docstring of this file.
            # 2. Say that the rows lie in the merged files.
            write_segment(run.commits_directory, merged.commits)
            # 3. Delete what the segment replaces. On a disk large runs need the space at once.
            delete(map(run.commit_file, merged.commits["shard"].to_pylist()))
            if isinstance(run.path, Path):
                delete(run.path / path for path in merged.old_paths)
        tell(f"{run.run_id}: group {number:,} of {len(unmerged):,} merged")
    # Shards of one damaged file share a message.
    return list(dict.fromkeys(problems.values()))


def _groups(commit_log: pa.Table, manifest: Manifest, rows: int) -> list[pa.Array]:
    """The shards that are merged with one another, as positions in the commit log, in order.

    One code measured them, so that either code can be read alone, and they hold all their
    sequences: a shard that will be longer is in no file with others.
    """
    if not len(commit_log):
        return []
    file_lists = commit_log["files"].combine_chunks()
    files = pc.list_flatten(file_lists)
    once = pa.array([name for name, table in TABLES.items() if table.written == "once"])
    is_once = pc.is_in(pc.struct_field(files, "table"), once)
    most_rows = pc.max(pc.struct_field(files, "rows").filter(pc.invert(is_once))).as_py()
    shards_of_group = min(MOST_SHARDS, max(1, rows // max(1, most_rows)))
    sequences = pc.subtract(commit_log["stop"], commit_log["start"])
    shards = pa.table(
        {
            "position": np.arange(len(commit_log)),
            "shard": commit_log["shard"],
            "first_file": pc.struct_field(file_lists.values, "path").take(file_lists.offsets[:-1]),
            "is_short": pc.less(sequences, manifest.identity["scan"]["sequences_per_shard"]),
            "code": commit_log["code"],
        }
    )
    # Shards that were merged share all their files. They are in the group of the first of them: if
    # other `rows` made the file, it may span several.
    sharing = pc.index_in(shards["first_file"], shards["first_file"])
    group = pc.divide(shards["shard"].take(sharing), shards_of_group)
    keys = ["code", "is_short", "group"]
    # In one thread, the shards of a group stay in order.
    groups = shards.append_column("group", group).group_by(keys, use_threads=False)
    in_order = groups.aggregate([("position", "list")]).sort_by([(k, "ascending") for k in keys])
    return [positions.values for positions in in_order["position_list"]]


def _gather_all(run: RunDirectory) -> None:
    """Put what all segments say into one, and delete the files that it replaces."""
    directory = run.commits_directory
    file_names = names(directory)
    segments: Segments = {}
    gathered = read_commit_log(directory, run.run_id, loose=False, segments=segments)
    # Those that were read: what else is listed says something that is not in `gathered`.
    old_segments = sorted(segments)
    if len(old_segments) > 1:
        write_segment(directory, gathered)
        # The new segment has the last name and everything that counts, so the older ones say
        # nothing any more. They go oldest first. If a segment that takes a shard back went before
        # the segment that has the shard, and the process was killed in between, the shard would
        # count again.
        for name in old_segments:
            (directory / name).unlink(missing_ok=True)
    gathered_shards = set(gathered["shard"].to_pylist())
    delete(
        directory / name
        for name in file_names
        if name.endswith(".tmp") or shard_of(name) in gathered_shards
    )


def _size(run: RunDirectory) -> Size:
    files = pc.list_flatten(run.commit_log(["files"])["files"])
    paths = pc.struct_field(files, "path").to_pylist()
    sizes = pc.struct_field(files, "bytes").to_pylist()
    # Every shard of a merged file names it, so a file counts once by its path.
    size_by_path = dict(zip(paths, sizes, strict=True))
    commit_log_files = sum(not name.startswith(".") for name in names(run.commits_directory))
    return Size(len(size_by_path) + commit_log_files, sum(size_by_path.values()))
