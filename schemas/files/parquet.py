"""Parquet files in memory, on disks and in stores."""

from collections.abc import Iterator, Sequence
from io import BufferedReader
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SMALL_BYTES = 32_768  # of a table that is written without compression


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


def read_content(file: BufferedReader, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of an open file, in the columns that it has; raises OSError for a wrong checksum."""
    content = pq.ParquetFile(file, page_checksum_verification=True)
    # Callers read many files at once, each in a thread of their own.
    return content.read(columns=columns, use_threads=False)
