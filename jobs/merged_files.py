"""The rows of some shards, moved into one file for each table and intervention.

A merge writes new files and changes nothing else: no commit refers to them yet. Only the process
that holds the run (`jobs.compaction`) says that the rows lie there, and deletes the small files. So
a merge may run anywhere, be cut off, or outlive the process that asked for it. What it leaves then
is a file that no reader sees and that the next compaction deletes.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from schemas.commits import COMMITS, READERS, Commit, DataFile, commits_of
from schemas.damage import Bounds, CommittedFile, declared_bounds, problem, shards_in_words
from schemas.digests import digest_of
from schemas.kinds import TABLES
from schemas.manifest import Manifest
from schemas.parquet import parquet_bytes, read_content
from schemas.places import open_at_once, reason, settle, write_whole
from schemas.run_directory import RunDirectory, data_path, pc

ROW_GROUP = 65_536
"""Rows of a row group, which a reader reads or skips together."""

Problems = dict[int, str]
"""What the user is told of each shard that cannot be merged."""


class DamagedShards(Exception):
    """Shards that cannot be merged because a file of theirs is damaged."""

    def __init__(self, shards: set[int], why: str) -> None:
        super().__init__(why)
        self.shards = shards
        self.why = why


class _ShardFile(NamedTuple):
    """A data file, as the commit of one of its shards refers to it."""

    commit: Commit
    file: DataFile


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
    has_foreign_rows: bool
    """Whether its files also hold rows of shards that no longer count there."""


@dataclass(frozen=True)
class Group:
    """Units of one code that are merged with one another."""

    run: RunDirectory
    manifest: Manifest
    units: list[Unit]
    ledger: pa.Table
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
    """Whether to merge some units: a single one only if it has rows that must be left behind."""
    return len(units) > 1 or (len(units) == 1 and units[0].has_foreign_rows)


def merge_group(group: Group) -> Merged:
    """Write the merged files of those units of a group that can be read."""
    problems: Problems = {}
    units = group.units
    while is_worth_merging(units):
        shards = pa.array([shard for unit in units for shard in unit.shards], pa.int64())
        rows = group.ledger.filter(pc.is_in(group.ledger["shard"], shards))
        try:
            moved_commits, old_paths = merge_files(
                group.run, group.manifest, list(commits_of(rows))
            )
        except DamagedShards as damage:
            # The others can be merged without them.
            message = damage_message(group.run, sorted(damage.shards), damage.why)
            problems |= dict.fromkeys(damage.shards, message)
            units = [unit for unit in units if not damage.shards.intersection(unit.shards)]
        else:
            dumped = [commit.model_dump() for commit in moved_commits]
            return Merged(pa.Table.from_pylist(dumped, schema=COMMITS), old_paths, problems)
    return Merged(COMMITS.empty_table(), [], problems)


def merged_here(groups: Iterable[Group]) -> Iterator[Merged]:
    """Merge one group after the other in this process."""
    return map(merge_group, groups)


def damage_message(run: RunDirectory, shards: Sequence[int], what: str) -> str:
    """What the user is told of damaged shards."""
    return f"{shards_in_words(shards)}: {what}; headcount resume {run.path} --verify, then compact"


def merge_files(
    run: RunDirectory, manifest: Manifest, commits: list[Commit]
) -> tuple[list[Commit], list[str]]:
    """Write the merged files of some shards.

    Returns the commits that refer to them, and the paths of the files that held these rows. Such a
    file may also hold rows of shards that no longer count there. They are not moved.
    """
    new_places = _write_merged_files(run, manifest, commits)
    old_paths = {
        file.path
        for commit in commits
        for file in commit.files
        if (file.table, file.intervention) in new_places
    }
    return [_moved(commit, new_places) for commit in commits], sorted(old_paths)


def _write_merged_files(
    run: RunDirectory, manifest: Manifest, commits: list[Commit]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write the merged files; returns the new fields of each `DataFile`.

    They are keyed by table and intervention. Files that stay where they are have no entry.
    """
    # The random part makes a name that was never used. A reader that holds an older commit must
    # find either the older file or none.
    shard_range = f"{commits[0].shard:06d}-{commits[-1].shard:06d}"
    name = f"merged-{shard_range}-{secrets.token_hex(4)}.parquet"
    groups: dict[tuple[str, str], list[_ShardFile]] = {}
    for commit in commits:
        for file in commit.files:
            groups.setdefault((file.table, file.intervention), []).append(_ShardFile(commit, file))
    new_places: dict[tuple[str, str], dict[str, Any]] = {}
    for (table, intervention), shard_files in groups.items():
        if len(shard_files) == 1 and shard_files[0].file.shards == 1:
            continue  # A run has one file of weights. It stays where it is.
        rows = _sorted(_read_rows(run, manifest, shard_files), TABLES[table].order)
        content = parquet_bytes(rows, row_group_size=ROW_GROUP)
        path = data_path(table, intervention, name)
        write_whole(run.path / path, content)
        # The old files are deleted later, so the new name must survive a power cut.
        settle((run.path / path).parent)
        new_places[table, intervention] = {
            "path": path,
            "bytes": content.size,
            "shards": len(shard_files),
            "digest": digest_of(content),
        }
    return new_places


def _moved(commit: Commit, new_places: Mapping[tuple[str, str], dict[str, Any]]) -> Commit:
    """A commit that refers to the merged files."""
    files = [
        file.model_copy(update=new_places.get((file.table, file.intervention), {}))
        for file in commit.files
    ]
    return commit.model_copy(update={"files": files})


def _read_rows(run: RunDirectory, manifest: Manifest, shard_files: list[_ShardFile]) -> pa.Table:
    """The rows of some shards in one table, from all the files that hold them."""
    by_path: dict[str, list[_ShardFile]] = {}
    for shard_file in shard_files:
        by_path.setdefault(shard_file.file.path, []).append(shard_file)
    sources = [_committed_file(of_one_path) for of_one_path in by_path.values()]
    bounds = declared_bounds(manifest)
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda file: _read_file(run, manifest, file, bounds), sources))
    for source, table in zip(sources, tables, strict=True):
        if table.schema != tables[0].schema:
            raise DamagedShards(
                set(source.shards), f"{source.path} has other columns than {sources[0].path}"
            )
    return pa.concat_tables(tables).combine_chunks()


def _committed_file(of_one_path: list[_ShardFile]) -> CommittedFile:
    """One file, as the commits of its shards describe it together."""
    file = of_one_path[0].file
    counts_whole = len(of_one_path) == file.shards
    return CommittedFile(
        path=file.path,
        table=file.table,
        intervention=file.intervention,
        bytes=file.bytes,
        digest=file.digest,
        shards=[shard_file.commit.shard for shard_file in of_one_path],
        rows=sum(shard_file.file.rows for shard_file in of_one_path) if counts_whole else None,
        start=min(shard_file.commit.start for shard_file in of_one_path),
        stop=max(shard_file.commit.stop for shard_file in of_one_path),
    )


def _read_file(
    run: RunDirectory, manifest: Manifest, file: CommittedFile, bounds: Mapping[str, Bounds]
) -> pa.Table:
    """The rows of a file that count; a file that is not as committed is never merged.

    A merged file gets a digest of its own, which would hide the damage for ever.
    """
    try:
        # The file is read twice, for its digest and for its rows.
        with open_at_once(run.path / file.path) as content:
            why = problem(run.path, manifest, file, bounds, content)
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


def _sorted(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    return table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in keys]))
