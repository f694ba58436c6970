"""Parquet files in memory, on disks and in stores."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.places import Place, open_whole


def table_of(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """A table of `schema`; NaN becomes NULL, and so does a column that is not given. A matrix is a
    column of lists.
    """
    rows = len(next(iter(columns.values())))
    arrays = [
        _array(columns[f.name]).cast(f.type) if f.name in columns else pa.nulls(rows, f.type)
        for f in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Any) -> pa.Array:
    if not isinstance(values, np.ndarray) or values.ndim == 1:
        return pa.array(values, from_pandas=True)
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), from_pandas=True))


def parquet_bytes(table: pa.Table, **options: Any) -> pa.Buffer:
    """A table as a Parquet file; statistics hardly repeat, and a dictionary of them would be a
    third of the file.
    """
    repeating = [leaf for field in table.schema for leaf in _leaves(field.name, field.type)]
    options |= {"compression": "zstd", "use_dictionary": repeating, "store_schema": True}
    options |= {"write_page_checksum": True}
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _leaves(path: str, type_: pa.DataType) -> Iterator[str]:
    """The columns of a file that hold a column of a table, but for floats."""
    if pa.types.is_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    elif pa.types.is_struct(type_):
        for i in range(type_.num_fields):
            yield from _leaves(f"{path}.{type_.field(i).name}", type_.field(i).type)
    elif not pa.types.is_floating(type_):
        yield path


def read_parquet(where: Place, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole file, or some columns of it."""
    with open_whole(where) as file:
        return read_content(file, columns)


def read_content(file: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """The same of an open file; pages that do not fit their checksums raise OSError."""
    content = pq.ParquetFile(file, page_checksum_verification=True)
    return content.read(columns=columns, use_threads=False)


def ends_whole(file: Path) -> bool:
    """Whether a file ends as a Parquet file does: after a power cut it can have its size and none of
    its content.
    """
    try:
        with file.open("rb", buffering=0) as content:
            content.seek(-4, os.SEEK_END)
            return content.read(4) == b"PAR1"
    except OSError:
        return False
