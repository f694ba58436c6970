"""The content of files, plain or compressed (.zst, .gz)."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from headcount.schemas.files.places import open_whole, place

COMPRESSED = (".zst", ".gz")
"""Endings of compressed files. The ending before it says what the file contains."""

STORE_BUFFER = 4 << 20
"""Bytes that are requested at once from a file in a store. A request waits 20 to 100 ms."""

CONTENT_BUFFER = 1 << 20
"""Bytes of a compressed file's content that are held at once."""

SAMPLE_BYTES = 1 << 20
"""Compressed bytes that are read to see how well a file is compressed."""

UTF8_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def open_content(path: str, start: int = 0) -> Iterator[io.BufferedReader]:
    """The content of a file from a byte on, decompressed if the file's name says so.

    A compressed file is read from its beginning, and what lies before that byte is dropped. A file
    that ends before it is open at its end. Memory does not depend on the file's size.
    """
    with open_whole(place(path)) as file:
        # A file in a store is Arrow's, which cannot peek or iterate over lines.
        stored = io.BufferedReader(file, STORE_BUFFER) if isinstance(file, pa.NativeFile) else file
        if not path.endswith(COMPRESSED):
            stored.seek(start)
            yield stored
            return
        stream = _decompressed(path, pa.PythonFile(stored, mode="r"))
        content = io.BufferedReader(stream, CONTENT_BUFFER)
        while start > 0 and (dropped := content.read(min(start, CONTENT_BUFFER))):
            start -= len(dropped)
        yield content


def _decompressed(path: str, stored: Any) -> Any:  # noqa: ANN401 (pyarrow has no types)
    # Arrow's streams go on behind the first frame of a file, hold one window and one block however
    # large a frame is, and raise where a file ends inside a frame, which the libraries zstandard
    # and gzip do not all do.
    return pa.CompressedInputStream(stored, "zstd" if path.endswith(".zst") else "gzip")


def content_bytes_of(path: str, stored_bytes: int) -> int:
    """About how many bytes a file holds when it is decompressed, by a sample of its beginning."""
    if not path.endswith(COMPRESSED):
        return stored_bytes
    with open_whole(place(path)) as file:
        sample = file.read(SAMPLE_BYTES)
    content_bytes = 0
    try:
        stream = _decompressed(path, pa.BufferReader(sample))
        # In small pieces, because the last one, which the end of the sample cuts, is lost.
        while piece := stream.read(1 << 14):
            content_bytes += len(piece)
    except OSError:
        pass  # A broken file is refused by whoever reads it.
    return stored_bytes * content_bytes // max(1, len(sample))


def begins_an_array(file: io.BufferedReader) -> bool:
    """Whether an open file of JSON holds an array rather than lines."""
    beginning = file.peek(1).removeprefix(UTF8_BYTE_ORDER_MARK).lstrip()
    return beginning[:1] == b"["
