"""What one worker reads of a corpus: a range of a large file, a whole file, or many small files.

A corpus is cut into such extents from the sizes of its files alone. Each is prepared portion by
portion, as `preparation` says.
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
from typing import NamedTuple

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from headcount.schemas.errors import CorpusError, printable
from headcount.schemas.files.places import StorePath, open_whole, place, reason
from headcount.workers.inputs.corpus.documents import (
    CHANGED,
    Reading,
    Record,
    Source,
    Stretch,
    hub_version,
    refusing_unreadable,
)

PORTION_BYTES = 16 << 20
"""Content of a source that a range of it covers, if the source can be entered anywhere. Small files
are read together up to as many stored bytes.
"""

FILES_IN_EXTENT = 10_000
"""Small files that are read together at most."""

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


@dataclass(frozen=True)
class Extent:
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
        """Identifies what the extent holds: its files as they were, and the range."""
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

    def check_unchanged(self) -> None:
        """Refuse an extent of which a file is not as it was when it was listed."""
        states = zip(self.sources, self.files, file_states(self.sources), strict=True)
        for source, before, now in states:
            if not before.is_same_file(now):
                raise CorpusError(f"{printable(source.name)}: {CHANGED}")

    def records(self, reading: Reading) -> Iterator[tuple[int, Record]]:
        """The records in order, blank lines too, each with the number of its source here."""
        stretch = Stretch(self.start, self.stop)
        try:
            for number, source in enumerate(self.sources):
                for record in source.records(reading, stretch):
                    yield number, record
        except CorpusError:
            # A file that changed is often unreadable first. What changed it is the better reason.
            self.check_unchanged()
            raise


def extents_of(sources: Sequence[Source]) -> list[Extent]:
    """The extents of a corpus in order. Every source is covered exactly once."""
    states = file_states(sources)
    large = [
        number
        for number, (source, state) in enumerate(zip(sources, states, strict=True))
        if state.bytes > PORTION_BYTES and source.can_be_entered
    ]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        found = pool.map(lambda number: _cuts_of(sources[number], states[number]), large)
        cuts = dict(zip(large, found, strict=True))
    extents: list[Extent] = []
    first = 0
    while first < len(sources):
        stop = first + 1
        stored_bytes = states[first].bytes
        starts = cuts.get(first, [0])
        # The last range is open: it goes to the end of the source, wherever that is.
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            some_bytes = stored_bytes // len(starts)
            extents.append(
                Extent(first, (sources[first],), (states[first],), start, end, some_bytes)
            )
        if len(starts) == 1 and sources[first].kind != "hub":
            # Whole sources are joined up to one with which they are too much.
            while stop < min(len(sources), first + FILES_IN_EXTENT) and sources[stop].kind != "hub":
                if stored_bytes + states[stop].bytes > PORTION_BYTES:
                    break
                stored_bytes += states[stop].bytes
                stop += 1
            some = slice(first, stop)
            extents[-1] = Extent(
                first, tuple(sources[some]), tuple(states[some]), bytes=stored_bytes
            )
        first = stop
    return extents


def _cuts_of(source: Source, state: FileState) -> list[int]:
    """Where the ranges of a source begin that can be entered anywhere, the first one at 0."""
    length = content_bytes = state.bytes
    if source.kind == "parquet":
        try:
            with refusing_unreadable(source), open_whole(place(source.path)) as content:
                metadata = pq.read_metadata(content)
        except CorpusError:
            # Whoever reads the file says what is wrong with it.
            return [0]
        length = metadata.num_rows
        groups = range(metadata.num_row_groups)
        content_bytes = sum(metadata.row_group(i).total_byte_size for i in groups)
    ranges = max(1, min(length, -(-content_bytes // PORTION_BYTES)))  # Rounded up.
    return [length * i // ranges for i in range(ranges)]
