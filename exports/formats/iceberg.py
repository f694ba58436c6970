"""The format `iceberg`: metadata of Iceberg tables over the committed files of a run."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from headcount.exports.registry import Exported, Needs, export_format
from headcount.exports.source import ExportSource
from headcount.schemas.errors import QueryError
from headcount.schemas.files.tables import HEADS, PARTITION_NAMES, SEQUENCES

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table


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
)
def iceberg(source: ExportSource) -> Exported:
    """Tables `heads` and `sequences` in Iceberg's format, each with one snapshot of a finished run.

    A table is the folder `heads/metadata`; `v1.metadata.json` describes it, so a reader needs no
    catalog, and a catalog can register that file. The data stay where the run lies: move or delete
    the run, and the tables point at nothing. The columns `run_id` and `intervention` are not in the
    files. They are partitions of the table, from which readers take their values.
    """
    try:
        import pyiceberg.catalog.memory
    except ModuleNotFoundError as error:
        raise QueryError(
            f"export iceberg needs {error.name}, which is not installed: pip install -e '.[export]'"
        ) from None
    from headcount.exports.held_files import HELD

    # An export that was cut off may have left something.
    HELD.clear()
    # For every text column of every file it warns that a dictionary will be read as text.
    logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)
    properties = {"py-io-impl": "headcount.exports.held_files.HeldFiles"}
    # Where an object store is, if it is not Amazon's.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        properties["s3.endpoint"] = endpoint
    catalog = pyiceberg.catalog.memory.InMemoryCatalog("headcount", **properties)
    catalog.create_namespace("run")
    files: dict[str, bytes] = {}
    counts: list[str] = []
    try:
        for name in (HEADS.name, SEQUENCES.name):
            table = _empty_table(source, catalog, name)
            counts.append(f"{_add_files(source, table, name):,} rows of {name}")
            table.refresh()
            snapshot = table.current_snapshot()
            assert snapshot is not None
            manifests = [manifest.manifest_path for manifest in snapshot.manifests(table.io)]
            for path in (*manifests, snapshot.manifest_list):
                files[path.removeprefix(f"{source.destination}/")] = HELD[path]
            # The last version has the name that readers without a catalog look for, and its number
            # lies beside it.
            files[f"{name}/metadata/v1.metadata.json"] = HELD[table.metadata_location]
            files[f"{name}/metadata/version-hint.text"] = b"1"
    finally:
        HELD.clear()
    return Exported(files=files, notes=(f"{' and '.join(counts)}, by reference",))


def _empty_table(source: ExportSource, catalog: Catalog, name: str) -> Table:
    """A table with the columns of a view, and what each of them means."""
    from pyiceberg.table.name_mapping import create_mapping_from_schema

    table = catalog.create_table(
        ("run", name),
        schema=source.stored_schema(name),
        location=f"{source.destination}/{name}",
        properties={"headcount": source.provenance_line},
    )
    with table.update_spec() as spec:
        for column in PARTITION_NAMES:
            spec.add_identity(column)
    # The files have no numbers of columns, so readers find them by name.
    mapping = create_mapping_from_schema(table.schema()).model_dump_json()
    with table.transaction() as transaction:
        transaction.set_properties({"schema.name-mapping.default": mapping})
    return table


def _add_files(source: ExportSource, table: Table, name: str) -> int:
    """Add the committed files of a table as one snapshot; returns the number of rows."""
    from pyiceberg.io.pyarrow import parquet_file_to_data_file

    # The query compares the content of the files with their commits.
    counted = f"SELECT count(*) FROM {name} WHERE run_id = '{source.run_id}'"
    ((rows,),) = source.database.rows(counted)
    data_files: list[Any] = []
    for path in source.opened.files(name):
        file = parquet_file_to_data_file(table.io, table.metadata, path)
        # The library takes partitions from statistics of columns, and these are not in the files.
        directories = dict(part.split("=", 1) for part in path.split("/") if "=" in part)
        for index, column in enumerate(PARTITION_NAMES):
            file.partition[index] = directories[column]
        data_files.append(file)
    added = sum(file.record_count for file in data_files)
    if added != rows:
        raise QueryError(
            f"run {source.run_id}: its files of {name} have {added:,} rows, expected {rows:,}; "
            "headcount check says which are not as committed"
        )
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        for file in data_files:
            append.append_data_file(file)
    return rows
