"""Which committed files have other content than was committed, and why.

Every file is read and compared with the digest in its commit and with the declared ranges of its
columns. Queries do so once for each file that they read, and then remember it.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.files.commits import READERS, pc
from headcount.schemas.files.damage import GONE, NOT_OURS, Damage, is_data_path, size_problem
from headcount.schemas.files.digests import digest_of_file
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.filled_tables import TABLES, columns_of
from headcount.schemas.places import OpenFile, Place, StorePath, open_whole, unread
from headcount.schemas.reasons import reason
from headcount.schemas.tables import ROLLUPS

BY_CONTENT = ["stop", "files"]  # columns of a commit log that `examined_files` reads

ROUNDING = 0.01  # share of a bound by which a value may pass it: bfloat16's is 0.4 %


Bounds = Mapping[str, tuple[float, float]]
"""The smallest and the largest possible value of each measured column of a table."""


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


def files_damaged_by_content(
    home: Place, manifest: Manifest, commit_log: pa.Table, tables: Iterable[str] = TABLES
) -> list[Damage]:
    """The files of some tables that differ from what was committed; it needs `BY_CONTENT`."""
    try:
        return [
            Damage(file.path, file.shards, why)
            for file, why in examined_files(home, manifest, commit_log, tables)
            if why is not None
        ]
    except OSError as error:
        raise unread(home, error) from None


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
        return size_problem(NOT_OURS, file.bytes)
    try:
        with open_whole(home / file.path) if content is None else nullcontext(content) as opened:
            size = opened.seek(0, os.SEEK_END)
            if size != file.bytes:
                return size_problem(size, file.bytes)
            if digest_of_file(opened) != file.digest:
                return "has other content than was committed"
            # The content is what was written; but what was written may have been wrong.
            footer = pq.read_metadata(opened)
            if file.table == ROLLUPS.name and (problem_of_columns := _column_problem(footer)):
                return problem_of_columns
            return _range_problem(footer, bounds.get(file.table, {}))
    except FileNotFoundError:
        return size_problem(GONE, file.bytes)
    except OSError as error:
        if isinstance(home, StorePath):
            # What a store does not give is not damaged.
            raise unread(home / file.path, error) from None
        return f"cannot be read ({reason(error)})"
    except (ValueError, pa.ArrowException) as error:
        return f"cannot be read ({reason(error)})"


def problem_of_size(home: Path, file: CommittedFile) -> str | None:
    """What is wrong with the size of a committed file on a disk, whose content is not read."""
    try:
        size = (home / file.path).stat().st_size
    except FileNotFoundError:
        size = GONE
    return None if size == file.bytes else size_problem(size, file.bytes)


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
