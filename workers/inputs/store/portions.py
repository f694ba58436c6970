"""Portions of a corpus: what one task reads and tokenises.

A corpus is cut into portions from the sizes of its files alone: a range of a large file, a whole
file, or many small files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from headcount.schemas.errors import CorpusError, printable
from headcount.schemas.files.places import StorePath, open_whole, place, reason
from headcount.workers.inputs.corpus.documents import (
    BLANK,
    CHANGED,
    Reading,
    Record,
    Source,
    Stretch,
    hub_version,
    refusing_unreadable,
)
from headcount.workers.inputs.corpus.file_content import COMPRESSED, content_bytes_of

RANGE_BYTES = 128 << 20
"""Stored bytes that one portion covers at most, if its files can be cut there."""

COMPRESSED_RANGE_BYTES = 256 << 20
"""Bytes of the content of a compressed file that one portion covers at least."""

COMPRESSED_RANGES = 64
"""Ranges into which one compressed file is cut at most. Whoever reads a range decompresses all
that lies before it, half the file on average. Measured at 0.74 GB/s of zstd, 0.24 GB/s of gzip and
2 MB/s of tokenising, 64 ranges cost 9 % more time (.gz: 27 %), however large the file is.
"""

EXPECTED_COMPRESSION = 8
"""How many times smaller a compressed file is expected to be at most. Files that can then hold no
more than one range are not opened to be cut.
"""

FILES_IN_PORTION = 10_000
"""Small files that one portion joins at most."""

FILES_AT_ONCE = 16
"""Files that are opened at once to see where they can be cut."""

FILES_WORTH_A_LISTING = 16
"""Files in a directory of a store from which on the directory is listed, 1,000 files a request,
rather than a request made for each file.
"""


class FileState(NamedTuple):
    """What a source was like when it was listed."""

    name: str
    bytes: int
    changed: int
    """When the file was changed last, in nanoseconds; 0 if that is not known."""
    version: str = ""
    """Identifies what a data set holds; empty for files."""

    @classmethod
    def of(cls, source: Source) -> FileState:
        """A source as it is now."""
        return file_states([source])[0]

    def is_same_file(self, now: FileState) -> bool:
        """Whether nothing tells a file from what it was; what is not known fits everything."""
        same_content = (self.name, self.bytes) == (now.name, now.bytes)
        same_version = self.changed in (0, now.changed) and self.version in ("", now.version)
        return same_content and same_version


def file_states(sources: Sequence[Source]) -> list[FileState]:
    """Sources as they are now.

    A data set is looked at once for all its parts, a directory of a store once for all its files.
    """
    data_sets = {(source.path, source.split) for source in sources if source.kind == "hub"}
    versions = {data_set: hub_version(*data_set) for data_set in data_sets}
    objects = _listed_objects(sources)
    states: list[FileState] = []
    for source in sources:
        if source.kind == "hub":
            version = versions[source.path, source.split]
            states.append(FileState(source.file_name, 0, 0, version))
        elif source.path in objects:
            states.append(FileState(source.file_name, *objects[source.path]))
        else:
            states.append(FileState(source.file_name, *_size_and_time(source)))
    return states


def _listed_objects(sources: Sequence[Source]) -> dict[str, tuple[int, int]]:
    """Sizes and times of objects by URL, in the directories of stores that hold many sources."""
    urls = [source.path for source in sources if source.kind != "hub" and "://" in source.path]
    directories = Counter(url.rpartition("/")[0] for url in urls)
    objects: dict[str, tuple[int, int]] = {}
    for directory, files in directories.items():
        path = place(directory)
        if files < FILES_WORTH_A_LISTING or not isinstance(path, StorePath):
            continue
        try:
            listed = path.filesystem.get_file_info(pafs.FileSelector(path.key))
        except OSError as error:
            raise CorpusError(f"{directory}: cannot be listed ({reason(error)})") from None
        for info in listed:
            objects[f"{directory}/{info.base_name}"] = (info.size or 0, info.mtime_ns or 0)
    return objects


def _size_and_time(source: Source) -> tuple[int, int]:
    """The size of a file and when it was changed; zeros if there is no such file."""
    # A place is made of addresses only: of a million paths it would take as long as `os.stat`.
    path = place(source.path) if "://" in source.path else os.path.expanduser(source.path)
    if isinstance(path, StorePath):
        try:
            info = path.filesystem.get_file_info(path.key)
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({reason(error)})") from None
        return info.size or 0, info.mtime_ns or 0
    try:
        status = os.stat(path)
    except OSError:
        # Whoever reads a file that is not there says so.
        return 0, 0
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, order=True)
class Position:
    """Where reading goes on inside a portion."""

    source: int = 0
    """Number of the source within the portion."""
    offset: int = 0
    """The byte of the (decompressed) content of lines, or the row of another source."""
    row: int = 0
    """Rows of that source that were read in this portion so far, blank lines counted."""


@dataclass(frozen=True)
class Portion:
    """Consecutive sources of a corpus, or a range of one source."""

    first_source: int
    """The number of its first source in the corpus."""
    sources: tuple[Source, ...]
    files: tuple[FileState, ...]
    """The state of each source when it was listed."""
    start: int = 0
    """Where the range of its only source begins: a byte of the content of lines, or a row."""
    stop: int | None = None
    """Where the range ends. None is the end of its last source."""
    bytes: int = 0
    """About how many stored bytes it covers."""

    @cached_property
    def key(self) -> str:
        """Identifies what the portion holds: its files as they were, and the range."""
        digest = hashlib.sha256()
        for source, state in zip(self.sources, self.files, strict=True):
            path = source.path
            # URLs and names on the Hub are the same from every directory.
            is_local = "://" not in path and (source.kind != "hub" or os.path.isdir(path))
            if is_local:
                path = os.path.abspath(os.path.expanduser(path))
            identity = (source.kind, path, source.split, source.part, source.parts)
            # The name of a file's state is a part of its path.
            content = [*identity, *state[1:], self.start, self.stop]
            digest.update(f"{json.dumps(content)}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def begins_source(self) -> bool:
        """Whether it begins where its first source begins."""
        return self.start == 0

    @property
    def ends_source(self) -> bool:
        """Whether it ends where its last source ends."""
        return self.stop is None

    def check_unchanged(self) -> None:
        """Refuse a portion of which a file is not as it was when it was listed."""
        states = zip(self.sources, self.files, file_states(self.sources), strict=True)
        for source, before, now in states:
            if not before.is_same_file(now):
                raise CorpusError(f"{printable(source.name)}: {CHANGED}")


class PortionReader:
    """Reads the records of a portion in order, from any position that an earlier reader had."""

    def __init__(self, portion: Portion, reading: Reading, position: Position = Position()) -> None:
        """Reading begins at `position`."""
        self.portion = portion
        self.reading = reading
        self.position = position
        """Behind the last record that was read. At the end all rows of the last source count."""
        self.ended = False
        """Whether everything was read."""

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        """The number of the source within the portion, and the record.

        The row of a record counts from the beginning of the portion in that source.
        """
        first_number = self.position.source
        for number in range(first_number, len(self.portion.sources)):
            if number > first_number:
                self.position = Position(number)
            for record in self._records(number):
                self.position = Position(number, record.stop, record.row + 1)
                if record.content is not BLANK:
                    yield number, record
        self.ended = True

    def _records(self, number: int) -> Iterator[Record]:
        """The records of one source from the position on."""
        stretch = Stretch(max(self.portion.start, self.position.offset), self.portion.stop)
        rows_before = self.position.row
        try:
            for record in self.portion.sources[number].records(self.reading, stretch):
                yield record._replace(row=rows_before + record.row)
        except CorpusError:
            # A file that changed is often unreadable first. What changed it is the better reason.
            self.portion.check_unchanged()
            raise


def portions_of(sources: Sequence[Source]) -> list[Portion]:
    """The portions of a corpus in order. Every source is covered exactly once."""
    states = file_states(sources)
    cuts = _cuts(sources, states)
    portions: list[Portion] = []
    first = 0
    while first < len(sources):
        if first in cuts:
            starts = cuts[first]
            stored_bytes = states[first].bytes // len(starts)
            # The last range is open: it goes to the end of the source, wherever that is.
            portions += [
                Portion(first, (sources[first],), (states[first],), start, stop, stored_bytes)
                for start, stop in zip(starts, [*starts[1:], None], strict=True)
            ]
            first += 1
            continue
        # Whole sources are joined up to one that is cut, or to one with which they are too much.
        stop = first + 1
        stored_bytes = states[first].bytes
        while stop < min(len(sources), first + FILES_IN_PORTION) and stop not in cuts:
            if stored_bytes + states[stop].bytes > RANGE_BYTES:
                break
            stored_bytes += states[stop].bytes
            stop += 1
        some = slice(first, stop)
        portions.append(
            Portion(first, tuple(sources[some]), tuple(states[some]), bytes=stored_bytes)
        )
        first = stop
    return portions


# Where a source is cut


def _cuts(sources: Sequence[Source], states: Sequence[FileState]) -> dict[int, list[int]]:
    """Where portions begin in the sources that are not joined with others, by their numbers."""
    cuts: dict[int, list[int]] = {}
    opened: list[int] = []
    for number, (source, state) in enumerate(zip(sources, states, strict=True)):
        if source.kind == "hub":
            cuts[number] = [0]
        elif source.kind in ("jsonl", "json", "parquet"):
            most_bytes, range_bytes = state.bytes, RANGE_BYTES
            if source.path.endswith(COMPRESSED):
                most_bytes *= EXPECTED_COMPRESSION
                range_bytes = COMPRESSED_RANGE_BYTES
            # A file that can hold no more than one range is not opened.
            if most_bytes > range_bytes:
                opened.append(number)
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        found = pool.map(lambda number: _cuts_of(sources[number], states[number]), opened)
        for number, cuts_of_source in zip(opened, found, strict=True):
            if len(cuts_of_source) > 1:
                cuts[number] = cuts_of_source
    return cuts


def _cuts_of(source: Source, state: FileState) -> list[int]:
    """Where the portions of one source begin, the first one at 0."""
    try:
        with refusing_unreadable(source):
            if source.kind == "parquet":
                return _cuts_of_rows(source, state)
            return _cuts_of_lines(source, state)
    except CorpusError:
        # Whoever reads the file says what is wrong with it.
        return [0]


def _cuts_of_lines(source: Source, state: FileState) -> list[int]:
    """Where portions begin in the content of a file of lines; an array is not cut."""
    if not source.has_lines:
        return [0]
    content_bytes = content_bytes_of(source.path, state.bytes)
    range_bytes = RANGE_BYTES
    if source.path.endswith(COMPRESSED):
        # Fewer and larger ranges, since each is reached through all that lies before it.
        range_bytes = max(COMPRESSED_RANGE_BYTES, -(-content_bytes // COMPRESSED_RANGES))
    ranges = max(1, -(-content_bytes // range_bytes))  # Rounded up.
    return [content_bytes * i // ranges for i in range(ranges)]


def _cuts_of_rows(source: Source, state: FileState) -> list[int]:
    """The row groups of a Parquet file with which portions begin, by their first rows."""
    with open_whole(place(source.path)) as content, pq.ParquetFile(content) as file:
        groups = file.num_row_groups
        first_rows = [0]
        for i in range(groups):
            first_rows.append(first_rows[-1] + file.metadata.row_group(i).num_rows)
    ranges = -(-state.bytes // RANGE_BYTES)
    rows_of_range = -(-first_rows[-1] // ranges)
    cuts = [0]
    for first_row, stop_row in pairwise(first_rows):
        # A group that would make the range too large begins the next one.
        if first_row > cuts[-1] and stop_row - cuts[-1] > rows_of_range:
            cuts.append(first_row)
    return cuts
