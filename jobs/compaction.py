"""Merge the small files of a run into few large ones, by the protocol that commits shards.

The order of writes, for one group of shards after another:

1. The merged files of every table and intervention are written whole, under names that are used
   once. No commit refers to them yet, so no reader sees them.
2. One fold says that the group's rows lie there. From that moment they do: a fold counts more than
   commit files, and a later fold more than an earlier one.
3. The commit files and the small data files are deleted. No commit that counts refers to them.

If the process is killed before 2, merged files are left that no commit refers to. If it is killed
after 2, small files are left that no commit refers to. So every row is counted once at every
moment, and the next compaction deletes what was left (`clean`). At the end one fold of all commits
replaces
the folds before it.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jobs.run_lock import locked
from schemas.commits import (
    COMMITS,
    READERS,
    Commit,
    DataFile,
    commit_name,
    commits_of,
    delete,
    fold,
    write_fold,
)
from schemas.damage import Bounds, CommittedFile, declared_bounds, problem, shards_in_words
from schemas.digests import digest_of
from schemas.errors import RunError
from schemas.kinds import TABLES
from schemas.manifest import Manifest
from schemas.parquet import parquet_bytes, read_content
from schemas.places import names, open_at_once, reason, settle, write_whole
from schemas.run_directory import RunDirectory, data_path, pc

ROWS = 2_000_000
"""Rows of a merged file of the largest table (`heads`, or `profiles`). A file with at least half of
them is left alone.
"""

ROW_GROUP = 65_536
"""Rows of a row group, which a reader reads or skips together."""

Tell = Callable[[str], None]
"""Takes a line about the progress."""


@dataclass(frozen=True)
class Size:
    """How large a run is on disk."""

    files: int
    """Data files and files of the ledger."""
    bytes: int
    """Of the data files."""


@dataclass(frozen=True)
class Compacted:
    """What a compaction did, and what it had to leave alone."""

    before: Size
    after: Size
    seconds: float
    problems: list[str]


@dataclass(frozen=True)
class _Unit:
    """Shards whose rows lie in the same files: a single shard until it is merged."""

    positions: list[int]
    """Of the shards in the ledger."""
    rows: int
    """Rows of the largest table under one intervention."""
    code: str
    """The code that measured them. Shards of two codes are never merged, so that either can be read
    alone.
    """
    has_foreign_rows: bool
    """Whether its files also hold rows of shards that no longer count there."""


class _ShardFile(NamedTuple):
    """A data file, as the commit of one of its shards refers to it."""

    commit: Commit
    file: DataFile


class DamagedShards(Exception):
    """Shards that cannot be merged because a file of theirs is damaged."""

    def __init__(self, shards: set[int], why: str) -> None:
        super().__init__(why)
        self.shards = shards
        self.why = why


def compact(run: RunDirectory, rows: int = ROWS, tell: Tell = lambda line: None) -> Compacted:
    """Merge the small files of a run; nobody else may be at work on it.

    On a disk a lock makes sure of that. A store has no locks.
    """
    began = time.monotonic()
    run.manifest()
    try:
        with locked(run):
            before = _size(run)
            problems = _compact_locked(run, rows, tell)
            return Compacted(before, _size(run), time.monotonic() - began, problems)
    except OSError as error:
        raise RunError(f"{run.path}: {reason(error)}; mend that, then compact again") from None


def _compact_locked(run: RunDirectory, rows: int, tell: Tell) -> list[str]:
    """Merge what can be merged; returns what is wrong with the shards that were left alone."""
    ledger = run.ledger().combine_chunks()
    # Make room first: a killed compaction may have left merged files that nobody needs.
    clean(run, ledger)
    damaged = _damaged_shards(run, ledger)
    whole_units = [
        unit
        for unit in _mergeable_units(ledger, rows)
        if not damaged.keys() & _shards(ledger, unit)
    ]
    groups = _groups(whole_units, rows)
    for number, group in enumerate(groups, start=1):
        damaged |= _merge_readable(run, ledger, group)
        tell(f"{run.run_id}: group {number:,} of {len(groups):,} merged")
    _fold_all(run, examined=set(ledger["shard"].to_pylist()) - damaged.keys())
    clean(run, run.ledger())
    # Shards of one damaged file share a message.
    return list(dict.fromkeys(damaged.values()))


def _mergeable_units(ledger: pa.Table, rows: int) -> list[_Unit]:
    """The units that are to be merged, in shard order.

    These are the units with less than half of `rows`, and those with rows that no longer count.
    """
    lists = ledger["files"].combine_chunks()
    files = pc.list_flatten(lists)
    # For each file of the flattened list, the position in the ledger of the shard that it is of.
    positions = pc.list_parent_indices(lists).to_numpy()

    rows_of_shard = np.zeros(len(ledger), int)
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

    codes = ledger["code"].to_pylist()
    units = [
        _Unit(
            positions=members,
            rows=int(rows_of_shard[members].sum()),
            code=codes[members[0]],
            has_foreign_rows=shards_by_path[path] != len(members),
        )
        for path, members in positions_by_path.items()
    ]
    return [unit for unit in units if unit.has_foreign_rows or 2 * unit.rows < rows]


def _groups(units: list[_Unit], rows: int) -> list[list[_Unit]]:
    """Units of one code that are merged with one another, with at most `rows` in a group.

    A unit without a partner stays as it is. Only one with foreign rows is written again alone.
    """
    groups: list[list[_Unit]] = []
    group_rows = 0
    for unit in sorted(units, key=lambda unit: unit.code):
        fits = groups and group_rows + unit.rows <= rows and groups[-1][0].code == unit.code
        if not fits:
            groups.append([])
            group_rows = 0
        groups[-1].append(unit)
        group_rows += unit.rows
    return [group for group in groups if _is_worth_merging(group)]


def _is_worth_merging(group: list[_Unit]) -> bool:
    return len(group) > 1 or (len(group) == 1 and group[0].has_foreign_rows)


def _shards(ledger: pa.Table, unit: _Unit) -> set[int]:
    return set(ledger["shard"].to_numpy()[unit.positions].tolist())


def _damaged_shards(run: RunDirectory, ledger: pa.Table) -> dict[int, str]:
    """The shards with a damaged file, and what the user is told of each."""
    messages: dict[int, str] = {}
    for damage in run.damaged_files([ledger]):
        message = _damage_message(run, damage.shards, f"{damage.path} {damage.why}")
        messages |= dict.fromkeys(damage.shards, message)
    return messages


def _damage_message(run: RunDirectory, shards: Sequence[int], what: str) -> str:
    return f"{shards_in_words(shards)}: {what}; headcount resume {run.path} --verify, then compact"


def _merge_readable(run: RunDirectory, ledger: pa.Table, group: list[_Unit]) -> dict[int, str]:
    """Merge those units of a group that can be read; returns the message of each other shard."""
    messages: dict[int, str] = {}
    units = group
    while _is_worth_merging(units):
        positions = sorted(position for unit in units for position in unit.positions)
        try:
            merge(run, list(commits_of(ledger.take(pa.array(positions)))))
            break
        except DamagedShards as damage:
            # Nothing was committed, so the others can be merged without them.
            message = _damage_message(run, sorted(damage.shards), damage.why)
            messages |= dict.fromkeys(damage.shards, message)
            units = [unit for unit in units if not damage.shards & _shards(ledger, unit)]
    return messages


def merge(run: RunDirectory, commits: list[Commit], dropped: Sequence[int] = ()) -> None:
    """Move the rows of some shards into one file for each table and intervention.

    Their files may also hold rows of shards that the same fold takes back (`dropped`), and rows of
    shards that no longer count there. Neither is moved.
    """
    # The numbers are those of the order of writes in the docstring of this file.
    # 1. Write the merged files.
    new_places = _write_merged_files(run, commits)
    # 2. Say that the rows lie there, which deletes the commit files, too (3).
    moved_commits = [_moved(commit, new_places) for commit in commits]
    fold(run.commits_directory, moved_commits, dropped)
    # 3. Delete the small files.
    old_paths = {
        file.path
        for commit in commits
        for file in commit.files
        if (file.table, file.intervention) in new_places
    }
    delete(run.path / path for path in sorted(old_paths))


def _write_merged_files(
    run: RunDirectory, commits: list[Commit]
) -> dict[tuple[str, str], dict[str, Any]]:
    """Write the merged files; returns the new fields of each `DataFile`.

    They are keyed by table and intervention. Files that stay where they are have no entry.
    """
    manifest = run.manifest()
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


def _fold_all(run: RunDirectory, examined: set[int]) -> None:
    """Put all commits that count into one fold, and delete the folds before it.

    A commit in a file of its own stays there if its shard was not `examined`: readers look at how
    files end only while a commit is in its own file (`schemas.damage.files_damaged_by_size`).
    """
    directory = run.commits_directory
    old_folds = sorted(name for name in names(directory) if name.startswith("fold-"))
    ledger = run.ledger()
    is_folded = ledger["folded"].to_numpy()
    shards = ledger["shard"].to_numpy()
    is_new = ~is_folded & np.isin(shards, list(examined))
    if len(old_folds) <= 1 and not is_new.any():
        return
    write_fold(directory, ledger.filter(pa.array(is_folded | is_new)).select(COMMITS.names))
    # The new fold has the last name and everything that counts, so the older ones say nothing any
    # more. They go oldest first. If a fold that takes a shard back went before the fold that has
    # the shard, and the process was killed in between, the shard would count again.
    for name in old_folds:
        (directory / name).unlink(missing_ok=True)
    delete(directory / commit_name(shard) for shard in shards[is_new].tolist())


def clean(run: RunDirectory, ledger: pa.Table) -> None:
    """Delete what a killed compaction or a late replica left.

    That is: commit files that a fold overrules, merged files that no commit refers to, and files
    of shards whose rows were merged. Files of a shard that is not done stay: the next attempt
    writes them again.
    """
    done_shards = set(ledger["shard"].to_pylist())
    folded_shards = set(ledger.filter(ledger["folded"])["shard"].to_pylist())
    commit_names = list(names(run.commits_directory))
    delete(
        run.commits_directory / name
        for name in commit_names
        if name.endswith(".tmp") or _shard_of(name, ".json") in folded_shards
    )
    data_files = pc.list_flatten(ledger["files"])
    committed_paths = set(pc.struct_field(data_files, "path").to_pylist())
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
            or _shard_of(name, ".parquet") in done_shards
        )


def _shard_of(name: str, suffix: str) -> int | None:
    """The shard that a file is named after; none if it has another kind of name."""
    number = name.removeprefix("shard-").removesuffix(suffix)
    has_our_form = number.isdecimal() and name == f"shard-{number}{suffix}"
    return int(number) if has_our_form else None


def _data_directories(run: RunDirectory) -> Iterator[str]:
    """The directories of data files, relative to the run."""
    for table in TABLES:
        for name in names(run.path / table):
            if name.startswith("intervention="):
                yield f"{table}/{name}"


def _size(run: RunDirectory) -> Size:
    files = pc.list_flatten(run.ledger(["files"])["files"])
    paths = pc.struct_field(files, "path").to_pylist()
    sizes = pc.struct_field(files, "bytes").to_pylist()
    # Every shard of a merged file names it, so a file counts once by its path.
    size_by_path = dict(zip(paths, sizes, strict=True))
    ledger_files = sum(not name.startswith(".") for name in names(run.commits_directory))
    return Size(len(size_by_path) + ledger_files, sum(size_by_path.values()))
