"""Parquet files in memory, on disks and in stores."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headcount.schemas.places import OpenFile, Place, open_at_once

SMALL_BYTES = 32_768  # of a table that is written without compression


def table_of(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """A table with the columns of `schema`.

    NaN becomes NULL. A column without values is all NULL. A matrix becomes a column of lists.
    """
    rows = len(next(iter(columns.values())))
    arrays: list[pa.Array] = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(rows, field.type))
            continue
        is_matrix = isinstance(values, np.ndarray) and values.ndim > 1
        # from_pandas is what makes NaN a NULL.
        array = pa.array(values.ravel() if is_matrix else values, from_pandas=True)
        if is_matrix:
            # Every list has the length of a row, so the flat values need no copying into lists.
            offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
            array = pa.ListArray.from_arrays(offsets, array)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def read_table(file: Place) -> pa.Table:
    """The table of a file, which from a store is fetched in one request."""
    with open_at_once(file) as content:
        return pq.read_table(content)


def parquet_bytes(table: pa.Table, row_group_size: int | None = None) -> pa.Buffer:
    """A table as the content of a Parquet file."""
    # Measured values hardly repeat. A dictionary of them would be a third of the file.
    columns = zip(table.schema.names, table.schema.types, strict=True)
    dictionary_columns: Any = [
        leaf for name, kind in columns for leaf in _leaves_without_floats(name, kind)
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=row_group_size,
        # To begin with a column takes zstd longer than it takes to write a few rows of it.
        compression="zstd" if table.nbytes > SMALL_BYTES else "none",
        use_dictionary=dictionary_columns,
        # Parquet itself would forget which columns are dictionaries.
        store_schema=True,
        # Readers that know no commit can tell a damaged page, too.
        write_page_checksum=True,
    )
    return sink.getvalue()


def _leaves_without_floats(path: str, data_type: pa.DataType) -> Iterator[str]:
    """The columns of a file that store a column of a table, except those of floats."""
    if pa.types.is_list(data_type):
        yield from _leaves_without_floats(f"{path}.list.element", data_type.value_type)
    elif pa.types.is_struct(data_type):
        for i in range(data_type.num_fields):
            field = data_type.field(i)
            yield from _leaves_without_floats(f"{path}.{field.name}", field.type)
    elif not pa.types.is_floating(data_type):
        yield path


def read_content(file: OpenFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of an open file, in the columns that it has; raises OSError for a wrong checksum."""
    content = pq.ParquetFile(file, page_checksum_verification=True)
    # Callers read many files at once, each in a thread of their own.
    return content.read(columns=columns, use_threads=False)
