"""What every database of runs begins with: empty tables, and the views of them without a query."""

from collections.abc import Iterable
from pathlib import Path

import duckdb
import pyarrow as pa

from headcount.queries.open import run_tables
from headcount.queries.open.descriptions import VIEWS
from headcount.queries.open.run import Run
from headcount.queries.open.sql_text import quoted_name
from headcount.queries.open.table_sql import SOURCES, source_sql
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.tables import PARTITIONS

MACROS = Path(__file__).with_name("internal") / "macros.sql"  # of spreads and errors

AT_AN_END = """
    OR lag(sequence) OVER in_order IS DISTINCT FROM sequence - 1
    OR lead(sequence) OVER in_order IS DISTINCT FROM sequence + 1"""
"""Whether a document may go on in sequences that are not among these. `internal.documents` has the
document of each sequence, or NULL if it has no other: most queries need no group for it."""


def create_base_views(connection: duckdb.DuckDBPyConnection, runs: list[Run]) -> dict[str, str]:
    """Create the tables of some runs, without rows, and their views; the SQL of each source."""
    # Seventy statements, each of which would be a transaction of its own.
    connection.begin()
    connection.execute("CREATE SCHEMA internal")
    # Creating a view opens a file of every run below it. So all views are created over empty
    # tables, and the tables are pointed at the files last.
    measured = run_tables.measured_columns(runs)
    partitions = [pa.field(column.name, pa.string()) for column in PARTITIONS]
    for table in TABLES.values():
        columns = [*partitions, *table.schema(measured[table.name].values())]
        # Seven times as fast as a copy of an Arrow table without rows.
        connection.execute(f"CREATE TABLE internal.{table.name}_content ({_sql_columns(columns)})")
    # Their rows come when the tables are pointed at the files.
    for name in ("runs", "shards"):
        columns = _sql_columns(run_tables.schema_of(name))
        connection.execute(f"CREATE TABLE internal.{name}_content ({columns})")
    for name, content in (
        ("statistics", run_tables.statistics_table(runs)),
        ("formulas", run_tables.formulas_table(runs)),
    ):
        store_content(connection, name, content)
    for name in ("runs", "shards", "statistics", "formulas"):
        connection.execute(f"CREATE VIEW internal.{name} AS FROM internal.{name}_content")
    source_views = {name: source_sql(source, []) for name, source in SOURCES.items()}
    for name, sql in source_views.items():
        connection.execute(f"CREATE VIEW internal.{name} AS {sql}")
    for name in VIEWS:
        # Every view with layers and heads also has the name that people write, L5H1.
        columns = TABLES[name].schema().names if name in TABLES else []
        needs_label = {"layer", "head"} <= {*columns} and "label" not in columns
        label = ", 'L' || layer || 'H' || head AS label" if needs_label else ""
        connection.execute(f"CREATE VIEW main.{name} AS SELECT *{label} FROM internal.{name}")
    connection.execute(MACROS.read_text(encoding="utf-8"))
    # Where all is rolled up, the latter reads nothing.
    for prefix, at_an_end in (("", ""), ("unrolled_", AT_AN_END)):
        connection.execute(
            f"""
            CREATE VIEW internal.{prefix}documents AS
            SELECT
                run_id, intervention, sequence, pile_set_name,
                CASE
                    WHEN count(*) OVER (PARTITION BY run_id, intervention, document) > 1 {at_an_end}
                    THEN document
                END AS document
            FROM internal.{prefix}sequences
            WINDOW in_order AS (PARTITION BY run_id, intervention ORDER BY sequence)"""
        )
    connection.commit()
    return source_views


def store_content(connection: duckdb.DuckDBPyConnection, name: str, content: pa.Table) -> None:
    """Fill the table of a view that describes the runs."""
    connection.register("content", content)
    connection.execute(f"CREATE OR REPLACE TABLE internal.{name}_content AS FROM content")
    connection.unregister("content")


def _sql_columns(fields: Iterable[pa.Field]) -> str:
    return ", ".join(f"{quoted_name(each.name)} {_sql_type(each.type)}" for each in fields)


def _sql_type(type_: pa.DataType) -> str:
    """What DuckDB makes of the type of a column. It knows simple ones by Arrow's names too."""
    if pa.types.is_list(type_):
        return f"{_sql_type(type_.value_type)}[]"
    if pa.types.is_struct(type_):
        return f"STRUCT({_sql_columns(type_.fields)})"
    return "TIMESTAMPTZ" if pa.types.is_timestamp(type_) else str(type_)
