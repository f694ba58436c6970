"""How many stored bytes of a corpus its pieces cover: for progress and for estimates."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

from functools import lru_cache

import pyarrow.parquet as pq

from headcount.schemas.files.places import open_whole, place
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.corpus.file_content import content_bytes_of
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.inputs.store.token_store import Piece


def covered_bytes(portion: Portion, last: Piece) -> float:
    """About how many stored bytes of a portion lie before the end of its last piece."""
    if last.ended:
        return float(portion.bytes)
    number, offset = last.stop.source, last.stop.offset
    before = sum(state.bytes for state in portion.files[:number])
    source, state = portion.sources[number], portion.files[number]
    # Only the first source of a portion may be entered in its middle.
    start = portion.start if number == 0 else 0
    # An offset counts bytes of content in text files, and rows in others.
    if source.kind == "jsonl":
        whole_length = _content_bytes(source.path, state.bytes)
    elif source.kind == "parquet":
        whole_length = _rows(source)
    else:
        # Nobody knows how many rows other files have before they are read.
        return float(before)
    in_file = state.bytes * (offset - start) / max(1, whole_length)
    return before + min(float(state.bytes), in_file)


@lru_cache(maxsize=256)
def _rows(source: Source) -> int:
    """The rows of a Parquet file."""
    with open_whole(place(source.path)) as file:
        return pq.read_metadata(file).num_rows


@lru_cache(maxsize=256)
def _content_bytes(path: str, file_bytes: int) -> int:
    """About how large the content of a file is. A sample of a compressed file is read once."""
    return content_bytes_of(path, file_bytes)
