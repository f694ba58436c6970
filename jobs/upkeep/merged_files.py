"""The rows of a group of shards, merged into one file for each table and intervention.

Roll-ups and a sample of these rows are made on the way, in files beside the others.

A merge writes files and changes nothing else: no commit names them yet. So it may run anywhere, be
cut off, or outlive the process that asked for it (`jobs.upkeep.compaction`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from headcount.schemas.files.commit import COMMITS
from headcount.schemas.files.commits import READERS
from headcount.schemas.files.content_check import (
    Bounds,
    CommittedFile,
    committed_files,
    declared_bounds,
    problem,
)
from headcount.schemas.files.damage import shards_in_words
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.parquet import parquet_bytes, read_content
from headcount.schemas.files.run_directory import RunDirectory, data_path, pc
from headcount.schemas.filled_tables import OF_MERGED, TABLES
from headcount.schemas.histogram_bins import Axis
from headcount.schemas.object_stores import wait_for_store
from headcount.schemas.places import StorePath, open_at_once, settle, unread, write_whole
from headcount.schemas.reasons import reason
from headcount.schemas.tables import (
    HEADS,
    ROLLUPS,
    SAMPLES,
    SEQUENCE,
    SEQUENCES,
    SHARD,
    with_partitions,
)
from headcount.workers.measurements.rollups import rolled_up

ROW_GROUP = 65_536  # rows of a row group, which a reader reads or skips together

DISK_READERS = 4  # files of a disk that are read at once; more threads would wait

Problems = dict[int, str]  # what the user is told of each shard that cannot be merged


class DamagedShards(Exception):
    """Shards that cannot be merged because a file of theirs is damaged."""

    def __init__(self, shards: Iterable[int], why: str) -> None:
        super().__init__(why)
        self.shards = sorted(shards)
        self.why = why


@dataclass(frozen=True)
class Group:
    """Shards that are merged with one another."""

    run: RunDirectory
    commits: pa.Table  # their commits, in shard order
    damaged_rollups: frozenset[str]  # paths of roll-ups and samples that must be written again


@dataclass(frozen=True)
class Merged:
    """Merged files that no commit names yet."""

    commits: pa.Table  # of the merged shards, naming the merged files
    old_paths: list[str]  # the files that held these rows
    problems: Problems


MergeGroups = Callable[[Iterable[Group]], Iterator[Merged]]  # merges groups, in any order


def is_merged(group: Group) -> bool:
    """Whether all shards of a group name the same files, which hold nothing else, roll-ups and a
    sample among them.
    """
    files = pc.list_flatten(group.commits["files"])
    paths = pc.unique(pc.struct_field(files, "path")).to_pylist()
    lengths = pc.unique(pc.list_value_length(group.commits["files"])).to_pylist()
    shards = pc.unique(pc.struct_field(files, "shards")).to_pylist()
    return (
        (lengths, shards) == ([len(paths)], [len(group.commits)])
        and {path.partition("/")[0] for path in paths}.issuperset(OF_MERGED)
        and group.damaged_rollups.isdisjoint(paths)
    )


def merge_group(group: Group) -> Merged:
    """Write the merged files of those shards of a group that can be read."""
    # A process that starts while the store stands still must not end the compaction.
    wait_for_store(group.run.path)
    problems: Problems = {}
    while len(group.commits) and not is_merged(group):
        try:
            return replace(_merge_files(group), problems=problems)
        except DamagedShards as damage:
            # The others can be merged without them.
            message = (
                f"{shards_in_words(damage.shards)}: {damage.why}; headcount resume "
                f"{group.run.path} --verify, then compact"
            )
            problems |= dict.fromkeys(damage.shards, message)
            is_damaged = pc.is_in(group.commits["shard"], pa.array(damage.shards))
            group = replace(group, commits=group.commits.filter(pc.invert(is_damaged)))
    return Merged(COMMITS.empty_table(), [], problems)


merged_here: MergeGroups = partial(map, merge_group)  # one after the other, in this process


def _merge_files(group: Group) -> Merged:
    """Write the merged files of a group; one that holds just the rows of its kind stays."""
    run, manifest = group.run, group.run.manifest()
    bounds = declared_bounds(manifest)
    shards = group.commits["shard"].to_pylist()
    old_files: dict[str, dict[str, list[CommittedFile]]] = {}
    for file in committed_files(group.commits):
        of_intervention = old_files.setdefault(file.intervention, {})
        of_intervention.setdefault(file.table, []).append(file)
    new_files: dict[tuple[str, str], dict[str, Any]] = {}
    old_paths: set[str] = set()
    for intervention, tables in old_files.items():
        rows_of: dict[str, pa.Table] = {}
        for table, files in tables.items():
            old_paths |= {file.path for file in files}
            if table in OF_MERGED:
                continue  # They are made anew, from the rows.
            # What stays is read all the same: what is damaged must not be committed again.
            rows = _read_rows(run, files, bounds)
            if TABLES[table].written == "once" or (len(files) == 1 and files[0].rows is not None):
                # The weights are in a file of shard 0. Now all shards of the group name it.
                new_files[table, intervention] = {
                    "path": files[0].path, "bytes": files[0].bytes, "digest": files[0].digest,
                }  # fmt: skip
            else:
                new_files[table, intervention] = _write(run, table, intervention, shards, rows)
            if table in (HEADS.name, SEQUENCES.name):
                rows_of[table] = rows
        if len(rows_of) == 2:
            heads, sequences = rows_of[HEADS.name], rows_of[SEQUENCES.name]
            # A damaged manifest may name more. Whoever opens the run hears of it.
            ends_of = bounds[HEADS.name]
            axes = {n: Axis(*ends) for n, ends in ends_of.items() if n in heads.column_names}
            rollups = with_partitions(rolled_up(heads, sequences, axes), run.run_id, intervention)
            is_sampled = heads[SEQUENCE.name].to_numpy() % manifest.sample_stride == 0
            sample = heads.filter(pa.array(is_sampled))
            for table, rows in ((ROLLUPS.name, rollups), (SAMPLES.name, sample)):
                new_files[table, intervention] = _write(run, table, intervention, shards, rows)
    new_paths = {file["path"] for file in new_files.values()}
    return Merged(_naming(group.commits, new_files), sorted(old_paths - new_paths), {})


def _write(
    run: RunDirectory, table: str, intervention: str, shards: list[int], rows: pa.Table
) -> dict[str, Any]:
    """Write a merged file; returns what a commit says of its content."""
    keys = [(key, "ascending") for key in TABLES[table].order]
    rows = rows.take(pc.sort_indices(rows, sort_keys=keys))
    content = parquet_bytes(rows, row_group_size=TABLES[table].row_group or ROW_GROUP)
    digest = digest_of(content)
    # As with the files of a shard, no name is ever used for two contents.
    name = f"merged-{shards[0]:06d}-{shards[-1]:06d}-{digest[:8]}.parquet"
    path = data_path(table, intervention, name)
    write_whole(run.path / path, content)
    # The old files are deleted later, so the new name must survive a power cut.
    settle((run.path / path).parent)
    return {"path": path, "bytes": content.size, "digest": digest}


def _naming(commits: pa.Table, new_files: Mapping[tuple[str, str], dict[str, Any]]) -> pa.Table:
    """The commits, which all name the same files; the rows are still those of each shard."""
    files_of_commits: list[list[dict[str, Any]]] = []
    for old_files in commits["files"].to_pylist():
        rows = {(file["table"], file["intervention"]): file["rows"] for file in old_files}
        files_of_commits.append([
            {"table": table, "intervention": intervention, "shards": len(commits),
             "rows": rows.get((table, intervention), 0), **file}
            for (table, intervention), file in new_files.items()
        ])  # fmt: skip
    field = COMMITS.field("files")
    index = commits.schema.get_field_index(field.name)
    return commits.set_column(index, field, pa.array(files_of_commits, field.type))


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
            raise DamagedShards(file.shards, f"{file.path} has other columns than {files[0].path}")
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
    except FileNotFoundError as error:
        why = f"cannot be read ({reason(error)})"
    except (OSError, pa.ArrowException) as error:
        if isinstance(run.path, StorePath):
            # What a store does not give is not damaged.
            raise unread(run.path / file.path, error) from None
        why = f"cannot be read ({reason(error)})"
    if why is not None:
        raise DamagedShards(file.shards, f"{file.path} {why}")
    if file.rows is None and TABLES[file.table].has(SHARD.name):
        # Only a scan and a compaction at once, which a store cannot refuse, leave such a file.
        return table.filter(pc.is_in(table[SHARD.name], pa.array(file.shards, SHARD.type)))
    return table
