"""Which committed files are not as committed, and why.

Two questions of different cost. By name and size: a listing of each directory answers it, for a
million files in seconds. By content: every file is read, and held to the digest in its commit and to
the declared ranges of its columns.
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
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from schemas.commits import READERS
from schemas.digests import digest_of_file
from schemas.kinds import TABLES, columns_of
from schemas.manifest import Manifest
from schemas.parquet import ends_whole, read_content
from schemas.places import Place, open_whole, reason, sizes

DATA_FOLDER = rf"({'|'.join(TABLES)})/intervention=[\w().,+-]+"
DATA_FILE = r"^(shard-\d+|merged-[\w-]+)\.parquet$"

BY_SIZE = ["files.path", "files.bytes"]
"""What of a ledger tells damage by name and size."""

BY_CONTENT = ["start", "stop", "files"]
"""What of a ledger tells damage by content."""

ROUNDING = 0.01
"""How far a value may lie outside its range, as a share of the bound: bfloat16 rounds by 0.4 %."""

LISTED = 65_536
"""Names of a directory that are held as Python strings at once."""

pc: Any = pyarrow.compute  # Its functions are made at run time; no type checker finds them.

Bounds = Mapping[str, tuple[float, float]]
"""Smallest and largest possible value of each measured column of a table."""


@dataclass(frozen=True)
class Damage:
    """A committed file that is not as committed."""

    path: str
    """Relative to the run directory."""
    shards: list[int]
    """Whose rows it held."""
    why: str

    def __str__(self) -> str:
        return f"{in_words(self.shards)}: {self.path} {self.why}"


def in_words(shards: Sequence[int]) -> str:
    """Some shards, in words.

    >>> in_words([4]), in_words([5, 3, 4]), in_words([3, 5])
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
    """What commits say of one file."""

    path: str
    table: str
    intervention: str
    bytes: int
    digest: str
    shards: list[int]
    """Shards whose rows count in it."""
    rows: int | None
    """None where it also holds rows that do not count."""
    start: int
    """First sequence of its first shard."""
    stop: int
    """One past the last sequence of its last shard."""


def by_size(home: Place, parts: Iterable[pa.Table]) -> list[Damage]:
    """Files of parts of a ledger that are not there, or not of their size.

    On a disk a power cut can leave a file without its content: as long as their commits are not
    folded, it is also looked at how files end. A file outside a run's tables is none of its files.
    """
    found: dict[str, Damage] = {}
    listings: dict[str, Listing] = {}
    for part in parts:
        rows = pc.list_parent_indices(part["files"]).to_numpy()
        files = pc.list_flatten(part["files"]).combine_chunks()
        paths, committed = pc.struct_field(files, "path"), pc.struct_field(files, "bytes")
        there = _sizes_there(home, paths, listings)
        bad = there != committed.to_numpy()
        shards, folded = part["shard"].to_numpy()[rows], part["folded"].to_numpy()[rows]
        endless = _without_end(home, paths, np.flatnonzero(~bad & ~folded))
        for i in [*np.flatnonzero(bad), *endless]:
            path, shard = paths[i].as_py(), int(shards[i])
            if path in found:
                found[path].shards.append(shard)
            else:
                why = _size_problem(int(there[i]), committed[i].as_py())
                found[path] = Damage(path, [shard], why)
    return list(found.values())


NOT_OURS = -2
GONE = -1
"""In place of a size: a path that no file of a run has, and a file that is not there."""


def _size_problem(there: int, committed: int) -> str:
    if there == NOT_OURS:
        return "is not a file of this run"
    if there == GONE:
        return "is gone"
    if there == committed:
        return "does not end as a Parquet file does"
    return f"has {there:,} bytes where {committed:,} were committed"


def _sizes_there(home: Place, paths: pa.Array, listings: dict[str, Listing]) -> np.ndarray:
    """The size of each file, as `listings` of directories have it, which are made as needed."""
    found = np.full(len(paths), NOT_OURS)
    if not len(paths):
        return found
    halves = pc.split_pattern(paths, "/", max_splits=1, reverse=True)
    folders, own = pc.list_element(halves, 0).dictionary_encode(), pc.list_element(halves, 1)
    ours = pc.match_substring_regex(own, DATA_FILE).to_numpy(zero_copy_only=False)
    codes = folders.indices.to_numpy()
    for code, folder in enumerate(folders.dictionary.to_pylist()):
        if re.fullmatch(DATA_FOLDER, folder):
            if folder not in listings:
                listings[folder] = Listing.of(sizes(home / folder))
            here = np.flatnonzero((codes == code) & ours)
            found[here] = listings[folder].sizes_of(own.take(pa.array(here)))
    return found


def _without_end(home: Place, paths: pa.Array, candidates: np.ndarray) -> np.ndarray:
    """Those of some files on a disk that do not end as Parquet files do."""
    if not isinstance(home, Path):
        return candidates[:0]
    with ThreadPoolExecutor(READERS) as pool:
        whole = pool.map(lambda i: ends_whole(home / paths[i].as_py()), candidates.tolist())
        return candidates[~np.fromiter(whole, bool, len(candidates))]


@dataclass(frozen=True)
class Listing:
    """What lies in a directory of data files; a million names take a few megabytes."""

    shards: np.ndarray
    """The numbers in `shard-NUMBER.parquet`, sorted."""
    shard_sizes: np.ndarray
    others: Mapping[str, int]
    """Sizes by name."""

    @classmethod
    def of(cls, found: Iterator[tuple[str, int]]) -> Listing:
        """Sort names by kind."""
        shards, shard_sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        others: dict[str, int] = {}
        while some := list(islice(found, LISTED)):
            names = pa.array([name for name, _ in some], pa.string())
            of_size = np.array([size for _, size in some], np.int64)
            of_shards = pc.match_substring_regex(names, r"^shard-\d+\.parquet$")
            numbers = pc.utf8_slice_codeunits(names.filter(of_shards), 6, -8).cast(pa.int64())
            numbered = of_shards.to_numpy(zero_copy_only=False)
            shards.append(numbers.to_numpy())
            shard_sizes.append(of_size[numbered])
            others.update(some[i] for i in np.flatnonzero(~numbered))
        every = np.concatenate(shards)
        order = np.argsort(every)
        return cls(every[order], np.concatenate(shard_sizes)[order], others)

    def sizes_of(self, names: pa.Array) -> np.ndarray:
        """The size of each of some files; `GONE` where it is not there."""
        of_shards = pc.starts_with(names, "shard-").to_numpy(zero_copy_only=False)
        found = np.full(len(names), GONE)
        for i in np.flatnonzero(~of_shards):
            found[i] = self.others.get(names[i].as_py(), GONE)
        if len(self.shards):
            numbers = pc.utf8_slice_codeunits(names.filter(pa.array(of_shards)), 6, -8)
            wanted = numbers.cast(pa.int64()).to_numpy()
            near = np.searchsorted(self.shards, wanted).clip(max=len(self.shards) - 1)
            there = self.shards[near] == wanted
            found[of_shards] = np.where(there, self.shard_sizes[near], GONE)
        return found


def committed_files(ledger: pa.Table, tables: Iterable[str] = TABLES) -> Iterator[CommittedFile]:
    """The files of some tables that a ledger, or a part of one, refers to, each once."""
    files = pc.list_flatten(ledger["files"]).combine_chunks()
    rows = pc.list_parent_indices(ledger["files"]).to_numpy()
    columns = {name: pc.struct_field(files, name) for name in files.type.names}
    of_commit = {name: ledger[name].to_numpy()[rows] for name in ("shard", "start", "stop")}
    flat = pa.table({**columns, **of_commit})
    flat = flat.filter(pc.is_in(flat["table"], pa.array(tables, pa.string())))
    # One row per file: a merged one has as many commits as shards.
    firsts = ("table", "intervention", "bytes", "digest", "shards")
    grouped = flat.group_by("path", use_threads=False).aggregate(
        [(name, "first") for name in firsts]
        + [("shard", "list"), ("rows", "sum"), ("start", "min"), ("stop", "max")]
    )
    for batch in grouped.to_batches(READERS * 64):
        for row in batch.to_pylist():
            shards = row["shard_list"]
            yield CommittedFile(
                path=row["path"],
                **{name: row[f"{name}_first"] for name in firsts if name != "shards"},
                shards=shards,
                rows=row["rows_sum"] if len(shards) == row["shards_first"] else None,
                start=row["start_min"],
                stop=row["stop_max"],
            )


def by_content(
    home: Place, manifest: Manifest, parts: Iterable[pa.Table], threads: int = READERS
) -> Iterator[tuple[CommittedFile, str | None]]:
    """Every file of a ledger, each once, and what is wrong with it; none where it is as committed."""
    bounds = declared_bounds(manifest)
    seen: set[str] = set()

    def examined(file: CommittedFile) -> tuple[CommittedFile, str | None]:
        return file, problem(home, manifest, file, bounds)

    with ThreadPoolExecutor(threads) as pool:
        for part in parts:
            new = iter([file for file in committed_files(part) if file.path not in seen])
            # A few at a time: the pool would read on while nobody takes what it has found.
            while some := list(islice(new, 4 * threads)):
                seen.update(file.path for file in some)
                yield from pool.map(examined, some)


def declared_bounds(manifest: Manifest) -> dict[str, Bounds]:
    """The measured columns of every table, and the range of each."""
    return {
        table: {name: _bounds(dict(column.facts)) for name, column in columns.items()}
        for table, columns in columns_of(manifest.kinds).items()
    }


def _bounds(facts: Mapping[str, str]) -> tuple[float, float]:
    low, high = json.loads(facts.get("range", "[null, null]"))
    return (-math.inf if low is None else low, math.inf if high is None else high)


def problem(
    home: Place,
    manifest: Manifest,
    file: CommittedFile,
    bounds: Mapping[str, Bounds],
    content: Any = None,
) -> str | None:
    """What is wrong with a committed file, in words that follow its path; none if it is as
    committed. `content` is the open file, where it is open already.

    What older code committed has no digest. It is held by its page checksums, if it has some, and
    by every value that has bounds.
    """
    folder, _, name = file.path.rpartition("/")
    if not (re.fullmatch(DATA_FOLDER, folder) and re.fullmatch(DATA_FILE, name)):
        return _size_problem(NOT_OURS, file.bytes)
    try:
        if content is None:
            with open_whole(home / file.path) as opened:
                return problem(home, manifest, file, bounds, opened)
        size = content.seek(0, os.SEEK_END)
        if size != file.bytes:
            return _size_problem(size, file.bytes)
        if file.digest:
            if digest_of_file(content) != file.digest:
                return "has other content than was committed"
            return _footer_problem(pq.read_metadata(content), bounds.get(file.table, {}))
        return _older_problem(content, manifest, file, bounds.get(file.table, {}))
    except FileNotFoundError:
        return _size_problem(GONE, file.bytes)
    except (OSError, ValueError, pa.ArrowException) as error:
        return f"cannot be read ({reason(error)})"


def _footer_problem(footer: pq.FileMetaData, bounds: Bounds) -> str | None:
    """The first column whose values, by the file's own statistics, lie outside its range."""
    for group in range(footer.num_row_groups if bounds else 0):
        row_group = footer.row_group(group)
        for i in range(row_group.num_columns):
            chunk = row_group.column(i)
            name = chunk.path_in_schema.partition(".")[0]
            if name in bounds and chunk.statistics is not None and chunk.statistics.has_min_max:
                span = chunk.statistics.min, chunk.statistics.max
                if why := _range_problem(name, span, bounds[name]):
                    return why
    return None


def _range_problem(name: str, span: tuple[Any, Any], bounds: tuple[float, float]) -> str | None:
    (least, most), (low, high) = span, bounds
    slack = ROUNDING * max([1.0, *(abs(bound) for bound in bounds if math.isfinite(bound))])
    if low - slack <= least and most <= high + slack:
        return None
    return (
        f"has {name} from {least:.6g} to {most:.6g}, outside of its range from {low:g} to {high:g}"
    )


def _older_problem(
    content: Any,
    manifest: Manifest,
    file: CommittedFile,
    bounds: Bounds,
) -> str | None:
    """What shows in a file without a digest: where it says it belongs, its rows and its values."""
    content.seek(0)
    table = read_content(content)
    said = table.schema.metadata or {}
    for key, expected in (("run_id", manifest.run_id), ("intervention", file.intervention)):
        if (found := said.get(key.encode())) is not None and found != expected.encode():
            return f"belongs to {key} {found.decode(errors='replace')}"
    if file.rows is not None and table.num_rows != file.rows:
        return f"holds {table.num_rows:,} rows where {file.rows:,} were committed"
    model = manifest.model
    keys = {
        "shard": (min(file.shards), max(file.shards)),
        "sequence": (file.start, file.stop - 1),
        "layer": (0, model.get("n_layers", math.inf) - 1),
        "head": (0, model.get("n_heads", math.inf) - 1),
        "tokens": (0, model.get("d_vocab", math.inf) - 1),
    }
    for name, (low, high) in keys.items():
        if name in table.column_names and (span := _span(table[name])) is not None:
            least, most = span
            # A file that also holds rows that do not count holds other shards and sequences.
            if (least < low or most > high) and (file.rows is not None or name == "layer"):
                return f"has {name} from {least} to {most} where {low} to {high} were committed"
    for name, of_column in bounds.items():
        if name not in table.column_names:
            return f"has no column {name}"
        if (span := _span(table[name])) and (why := _range_problem(name, span, of_column)):
            return why
    return None


def _span(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The smallest and the largest value of a column, or of its lists; none if it has none."""
    values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    span = pc.min_max(values).as_py()
    return None if span["min"] is None else (span["min"], span["max"])
