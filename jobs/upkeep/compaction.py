"""Merge the small files of a run into few large ones, by the protocol that commits shards.

The order of writes, for one group of shards after another:

1. The merged files of every table and intervention are written whole, under names that are used
   once (`jobs.upkeep.merged_files`). No commit refers to them yet, so no reader sees them. Many
   groups are at this step at once, in other processes or on other machines.
2. One segment says that the group's rows lie there. From that moment they do: a segment counts more
  than commit files, and a later segment more than an earlier one.
3. The commit files and the small data files are deleted. No commit that counts refers to them.

If the process is killed before 2, merged files are left that no commit refers to. If it is killed
after 2, small files are left that no commit refers to. So every row is counted once at every
moment, and the next compaction deletes what was left (`clean`). At the end one segment of all
commits replaces the segments before it.

A damaged roll-up is written again in the same three steps. Merged files of its rows stay.

Steps 2 and 3 belong to the one process that holds the run: by a lock on a disk, by a lease in a
store. A worker that outlives it only leaves files of step 1.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headcount.jobs.run.lock import locked
from headcount.jobs.upkeep.compaction_lease import Lease, leased
from headcount.jobs.upkeep.merged_files import (
    Group,
    MergeGroups,
    Problems,
    Unit,
    damage_message,
    is_worth_merging,
    merge_files,
    merged_here,
)
from headcount.schemas.errors import RunError
from headcount.schemas.files.commit import COMMITS, Commit
from headcount.schemas.files.commits import (
    COMMITS_PER_SEGMENT,
    commit_name,
    delete,
    read_commit_log,
    taken_back,
    write_segment,
)
from headcount.schemas.files.places import names, reason
from headcount.schemas.files.run_directory import RunDirectory, pc
from headcount.schemas.files.tables import ROLLUPS
from headcount.schemas.scans.kinds import TABLES

ROWS = 2_000_000
"""Rows of a merged file of the largest table (`heads`, or `profiles`). A file with at least half of
them is left alone.
"""

MOST_UNITS = COMMITS_PER_SEGMENT
"""Units that are merged at once. A run of tiny shards is merged in several rounds: the units of the
next round are the merged files of this one.
"""

Tell = Callable[[str], None]
"""Takes a line about the progress."""


@dataclass(frozen=True)
class Size:
    """How large a run is on disk."""

    files: int
    """Data files and files of the commit log."""
    bytes: int
    """Of the data files."""


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
    """Merge the small files of a run; nobody else may be at work on it.

    On a disk a lock makes sure of that, in a store a lease. `merge_groups` writes the merged files,
    perhaps in other processes or on other machines.
    """
    began = time.monotonic()
    run.manifest()
    try:
        with locked(run), leased(run) as lease:
            before = _size(run)
            problems = _Compaction(run, rows, tell, merge_groups, lease).run_to_end()
            return Compacted(before, _size(run), time.monotonic() - began, problems)
    except OSError as error:
        raise RunError(f"{run.path}: {reason(error)}; mend that, then compact again") from None


@dataclass(frozen=True)
class _Compaction:
    """A compaction at work. It holds the run."""

    run: RunDirectory
    rows: int
    tell: Tell
    merge_groups: MergeGroups
    lease: Lease

    def run_to_end(self) -> list[str]:
        """Merge what can be merged; returns what is wrong with the shards that were left alone."""
        run = self.run
        commit_log = run.commit_log().combine_chunks()
        # Make room first: a killed compaction may have left merged files that nobody needs.
        clean(run, commit_log)
        problems: Problems = {}
        for damage in run.damaged_files([commit_log]):
            if not damage.is_of_rollup:
                message = damage_message(run, damage.shards, f"{damage.path} {damage.why}")
                problems |= dict.fromkeys(damage.shards, message)
        # All roll-ups are read: they take 4 % of the rows' space.
        rollup_damages = run.damaged_files([commit_log], run.manifest(), [ROLLUPS.name])
        damaged_rollups = [damage.path for damage in rollup_damages if damage.is_of_rollup]
        while True:
            units = _mergeable_units(commit_log, self.rows, damaged_rollups)
            # A unit is left alone as soon as one of its shards has a problem.
            sound_units = [u for u in units if problems.keys().isdisjoint(u.shards)]
            unit_groups = _grouped(sound_units, self.rows)
            if not unit_groups:
                break
            problems |= self._merge(commit_log, unit_groups)
            commit_log = run.commit_log().combine_chunks()
        _gather_all(run, examined=set(commit_log["shard"].to_pylist()) - problems.keys())
        clean(run, run.commit_log())
        # Shards of one damaged file share a message.
        return list(dict.fromkeys(problems.values()))

    def _merge(self, commit_log: pa.Table, unit_groups: list[list[Unit]]) -> Problems:
        """Merge groups; returns what is wrong with the shards that cannot be merged."""
        problems: Problems = {}
        groups = self._with_commits(commit_log, unit_groups)
        for number, merged in enumerate(self.merge_groups(groups), start=1):
            problems |= merged.problems
            if len(merged.commits):
                # The numbers are those of the order of writes in the docstring of this file. A
                # process that lost the run must not go on: another one may be at work on it.
                self.lease.check()
                # 2. Say that the rows lie in the merged files.
                write_segment(self.run.commits_directory, merged.commits)
                # 3. Delete the commit files and the small data files.
                delete(map(self.run.commit_file, merged.commits["shard"].to_pylist()))
                delete(self.run.path / path for path in merged.old_paths)
            self.tell(f"{self.run.run_id}: group {number:,} of {len(unit_groups):,} merged")
        return problems

    def _with_commits(self, commit_log: pa.Table, unit_groups: list[list[Unit]]) -> Iterator[Group]:
        """The groups as workers get them, each when its turn comes."""
        manifest = self.run.manifest()
        shards = commit_log["shard"].to_numpy()
        for units in unit_groups:
            shards_of_group = sorted(shard for unit in units for shard in unit.shards)
            # The commit log is in shard order and has them all.
            positions = np.searchsorted(shards, shards_of_group)
            commits = commit_log.take(pa.array(positions)).select(COMMITS.names)
            yield Group(self.run, manifest, units, commits)


def _mergeable_units(commit_log: pa.Table, rows: int, damaged_rollups: list[str]) -> list[Unit]:
    """The units that are to be merged, in shard order.

    These are the units with less than half of `rows`, and those that must be written again.
    """
    lists = commit_log["files"].combine_chunks()
    files = pc.list_flatten(lists)
    # For each file of the flattened list, the position in the commit log of the shard that it is
    # of.
    positions = pc.list_parent_indices(lists).to_numpy()

    rows_of_shard = np.zeros(len(commit_log), int)
    np.maximum.at(rows_of_shard, positions, pc.struct_field(files, "rows").to_numpy())

    # Shards that were merged together share the files of all tables and interventions. So their
    # first files are enough to tell who belongs to whom.
    _, first_files = np.unique(positions, return_index=True)
    paths = pc.struct_field(files, "path").take(pa.array(first_files)).to_pylist()
    positions_by_path: dict[str, list[int]] = {}
    for position, path in zip(positions[first_files].tolist(), paths, strict=True):
        positions_by_path.setdefault(path, []).append(position)
    shards_in_file = pc.struct_field(files, "shards").to_numpy()[first_files].tolist()
    shards_by_path = dict(zip(paths, shards_in_file, strict=True))
    is_rollup = pc.equal(pc.struct_field(files, "table"), ROLLUPS.name).to_numpy(False)
    has_rollups = np.zeros(len(commit_log), bool)
    has_rollups[positions[is_rollup]] = True
    is_damaged = pc.is_in(pc.struct_field(files, "path"), pa.array(damaged_rollups, pa.string()))
    has_damaged_rollups = np.zeros(len(commit_log), bool)
    has_damaged_rollups[positions[is_damaged.to_numpy(False)]] = True

    shards = commit_log["shard"].to_numpy()
    codes = commit_log["code"].to_pylist()
    units: list[Unit] = []
    for path, members in positions_by_path.items():
        unit_rows = int(rows_of_shard[members].sum())
        has_foreign_rows = shards_by_path[path] != len(members)
        # Older code merged without roll-ups, and a large shard is never merged.
        is_large = len(members) > 1 or 2 * unit_rows >= ROWS
        lacks_rollups = is_large and not has_rollups[members].all()
        must_be_rewritten = (
            has_foreign_rows or lacks_rollups or bool(has_damaged_rollups[members].any())
        )
        units.append(
            Unit(shards[members].tolist(), unit_rows, codes[members[0]], must_be_rewritten)
        )
    return [unit for unit in units if unit.must_be_rewritten or 2 * unit.rows < rows]


def _grouped(units: list[Unit], rows: int) -> list[list[Unit]]:
    """Units of one code that are merged with one another, with at most `rows` in a group.

    A unit without a partner stays as it is, unless it must be written again.
    """
    groups: list[list[Unit]] = []
    group_rows = 0
    for unit in sorted(units, key=lambda unit: unit.code):
        fits = (
            groups
            and group_rows + unit.rows <= rows
            and len(groups[-1]) < MOST_UNITS
            and groups[-1][0].code == unit.code
        )
        if not fits:
            groups.append([])
            group_rows = 0
        groups[-1].append(unit)
        group_rows += unit.rows
    return [group for group in groups if is_worth_merging(group)]


def merge(run: RunDirectory, commits: list[Commit], dropped: Sequence[int] = ()) -> None:
    """Move the rows of some shards into one file for each table and intervention.

    Their files may also hold rows of shards that the same segment takes back (`dropped`), and rows
    of shards that no longer count there. Neither is moved.
    """
    # The order of writes is that of the docstring of this file.
    rows = pa.Table.from_pylist([commit.model_dump() for commit in commits], schema=COMMITS)
    moved_rows, old_paths = merge_files(run, run.manifest(), rows)
    write_segment(
        run.commits_directory, pa.concat_tables([moved_rows, taken_back(run.run_id, dropped)])
    )
    delete(run.commit_file(commit.shard) for commit in commits)
    delete(run.path / path for path in old_paths)


def _gather_all(run: RunDirectory, examined: set[int]) -> None:
    """Put all commits that count into one segment, and delete the segments before it.

    A commit in a file of its own stays there if its shard was not `examined`.
    """
    directory = run.commits_directory
    old_segments = sorted(name for name in names(directory) if name.startswith("segment-"))
    commit_log = run.commit_log()
    shards = commit_log["shard"].to_numpy()
    is_gathered = np.isin(shards, _gathered_shards(run))
    is_new = ~is_gathered & np.isin(shards, list(examined))
    if len(old_segments) <= 1 and not is_new.any():
        return
    write_segment(
        directory, commit_log.filter(pa.array(is_gathered | is_new)).select(COMMITS.names)
    )
    # The new segment has the last name and everything that counts, so the older ones say nothing
    # any more. They go oldest first. If a segment that takes a shard back went before the segment
    # that has the shard, and the process was killed in between, the shard would count again.
    for name in old_segments:
        (directory / name).unlink(missing_ok=True)
    delete(directory / commit_name(shard) for shard in shards[is_new].tolist())


def _gathered_shards(run: RunDirectory) -> np.ndarray:
    """The shards that segments have."""
    return read_commit_log(run.commits_directory, run.run_id, [], loose=False)["shard"].to_numpy()


def clean(run: RunDirectory, commit_log: pa.Table) -> None:
    """Delete what a killed compaction or a late replica left.

    That is: commit files that a segment overrules, merged files that no commit refers to, and files
    of shards whose rows lie in others. Files of a shard that is not done stay: somebody may be
    about to commit them.
    """
    done_shards = set(commit_log["shard"].to_pylist())
    gathered_shards = set(_gathered_shards(run).tolist())
    commit_names = list(names(run.commits_directory))
    delete(
        run.commits_directory / name
        for name in commit_names
        if name.endswith(".tmp") or _shard_of(name) in gathered_shards
    )
    committed_paths = _paths(commit_log)
    for directory in _data_directories(run):
        unused_names = [
            name
            for name in names(run.path / directory)
            if f"{directory}/{name}" not in committed_paths
        ]
        delete(
            run.path / directory / name
            for name in unused_names
            if name.endswith(".tmp")
            or (name.startswith("merged-") and name.endswith(".parquet"))
            or _shard_of(name) in done_shards
        )


def delete_lost_attempts(run: RunDirectory) -> None:
    """Delete the files of attempts whose commit does not count, in a run of which all is done.

    Then a bare glob is right, too. An attempt that is still under way takes its files back itself.
    """
    # Listed before the commit log is read: an attempt that is committed meanwhile loses nothing.
    names_by_directory = {
        directory: list(names(run.path / directory)) for directory in _data_directories(run)
    }
    # Unless shards were merged, each has one file in a directory. The commit log is read only if
    # that is not so, because in a store each commit is two requests.
    shards_by_directory = [list(map(_shard_of, each)) for each in names_by_directory.values()]
    if all(None not in each and len(set(each)) == len(each) for each in shards_by_directory):
        return
    committed_paths = _paths(run.commit_log(["files.path"]))
    delete(
        run.path / directory / name
        for directory, file_names in names_by_directory.items()
        for name in file_names
        if name.endswith(".tmp")
        or (_shard_of(name) is not None and f"{directory}/{name}" not in committed_paths)
    )


def _paths(commit_log: pa.Table) -> set[str]:
    """The paths of all files that a commit log refers to."""
    return set(pc.struct_field(pc.list_flatten(commit_log["files"]), "path").to_pylist())


SHARD_FILE = re.compile(r"shard-(\d+)(-[0-9a-f]+)?\.(json|parquet)")
"""Names of the files of one shard: its commit, and its data."""


def _shard_of(name: str) -> int | None:
    """The shard that a file is named after; none if it has another kind of name."""
    match = SHARD_FILE.fullmatch(name)
    return int(match[1]) if match else None


def _data_directories(run: RunDirectory) -> Iterator[str]:
    """The directories of data files, relative to the run."""
    for table in TABLES:
        for name in names(run.path / table):
            if name.startswith("intervention="):
                yield f"{table}/{name}"


def _size(run: RunDirectory) -> Size:
    files = pc.list_flatten(run.commit_log(["files"])["files"])
    paths = pc.struct_field(files, "path").to_pylist()
    sizes = pc.struct_field(files, "bytes").to_pylist()
    # Every shard of a merged file names it, so a file counts once by its path.
    size_by_path = dict(zip(paths, sizes, strict=True))
    commit_log_files = sum(not name.startswith(".") for name in names(run.commits_directory))
    return Size(len(size_by_path) + commit_log_files, sum(size_by_path.values()))
