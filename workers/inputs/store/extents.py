"""What one worker reads of a corpus: a range of a large file, a whole file, or many small files.

A corpus is cut into such extents from the sizes of its files alone. Each is prepared portion by
portion, as `preparation` says.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import pyarrow.parquet as pq

from headcount.schemas.errors import CorpusError, RunError, printable
from headcount.schemas.files.input_files import open_input
from headcount.schemas.object_stores import listed, object_info
from headcount.schemas.places import StorePath, place
from headcount.schemas.reasons import reason
from headcount.workers.inputs.corpus.documents import (
    CHANGED,
    Source,
    hub_version,
    refusing_unreadable,
)

PORTION_BYTES = 16 << 20
"""Content of a source that a range of it covers, if the source can be entered anywhere. Small files
are read together up to as many stored bytes.
"""

FILES_IN_EXTENT = 10_000  # small files that are read together at most
FILES_AT_ONCE = 16  # files that are opened at once to see where they can be cut

FILES_WORTH_A_LISTING = 16
"""Files in a directory of a store from which on the directory is listed, 1,000 files a request,
rather than a request made for each file.
"""


def sources_now(sources: Sequence[Source]) -> list[Source]:
    """Sources as they are now: their sizes, when they were changed, the versions of data sets.

    A data set is looked at once for all its parts, a directory of a store once for all its files.
    """
    data_sets = {(source.path, source.split) for source in sources if source.kind == "hub"}
    versions = {data_set: hub_version(*data_set) for data_set in data_sets}
    objects = _objects_now([s.path for s in sources if s.kind != "hub" and "://" in s.path])
    now: list[Source] = []
    for source in sources:
        if source.kind == "hub":
            version = versions[source.path, source.split]
            now.append(replace(source, bytes=0, changed=0, version=version))
            continue
        size, changed = objects.get(source.path, (0, 0))
        if "://" not in source.path:
            # No place is made: of a million paths that would take as long as `os.stat`.
            try:
                status = os.stat(os.path.expanduser(source.path))
                size, changed = status.st_size, status.st_mtime_ns
            except OSError:
                pass  # Whoever reads a file that is not there says so.
        now.append(replace(source, bytes=size, changed=changed))
    return now


def _objects_now(urls: list[str]) -> dict[str, tuple[int, int]]:
    """Sizes and times of objects in stores, by URL; none of an object that is not there."""
    objects: dict[str, tuple[int, int]] = {}
    names: dict[str, list[str]] = defaultdict(list)
    for url in urls:
        directory, _, name = url.rpartition("/")
        names[directory].append(name)
    for directory, names_in_it in names.items():
        path = place(directory)
        assert isinstance(path, StorePath)
        try:
            if len(names_in_it) >= FILES_WORTH_A_LISTING:
                infos = listed(path)
            else:
                infos = [object_info(path / name) for name in names_in_it]
        except (OSError, RunError) as error:
            raise CorpusError(f"{directory}: cannot be read ({reason(error)})") from None
        for info in infos:
            objects[f"{directory}/{info.base_name}"] = (info.size or 0, info.mtime_ns or 0)
    return objects


@dataclass(frozen=True)
class Extent:
    """Consecutive sources of a corpus, or a range of one source."""

    first_source: int  # the number of its first source in the corpus
    sources: tuple[Source, ...]  # as they were when they were listed
    start: int = 0  # where the range of its only source begins: a byte of lines, or a row
    stop: int | None = None  # Where the range ends. None is the end of its last source.
    bytes: int = 0  # about how many stored bytes it covers

    @cached_property
    def key(self) -> str:
        """Identifies what the extent holds: its files as they were, and the range."""
        digest = hashlib.sha256()
        for source in self.sources:
            path = source.path
            # URLs and names on the Hub are the same from every directory.
            if "://" not in path and (source.kind != "hub" or os.path.isdir(path)):
                path = _real_path(os.path.abspath(os.path.expanduser(path)))
            identity = [source.kind, path, source.split, source.part, source.parts]
            state = [source.bytes, source.changed, source.version]
            digest.update(f"{json.dumps([*identity, *state, self.start, self.stop])}\n".encode())
        return digest.hexdigest()[:16]

    def check_unchanged(self) -> None:
        """Refuse an extent of which a file is not as it was when it was listed."""
        for source, now in zip(self.sources, sources_now(self.sources), strict=True):
            if source != now:
                raise CorpusError(f"{printable(source.name)}: {CHANGED}")


def _real_path(path: str) -> str:
    """A path without links. Of a million files in a directory, it is followed once."""
    directory, name = os.path.split(path)
    path = os.path.join(_real_directory(directory), name)
    return os.path.realpath(path) if os.path.islink(path) else path


@lru_cache
def _real_directory(directory: str) -> str:
    return os.path.realpath(directory)


def extents_of(sources: Sequence[Source]) -> list[Extent]:
    """The extents of a corpus in order. Every source is covered exactly once."""
    sources = sources_now(sources)
    large = [s for s in sources if s.bytes > PORTION_BYTES and s.can_be_entered]
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        cuts = dict(zip(large, pool.map(_cuts_of, large), strict=True))
    groups: list[list[Source]] = []
    room = -1  # bytes of small sources that the last group still takes; negative if it takes none
    for source in sources:
        is_alone = source.kind == "hub" or len(cuts.get(source, ())) > 1
        if is_alone or source.bytes > room or len(groups[-1]) == FILES_IN_EXTENT:
            groups.append([])
            room = PORTION_BYTES
        groups[-1].append(source)
        room = -1 if is_alone else room - source.bytes
    extents: list[Extent] = []
    first = 0
    for group in groups:
        starts = cuts.get(group[0], [0])
        some_bytes = sum(source.bytes for source in group) // len(starts)
        # The last range is open: it goes to the end of the source, wherever that is.
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            extents.append(Extent(first, tuple(group), start, stop, some_bytes))
        first += len(group)
    return extents


def _cuts_of(source: Source) -> list[int]:
    """Where the ranges of a source begin that can be entered anywhere, the first one at 0."""
    length = content_bytes = source.bytes
    if source.kind == "parquet":
        try:
            with refusing_unreadable(source), open_input(place(source.path)) as content:
                metadata = pq.read_metadata(content)
        except CorpusError:
            # Whoever reads the file says what is wrong with it.
            return [0]
        length = metadata.num_rows
        groups = range(metadata.num_row_groups)
        content_bytes = sum(metadata.row_group(i).total_byte_size for i in groups)
    ranges = max(1, min(length, -(-content_bytes // PORTION_BYTES)))  # Rounded up.
    return [length * i // ranges for i in range(ranges)]
