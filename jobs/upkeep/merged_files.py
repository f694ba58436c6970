"""The rows of some shards, moved into one file for each table and intervention.

Roll-ups of these rows are made on the way, in a file beside the others.

A merge writes new files and changes nothing else: no commit refers to them yet. Only the process
that holds the run (`jobs.upkeep.compaction`) says that the rows lie there, and deletes the small
files. So a merge may run anywhere, be cut off, or outlive the process that asked for it. What it
leaves then is a file that no reader sees and that the next compaction deletes.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from headcount.schemas.files.commit import COMMITS, FILES, DataFile
from headcount.schemas.files.commits import READERS
from headcount.schemas.files.damage import (
    Bounds,
    CommittedFile,
    committed_files,
    declared_bounds,
    problem,
    shards_in_words,
)
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.parquet import parquet_bytes, read_content
from headcount.schemas.files.places import open_at_once, reason, settle, write_whole
from headcount.schemas.files.run_directory import RunDirectory, data_path, pc
from headcount.schemas.files.tables import HEADS, ROLLUPS, SEQUENCES, with_partitions
from headcount.schemas.histogram_bins import Axis
from headcount.schemas.scans.kinds import TABLES
from headcount.workers.measurements.rollups import rolled_up

ROW_GROUP = 65_536
"""Rows of a row group, which a reader reads or skips together."""

DISK_READERS = 4
"""Files of a disk that a process reads at once. More threads would wait for one another."""

Problems = dict[int, str]
"""What the user is told of each shard that cannot be merged."""


class DamagedShards(Exception):
    """Shards that cannot be merged because a file of theirs is damaged."""

    def __init__(self, shards: set[int], why: str) -> None:
        super().__init__(why)
        self.shards = shards
        self.why = why


@dataclass(frozen=True)
class Unit:
    """Shards whose rows lie in the same files: a single shard until it is merged."""

    shards: list[int]
    rows: int
    """Rows of the largest table under one intervention."""
    code: str
    """The code that measured them. Shards of two codes are never merged, so that either can be read
    alone.
    """
    must_be_rewritten: bool
    """Whether it is merged even alone: its files also hold rows of shards that no longer count
    there, its roll-ups are damaged, or it is large and has none.
    """


@dataclass(frozen=True)
class Group:
    """Units of one code that are merged with one another."""

    run: RunDirectory
    manifest: Manifest
    units: list[Unit]
    commit_log: pa.Table
    """The commits of their shards, in shard order."""


@dataclass(frozen=True)
class Merged:
    """Merged files that no commit refers to yet."""

    commits: pa.Table
    """The commits of the merged shards as they must become. They refer to the merged files."""
    old_paths: list[str]
    """The files that held these rows."""
    problems: Problems


MergeGroups = Callable[[Iterable[Group]], Iterator[Merged]]
"""Merges groups, in any order."""


def is_worth_merging(units: Sequence[Unit]) -> bool:
    """Whether to merge some units: a single one only if it must be written again."""
    return len(units) > 1 or (len(units) == 1 and units[0].must_be_rewritten)


def merge_group(group: Group) -> Merged:
    """Write the merged files of those units of a group that can be read."""
    problems: Problems = {}
    units = group.units
    while is_worth_merging(units):
        shards = pa.array([shard for unit in units for shard in unit.shards], pa.int64())
        rows = group.commit_log.filter(pc.is_in(group.commit_log["shard"], shards))
        try:
            commits, old_paths = merge_files(group.run, group.manifest, rows)
        except DamagedShards as damage:
            # The others can be merged without them.
            message = damage_message(group.run, sorted(damage.shards), damage.why)
            problems |= dict.fromkeys(damage.shards, message)
            units = [unit for unit in units if not damage.shards.intersection(unit.shards)]
        else:
            return Merged(commits, old_paths, problems)
    return Merged(COMMITS.empty_table(), [], problems)


def merged_here(groups: Iterable[Group]) -> Iterator[Merged]:
    """Merge one group after the other in this process."""
    return map(merge_group, groups)


def damage_message(run: RunDirectory, shards: Sequence[int], what: str) -> str:
    """What the user is told of damaged shards."""
    return f"{shards_in_words(shards)}: {what}; headcount resume {run.path} --verify, then compact"


def merge_files(
    run: RunDirectory, manifest: Manifest, commits: pa.Table
) -> tuple[pa.Table, list[str]]:
    """Write the merged files of some shards, whose commits are rows of a commit log.

    Returns the commits that refer to them, and the paths of the files that held these rows. Such a
    file may also hold rows of shards that no longer count there. They are not moved. A merged file
    of just these rows stays, so that damaged roll-ups cost no more than reading what they repeat.
    """
    shards = commits["shard"].to_numpy()
    # The random part makes a name that was never used. A reader that holds an older commit must
    # find either the older file or none.
    shard_range = f"{shards.min():06d}-{shards.max():06d}"
    name = f"merged-{shard_range}-{secrets.token_hex(4)}.parquet"
    files_by_kind: dict[tuple[str, str], list[CommittedFile]] = {}
    for file in committed_files(commits):
        files_by_kind.setdefault((file.table, file.intervention), []).append(file)
    bounds = declared_bounds(manifest)
    new_files: list[DataFile] = []
    new_rollups: list[DataFile] = []
    old_paths: list[str] = []
    merged_rows: dict[str, dict[str, pa.Table]] = {}
    for (table, intervention), files in files_by_kind.items():
        if TABLES[table].written == "once":
            continue  # A run has one file of weights. It stays where it is.
        # One merged file of which every row counts is what a merge would write again.
        is_merged = files[0].path.rpartition("/")[2].startswith("merged-")
        is_whole = len(files) == 1 and files[0].rows is not None
        stays = table != ROLLUPS.name and is_merged and is_whole
        if not stays:
            old_paths += [file.path for file in files]
        if table == ROLLUPS.name:
            continue  # They are made anew, from the rows.
        is_rolled_up = table in (HEADS.name, SEQUENCES.name)
        if stays and not is_rolled_up:
            continue
        rows = _read_rows(run, files, bounds)
        if not stays:
            keys = [(key, "ascending") for key in TABLES[table].order]
            rows = rows.take(pc.sort_indices(rows, sort_keys=keys))
            shard_count = sum(len(file.shards) for file in files)
            new_files.append(_write_merged_file(run, table, intervention, name, rows, shard_count))
        if is_rolled_up:
            tables = merged_rows.setdefault(intervention, {})
            tables[table] = rows
            # Roll-ups need the rows of both tables.
            if len(tables) == 2:
                rollups = _rollups(run, manifest, intervention, merged_rows.pop(intervention))
                new_rollups.append(
                    _write_merged_file(run, ROLLUPS.name, intervention, name, rollups, len(commits))
                )
    return _with_rollups(_with_new_files(commits, new_files), new_rollups), old_paths


def _rollups(
    run: RunDirectory, manifest: Manifest, intervention: str, tables: Mapping[str, pa.Table]
) -> pa.Table:
    """The roll-ups of merged rows under one intervention."""
    heads = tables[HEADS.name]
    axes = {
        name: Axis(*range_of_statistic)
        for name, range_of_statistic in declared_bounds(manifest)[HEADS.name].items()
        # A damaged manifest may name more. Whoever opens the run hears of it.
        if name in heads.column_names
    }
    rows = rolled_up(heads, tables[SEQUENCES.name], axes)
    return with_partitions(rows, run.run_id, intervention)


def _write_merged_file(
    run: RunDirectory, table: str, intervention: str, name: str, rows: pa.Table, shards: int
) -> DataFile:
    """Write the rows of some shards into one file."""
    content = parquet_bytes(rows, row_group_size=TABLES[table].row_group or ROW_GROUP)
    path = data_path(table, intervention, name)
    write_whole(run.path / path, content)
    # The old files are deleted later, so the new name must survive a power cut.
    settle((run.path / path).parent)
    return DataFile(
        table=table,
        intervention=intervention,
        path=path,
        rows=rows.num_rows,
        bytes=content.size,
        shards=shards,
        digest=digest_of(content),
    )


def _with_new_files(commits: pa.Table, new_files: list[DataFile]) -> pa.Table:
    """Commits that refer to merged files, each in place of the file of its table and intervention.

    The number of rows stays: it is that of the shard.
    """
    lists = commits["files"].combine_chunks()
    files = pc.list_flatten(lists)
    kinds = pc.binary_join_element_wise(
        pc.struct_field(files, "table"), pc.struct_field(files, "intervention"), "/"
    )
    new_kinds = pa.array([f"{file.table}/{file.intervention}" for file in new_files], pa.string())
    # NULL for a file that stays where it is.
    new_indices = pc.index_in(kinds, new_kinds)
    arrays: list[pa.Array] = []
    for field in FILES:
        old_values = pc.struct_field(files, field.name)
        if field.name in ("path", "bytes", "shards", "digest"):
            new_values = pa.array([getattr(file, field.name) for file in new_files], field.type)
            old_values = pc.coalesce(new_values.take(new_indices), old_values)
        arrays.append(old_values)
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())])
    moved = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.StructArray.from_arrays(arrays, fields=list(FILES))
    )
    field = COMMITS.field("files")
    return commits.set_column(
        commits.schema.get_field_index("files"), field, moved.cast(field.type)
    )


def _with_rollups(commits: pa.Table, new_rollups: list[DataFile]) -> pa.Table:
    """Commits that refer to new roll-ups, in place of older ones.

    No row of them is of one shard, so each commit counts none.
    """
    lists = commits["files"].combine_chunks()
    files = pc.list_flatten(lists)
    is_kept = pc.not_equal(pc.struct_field(files, "table"), ROLLUPS.name)
    commit_of_file = pc.list_parent_indices(lists).filter(is_kept).to_numpy()
    kept_files = files.filter(is_kept)
    records = [file.model_dump() | {"rows": 0} for file in new_rollups]
    all_files = pa.concat_arrays([kept_files, pa.array(records, files.type)])
    # Each commit has the files that it keeps, and then all the roll-ups.
    kept = np.bincount(commit_of_file, minlength=len(commits))
    added = np.tile(np.arange(len(records)) + len(kept_files), len(commits))
    indices = np.insert(np.arange(len(kept_files)), np.repeat(np.cumsum(kept), len(records)), added)
    offsets = np.concatenate([[0], np.cumsum(kept + len(records))])
    new_lists = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), all_files.take(pa.array(indices))
    )
    field = COMMITS.field("files")
    return commits.set_column(
        commits.schema.get_field_index("files"), field, new_lists.cast(field.type)
    )


def _read_rows(
    run: RunDirectory, files: list[CommittedFile], bounds: Mapping[str, Bounds]
) -> pa.Table:
    """The rows of some files of one table, without those that do not count."""
    readers = DISK_READERS if isinstance(run.path, Path) else READERS
    with ThreadPoolExecutor(readers) as pool:
        tables = list(pool.map(lambda file: _read_file(run, file, bounds), files))
    # Files of one code have the same columns, unless one of them was written by something else.
    for file, table in zip(files, tables, strict=True):
        if table.schema != tables[0].schema:
            raise DamagedShards(
                set(file.shards), f"{file.path} has other columns than {files[0].path}"
            )
    return pa.concat_tables(tables).combine_chunks()


def _read_file(run: RunDirectory, file: CommittedFile, bounds: Mapping[str, Bounds]) -> pa.Table:
    """The rows of a file that count; a file that is not as committed is never merged.

    A merged file gets a digest of its own, which would hide the damage for ever.
    """
    try:
        # The file is read twice, for its digest and for its rows.
        with open_at_once(run.path / file.path) as content:
            why = problem(run.path, file, bounds, content)
            if why is None:
                content.seek(0)
                table = read_content(content)
    except (OSError, pa.ArrowException) as error:
        why = f"cannot be read ({reason(error)})"
    if why is not None:
        raise DamagedShards(set(file.shards), f"{file.path} {why}")
    if file.rows is None:
        return table.filter(pc.is_in(table["shard"], pa.array(file.shards, table["shard"].type)))
    return table
