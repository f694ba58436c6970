"""Merge the small files of a run into few large ones, by the protocol that commits shards.

For one group of shards after another: the merged files of every table and intervention are written
whole, under names that are used once; then one fold says that the group's rows lie there, and from
that moment they do; then the small files and their commits are deleted. Whoever is killed in
between leaves files that no commit refers to, and the next compaction deletes those. At the end one
fold of all commits replaces the folds before it.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from schemas.places import Place, names, open_whole, reason, settle, write_whole
from schemas.run_directory import RunDirectory, data_path, pc

ROWS = 2_000_000
"""Rows of a merged file of the largest table (`heads`, or `profiles`); a file with half of them is
left alone.
"""

ROW_GROUP = 65_536
"""Rows that are read or passed over together."""


@dataclass(frozen=True)
class Size:
    """Files of a run, those of its ledger included, and bytes of its data files."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Compacted:
    """What a compaction did, and what it had to leave alone."""

    before: Size
    after: Size
    seconds: float
    problems: list[str]


@dataclass(frozen=True)
class _Unit:
    """Shards whose rows lie in the same files: one shard until it is merged."""

    positions: list[int]
    """In the ledger."""
    rows: int
    """Rows of the largest table under one intervention."""
    code: str
    """The code that measured them; shards of two codes are kept apart, so that either can be read."""
    torn: bool
    """Whether its files hold rows of other shards, which no longer count there."""


class DamagedShards(Exception):
    """Shards that cannot be merged because a file of theirs is damaged, and why."""

    def __init__(self, shards: set[int], why: str) -> None:
        super().__init__(why)
        self.shards, self.why = shards, why


def compact(
    run: RunDirectory, rows: int = ROWS, tell: Callable[[str], None] = lambda line: None
) -> Compacted:
    """Merge what is small; nobody else may be at work on the run, which only a disk can make sure
    of.
    """
    began = time.monotonic()
    run.manifest()
    try:
        with locked(run):
            before = _size(run)
            problems = _compact(run, rows, tell)
            return Compacted(before, _size(run), time.monotonic() - began, problems)
    except OSError as error:
        raise RunError(f"{run.path}: {reason(error)}; mend that, then compact again") from None


def _compact(run: RunDirectory, rows: int, tell: Callable[[str], None]) -> list[str]:
    ledger = run.ledger().combine_chunks()
    clean(run, ledger)
    damaged = _damaged(run, ledger)
    groups = _groups(
        [u for u in _units(ledger, rows) if not damaged.keys() & _shards(ledger, u)], rows
    )
    for i, group in enumerate(groups):
        damaged |= _merge_readable(run, ledger, group)
        tell(f"{run.run_id}: group {i + 1:,} of {len(groups):,} merged")
    _fold_all(run, examined=set(ledger["shard"].to_pylist()) - damaged.keys())
    clean(run, run.ledger())
    return list(dict.fromkeys(damaged.values()))


def _units(ledger: pa.Table, rows: int) -> list[_Unit]:
    """The units that are to be merged, in shard order: those with less than half the rows."""
    lists = ledger["files"].combine_chunks()
    parents, files = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    per_shard = np.zeros(len(ledger), int)
    np.maximum.at(per_shard, parents, pc.struct_field(files, "rows").to_numpy())
    _, first = np.unique(parents, return_index=True)
    paths = pc.struct_field(files, "path").take(pa.array(first)).to_pylist()
    held = pc.struct_field(files, "shards").to_numpy()[first]
    together: dict[str, list[int]] = {}
    for position, path in zip(parents[first].tolist(), paths, strict=True):
        together.setdefault(path, []).append(position)
    codes = ledger["code"].to_pylist()
    kept = dict(zip(paths, held.tolist(), strict=True))
    units = [
        _Unit(at, int(per_shard[at].sum()), codes[at[0]], kept[path] != len(at))
        for path, at in together.items()
    ]
    return [u for u in units if u.torn or 2 * u.rows < rows]


def _groups(units: list[_Unit], rows: int) -> list[list[_Unit]]:
    """Units of one code to merge with one another, up to `rows` each; what has no partner stays as
    it is.
    """
    groups: list[list[_Unit]] = []
    size = 0
    for unit in sorted(units, key=lambda unit: unit.code):
        if not groups or size + unit.rows > rows or groups[-1][0].code != unit.code:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.rows
    return [group for group in groups if len(group) > 1 or group[0].torn]


def _shards(ledger: pa.Table, unit: _Unit) -> set[int]:
    return set(ledger["shard"].to_numpy()[unit.positions].tolist())


def _damaged(run: RunDirectory, ledger: pa.Table) -> dict[int, str]:
    """Shards with a damaged file, and what to tell the user of it."""
    return {
        shard: _problem(run, damage.shards, f"{damage.path} {damage.why}")
        for damage in run.damaged_files([ledger])
        for shard in damage.shards
    }


def _problem(run: RunDirectory, shards: Sequence[int], what: str) -> str:
    return f"{shards_in_words(shards)}: {what}; headcount resume {run.path} --verify, then compact"


def _merge_readable(run: RunDirectory, ledger: pa.Table, group: list[_Unit]) -> dict[int, str]:
    """Merge those units of a group whose files can be read; returns the shards of the others, and
    why.
    """
    problems: dict[int, str] = {}
    while len(group) > 1 or (group and group[0].torn):
        positions = sorted(p for unit in group for p in unit.positions)
        try:
            merge(run, list(commits_of(ledger.take(pa.array(positions)))))
            break
        except DamagedShards as damage:
            problems |= dict.fromkeys(
                damage.shards, _problem(run, sorted(damage.shards), damage.why)
            )
            group = [unit for unit in group if not damage.shards & _shards(ledger, unit)]
    return problems


def merge(run: RunDirectory, commits: list[Commit], dropped: Sequence[int] = ()) -> None:
    """Move the rows of some shards into one file per table and intervention.

    The files they lie in may hold rows of shards that are `dropped` in the same step, and of shards
    that no longer count there.
    """
    manifest = run.manifest()
    name = f"merged-{commits[0].shard:06d}-{commits[-1].shard:06d}-{secrets.token_hex(4)}.parquet"
    tables: dict[tuple[str, str], list[tuple[Commit, DataFile]]] = {}
    for commit in commits:
        for file in commit.files:
            tables.setdefault((file.table, file.intervention), []).append((commit, file))
    changes: dict[tuple[str, str], dict[str, Any]] = {}
    for (table, intervention), files in tables.items():
        if len(files) == 1 and files[0][1].shards == 1:
            changes[table, intervention] = {}  # A lone file, of weights, stays.
            continue
        content = parquet_bytes(
            _sorted(_read(run, manifest, files), TABLES[table].order), row_group_size=ROW_GROUP
        )
        path = data_path(table, intervention, name)
        write_whole(run.path / path, content)
        settle((run.path / path).parent)
        changes[table, intervention] = {
            "path": path,
            "bytes": content.size,
            "shards": len(files),
            "digest": digest_of(content),
        }
    moved = [
        c.model_copy(
            update={
                "files": [f.model_copy(update=changes[f.table, f.intervention]) for f in c.files]
            }
        )
        for c in commits
    ]
    fold(run.commits_directory, moved, dropped)
    moved_from = {f.path for c in commits for f in c.files if changes[f.table, f.intervention]}
    delete(run.path / path for path in sorted(moved_from))


def _read(run: RunDirectory, manifest: Manifest, files: list[tuple[Commit, DataFile]]) -> pa.Table:
    """The rows of some shards, from all the files that hold them."""
    by_path: dict[str, list[tuple[Commit, DataFile]]] = {}
    for commit, file in files:
        by_path.setdefault(file.path, []).append((commit, file))
    sources = [_committed_file(found) for found in by_path.values()]
    bounds = declared_bounds(manifest)
    with ThreadPoolExecutor(READERS) as pool:
        tables = list(pool.map(lambda file: _read_file(run, manifest, file, bounds), sources))
    for file, table in zip(sources, tables, strict=True):
        if table.schema != tables[0].schema:
            raise DamagedShards(
                set(file.shards), f"{file.path} has other columns than {sources[0].path}"
            )
    return pa.concat_tables(tables).combine_chunks()


def _committed_file(found: list[tuple[Commit, DataFile]]) -> CommittedFile:
    """One file, as the commits of its shards have it."""
    file = found[0][1]
    rows = sum(of_shard.rows for _, of_shard in found)
    return CommittedFile(
        path=file.path,
        table=file.table,
        intervention=file.intervention,
        bytes=file.bytes,
        digest=file.digest,
        shards=[commit.shard for commit, _ in found],
        rows=rows if len(found) == file.shards else None,
        start=min(commit.start for commit, _ in found),
        stop=max(commit.stop for commit, _ in found),
    )


def _read_file(
    run: RunDirectory, manifest: Manifest, file: CommittedFile, bounds: Mapping[str, Bounds]
) -> pa.Table:
    """The rows of a file that count; a file that is not as committed is never merged."""
    try:
        with _opened(run.path / file.path) as content:
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


def _opened(where: Place) -> Any:
    """A file that is read twice; from a store it is fetched once."""
    return open_whole(where) if isinstance(where, Path) else pa.BufferReader(where.read_bytes())


def _sorted(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    return table.take(pc.sort_indices(table, sort_keys=[(key, "ascending") for key in keys]))


def _fold_all(run: RunDirectory, examined: set[int]) -> None:
    """Put all commits into one fold, but those of their own file that were not `examined`; delete
    the folds before it.

    The new fold has the last name, and all that counts, so the older ones say nothing any more.
    They go oldest first: a fold that takes a shard back must not go before the one that had it.
    """
    directory = run.commits_directory
    old = sorted(name for name in names(directory) if name.startswith("fold-"))
    ledger = run.ledger()
    folded, shards = ledger["folded"].to_numpy(), ledger["shard"].to_numpy()
    new = ~folded & np.isin(shards, list(examined))
    if len(old) > 1 or new.any():
        write_fold(directory, ledger.filter(pa.array(folded | new)).select(COMMITS.names))
        for name in old:
            (directory / name).unlink(missing_ok=True)
        delete(directory / commit_name(shard) for shard in shards[new].tolist())


def clean(run: RunDirectory, ledger: pa.Table) -> None:
    """Delete what a killed compaction or a late replica left: commits that a fold overrules, files
    that none refers to.

    Files of a shard that is not done are left; whoever measures it writes them again.
    """
    done = set(ledger["shard"].to_pylist())
    overruled = set(ledger.filter(ledger["folded"])["shard"].to_pylist())
    found = list(names(run.commits_directory))
    delete(
        run.commits_directory / n
        for n in found
        if n.endswith(".tmp") or _number(n, ".json") in overruled
    )
    counted = set(pc.struct_field(pc.list_flatten(ledger["files"]), "path").to_pylist())
    for directory in _directories(run):
        unused = [n for n in names(run.path / directory) if f"{directory}/{n}" not in counted]
        merged = [
            n
            for n in unused
            if n.endswith(".tmp") or (n.startswith("merged-") and n.endswith(".parquet"))
        ]
        small = [n for n in unused if _number(n, ".parquet") in done]
        delete(run.path / directory / n for n in merged + small)


def _number(name: str, suffix: str) -> int | None:
    """The shard that a file is named after."""
    number = name.removeprefix("shard-").removesuffix(suffix)
    return int(number) if number.isdecimal() and name == f"shard-{number}{suffix}" else None


def _directories(run: RunDirectory) -> Iterator[str]:
    """The directories of data files, relative to the run."""
    for table in TABLES:
        yield from (
            f"{table}/{name}"
            for name in names(run.path / table)
            if name.startswith("intervention=")
        )


def _size(run: RunDirectory) -> Size:
    files = pc.list_flatten(run.ledger(["files"])["files"])
    pairs = zip(
        pc.struct_field(files, "path").to_pylist(),
        pc.struct_field(files, "bytes").to_pylist(),
        strict=True,
    )
    sizes = dict(pairs)
    return Size(
        len(sizes) + sum(not n.startswith(".") for n in names(run.commits_directory)),
        sum(sizes.values()),
    )
