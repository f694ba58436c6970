"""Portions of a corpus: what one task reads and tokenises.

A corpus is cut into portions from the sizes of its files alone: a range of a large file, a whole
file, or many small files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from schemas.errors import CorpusError, printable
from schemas.places import StorePath, absolute, place
from workers.inputs.documents import (
    BLANK,
    CHANGED,
    COMPRESSED,
    Reading,
    Record,
    Source,
    Stretch,
)

RANGE_BYTES = 128 << 20
"""Bytes of an uncompressed file that one portion covers, or of small files that it joins."""

FILES_IN_PORTION = 10_000
"""Small files that one portion joins at most."""


class FileState(NamedTuple):
    """What a source was like when it was listed."""

    name: str
    bytes: int
    changed: int
    """When the file was changed last, in nanoseconds; 0 if that is not known."""

    @classmethod
    def of(cls, source: Source) -> FileState:
        """A source as it is now."""
        if source.kind == "hub":
            return cls(source.file_name, 0, 0)
        path = place(source.path)
        if isinstance(path, StorePath):
            info = path.filesystem.get_file_info(path.key)
            return cls(source.file_name, info.size, info.mtime_ns)
        try:
            status = os.stat(path)
        except OSError:
            # Whoever reads the file next says what is wrong with it.
            return cls(source.file_name, 0, 0)
        return cls(source.file_name, status.st_size, status.st_mtime_ns)

    def is_same_file(self, now: FileState) -> bool:
        """Whether nothing tells a file from what it was; an unknown time fits every time."""
        same_content = (self.name, self.bytes) == (now.name, now.bytes)
        return same_content and self.changed in (0, now.changed)


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
            path = source.path if source.kind == "hub" else str(absolute(source.path))
            identity = (source.kind, path, source.split, source.part, source.parts, *state[1:])
            digest.update(json.dumps([*identity, self.start, self.stop]).encode())
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
        for source, before in zip(self.sources, self.files, strict=True):
            if not before.is_same_file(FileState.of(source)):
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
        stretch = Stretch(
            self.portion.start, self.portion.stop, self.position.offset, self.position.row
        )
        return self.portion.sources[number].records(self.reading, stretch)


def portions_of(sources: Sequence[Source]) -> list[Portion]:
    """The portions of a corpus in order. Every source is covered exactly once."""
    portions: list[Portion] = []
    joined: list[tuple[Source, FileState]] = []
    joined_bytes = 0
    for number, source in enumerate(sources):
        state = FileState.of(source)
        cuts = _cuts_of(source, state)
        is_joined = source.kind != "hub" and len(cuts) == 1
        if joined and not (is_joined and _fits(len(joined), joined_bytes + state.bytes)):
            portions.append(_joined_portion(number - len(joined), joined, joined_bytes))
            joined = []
            joined_bytes = 0
        if is_joined:
            joined.append((source, state))
            joined_bytes += state.bytes
        else:
            portions += _ranges(number, source, state, cuts)
    if joined:
        portions.append(_joined_portion(len(sources) - len(joined), joined, joined_bytes))
    return portions


def _fits(files: int, bytes_with_next: int) -> bool:
    """Whether another file may be joined to some."""
    return files < FILES_IN_PORTION and bytes_with_next <= RANGE_BYTES


def _joined_portion(
    first_source: int, joined: Iterable[tuple[Source, FileState]], stored_bytes: int
) -> Portion:
    sources, files = zip(*joined, strict=True)
    return Portion(first_source, tuple(sources), tuple(files), bytes=stored_bytes)


def _ranges(number: int, source: Source, state: FileState, cuts: list[int]) -> list[Portion]:
    """The portions of one source that begin at `cuts`."""
    return [
        Portion(number, (source,), (state,), start, stop, state.bytes // len(cuts))
        for start, stop in zip(cuts, [*cuts[1:], None], strict=True)
    ]


def _cuts_of(source: Source, state: FileState) -> list[int]:
    """Where the portions of one source begin; the first one at 0."""
    if source.kind == "jsonl" and not source.path.endswith(COMPRESSED):
        return list(range(0, max(1, state.bytes), RANGE_BYTES))
    return [0]
