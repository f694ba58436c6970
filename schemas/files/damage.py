"""Which committed files differ from what was committed, and why.

There are two checks of different cost. By name and size: a listing of each directory is enough, for
a million files in seconds. By content: every file is read and compared with the digest in its
commit and with the declared ranges of its columns.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from headcount.schemas.files.commits import READERS, reading_at_once
from headcount.schemas.files.digests import digest_of_file
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.parquet import ends_whole
from headcount.schemas.files.places import OpenFile, Place, open_whole, reason, sizes
from headcount.schemas.files.tables import ROLLUPS
from headcount.schemas.scans.kinds import TABLES, columns_of

DATA_FOLDER = rf"({'|'.join(TABLES)})/intervention=[\w().,+-]+"
DATA_FILE = r"^(shard|merged)-[\w-]+\.parquet$"
"""Names of the folders and files of data. A commit that names another path is damaged."""

BY_SIZE = ["files.path", "files.bytes"]
"""Columns of a commit log that `files_damaged_by_size` reads."""

BY_CONTENT = ["stop", "files"]
"""Columns of a commit log that `examined_files` reads."""

ROUNDING = 0.01
"""How far a value may lie outside its range, as a share of the bound: bfloat16 rounds by 0.4 %."""

pc: Any = pyarrow.compute  # Its functions are made at run time; no type checker finds them.


class Range(NamedTuple):
    """The smallest and the largest value that may be, or that is."""

    low: float
    high: float


Bounds = Mapping[str, Range]
"""The possible values of each measured column of a table."""


@dataclass(frozen=True)
class Damage:
    """A committed file that differs from what was committed."""

    path: str
    """Relative to the run directory."""
    shards: list[int]
    """Shards whose rows were in the file."""
    why: str

    def __str__(self) -> str:
        return f"{shards_in_words(self.shards)}: {self.path} {self.why}"

    @property
    def is_of_rollup(self) -> bool:
        """Whether the file is a roll-up. Its shards are done: their rows lie in other files."""
        return self.path.startswith(f"{ROLLUPS.name}/") and is_data_path(self.path)


def shards_in_words(shards: Sequence[int]) -> str:
    """A list of shards as a phrase.

    >>> shards_in_words([4]), shards_in_words([5, 3, 4]), shards_in_words([3, 5])
    ('shard 4', 'shards 3 to 5', '2 shards from 3 to 5')
    """
    if len(shards) == 1:
        return f"shard {shards[0]}"
    low, high = min(shards), max(shards)
    if len(shards) == high - low + 1:
        return f"shards {low} to {high}"
    return f"{len(shards):,} shards from {low} to {high}"


@dataclass(frozen=True)
class CommittedFile:
    """What the commits say about one file."""

    path: str
    table: str
    intervention: str
    bytes: int
    digest: str
    shards: list[int]
    """Shards whose rows in the file count."""
    rows: int | None
    """Number of rows; None if the file also holds rows that do not count."""


def is_data_path(path: str) -> bool:
    """Whether a run may have a data file there. A damaged commit log may hold any path."""
    folder, _, name = path.rpartition("/")
    return bool(re.fullmatch(DATA_FOLDER, folder) and re.fullmatch(DATA_FILE, name))


def data_folders(commit_log: pa.Table) -> list[str]:
    """The directories of the data files of a commit log, relative to the run."""
    paths = pc.struct_field(pc.list_flatten(commit_log["files"]), "path")
    folders = pc.unique(
        pc.list_element(pc.split_pattern(paths, "/", max_splits=1, reverse=True), 0)
    )
    # A damaged commit log may hold any path. Nothing outside the run's tables is listed.
    return sorted(one for one in folders.to_pylist() if re.fullmatch(DATA_FOLDER, one))


def files_damaged_by_size(home: Place, parts: Iterable[pa.Table]) -> list[Damage]:
    """Committed files that are missing or have another size; `parts` are those of a commit log.

    On a disk a power cut can leave a file with its size but without its content. So the ends of
    files are read too, until their commits are gathered. A path outside the run's tables is damage.
    """
    damages: dict[str, Damage] = {}
    listings: dict[str, Listing] = {}
    for part in parts:
        # A row of the commit log has a list of files. From here on there is one entry per file.
        row_of_file = pc.list_parent_indices(part["files"]).to_numpy()
        files = pc.list_flatten(part["files"]).combine_chunks()
        paths, committed_sizes = pc.struct_field(files, "path"), pc.struct_field(files, "bytes")
        shards = part["shard"].to_numpy()[row_of_file]
        is_gathered = part["gathered"].to_numpy()[row_of_file]

        actual_sizes = _actual_sizes(home, paths, listings)
        differs = actual_sizes != committed_sizes.to_numpy()
        incomplete = _without_end(home, paths, np.flatnonzero(~differs & ~is_gathered))
        for i in [*np.flatnonzero(differs), *incomplete]:
            path, shard = paths[i].as_py(), int(shards[i])
            if path in damages:
                damages[path].shards.append(shard)
            else:
                why = _size_problem(int(actual_sizes[i]), committed_sizes[i].as_py())
                damages[path] = Damage(path, [shard], why)
    return list(damages.values())


NOT_OURS = -2
"""Stands for the size of a path that no file of a run has."""

GONE = -1
"""Stands for the size of a file that does not exist."""


def _size_problem(actual: int, committed: int) -> str:
    if actual == NOT_OURS:
        return "is not a file of this run"
    if actual == GONE:
        return "is gone"
    if actual == committed:
        return "does not end as a Parquet file does"
    return f"has {actual:,} bytes where {committed:,} were committed"


def _actual_sizes(home: Place, paths: pa.Array, listings: dict[str, Listing]) -> np.ndarray:
    """The size of each file, `NOT_OURS` or `GONE`.

    `listings` is a cache by directory. Each directory is listed once, instead of asking for every
    file: in a store a request per file would take hours.
    """
    actual_sizes = np.full(len(paths), NOT_OURS)
    if not len(paths):
        return actual_sizes
    folder_and_name = pc.split_pattern(paths, "/", max_splits=1, reverse=True)
    folders = pc.list_element(folder_and_name, 0).dictionary_encode()
    file_names = pc.list_element(folder_and_name, 1)
    is_data_file = pc.match_substring_regex(file_names, DATA_FILE).to_numpy(zero_copy_only=False)
    folder_codes = folders.indices.to_numpy()
    for code, folder in enumerate(folders.dictionary.to_pylist()):
        # A damaged commit log may hold any path. Nothing outside the run's tables is listed.
        if re.fullmatch(DATA_FOLDER, folder):
            if folder not in listings:
                listings[folder] = Listing.of(sizes(home / folder))
            in_folder = np.flatnonzero((folder_codes == code) & is_data_file)
            names_in_folder = file_names.take(pa.array(in_folder))
            actual_sizes[in_folder] = listings[folder].sizes_of(names_in_folder)
    return actual_sizes


def _without_end(home: Place, paths: pa.Array, candidates: np.ndarray) -> np.ndarray:
    """The `candidates`, as indices of `paths`, that do not end as Parquet files do.

    Files of a store always do, because a store shows an object only when it is whole.
    """
    if not isinstance(home, Path):
        return candidates[:0]
    with reading_at_once(home, len(candidates)) as map_files:
        is_whole = map_files(lambda i: ends_whole(home / paths[i].as_py()), candidates.tolist())
        return candidates[~np.fromiter(is_whole, bool, len(candidates))]


@dataclass(frozen=True)
class Listing:
    """The files in a data directory and their sizes; a million names take 16 megabytes."""

    hashes: np.ndarray
    """Python's hashes of the names, of 64 bits, sorted."""
    sizes: np.ndarray

    @classmethod
    def of(cls, entries: Iterator[tuple[str, int]]) -> Listing:
        """The listing of a directory, from names and sizes."""
        hashed = ((hash(name), size) for name, size in entries)
        listed = np.fromiter(hashed, [("hash", np.int64), ("size", np.int64)])
        order = np.argsort(listed["hash"])
        return cls(listed["hash"][order], listed["size"][order])

    def sizes_of(self, names: pa.Array) -> np.ndarray:
        """The size of each of some files; `GONE` if it does not exist."""
        if not len(self.hashes):
            return np.full(len(names), GONE)
        wanted = np.fromiter(map(hash, names.to_pylist()), np.int64, len(names))
        # searchsorted gives the place where a hash would be, present or not.
        nearest = np.searchsorted(self.hashes, wanted).clip(max=len(self.hashes) - 1)
        return np.where(self.hashes[nearest] == wanted, self.sizes[nearest], GONE)


def committed_files(
    commit_log: pa.Table, tables: Iterable[str] = TABLES
) -> Iterator[CommittedFile]:
    """The files of some tables that a commit log (or a part of it) refers to, each once."""
    files = pc.list_flatten(commit_log["files"]).combine_chunks()
    row_of_file = pc.list_parent_indices(commit_log["files"]).to_numpy()
    file_columns = {name: pc.struct_field(files, name) for name in files.type.names}
    shards = commit_log["shard"].to_numpy()[row_of_file]
    references = pa.table({**file_columns, "shard": shards})
    references = references.filter(pc.is_in(references["table"], pa.array(tables, pa.string())))
    # One row per file: a merged file has a reference from the commit of each of its shards.
    # One thread, because with several the order of the groups would change from call to call.
    same_in_all = ("table", "intervention", "bytes", "digest", "shards")
    grouped = references.group_by("path", use_threads=False).aggregate(
        [(name, "first") for name in same_in_all] + [("shard", "list"), ("rows", "sum")]
    )
    # In batches, because Python objects take far more memory than their Arrow table.
    for batch in grouped.to_batches(READERS * 64):
        for row in batch.to_pylist():
            shards = row["shard_list"]
            every_row_counts = len(shards) == row["shards_first"]
            yield CommittedFile(
                path=row["path"],
                table=row["table_first"],
                intervention=row["intervention_first"],
                bytes=row["bytes_first"],
                digest=row["digest_first"],
                shards=shards,
                rows=row["rows_sum"] if every_row_counts else None,
            )


def examined_files(
    home: Place,
    manifest: Manifest,
    parts: Iterable[pa.Table],
    tables: Iterable[str] = TABLES,
    threads: int = READERS,
) -> Iterator[tuple[CommittedFile, str | None]]:
    """The files of a commit log, each once, with what is wrong with it: None if nothing is."""
    bounds = declared_bounds(manifest)
    examined_paths: set[str] = set()

    def examine(file: CommittedFile) -> tuple[CommittedFile, str | None]:
        return file, problem(home, file, bounds)

    with ThreadPoolExecutor(threads) as pool:
        for part in parts:
            # A merged file may have commits in several parts.
            files = committed_files(part, tables)
            new_files = iter([file for file in files if file.path not in examined_paths])
            # A few at a time: the pool would read ahead without limit if nobody took its results.
            while batch := list(islice(new_files, 4 * threads)):
                examined_paths.update(file.path for file in batch)
                yield from pool.map(examine, batch)


def declared_bounds(manifest: Manifest) -> dict[str, Bounds]:
    """The range of each measured column, by table and column."""
    bounds: dict[str, Bounds] = {}
    for table, columns in columns_of(manifest.kinds).items():
        ranges: dict[str, Range] = {}
        for name, column in columns.items():
            # JSON does not have infinity: null is an open end.
            low, high = json.loads(dict(column.facts).get("range", "[null, null]"))
            ranges[name] = Range(
                -math.inf if low is None else low, math.inf if high is None else high
            )
        bounds[table] = ranges
    return bounds


def problem(
    home: Place,
    file: CommittedFile,
    bounds: Mapping[str, Bounds],
    content: OpenFile | None = None,
) -> str | None:
    """What is wrong with a committed file, as words that follow its path; None if nothing is.

    `content` is the open file; without it the file is opened here.
    """
    # Nothing outside of the run is opened, whatever a damaged commit names.
    if not is_data_path(file.path):
        return _size_problem(NOT_OURS, file.bytes)
    try:
        if content is not None:
            return _content_problem(content, file, bounds.get(file.table, {}))
        with open_whole(home / file.path) as opened:
            return _content_problem(opened, file, bounds.get(file.table, {}))
    except FileNotFoundError:
        return _size_problem(GONE, file.bytes)
    except (OSError, ValueError, pa.ArrowException) as error:
        return f"cannot be read ({reason(error)})"


def _content_problem(content: OpenFile, file: CommittedFile, bounds: Bounds) -> str | None:
    size = content.seek(0, os.SEEK_END)
    if size != file.bytes:
        return _size_problem(size, file.bytes)
    if digest_of_file(content) != file.digest:
        return "has other content than was committed"
    # The content is what was written; but what was written may have been wrong.
    return _footer_problem(pq.read_metadata(content), bounds)


def _footer_problem(footer: pq.FileMetaData, bounds: Bounds) -> str | None:
    """The first column whose values, by the file's own statistics, lie outside its range."""
    if not bounds:
        return None
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for i in range(row_group.num_columns):
            chunk = row_group.column(i)
            # The path of a list column is NAME.list.element.
            name = chunk.path_in_schema.partition(".")[0]
            statistics = chunk.statistics
            # A column that is all NULL has neither a smallest nor a largest value.
            if name not in bounds or statistics is None or not statistics.has_min_max:
                continue
            allowed = bounds[name]
            # An open end says nothing of the size of the values, so only finite ones give slack.
            finite_bounds = [abs(bound) for bound in allowed if math.isfinite(bound)]
            slack = ROUNDING * max([1.0, *finite_bounds])
            low, high = statistics.min, statistics.max
            # Not the other way round: a NaN is in no range.
            if not (allowed.low - slack <= low and high <= allowed.high + slack):
                return (
                    f"has {name} from {low:.6g} to {high:.6g}, outside of its range from "
                    f"{allowed.low:g} to {allowed.high:g}"
                )
    return None
