"""Parquet files of token ids, which are read from any token to any other.

The ids lie in row groups of 65,536. Reading decodes only the row groups that it needs, and a
process keeps a few files open and their last row groups decoded.

Parquet's own checksums cover the content of pages, but neither their headers nor the footer, where
a flipped bit can change what is read. So a file also has a digest of the tokens of each row group.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.errors import CorpusError, counted
from headcount.schemas.files.digests import digest_of
from headcount.schemas.files.places import Place, StorePath, reason

TOKENS_PER_GROUP = 1 << 16
"""Tokens that are decoded at once: half a millisecond."""

OPEN_FILES = 8
"""Files that a process keeps open."""

DECODED_GROUPS = 32
"""Row groups that are kept of each open file: 4 MiB if the ids have 16 bits."""

READ_AHEAD = 16
"""Row groups that are fetched at once from a store if a file is read forward: about 1.6 MB."""

COLUMN = "token"

DIGEST_BYTES = 8

UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)
"""What is raised of a file that is missing, or whose content is broken."""


def token_bytes(
    tokens: Sequence[np.ndarray], token_type: pa.DataType, record: Mapping[str, str]
) -> pa.Buffer:
    """The tokens of some documents, one after the other, as the content of a file.

    `record` says which tokens they are. Whoever reads the file must say the same.
    """
    chunks = [pa.array(ids, token_type) for ids in tokens]
    column = pa.chunked_array(chunks, token_type).combine_chunks()
    schema = pa.schema([pa.field(COLUMN, token_type, nullable=False)])
    groups = [
        digest_of_array(values_of(column.slice(start, TOKENS_PER_GROUP)))
        for start in range(0, len(column), TOKENS_PER_GROUP)
    ]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=False,
        # Nobody looks for a token by its number.
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        writer.write_table(pa.table([column], schema=schema), row_group_size=TOKENS_PER_GROUP)
        writer.add_key_value_metadata(guarded({**record, "groups": groups}))
    return sink.getvalue()


def values_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The numbers of a column that has no NULL, without a copy if they lie together.

    Arrow's own `to_numpy` imports pandas, which takes longer than everything else here.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    data_type = array.type.to_pandas_dtype()
    # Buffer 0 would say which values are NULL.
    content = array.buffers()[1]
    if content is None or not len(array):
        return np.empty(0, data_type)
    return np.frombuffer(content, data_type, len(array), array.offset * array.type.bit_width // 8)


def digest_of_array(values: np.ndarray) -> str:
    """A digest of the values of an array."""
    content = np.ascontiguousarray(values).data
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def guarded(record: Mapping[str, Any]) -> dict[str, str]:
    """What a file says about itself, as metadata with a digest."""
    content = json.dumps(record)
    return {"record": content, "digest": digest_of(content.encode())}


def guarded_record(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """What a file says about itself; raises ValueError or KeyError if that is broken."""
    metadata = metadata or {}
    content = metadata[b"record"]
    if digest_of(content).encode() != metadata[b"digest"]:
        raise ValueError("its record is damaged")
    return json.loads(content)


class TokenFile:
    """A file of tokens that is open for reading. Threads may share it."""

    def __init__(self, file: Place, tokens: int, record: Mapping[str, str]) -> None:
        """`tokens` and `record` are those that the file must have."""
        self._place = file
        self._in_store = isinstance(file, StorePath)
        self._lock = threading.Lock()
        self._decoded: OrderedDict[int, np.ndarray] = OrderedDict()
        self._next_group = 0
        """The row group behind the last one that was read."""
        try:
            # A file of Python's own would have to be closed.
            content: Any = file.open() if isinstance(file, StorePath) else pa.OSFile(str(file))
            self._parquet = pq.ParquetFile(
                content, page_checksum_verification=True, pre_buffer=self._in_store
            )
            actual_record = guarded_record(self._parquet.metadata.metadata)
            self._digests: list[str] = actual_record.pop("groups")
        except UNREADABLE as error:
            raise unreadable(file, error) from None
        # A damaged footer may name any other type.
        if self._parquet.schema_arrow.types not in ([pa.uint16()], [pa.uint32()]):
            raise unreadable(file, ValueError("it does not hold token ids"))
        if actual_record != record:
            raise unreadable(file, ValueError("it holds the tokens of other documents"))
        if self._parquet.metadata.num_rows != tokens:
            raise unreadable(file, ValueError(f"it does not hold {counted(tokens, 'token')}"))

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`, as an array of the caller's own."""
        if start >= stop:
            return np.empty(0, self._parquet.schema_arrow.field(COLUMN).type.to_pandas_dtype())
        first_group = start // TOKENS_PER_GROUP
        groups = self._groups(first_group, -(-stop // TOKENS_PER_GROUP))
        offset = first_group * TOKENS_PER_GROUP
        if len(groups) == 1:
            return groups[0][start - offset : stop - offset].copy()
        # The ends are cut before the groups are joined, so that joining is the only copy.
        groups[0] = groups[0][start - offset :]
        # `stop % TOKENS_PER_GROUP` would be 0 where a whole group is wanted.
        groups[-1] = groups[-1][: (stop - 1) % TOKENS_PER_GROUP + 1]
        return np.concatenate(groups)

    def _groups(self, first: int, end: int) -> list[np.ndarray]:
        """The row groups from `first` to before `end`, decoded."""
        with self._lock:
            groups = {i: self._decoded[i] for i in range(first, end) if i in self._decoded}
            missing = [i for i in range(first, end) if i not in groups]
            if missing:
                groups |= self._fetch(missing[0], missing[-1] + 1)
            self._next_group = end
            for i in range(first, end):
                self._decoded[i] = groups[i]
                self._decoded.move_to_end(i)
            while len(self._decoded) > DECODED_GROUPS:
                self._decoded.popitem(last=False)
        return [groups[i] for i in range(first, end)]

    def _fetch(self, first: int, end: int) -> dict[int, np.ndarray]:
        """Row groups that are read and decoded now, perhaps with some behind them."""
        reads_forward = first == self._next_group
        if self._in_store and reads_forward:
            # A request takes as long as a megabyte takes.
            end = min(max(end, first + READ_AHEAD), self._parquet.num_row_groups)
        try:
            table = self._parquet.read_row_groups(list(range(first, end)), use_threads=False)
            tokens = values_of(table.column(0))
            groups: dict[int, np.ndarray] = {}
            for i in range(first, end):
                begin = (i - first) * TOKENS_PER_GROUP
                groups[i] = tokens[begin : begin + TOKENS_PER_GROUP]
                if digest_of_array(groups[i]) != self._digests[i]:
                    raise ValueError("its content is not what was written")
        except UNREADABLE as error:
            raise unreadable(self._place, error) from None
        self._decoded |= groups
        return groups


@lru_cache(maxsize=OPEN_FILES)
def open_token_file(file: Place, tokens: int, record: tuple[tuple[str, str], ...]) -> TokenFile:
    """An open file. A process keeps the last ones that it used."""
    return TokenFile(file, tokens, dict(record))


def forget_open_files() -> None:
    """Close the files that this process keeps open, for example because they are deleted."""
    open_token_file.cache_clear()


def unreadable(file: Place, error: BaseException) -> CorpusError:
    """The error about a file of a token store that is missing or cannot be read."""
    if isinstance(error, FileNotFoundError):
        return CorpusError(f"{file}: not there; run the same command, which prepares it again")
    return CorpusError(
        f"{file}: cannot be read ({reason(error)}); if it is damaged, delete it, then run the same "
        "command, which prepares it again"
    )
