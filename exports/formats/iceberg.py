"""The format `iceberg`: metadata of Iceberg tables over the committed files of a run."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from headcount.exports.shared.registry import Exported, Needs, export_format
from headcount.exports.shared.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.tables import HEADS, PARTITION_NAMES, SEQUENCES

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

    from headcount.exports.shared.held_files import HeldFiles


@export_format(
    "Iceberg tables over the files of a run; no row is copied",
    read_by="PyIceberg, Spark, Trino, Snowflake and other engines",
    source="https://iceberg.apache.org/spec/",
    writes="folder",
    example="tables/my-run",
    load="""\
from pyiceberg.table import StaticTable

heads = StaticTable.from_metadata("tables/my-run/heads")
print(heads.scan(row_filter="intervention = 'none' and layer = 1").to_arrow().num_rows)
""",
    needs=Needs(every_head=False),
    file_patterns=("heads/metadata/*", "sequences/metadata/*"),
    libraries=("pyiceberg",),
)
def iceberg(source: ExportSource) -> Exported:
    """Tables `heads` and `sequences` in Iceberg's format, each with one snapshot of a finished run.

    A table is the folder `heads/metadata`; `v1.metadata.json` describes it, so a reader needs no
    catalog, and a catalog can register that file. The data stay where the run lies: move or delete
    the run, and the tables point at nothing. The columns `run_id` and `intervention` are not in the
    files. They are partitions of the table, from which readers take their values.
    """
    # Imported here: the library is installed for this format alone.
    from headcount.exports.shared.held_files import HeldFiles

    # For every text column of every file it warns that a dictionary will be read as text.
    logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)
    files: dict[str, bytes] = {}
    counts: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        held = HeldFiles(folder, source.destination)
        for name in (HEADS.name, SEQUENCES.name):
            changes = _empty_table(source, held, name).transaction()
            counts.append(f"{_add_files(source, changes, held, name):,} rows of {name}")
            table = changes.table_metadata.model_dump_json(exclude_none=True)
            # The name that readers without a catalog look for, and its number beside it.
            files[f"{name}/metadata/v1.metadata.json"] = table.encode()
            files[f"{name}/metadata/version-hint.text"] = b"1"
        for manifest in folder.rglob("*.avro"):
            files[str(manifest.relative_to(folder))] = manifest.read_bytes()
    return Exported(files=files, notes=(f"{' and '.join(counts)}, by reference",))


def _empty_table(source: ExportSource, held: HeldFiles, name: str) -> Table:
    """A table with the columns of a view, and what each of them means. No catalog knows it."""
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
    from pyiceberg.schema import assign_fresh_schema_ids
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import new_table_metadata
    from pyiceberg.table.name_mapping import create_mapping_from_schema
    from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
    from pyiceberg.transforms import IdentityTransform

    numbers = count(1)
    columns = [_numbered(column, numbers) for column in source.stored_schema(name)]
    schema = assign_fresh_schema_ids(pyarrow_to_schema(pa.schema(columns)))
    partitions = [
        PartitionField(schema.find_field(column).field_id, number, IdentityTransform(), column)
        for number, column in enumerate(PARTITION_NAMES, PARTITION_FIELD_ID_START)
    ]
    # The files have no numbers of columns, so readers find them by name.
    mapping = create_mapping_from_schema(schema).model_dump_json()
    properties = {"headcount": source.provenance_line, "schema.name-mapping.default": mapping}
    location = f"{source.destination}/{name}"
    metadata = new_table_metadata(
        schema, PartitionSpec(*partitions), UNSORTED_SORT_ORDER, location, properties
    )
    return Table(("run", name), metadata, location, held, NoopCatalog("none"))


def _numbered(column: pa.Field, numbers: Iterator[int]) -> pa.Field:
    """A column, and the items of a list in it, with the numbers that Iceberg wants."""
    metadata = (column.metadata or {}) | {b"PARQUET:field_id": str(next(numbers))}
    if pa.types.is_list(column.type):
        column = column.with_type(pa.list_(_numbered(column.type.value_field, numbers)))
    return column.with_metadata(metadata)


def _add_files(source: ExportSource, changes: Transaction, held: HeldFiles, name: str) -> int:
    """Add the committed files of a table as one snapshot; returns the number of rows."""
    from pyiceberg.io.pyarrow import parquet_file_to_data_file

    # The query compares the content of the files with their commits.
    counted = f"SELECT count(*) FROM {name} WHERE run_id = '{source.run_id}'"
    ((rows,),) = source.database.rows(counted)
    table = changes.table_metadata
    with changes.update_snapshot().fast_append() as append:
        added = 0
        for path in source.opened.files(name):
            file = parquet_file_to_data_file(held, table, path)
            # The library takes partitions from statistics of columns, which are not in the files.
            directories = dict(part.split("=", 1) for part in path.split("/") if "=" in part)
            for index, column in enumerate(PARTITION_NAMES):
                file.partition[index] = directories[column]
            append.append_data_file(file)
            added += file.record_count
        if added != rows:
            raise QueryError(
                f"run {source.run_id}: its files of {name} have {added:,} rows, expected "
                f"{rows:,}; headcount check says which are not as committed"
            )
    return rows
