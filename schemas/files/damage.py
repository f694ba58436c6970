"""Which committed files differ from what was committed, and why.

There are two checks of different cost. By name, which has a digest in it, and in a store by size: a
listing of each directory is enough, for a million files in seconds. By content: every file is read
and compared with the digest in its commit and with the declared ranges of its columns.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.files.commits import COMMITS_PER_SEGMENT, READERS, pc
from headcount.schemas.files.digests import digest_of_file
from headcount.schemas.files.listing import Listing
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.filled_tables import OF_MERGED, TABLES, columns_of
from headcount.schemas.places import (
    NOT_LISTED,
    OpenFile,
    Place,
    StorePath,
    names,
    open_whole,
    sizes,
    unread,
)
from headcount.schemas.reasons import reason
from headcount.schemas.tables import ROLLUPS

DATA_FOLDER = rf"({'|'.join(TABLES)})/intervention=[\w().,+-]+"
DATA_FILE = r"(shard|merged)-[\w-]+\.parquet"
"""Names of the folders and files of data. A commit that names another path is damaged."""

BY_SIZE = ["files.path", "files.bytes"]  # what `files_damaged_by_size` reads

BY_CONTENT = ["stop", "files"]  # columns of a commit log that `examined_files` reads

LOOKED_FOR = 16  # objects that a listing lacks, of which the store is asked one by one

ROUNDING = 0.01  # share of a bound by which a value may pass it: bfloat16's is 0.4 %


Bounds = Mapping[str, tuple[float, float]]
"""The smallest and the largest possible value of each measured column of a table."""


@dataclass(frozen=True)
class Damage:
    """A committed file that differs from what was committed."""

    path: str  # relative to the run directory
    shards: list[int]  # shards whose rows were in the file
    why: str

    def __str__(self) -> str:
        return f"{shards_in_words(self.shards)}: {self.path} {self.why}"

    @property
    def is_of_rollup(self) -> bool:
        """Whether a merge made the file of rows that lie in other files: its shards are done."""
        return self.path.partition("/")[0] in OF_MERGED and is_data_path(self.path)


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
    shards: list[int]  # shards whose rows in the file count
    rows: int | None  # number of rows; None if the file also holds rows that do not count


def is_data_path(path: str) -> bool:
    """Whether a run may have a data file there. A damaged commit log may hold any path."""
    return bool(re.fullmatch(f"{DATA_FOLDER}/{DATA_FILE}", path))


def data_folders(commit_log: pa.Table) -> list[str]:
    """The directories of the data files of a commit log, relative to the run."""
    folders: set[str] = set()
    # In batches, because the texts of a million commits take much memory.
    for batch in commit_log.select(["files"]).to_batches(COMMITS_PER_SEGMENT):
        paths = pc.struct_field(batch["files"].flatten(), "path")
        folders.update(_folders_and_names(paths)[0].unique().to_pylist())
    # A damaged commit log may hold any path. Nothing outside the run's tables is listed.
    return sorted(one for one in folders if re.fullmatch(DATA_FOLDER, one))


def _folders_and_names(paths: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The folder and the name of each path; a path without a folder is both."""
    parts = pc.split_pattern(paths, "/", max_splits=1, reverse=True)
    ends = parts.offsets.to_numpy()
    return parts.values.take(pa.array(ends[:-1])), parts.values.take(pa.array(ends[1:] - 1))


def files_damaged_by_size(home: Place, commit_log: pa.Table) -> list[Damage]:
    """Committed files of a commit log that are missing, or in a store have another size.

    A directory is listed once, instead of asking for each file: in a store a request per file would
    take hours. A path outside the run's tables is damage.
    """
    sizes_in: dict[str, SizesIn] = {}
    damages: dict[str, Damage] = {}
    for batch in commit_log.select(["shard", "files"]).to_batches(COMMITS_PER_SEGMENT):
        # A row of the commit log has a list of files. From here on there is one entry per file.
        files, rows = batch["files"].flatten(), pc.list_parent_indices(batch["files"])
        paths = pc.struct_field(files, "path")
        committed = pc.struct_field(files, "bytes").to_numpy()
        actual = np.full(len(files), NOT_OURS)
        folders, file_names = _folders_and_names(paths)
        encoded = folders.dictionary_encode()
        for number, folder in enumerate(encoded.dictionary.to_pylist()):
            if re.fullmatch(DATA_FOLDER, folder):
                if folder not in sizes_in:
                    sizes_in[folder] = _sizes_in(home / folder)
                here = np.flatnonzero(encoded.indices.to_numpy() == number)
                of_folder = file_names.take(pa.array(here))
                actual[here] = sizes_in[folder](of_folder, committed[here])
        for i in np.flatnonzero(actual != committed).tolist():
            path, shard = paths[i].as_py(), batch["shard"][rows[i].as_py()].as_py()
            size = int(actual[i]) if is_data_path(path) else NOT_OURS
            why = _size_problem(size, int(committed[i]))
            damages.setdefault(path, Damage(path, [], why)).shards.append(shard)
    return list(damages.values())


SizesIn: TypeAlias = Callable[[pa.Array, np.ndarray], np.ndarray]
"""The sizes of files in a directory, of their names and committed sizes; `GONE` if not there."""


def _sizes_in(directory: Place) -> SizesIn:
    if isinstance(directory, StorePath):
        listed = dict(sizes(directory))

        def sizes_listed(files: pa.Array, _: np.ndarray) -> np.ndarray:
            found = np.array([listed.get(name, GONE) for name in files.to_pylist()])
            gone = np.flatnonzero(found == GONE)
            # A listing that was cut lacks objects that are there, so some are looked for by name.
            for i in gone[:: max(1, len(gone) // LOOKED_FOR)].tolist():
                if (directory / files[i].as_py()).is_file():
                    raise unread(directory, OSError(NOT_LISTED))
            return found

        return sizes_listed
    # On a disk a size is a call for each file, so what is there counts as committed.
    listing = Listing(names(directory))
    return lambda files, committed: np.where(listing.holds(files), committed, GONE)


NOT_OURS, GONE = -2, -1  # in place of the size of a path that is none of ours, or is gone


def _size_problem(actual: int, committed: int) -> str:
    if actual == NOT_OURS:
        return "is not a file of this run"
    if actual == GONE:
        return "is gone"
    return f"has {actual:,} bytes where {committed:,} were committed"


def committed_files(
    commit_log: pa.Table, tables: Iterable[str] = TABLES
) -> Iterator[CommittedFile]:
    """The files of some tables that a commit log (or a part of it) refers to, each once."""
    files = pc.list_flatten(commit_log["files"]).combine_chunks()
    shards = commit_log["shard"].take(pc.list_parent_indices(commit_log["files"]).combine_chunks())
    references = pa.table(
        {name: pc.struct_field(files, name) for name in files.type.names} | {"shard": shards}
    )
    references = references.filter(pc.is_in(references["table"], pa.array(tables, pa.string())))
    # One row per file: a merged file has a reference from the commit of each of its shards.
    # One thread, because with several the order of the groups would change from call to call.
    same_in_all = ("table", "intervention", "bytes", "digest", "shards")
    grouped = references.group_by("path", use_threads=False).aggregate(
        [("shard", "list"), ("rows", "sum"), *((name, "first") for name in same_in_all)]
    )
    grouped = grouped.rename_columns(["path", "shard_list", "rows", *same_in_all])
    # In batches, because Python objects take far more memory than their Arrow table.
    for batch in grouped.to_batches(READERS * 64):
        for row in batch.to_pylist():
            counted, in_file = row.pop("shard_list"), row.pop("shards")
            row["rows"] = row["rows"] if len(counted) == in_file else None
            yield CommittedFile(**row, shards=counted)


def examined_files(
    home: Place, manifest: Manifest, commit_log: pa.Table, tables: Iterable[str] = TABLES
) -> Iterator[tuple[CommittedFile, str | None]]:
    """The files of a commit log, each once, with what is wrong with it: None if nothing is."""
    bounds = declared_bounds(manifest)
    files = committed_files(commit_log, tables)
    with ThreadPoolExecutor(READERS) as pool:
        # A few at a time: the pool would read ahead without limit if nobody took its results.
        while batch := list(islice(files, 4 * READERS)):
            problems = pool.map(lambda file: problem(home, file, bounds), batch)
            yield from zip(batch, problems, strict=True)


def declared_bounds(manifest: Manifest) -> dict[str, Bounds]:
    """The range of each measured column, by table and column."""
    bounds: dict[str, dict[str, tuple[float, float]]] = {table: {} for table in TABLES}
    for table, columns in columns_of(manifest.kinds).items():
        for name, column in columns.items():
            # JSON does not have infinity: null is an open end.
            low, high = json.loads(dict(column.facts).get("range", "[null, null]"))
            ends = (-math.inf if low is None else low, math.inf if high is None else high)
            bounds[table][name] = ends
    return {**bounds}


def problem(
    home: Place, file: CommittedFile, bounds: Mapping[str, Bounds], content: OpenFile | None = None
) -> str | None:
    """What is wrong with a committed file, as words behind its path; `content` is it, if open."""
    # Nothing outside of the run is opened, whatever a damaged commit names.
    if not is_data_path(file.path):
        return _size_problem(NOT_OURS, file.bytes)
    try:
        with open_whole(home / file.path) if content is None else nullcontext(content) as opened:
            size = opened.seek(0, os.SEEK_END)
            if size != file.bytes:
                return _size_problem(size, file.bytes)
            if digest_of_file(opened) != file.digest:
                return "has other content than was committed"
            # The content is what was written; but what was written may have been wrong.
            footer = pq.read_metadata(opened)
            if file.table == ROLLUPS.name and (problem_of_columns := _column_problem(footer)):
                return problem_of_columns
            return _range_problem(footer, bounds.get(file.table, {}))
    except FileNotFoundError:
        return _size_problem(GONE, file.bytes)
    except OSError as error:
        if isinstance(home, StorePath):
            # What a store does not give is not damaged.
            raise unread(home / file.path, error) from None
        return f"cannot be read ({reason(error)})"
    except (ValueError, pa.ArrowException) as error:
        return f"cannot be read ({reason(error)})"


def size_problem(home: Path, file: CommittedFile) -> str | None:
    """What is wrong with the size of a committed file on a disk, whose content is not read."""
    try:
        size = (home / file.path).stat().st_size
    except FileNotFoundError:
        size = GONE
    return None if size == file.bytes else _size_problem(size, file.bytes)


def _column_problem(footer: pq.FileMetaData) -> str | None:
    """The first column of roll-ups that the file lacks. Rows answer until it is written again."""
    names = footer.schema.to_arrow_schema().names
    lacking = [name for name in ROLLUPS.own if name not in names]
    return f"has no column {lacking[0]}: an earlier version wrote it" if lacking else None


def _range_problem(footer: pq.FileMetaData, bounds: Bounds) -> str | None:
    """The first column whose values, by the file's own statistics, lie outside its range."""
    for group in range(footer.num_row_groups if bounds else 0):
        row_group = footer.row_group(group)
        for i in range(row_group.num_columns):
            chunk = row_group.column(i)
            # The path of a list column is NAME.list.element.
            name = chunk.path_in_schema.partition(".")[0]
            statistics = chunk.statistics
            # A column that is all NULL has neither a smallest nor a largest value.
            if name not in bounds or statistics is None or not statistics.has_min_max:
                continue
            low, high = bounds[name]
            # An open end says nothing of the size of the values, so only finite ones give slack.
            slack = ROUNDING * max([1.0, *(abs(end) for end in (low, high) if math.isfinite(end))])
            # Not the other way round: a NaN is in no range.
            if not (low - slack <= statistics.min and statistics.max <= high + slack):
                return (
                    f"has {name} from {statistics.min:.6g} to {statistics.max:.6g}, outside of its "
                    f"range from {low:g} to {high:g}"
                )
    return None
