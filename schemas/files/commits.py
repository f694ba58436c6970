"""The commit log of a run: which shards are done, and how each one was measured.

    a replica, for each shard                   a driver, for every 4,096 commits
    -------------------------                   ---------------------------------
    1. shard-000003-DIGEST.parquet, ...         3. segment-000000-DIGEST.parquet
       the data files, each written whole          these commits, written whole
             |                                           |
             v                                           v
    2. commits/shard-000003.json                4. the files of their own are deleted
       only if there is none yet

A process may die between any two steps. Before 2, it leaves data files that no commit names.
Between 3 and 4, a commit is in two places and counts once. Whoever reads goes by three rules:

Rule 1: of several segments with one shard, the last one wins.
Rule 2: a segment's row without files takes the shard back: it is missing again.
Rule 3: a file of its own counts unless a segment has the shard: a late attempt left it.

No name is ever used for two contents: data files and segments have their digests in their names,
and of two attempts at a shard the second finds that there is a commit. So two drivers may be at
work at once, and a straggler that finishes when its shard is in a segment changes nothing.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import ValidationError

from headcount.schemas.errors import RunError, StoreError
from headcount.schemas.files.commit import COMMITS, FILES, Commit
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.parquet import parquet_bytes, read_content
from headcount.schemas.places import (
    NOT_LISTED,
    READINGS,
    Place,
    StorePath,
    names,
    read_as,
    settle,
    unread,
    write_whole,
)
from headcount.schemas.reasons import reason

pc: Any = pyarrow.compute  # Its functions are made at run time; no type checker finds them.

COMMITS_PER_SEGMENT = 4096  # commits that are gathered into one file

READERS = 16  # files read or deleted at once: a store is slow for each, not for many

DISK_READERS, FEW_FILES = 4, 64
"""Files of a disk that are read at once; of so few, one after the other before threads start."""

MOVED = "bring back a copy, or move it away, and headcount resume measures its shards anew"
"""What to do about a part of a commit log that cannot be read. What is moved is not lost."""

LISTINGS, LISTING_PAUSE = 20, 0.1
"""Times that a commit log which changes meanwhile is listed, and seconds between two: whoever
gathers deletes thousands of files.
"""

T = TypeVar("T")

Segments: TypeAlias = dict[str, Any]
"""Tables of segments by name. Whoever reads again and again keeps them: a segment never changes."""


def read_commit_log(
    directory: Place,
    run_id: str,
    columns: Sequence[str] | None = None,
    loose: bool = True,
    segments: Segments | None = None,
    in_order: bool = True,
) -> pa.Table:
    """The commits that count: a row for each shard that is done, in shard order.

    It has the column `shard` and `columns` (default: all). A column `files.path` is `files` with
    only that field. Without `loose` commits, only segments are read. A caller that reads again and
    again keeps them in `segments`, by name. To put rows `in_order` takes as much memory again, if
    many replicas measured them. Raises `RunError` if the commit log cannot be read.
    """
    wanted = {"shard", *(COMMITS.names if columns is None else columns)}
    has_files = any(name.startswith("files") for name in wanted)
    # Without any file, a row takes its shard back.
    part = [f for f in FILES if f"files.{f.name}" in (wanted if has_files else {"files.rows"})]
    fields = [field for field in COMMITS if field.name in wanted]
    if part and "files" not in wanted:
        fields.append(pa.field("files", pa.list_(pa.struct(part))))
    schema = pa.schema(fields)
    known = {} if segments is None else segments

    def read(listed: list[str]) -> pa.Table:
        commits = _read_loose(directory, run_id, _loose(listed) if loose else [], schema)
        # A segment never changes, so none is read twice, however often the directory is listed.
        new = [name for name in _segments(listed) if name not in known]
        tables = _at_once(directory, lambda name: _read_segment(directory / name, schema), new)
        known.update(zip(new, tables, strict=True))
        gathered = [known[name] for name in _segments(listed)]
        return pa.concat_tables(_that_count(gathered, commits) or [schema.empty_table()])

    table = _unchanged_meanwhile(directory, read)
    if not len(table):
        _check_listed(directory)
    if segments is None:
        known.clear()
    shards = table["shard"].to_numpy()
    if in_order and not (np.diff(shards) > 0).all():
        table = table.take(pa.array(np.argsort(shards)))
    # What reading took beside the table: half as much again for a million commits.
    pa.default_memory_pool().release_unused()
    return table if has_files else table.drop_columns("files")


def _check_listed(directory: Place) -> None:
    """Refuse an empty commit log of a store that lists nothing at all, not even the manifest."""
    if isinstance(directory, StorePath):
        manifest = directory.parent / "manifest.json"
        if manifest.is_file() and manifest.name not in names(directory.parent):
            raise unread(directory, OSError(NOT_LISTED))


def any_commit(directory: Place, run_id: str) -> Commit | None:
    """A commit of a run, from one file, for facts that are the same in all; None without any."""

    def read(listed: list[str]) -> Commit | None:
        for name in _segments(listed):
            (table,) = _that_count([_read_segment(directory / name, COMMITS)], [])
            if len(table):
                return next(commits_of(table.slice(0, 1)))
        commits = (read_commit(directory / name, run_id) for name in _loose(listed))
        return next((commit for commit in commits if commit is not None), None)

    return _unchanged_meanwhile(directory, read)


def _unchanged_meanwhile(directory: Place, read: Callable[[list[str]], T]) -> T:
    """What `read` makes of the names in a commit log, read while no segment came or went.

    A listing is not a snapshot: it may show neither a new segment nor the files deleted for it. If
    the segments are the same before and after, no shard fell between the two.
    """
    problem = f"{directory}: changes faster than it can be read; run the same command again"
    try:
        for _ in range(LISTINGS):
            listed = sorted(names(directory))
            try:
                result = read(listed)
                if _segments(names(directory)) == _segments(listed):
                    return result
            except FileNotFoundError as error:
                # Somebody gathered meanwhile, unless every listing has the file: then it is for
                # example a link to nowhere.
                problem = (
                    f"{error.filename or error}: is listed and cannot be opened ({reason(error)}); "
                    f"{MOVED}"
                )
            time.sleep(LISTING_PAUSE)
    except (OSError, pa.ArrowException) as error:
        raise unread(directory, error) from None
    raise RunError(problem)


def _segments(listed: Iterable[str]) -> list[str]:
    return sorted(n for n in listed if n.startswith("segment-") and n.endswith(".parquet"))


def _loose(listed: Iterable[str]) -> list[str]:
    return [name for name in listed if name.startswith("shard-") and name.endswith(".json")]


def _that_count(segments: Sequence[pa.Table], loose: Sequence[pa.Table]) -> list[pa.Table]:
    """What the three rules leave of segments, in their order, and of commits in own files."""
    tables = [*segments, *loose]
    if not tables:
        return []
    table = pa.concat_tables(tables)
    shards = table["shard"].to_numpy()
    gathered = shards[: sum(map(len, segments))]
    counts = np.zeros(len(table), bool)
    # np.unique finds first places, and the last place of a shard is the first one from the end.
    _, places_from_end = np.unique(gathered[::-1], return_index=True)
    last = len(gathered) - 1 - places_from_end  # rule 1
    counts[last] = pc.list_value_length(table["files"]).to_numpy()[last] > 0  # rule 2
    done = gathered[counts[: len(gathered)]]
    counts[len(gathered) :] = ~np.isin(shards[len(gathered) :], done)  # rule 3
    # A part whose rows all count is not copied.
    parts = np.split(counts, np.cumsum([len(each) for each in tables])[:-1])
    return [
        each if part.all() else each.take(pa.array(np.flatnonzero(part)))
        for each, part in zip(tables, parts, strict=True)
    ]


def _read_segment(file: Place, schema: pa.Schema) -> pa.Table:
    """Some columns of a segment; raises `RunError` if the segment is damaged."""
    # Parquet calls the items of a list `list.element`.
    leaves = [
        f"files.list.element.{part.name}" if column.name == "files" else column.name
        for column in schema
        for part in (column.type.value_type if column.name == "files" else [column])
    ]

    def parse(content: bytes) -> pa.Table:
        if digest_of(content) != file.name[15:].removesuffix(".parquet"):
            raise pa.ArrowInvalid("its content is not what its name says")
        return read_content(pa.BufferReader(content), leaves).select(schema.names)

    try:
        return read_as(file, parse)
    except FileNotFoundError:
        raise  # Somebody gathered meanwhile; the directory is listed again.
    except OSError as error:
        raise unread(file, error) from None
    except (KeyError, pa.ArrowException) as error:
        kind = RunError if isinstance(file, Path) else StoreError
        raise kind(f"{file}: damaged ({reason(error)}); it holds commits: {MOVED}") from None


def _read_loose(
    directory: Place, run_id: str, loose: list[str], schema: pa.Schema
) -> list[pa.Table]:
    """Commits that are files of their own; files that are not commits of this run are ignored."""
    columns = set(schema.names)
    tables: list[pa.Table] = []
    # In batches, because Python objects take far more memory than their Arrow table.
    for start in range(0, len(loose), COMMITS_PER_SEGMENT):
        batch = loose[start : start + COMMITS_PER_SEGMENT]
        commits = _at_once(directory, lambda name: read_commit(directory / name, run_id), batch)
        rows = [commit.model_dump(include=columns) for commit in commits if commit is not None]
        tables.append(pa.Table.from_pylist(rows, schema=schema))
    return tables


def _at_once(directory: Place, read: Callable[[str], T], files: list[str]) -> list[T]:
    """Read files of a directory in threads, unless they are few."""
    # A list of a thousand small runs would otherwise start thousands of threads.
    if isinstance(directory, Path) and len(files) <= FEW_FILES:
        return [read(name) for name in files]
    # More threads on a disk would only take more memory.
    with ThreadPoolExecutor(DISK_READERS if isinstance(directory, Path) else READERS) as pool:
        return list(pool.map(read, files))


def commit_name(shard: int) -> str:
    """Name of the file that commits a shard."""
    return f"shard-{shard:06d}.json"


def read_commit(file: Place, run_id: str) -> Commit | None:
    """The commit in a file; None if it is not a commit of this run, or on a disk none at all."""
    try:
        commit = read_as(file, Commit.model_validate_json)
    except ValidationError:
        if isinstance(file, Path):
            return None
        # Each object appears whole: so this is what the store makes of a commit.
        raise StoreError(
            f"{file}: read {READINGS} times, and it is not a commit; the store may answer with "
            "something else: mend that, or bring back a copy of the object"
        ) from None
    # A copy under another name would count the shard twice.
    return commit if commit.run_id == run_id and file.name == commit_name(commit.shard) else None


def commits_of(table: pa.Table) -> Iterator[Commit]:
    """The rows of a commit log as commits."""
    for batch in table.to_batches(COMMITS_PER_SEGMENT):
        yield from (Commit.model_validate(row) for row in batch.to_pylist())


def taken_back(run_id: str, shards: Iterable[int]) -> pa.Table:
    """Rows of a segment that take shards back; files of their own would count again."""
    rows = [{"run_id": run_id, "shard": shard, "files": []} for shard in shards]
    return pa.Table.from_pylist(rows, schema=COMMITS)


def gathered_shards(directory: Place, segments: Segments | None = None) -> set[int]:
    """The shards whose commits are in segments; `segments` as in `read_commit_log`."""
    gathered = read_commit_log(directory, "", [], loose=False, segments=segments)
    return set(gathered["shard"].to_pylist())


def gather(directory: Place, commits: Sequence[Commit], segments: Segments | None = None) -> None:
    """Put commits into one segment, then delete the files of their own.

    `segments` as in `read_commit_log`: a driver of a million shards gathers 245 times.
    """
    # A shard that another driver has gathered counts as that one has it (rule 3).
    gathered = gathered_shards(directory, segments)
    new = [commit.model_dump() for commit in commits if commit.shard not in gathered]
    # In this order: a shard that is in the segment and in a file counts once, one in neither is
    # lost.
    if new:
        write_segment(directory, pa.Table.from_pylist(new, schema=COMMITS))
    delete(directory / commit_name(commit.shard) for commit in commits)


def gather_loose(directory: Place, run_id: str, least: int = COMMITS_PER_SEGMENT) -> None:
    """Gather the commits that are files of their own, if there are at least so many."""

    def read(name: str) -> Commit | None:
        try:
            return read_commit(directory / name, run_id)
        except FileNotFoundError:
            return None  # Another driver has gathered it since the directory was listed.

    loose = _loose(names(directory))
    if len(loose) >= least:
        commits = _at_once(directory, read, loose)
        gather(directory, [commit for commit in commits if commit is not None])


def write_segment(directory: Place, table: pa.Table) -> None:
    """Write a segment, which outranks those before it; a row without files takes its shard back."""
    # The name goes on with six digits, by which readers know the latest segment.
    numbers = [int(name[8:14]) for name in _segments(names(directory))]
    content = parquet_bytes(table)
    # If two processes take the same number, the digest still keeps their names apart.
    name = f"segment-{max(numbers, default=-1) + 1:06d}-{digest_of(content)}.parquet"
    write_whole(directory / name, content)
    # The caller now deletes what the segment replaces, so its name must survive a power cut.
    settle(directory)


def delete(files: Iterable[Place]) -> None:
    """Delete files, many at a time; a file that is already gone is not an error."""
    with ThreadPoolExecutor(READERS) as pool:
        # Reading the results raises the error of a deletion that failed.
        for _ in pool.map(lambda file: file.unlink(missing_ok=True), files):
            pass
