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

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from headcount.jobs.run.lock import locked
from headcount.jobs.upkeep.merged_files import (
    Group,
    MergeGroups,
    Problems,
    is_merged,
    merged_here,
)
from headcount.schemas.errors import HeadcountError, RunError, counted
from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.commits import (
    COMMITS_PER_SEGMENT,
    Segments,
    delete,
    read_commit_log,
    write_segment,
)
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, pc
from headcount.schemas.filled_tables import OF_MERGED, TABLES
from headcount.schemas.places import Place, listed, names, reason

ROWS = 2_000_000  # rows of the largest table in a group; a shard with more is a group
MOST_SHARDS = COMMITS_PER_SEGMENT  # of a group, however small: their files are read at once

LARGE_ROWS = ROWS // 2
"""Rows from which on a complete run is merged without being asked. The rows of a smaller one answer
as quickly as roll-ups.
"""

GRACE = timedelta(hours=1)
"""How long files stay in a store after they were written, and after a segment ceased to name them.

A query that began before reads them, and another compaction may be about to name them.
"""

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)

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


def merge_finished(run: RunDirectory, merge_groups: MergeGroups, tell: Tell) -> None:
    """Merge the shards of a large run that is complete, so that dashboards read its roll-ups."""
    # Nothing locks a run in a store: somebody else may be extending it.
    if not isinstance(run.path, Path):
        return
    commit_log = run.commit_log(["rows"])
    # A run without any commit has no sum.
    rows = pc.sum(commit_log["rows"]).as_py() or 0
    if len(commit_log) < run.manifest().shards or rows < LARGE_ROWS:
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
    damages = run.damaged_files(commit_log, manifest, OF_MERGED)
    damaged_rollups = frozenset(damage.path for damage in damages)

    def group_of(positions: np.ndarray) -> Group:
        commits = commit_log.take(pa.array(positions)).select(COMMITS.names)
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


def _groups(commit_log: pa.Table, manifest: Manifest, rows: int) -> list[np.ndarray]:
    """The shards that are merged with one another, as positions in the commit log.

    One code measured them, so that either code can be read alone, and they hold all their
    sequences: a shard that will be longer is in no file with others.
    """
    if not len(commit_log):
        return []
    lists = commit_log["files"].combine_chunks()
    files = pc.list_flatten(lists)
    once = pa.array([name for name, table in TABLES.items() if table.written == "once"])
    is_once = pc.is_in(pc.struct_field(files, "table"), once)
    most_rows = pc.max(pc.struct_field(files, "rows").filter(pc.invert(is_once))).as_py()
    shards_of_group = min(MOST_SHARDS, max(1, rows // max(1, most_rows)))

    # Shards that were merged share all their files, so the first file tells which they are. They
    # are in the group of the first of them: if other `rows` made the file, it may span several.
    _, first_files = np.unique(pc.list_parent_indices(lists).to_numpy(), return_index=True)
    paths = pc.struct_field(files, "path").take(pa.array(first_files))
    file_of_shard = paths.dictionary_encode().indices.to_numpy()
    _, first_places = np.unique(file_of_shard, return_index=True)
    groups = commit_log["shard"].to_numpy()[first_places[file_of_shard]] // shards_of_group

    sequences = pc.subtract(commit_log["stop"], commit_log["start"]).to_numpy()
    is_short = sequences < manifest.identity["scan"]["sequences_per_shard"]
    codes = commit_log["code"].combine_chunks().dictionary_encode().indices.to_numpy()
    keys = np.stack([groups, is_short, codes])
    # Stable: within a group, shards stay in order.
    order = np.lexsort(keys)
    begins = np.diff(keys[:, order]).any(axis=0)
    return np.split(order, np.flatnonzero(begins) + 1)


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
        if name.endswith(".tmp") or _shard_of(name) in gathered_shards
    )


def clean(run: RunDirectory, tell: Tell) -> None:
    """Delete files that no commit names, of shards that are done; the caller has the run's lock.

    Those of lost attempts go at once, and on a disk also those that were merged, so that a bare
    glob is right. In a store what was merged goes an hour later. A file of a shard that is not done
    stays: somebody may be about to commit it.
    """
    # Listed before the commit log is read: an attempt that is committed meanwhile loses nothing.
    times = {
        f"{table}/{folder}": _times(run.path / table / folder)
        for table in TABLES
        for folder in names(run.path / table)
    }
    # Unless shards were merged, each has one file in a directory. The commit log is read only if
    # that is not so, because in a store each commit is two requests.
    shards = [list(map(_shard_of, files)) for files in times.values()]
    if all(None not in each and len(set(each)) == len(each) for each in shards):
        return
    commit_log = run.commit_log(["files.path"])
    paths = pc.struct_field(pc.list_flatten(commit_log["files"]), "path")
    shard_of_path = commit_log["shard"].take(pc.list_parent_indices(commit_log["files"]))
    merged = set(shard_of_path.filter(pc.match_substring(paths, "/merged-")).to_pylist())
    attempted = set(commit_log["shard"].to_pylist()) - merged
    named = set(paths.to_pylist())
    unnamed = {
        run.path / directory / name: written
        for directory, files in times.items()
        for name, written in files.items()
        if f"{directory}/{name}" not in named
    }
    lost = [f for f in unnamed if f.name.endswith(".tmp") or _shard_of(f.name) in attempted]
    replaced = [f for f in unnamed if f.name.startswith("merged-") or _shard_of(f.name) in merged]
    # Until the newest segment was written, another one may have named any of them.
    segments = {name: t for name, t in _times(run.commits_directory).items() if "segment-" in name}
    newest_segment = max(segments.values(), default=LONG_AGO)
    # In a store `locked` has just written this object, so it tells the time by the store's clock.
    now = _times(run.path).get(".lock", LONG_AGO)
    limit = now if isinstance(run.path, Path) else now - GRACE
    old = [file for file in replaced if max(unnamed[file], newest_segment) <= limit]
    delete([*lost, *old])
    if waiting := len(replaced) - len(old):
        tell(
            f"{run.run_id}: {counted(waiting, 'file')} may still be read and can go in an hour, by "
            f"headcount compact {run.path}; until then a bare glob counts rows twice"
        )


def _times(directory: Place) -> dict[str, datetime]:
    """When each file was written, by the clock of the store. On a disk it does not matter."""
    if isinstance(directory, Path):
        return dict.fromkeys(names(directory), LONG_AGO)
    files = [info for info in listed(directory) if info.type is pafs.FileType.File]
    return {file.base_name: file.mtime for file in files}


SHARD_FILE = re.compile(r"shard-(\d+)(-[0-9a-f]+)?\.(json|parquet)")
"""Names of the files of one shard: its commit, and its data."""


def _shard_of(name: str) -> int | None:
    """The shard that a file is named after; none if it has another kind of name."""
    match = SHARD_FILE.fullmatch(name)
    return int(match[1]) if match else None


def _size(run: RunDirectory) -> Size:
    files = pc.list_flatten(run.commit_log(["files"])["files"])
    paths = pc.struct_field(files, "path").to_pylist()
    sizes = pc.struct_field(files, "bytes").to_pylist()
    # Every shard of a merged file names it, so a file counts once by its path.
    size_by_path = dict(zip(paths, sizes, strict=True))
    commit_log_files = sum(not name.startswith(".") for name in names(run.commits_directory))
    return Size(len(size_by_path) + commit_log_files, sum(size_by_path.values()))
