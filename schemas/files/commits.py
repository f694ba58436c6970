"""The commit log of a run: which shards are done, and how each one was measured.

commits/shard-000000.json           one commit, written last by the replica that measured the shard
commits/segment-000000-DIGEST.parquet  thousands of commits in one file, which replaces their files

A shard is done if and only if its commit is in the commit log, as a file of its own or in a
segment. If several segments hold a shard, the segment with the latest name wins. If a segment and a
file hold it, the segment wins: the file is what a late or repeated attempt left behind. A segment
may also take shards back (`dropped`); then a file counts again.

A segment is written whole before the files that it replaces are deleted, and no file name is ever
used for two contents. So a process that gathers may die at any time, and two may gather at once.

A commit knows its data files by their digests. A segment has its own digest in its name.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from headcount.schemas.errors import RunError
from headcount.schemas.files.digests import digest_of, digest_of_file
from headcount.schemas.files.parquet import parquet_bytes, read_content
from headcount.schemas.files.places import Place, names, open_at_once, reason, settle, write_whole

COMMITS_PER_SEGMENT = 4096
"""Commits that are gathered into one file."""

READERS = 16
"""Files read or deleted at once. A store answers each request slowly, but many at a time."""

MOST_LISTINGS = 20
"""A file that so many listings have and nobody can open is an error."""

LISTING_PAUSE = 0.1
"""Seconds between two listings: whoever gathers deletes thousands of files."""

T = TypeVar("T")

FEW_FILES = 64
"""So many files of a disk are read one after another before threads for them would have started."""


class DataFile(BaseModel):
    """A Parquet file with rows of a committed shard; its path is relative to the run directory."""

    model_config = ConfigDict(frozen=True)
    table: str
    intervention: str
    path: str
    rows: int
    """Rows of this shard."""
    bytes: int
    """Size of the file."""
    shards: int = 1
    """Number of shards with rows in the file; more than one after `headcount compact`."""
    digest: str
    """Digest of the content (`schemas.files.digests`)."""


class Method(BaseModel):
    """How one intervention was measured."""

    model_config = ConfigDict(frozen=True)
    intervention: str
    engine: str
    """fused or dense."""
    precision: str
    """Number formats of the products, one of `schemas.scans.precision.PRECISIONS`."""
    attention: str
    """How the engine computed attention. tiles or kernel: the fused engine, without a pattern.
    matrix: patterns were built.
    """
    built_layers: list[int]
    """Layers whose pattern was built because an intervention needs it."""


class Version(BaseModel):
    """A library that took part in measuring."""

    model_config = ConfigDict(frozen=True)
    library: str
    version: str


class Commit(BaseModel):
    """The record that makes a shard done."""

    model_config = ConfigDict(frozen=True)
    run_id: str
    shard: int
    start: int
    stop: int
    rows: int
    tokens: int
    seconds: float
    """From the first forward pass to the last data file."""
    compute_seconds: float
    """Part of `seconds` that went into forward passes and reductions. While a replica writes one
    shard it already computes the next.
    """
    idle_seconds: float
    """How long the replica waited for this shard without computing anything."""
    finished: datetime
    """Time of the commit by the host's clock. Only the speed in `headcount status` reads it."""
    host: str
    replica: str
    """Identifies the replica among those of the run."""
    attempt: int
    code: str
    """Fingerprint of the code that measured the shard."""
    device: str
    """Device that computed it, for example `cuda NVIDIA H100`."""
    versions: list[Version]
    """Libraries that measured."""
    methods: list[Method]
    """How each intervention was measured, in the order of the scan."""
    bad_rows: list[str]
    files: list[DataFile]


@dataclass(frozen=True)
class Failure:
    """An attempt at a shard that failed, and why."""

    shard: int
    error: str
    of_writing: bool = False
    """Whether the shard was measured, and the disk or the store did not take it."""
    is_last: bool = True
    """Whether this command does not try the shard again."""


ARROW_TYPES = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    datetime: pa.timestamp("us", "UTC"),
}


def _arrow_type(annotation: object) -> pa.DataType:
    """The Arrow type of a field of `Commit`: a scalar, a record, or a list of either."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct(_arrow_fields(annotation))
    if annotation in ARROW_TYPES:
        return ARROW_TYPES[annotation]
    return pa.list_(_arrow_type(get_args(annotation)[0]))


def _arrow_fields(model: type[BaseModel]) -> list[tuple[str, pa.DataType]]:
    annotations = get_type_hints(model)
    return [(name, _arrow_type(annotations[name])) for name in model.model_fields]


COMMITS = pa.schema(_arrow_fields(Commit))
"""Columns of a segment, which also has the column `dropped`."""

FILES = COMMITS.field("files").type.value_type
"""What a segment says about each data file."""

DROPPED = pa.field("dropped", pa.bool_())


def read_commit_log(
    directory: Place, run_id: str, columns: Sequence[str] | None = None
) -> pa.Table:
    """The commits that count, one row per done shard in shard order.

    The table has `columns` (default: all) and `gathered`. A column `files.path` is `files` with
    only that field.
    """
    while True:
        segments = _segment_names(names(directory))
        commit_log = listed_again(lambda: pa.concat_tables(read_parts(directory, run_id, columns)))
        # A listing is not a snapshot: it may show neither a new segment nor the files deleted for
        # it. If the segments are the same before and after, no shard fell between the two.
        if _segment_names(names(directory)) == segments:
            order = np.argsort(commit_log["shard"].to_numpy(), kind="stable")
            return commit_log.take(order)


def read_oldest(directory: Place, run_id: str, columns: Sequence[str]) -> dict[str, Any] | None:
    """Some columns of one of a run's first commits; None if the run has no commit yet.

    A million commits take a gigabyte. Use this for facts that are the same in all of them.
    """

    def oldest() -> dict[str, Any] | None:
        filled = (part for part in read_parts(directory, run_id, columns) if len(part))
        part = next(filled, None)
        return None if part is None else part.slice(0, 1).to_pylist()[0]

    return listed_again(oldest)


def listed_again(read: Callable[[], T]) -> T:
    """What `read` makes of a commit log; it is called again if a file that it has listed is gone.

    Then somebody gathered meanwhile, and the next listing has a newer segment instead of the file.
    One that every listing has is not gone: it is for example a link to nowhere.
    """
    times_gone: Counter[str] = Counter()
    while True:
        try:
            return read()
        except FileNotFoundError as error:
            times_gone[str(error)] += 1
            if times_gone[str(error)] == MOST_LISTINGS:
                raise cannot_be_opened(error) from None
            time.sleep(LISTING_PAUSE)


def cannot_be_opened(error: FileNotFoundError) -> RunError:
    """The line about a file that is listed and is not there."""
    return RunError(
        f"{error.filename or error}: is listed and cannot be opened ({reason(error)}); delete it, "
        "and headcount resume measures anew the shards that it committed"
    )


MapFiles = Callable[..., Iterator[Any]]
"""Calls a function for every file, as the builtin `map` does."""


@contextmanager
def reading_at_once(directory: Place, files: int) -> Iterator[MapFiles]:
    """What calls a function for so many files of a directory: in threads, unless they are few."""
    # A list of a thousand small runs would otherwise start thousands of threads.
    if isinstance(directory, Path) and files <= FEW_FILES:
        yield map
        return
    with ThreadPoolExecutor(READERS) as pool:
        yield pool.map


def read_parts(
    directory: Place, run_id: str, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """The rows of `read_commit_log` in parts of bounded size, the oldest segment first.

    Commits that are files of their own come last. Raises FileNotFoundError if somebody else gathers
    meanwhile.
    """
    # Which rows count is decided by their shards, so these are read in any case.
    wanted_columns = list(
        dict.fromkeys(["shard", *(COMMITS.names if columns is None else columns)])
    )
    file_names = list(names(directory))
    segments = _segment_names(file_names)
    commit_files = [n for n in file_names if n.startswith("shard-") and n.endswith(".json")]
    with reading_at_once(directory, len(segments) + len(commit_files)) as map_files:
        # The keys of all segments come first: a later segment decides whether an earlier row
        # counts.
        segment_keys = list(map_files(lambda name: _read_keys(directory / name), segments))
        row_masks = _rows_that_count(segment_keys)
        gathered_shards = [
            keys["shard"].to_numpy()[mask]
            for keys, mask in zip(segment_keys, row_masks, strict=True)
        ]
        loose = _read_files(map_files, directory, run_id, commit_files, _schema_of(wanted_columns))
        # A segment wins over a file of the same shard, which a late attempt may have left behind.
        every_gathered_shard = np.concatenate([*gathered_shards, np.empty(0, int)])
        is_loose = ~np.isin(loose["shard"].to_numpy(), every_gathered_shard)
        # A few segments at a time, so that the memory stays bounded while the caller works.
        for start in range(0, len(segments), READERS):
            stop = start + READERS
            tables = map_files(
                lambda name, mask: _read_segment(directory / name, wanted_columns, mask),
                segments[start:stop],
                row_masks[start:stop],
            )
            for table in tables:
                yield _with_gathered(table, gathered=True)
        yield _with_gathered(loose.filter(pa.array(is_loose)), gathered=False)


def _read_segment(file: Place, wanted_columns: list[str], mask: np.ndarray) -> pa.Table:
    """Some columns of the rows of a segment that `mask` selects."""
    # Parquet calls the items of a list `list.element`.
    leaves = [name.replace("files.", "files.list.element.") for name in wanted_columns]
    with open_at_once(file) as content:
        table = read_content(content, leaves)
    if not mask.all():
        table = table.filter(pa.array(mask))
    return table.select(_schema_of(wanted_columns).names)


def _schema_of(wanted_columns: Sequence[str]) -> pa.Schema:
    """The schema of some columns, where `files.path` and the like are fields of `files`."""
    top_level = [COMMITS.field(name) for name in wanted_columns if "." not in name]
    file_fields = [n.partition(".")[2] for n in wanted_columns if n.startswith("files.")]
    if not file_fields or "files" in wanted_columns:
        return pa.schema(top_level)
    files = pa.struct([FILES.field(name) for name in file_fields])
    return pa.schema([*top_level, pa.field("files", pa.list_(files))])


SEGMENT_NAME = re.compile(r"segment-\d+-([0-9a-f]{32})\.parquet")
"""The name of a segment, with the digest of its content."""


def _read_keys(file: Place) -> pa.Table:
    """Which shards a segment holds or drops; raises `RunError` if the segment is damaged."""
    try:
        with open_at_once(file) as content:
            name = SEGMENT_NAME.fullmatch(file.name)
            if name is not None and digest_of_file(content) != name[1]:
                raise pa.ArrowInvalid("its content is not what its name says")
            return read_content(content, ["shard", DROPPED.name])
    except FileNotFoundError:
        raise  # Somebody gathered meanwhile; the caller lists again.
    except (OSError, pa.ArrowException) as error:
        raise RunError(
            f"{file}: damaged ({reason(error)}); it holds commits. Delete it, and headcount resume "
            f"{file.parent.parent} measures their shards anew; headcount rm deletes the run"
        ) from None


def _rows_that_count(segments: list[pa.Table]) -> list[np.ndarray]:
    """A mask for each segment: the last row of each shard counts, unless it drops the shard."""
    if not segments:
        return []
    rows = pa.concat_tables(segments)
    shards = rows["shard"].to_numpy()
    # np.unique finds first places, and the last place of a shard is the first one from the end.
    _, places_from_end = np.unique(shards[::-1], return_index=True)
    mask = np.zeros(len(shards), bool)
    mask[len(shards) - 1 - places_from_end] = True
    mask &= ~rows[DROPPED.name].to_numpy()
    return np.split(mask, np.cumsum([len(segment) for segment in segments])[:-1])


def _with_gathered(table: pa.Table, gathered: bool) -> pa.Table:
    return table.append_column("gathered", pa.array(np.full(len(table), gathered)))


def _segment_names(file_names: Iterable[str]) -> list[str]:
    return sorted(n for n in file_names if n.startswith("segment-") and n.endswith(".parquet"))


def _read_files(
    map_files: MapFiles, directory: Place, run_id: str, files: list[str], schema: pa.Schema
) -> pa.Table:
    """Commits that are files of their own; files that are not commits of this run are ignored."""
    tables = [schema.empty_table()]
    columns = set(schema.names)
    remaining = iter(files)
    # In batches, because Python objects take far more memory than their Arrow table.
    while batch := list(islice(remaining, COMMITS_PER_SEGMENT)):
        commits = map_files(lambda name: read_commit(directory / name, run_id), batch)
        rows = [commit.model_dump(include=columns) for commit in commits if commit is not None]
        tables.append(pa.Table.from_pylist(rows, schema=schema))
    return pa.concat_tables(tables)


def commit_name(shard: int) -> str:
    """Name of the file that commits a shard."""
    return f"shard-{shard:06d}.json"


def read_commit(file: Place, run_id: str) -> Commit | None:
    """The commit in a file; None if it is not a commit of this run."""
    try:
        commit = Commit.model_validate_json(file.read_bytes())
    except ValidationError:
        return None
    # A copy under another name would count the shard twice.
    return commit if commit.run_id == run_id and file.name == commit_name(commit.shard) else None


def commits_of(table: pa.Table) -> Iterator[Commit]:
    """The rows of a commit log as commits."""
    for batch in table.select(COMMITS.names).to_batches(COMMITS_PER_SEGMENT):
        yield from (Commit.model_validate(row) for row in batch.to_pylist())


def gather(directory: Place, commits: Sequence[Commit], dropped: Sequence[int] = ()) -> None:
    """Put commits into one segment, then delete the files of their own.

    The same segment takes the shards `dropped` back. They must not have a file of their own,
    because that file would count again.
    """
    rows = [commit.model_dump() for commit in commits]
    if dropped:
        rows += _dropped_rows(commits[0].run_id, dropped)
    # In this order: a shard that is in the segment and in a file counts once, one in neither is
    # lost.
    write_segment(directory, pa.Table.from_pylist(rows, schema=COMMITS), len(dropped))
    delete(directory / commit_name(commit.shard) for commit in commits)


def drop(directory: Place, run_id: str, shards: Sequence[int]) -> None:
    """Take gathered shards back: they are missing again."""
    rows = _dropped_rows(run_id, shards)
    write_segment(directory, pa.Table.from_pylist(rows, schema=COMMITS), len(shards))


def _dropped_rows(run_id: str, shards: Sequence[int]) -> list[dict[str, Any]]:
    blank: dict[str, Any] = dict.fromkeys(COMMITS.names)
    return [blank | {"run_id": run_id, "shard": shard} for shard in shards]


def write_segment(directory: Place, table: pa.Table, dropped: int = 0) -> None:
    """Write commits into one segment, without deleting the files that it replaces.

    The last `dropped` rows take their shards back.
    """
    # The name goes on with six digits, by which readers know the latest segment.
    numbers = [int(name[8:14]) for name in names(directory) if name.startswith("segment-")]
    is_dropped = np.arange(len(table)) >= len(table) - dropped
    content = parquet_bytes(table.append_column(DROPPED, pa.array(is_dropped, pa.bool_())))
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
