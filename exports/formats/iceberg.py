"""The format `iceberg`: metadata of Iceberg tables over the committed files of a run."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headcount.exports.registry import Exported, Needs, export_format
from headcount.exports.source import ExportSource
from headcount.queries.open.column_facts import column_facts
from headcount.queries.sql_text import quoted_name
from headcount.schemas.errors import QueryError
from headcount.schemas.files.tables import HEADS, PARTITION_NAMES, SEQUENCES

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

EXPORTED_TABLES = (HEADS.name, SEQUENCES.name)


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
    from headcount.exports.in_memory.held_files import HELD

    # An export that was cut off may have left something.
    HELD.clear()
    # For every text column of every file it warns that a dictionary will be read as text.
    logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)
    properties = {"py-io-impl": "headcount.exports.in_memory.held_files.HeldFiles"}
    # Where an object store is, if it is not Amazon's.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        properties["s3.endpoint"] = endpoint
    catalog = pyiceberg.catalog.memory.InMemoryCatalog("headcount", **properties)
    catalog.create_namespace("run")
    files: dict[str, bytes] = {}
    counts: list[str] = []
    try:
        for name in EXPORTED_TABLES:
            table = _table(source, catalog, name)
            rows = _add_files(source, table, name)
            counts.append(f"{rows:,} rows of {name}")
            files |= _metadata_files(source, table, name)
    finally:
        HELD.clear()
    return Exported(files=files, notes=(f"{' and '.join(counts)}, by reference",))


def _table(source: ExportSource, catalog: Catalog, name: str) -> Table:
    """An empty table with the columns of a view, and what each of them means."""
    from pyiceberg.table.name_mapping import create_mapping_from_schema

    # The stored columns of a view. `label` is none of them: the view makes it.
    facts = column_facts(source.database.connection, f"FROM {name}")
    stored = source.table(f"SELECT * FROM internal.{quoted_name(name)} LIMIT 0").schema
    schema = pa.schema(
        field.with_metadata({"doc": facts.get(field.name, {}).get("description", "")})
        for field in stored
    )
    properties = {"headcount": json.dumps(source.provenance, ensure_ascii=False)}
    table = catalog.create_table(
        ("run", name),
        schema=schema,
        location=f"{source.destination}/{name}",
        properties=properties,
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
    ((rows,),) = source.rows(f"SELECT count(*) FROM {name} WHERE run_id = '{source.run_id}'")
    data_files: list[Any] = []
    for path in source.committed_files(name):
        file = parquet_file_to_data_file(table.io, table.metadata, path)
        # The library takes partitions from statistics of columns, and these are not in the files.
        for index, value in enumerate(partition_of(path)):
            file.partition[index] = value
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


def partition_of(path: str) -> list[str]:
    """The values of the partitions of a file, from its directories.

    >>> partition_of("runs/run_id=a-1/heads/intervention=none/shard-000000.parquet")
    ['a-1', 'none']
    """
    pairs = [part.partition("=") for part in path.split("/")]
    values = {name: value for name, equals, value in pairs if equals}
    return [values[name] for name in PARTITION_NAMES]


def _metadata_files(source: ExportSource, table: Table, name: str) -> dict[str, bytes]:
    """The files of a table's metadata, by name in the folder of the export.

    The last version of the description has the name that readers without a catalog look for.
    """
    from headcount.exports.in_memory.held_files import HELD

    table.refresh()
    root = f"{source.destination}/"
    snapshot = table.current_snapshot()
    assert snapshot is not None
    lists = [snapshot.manifest_list]
    manifests = [manifest.manifest_path for manifest in snapshot.manifests(table.io)]
    files = {path.removeprefix(root): HELD[path] for path in (*manifests, *lists)}
    files[f"{name}/metadata/v1.metadata.json"] = HELD[table.metadata_location]
    # Readers without a catalog find the number of the last version here.
    files[f"{name}/metadata/version-hint.text"] = b"1"
    return files
