"""The content of files, plain or compressed (.zst, .gz), from any of its bytes on.

A compressed file cannot be entered anywhere: it is decompressed from its beginning, and what lies
before the wanted byte is dropped. A .zst file may consist of several frames, each compressed by
itself. If their headers say how much they hold, reading begins with the frame that has the wanted
byte.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import zstandard

from headcount.schemas.errors import CorpusError, printable
from headcount.schemas.files.places import open_whole, place

COMPRESSED = (".zst", ".gz")
"""Endings of compressed files. The ending before it says what the file contains."""

STORE_BUFFER = 4 << 20
"""Bytes that are requested at once from a file in a store. A request waits 20 to 100 ms."""

CONTENT_BUFFER = 1 << 20
"""Bytes of a compressed file's content that are held at once."""

SAMPLE_SHARE = 64
"""One of so many bytes of a compressed file is read to see how well it is compressed."""

SAMPLE_BYTES = (1 << 20, 16 << 20)
"""Compressed bytes that are read for it at least and at most."""

SAMPLE_PIECE = 1 << 14
"""Bytes of a sample's content that are read at once. The last ones, cut in the middle, are lost."""

SKIPPABLE = range(0x184D2A50, 0x184D2A60)
"""First numbers of zstd's frames that hold no content, for instance a table of other frames."""

LONGEST_HEADER = 18
"""Bytes of the longest header that a zstd frame has."""

RUN_OF_ONE_BYTE = 1
"""Type of a zstd block that is stored as one byte, whatever the length of its content."""


@contextmanager
def open_content(path: str, start: int = 0) -> Iterator[io.BufferedReader]:
    """The content of a file from a byte on, decompressed if the file's name says so.

    A file that ends before that byte is open at its end. Memory does not depend on the file's size.
    """
    with open_whole(place(path)) as file:
        # A file in a store is Arrow's, which cannot peek or iterate over lines.
        stored = io.BufferedReader(file, STORE_BUFFER) if isinstance(file, pa.NativeFile) else file
        if path.endswith(".zst"):
            content_start = _enter_frame(path, stored, start)
            # Arrow's stream says if the file ends inside a frame, which the one of the library
            # zstandard takes for a complete file. Both hold one window and one block, however large
            # a frame is.
            stream: Any = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
        elif path.endswith(".gz"):
            content_start = 0
            stream = gzip.GzipFile(fileobj=stored)
        else:
            stored.seek(start)
            yield stored
            return
        content = io.BufferedReader(stream, CONTENT_BUFFER)
        with _saying_what_zstd_means(path):
            # A compressed stream cannot seek: what lies before is read and dropped.
            to_drop = start - content_start
            while to_drop > 0 and (dropped := content.read(min(to_drop, CONTENT_BUFFER))):
                to_drop -= len(dropped)
            yield content


@contextmanager
def _saying_what_zstd_means(path: str) -> Iterator[None]:
    """Explain the two errors of decompression for which something else than the file helps."""
    try:
        yield
    except OSError as error:
        if "Truncated compressed stream" in str(error):
            raise CorpusError(
                f"{printable(path)}: the zstd stream ends in the middle; fetch the file again"
            ) from None
        if "too much memory" in str(error):
            raise CorpusError(
                f"{printable(path)}: is compressed with a window of more than 128 MiB; compress it "
                "again with zstd and without --long or --ultra"
            ) from None
        raise


# Frames of a .zst file


class Frame(NamedTuple):
    """A frame of a .zst file."""

    start: int
    """Its first byte in the file."""
    header_bytes: int
    content_bytes: int | None
    """None if its header does not say it."""
    has_checksum: bool
    stored_bytes: int | None
    """Bytes of a frame without content; None for others, whose blocks say it."""


def _enter_frame(path: str, file: io.BufferedReader, start: int) -> int:
    """Go to the frame that holds a byte of the content, and return the frame's first byte of it.

    It is the first frame if the frames do not say how much they hold. In a store it is always the
    first frame: looking for others would read the file all the same.
    """
    content_start = 0
    frame_start = 0
    if start and isinstance(place(path), Path):
        while (frame := _frame_at(file, frame_start)) is not None:
            if frame.content_bytes is None or content_start + frame.content_bytes > start:
                break
            frame_stop = _stop_of(file, frame)
            if frame_stop is None:
                break
            frame_start = frame_stop
            content_start += frame.content_bytes
    file.seek(frame_start)
    return content_start


def _frame_at(file: io.BufferedReader, start: int) -> Frame | None:
    """The frame that begins at a byte of the file; None if none does."""
    file.seek(start)
    header = file.read(LONGEST_HEADER)
    if int.from_bytes(header[:4], "little") in SKIPPABLE and len(header) >= 8:
        return Frame(start, 8, 0, False, 8 + int.from_bytes(header[4:8], "little"))
    try:
        parameters = zstandard.get_frame_parameters(header)
        header_bytes = zstandard.frame_header_size(header)
    except zstandard.ZstdError:
        return None
    content_bytes = parameters.content_size
    if content_bytes == zstandard.CONTENTSIZE_UNKNOWN:
        content_bytes = None
    return Frame(start, header_bytes, content_bytes, parameters.has_checksum, None)


def _stop_of(file: io.BufferedReader, frame: Frame, limit: int | None = None) -> int | None:
    """Where a frame ends in the file, by the three bytes that each of its blocks begins with.

    None if the file ends first, or the frame does not end before `limit`.
    """
    if frame.stored_bytes is not None:
        return frame.start + frame.stored_bytes
    offset = frame.start + frame.header_bytes
    is_last = False
    while not is_last:
        if limit is not None and offset > limit:
            return None
        file.seek(offset)
        block_header = file.read(3)
        if len(block_header) < 3:
            return None
        number = int.from_bytes(block_header, "little")
        is_last = bool(number & 1)
        block_type = (number >> 1) & 3
        offset += 3 + (1 if block_type == RUN_OF_ONE_BYTE else number >> 3)
    return offset + (4 if frame.has_checksum else 0)


# How much a compressed file holds


def content_bytes_of(path: str, stored_bytes: int) -> int:
    """About how many bytes a file holds when it is decompressed, by a sample of its beginning."""
    if not path.endswith(COMPRESSED):
        return stored_bytes
    least, most = SAMPLE_BYTES
    sample = min(max(least, stored_bytes // SAMPLE_SHARE), most, stored_bytes)
    if path.endswith(".zst"):
        return _zstd_content_bytes(path, stored_bytes, sample)
    return stored_bytes * _decompressed_bytes(path, sample) // max(1, sample)


def _zstd_content_bytes(path: str, stored_bytes: int, sample: int) -> int:
    """What the headers of the frames say, else how much a sample holds."""
    with open_whole(place(path)) as file:
        stored = io.BufferedReader(file, STORE_BUFFER) if isinstance(file, pa.NativeFile) else file
        first_frame = _frame_at(stored, 0)
        frame = first_frame
        frames_stop = 0
        frames_content = 0
        while frame is not None and frame.content_bytes is not None and frames_stop < sample:
            frame_stop = _stop_of(stored, frame, limit=sample)
            if frame_stop is None:
                break
            frames_stop = frame_stop
            frames_content += frame.content_bytes
            frame = _frame_at(stored, frames_stop)
    if frames_content:
        return frames_content * stored_bytes // frames_stop
    estimate = stored_bytes * _decompressed_bytes(path, sample) // max(1, sample)
    # A frame that holds about what the whole file should hold is the whole file.
    said = first_frame.content_bytes if first_frame is not None else None
    return said if said and estimate < 2 * said else estimate


def _decompressed_bytes(path: str, sample: int) -> int:
    """Bytes of content in the first bytes of a compressed file."""
    with open_whole(place(path)) as file:
        beginning = file.read(sample)
    if path.endswith(".zst"):
        stream: Any = pa.CompressedInputStream(pa.BufferReader(beginning), "zstd")
    else:
        stream = gzip.GzipFile(fileobj=io.BytesIO(beginning))
    content_bytes = 0
    try:
        while piece := stream.read(SAMPLE_PIECE):
            content_bytes += len(piece)
    except (OSError, EOFError):
        # A sample ends in the middle, and a broken file is refused by whoever reads it.
        pass
    return content_bytes
