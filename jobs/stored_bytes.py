"""How many stored bytes of a corpus its pieces cover: for progress and for estimates."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import zlib
from functools import lru_cache

import pyarrow.parquet as pq
import zstandard

from schemas.places import open_whole, place
from workers.inputs.documents import COMPRESSED, Source
from workers.inputs.portions import Portion
from workers.inputs.token_store import Piece

RATIO_BYTES = 1 << 20
"""Stored bytes from which it is seen how far a file is compressed."""


def covered_bytes(portion: Portion, last: Piece) -> float:
    """About how many stored bytes of a portion lie before the end of its last piece."""
    if last.ended:
        return float(portion.bytes)
    number, offset = last.stop.source, last.stop.offset
    before = sum(state.bytes for state in portion.files[:number])
    source, state = portion.sources[number], portion.files[number]
    start = portion.start if number == 0 else 0
    return before + min(float(state.bytes), _stored_bytes(source, state.bytes, offset - start))


def _stored_bytes(source: Source, file_bytes: int, length: int) -> float:
    """About how many bytes of a file hold some bytes of its content, or some of its rows."""
    if source.kind == "jsonl":
        return length / _content_per_byte(source)
    if source.kind == "parquet":
        return file_bytes * length / max(1, _rows(source))
    # Nobody knows how many rows other files have before they are read.
    return 0.0


@lru_cache(maxsize=256)
def _rows(source: Source) -> int:
    """The rows of a Parquet file."""
    with open_whole(place(source.path)) as file:
        return pq.read_metadata(file).num_rows


@lru_cache(maxsize=256)
def _content_per_byte(source: Source) -> float:
    """Bytes of the content of a file of lines in a stored byte, at its beginning."""
    if not source.path.endswith(COMPRESSED):
        return 1.0
    with open_whole(place(source.path)) as file:
        head = file.read(RATIO_BYTES)
    if source.path.endswith(".zst"):
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    else:
        decompressor = zlib.decompressobj(wbits=31)
    content = len(decompressor.decompress(head))
    return max(1, content) / max(1, len(head) - len(decompressor.unused_data))
