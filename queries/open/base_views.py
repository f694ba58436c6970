"""What every database of runs may hold without a query: tables, and the views and macros over them.

Each is made when a query names it: all of them would take longer than most queries.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import duckdb
import pyarrow as pa

from headcount.queries.open import run_tables
from headcount.queries.open.sql_text import quoted_name
from headcount.queries.open.table_sql import SOURCES, UNROLLED_HEADS, UNROLLED_SEQUENCES, source_sql
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.tables import HEADS, PARTITION_NAMES, PARTITIONS, SEQUENCES, Column

MACROS = Path(__file__).with_name("internal") / "macros.sql"  # of spreads and errors

MACROS_SQL = MACROS.read_text(encoding="utf-8")

MACRO_NAMES = frozenset(re.findall(r"^CREATE MACRO (\w+)", MACROS_SQL, re.MULTILINE))

OF_DOCUMENTS = {"documents": SEQUENCES.name, "unrolled_documents": UNROLLED_SEQUENCES.name}
"""The views with the document of each sequence, each with what it reads."""

FOUNDATIONS = OF_DOCUMENTS | {
    UNROLLED_HEADS.name: HEADS.name,
    UNROLLED_SEQUENCES.name: SEQUENCES.name,
}
"""What must be there before something is made."""

BASE = (*SOURCES, *run_tables.CONTENTS, *OF_DOCUMENTS)
"""All that can be made, by name."""

AT_AN_END = """
    OR lag(sequence) OVER in_order IS DISTINCT FROM sequence - 1
    OR lead(sequence) OVER in_order IS DISTINCT FROM sequence + 1"""
"""Whether a document may go on in sequences that are not among these. `internal.documents` has the
document of each sequence, or NULL if it has no other: most queries need no group for it."""


def with_foundations(names: Iterable[str]) -> list[str]:
    """Some names of `BASE` and what they stand on, in the order in which they can be made.

    >>> with_foundations(["unrolled_documents", "sequences"])
    ['sequences', 'unrolled_sequences', 'unrolled_documents']
    """
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        if name in FOUNDATIONS:
            add(FOUNDATIONS[name])
        ordered[name] = None

    for name in names:
        add(name)
    return list(ordered)


def base_columns(measured: Mapping[str, Mapping[str, Column]]) -> set[str]:
    """The columns of all tables; `measured` has those of some kinds of measurement, by table."""
    schemas = [
        *(table.schema(measured[name].values()) for name, table in TABLES.items()),
        *map(run_tables.schema_of, run_tables.CONTENTS),
    ]
    return {"label", *PARTITION_NAMES, *(name for schema in schemas for name in schema.names)}


def create_base(
    connection: duckdb.DuckDBPyConnection,
    names: Iterable[str],
    measured: Mapping[str, Mapping[str, Column]],
) -> None:
    """Create what has some names, over tables without rows. `measured` has the columns by table.

    Creating a view opens a file of every run below it. So all views are created over empty tables,
    and the tables are pointed at the files last.
    """
    # Many statements, each of which would be a transaction of its own.
    connection.begin()
    connection.execute("CREATE SCHEMA IF NOT EXISTS internal")
    for name in names:
        if name in TABLES:
            table = TABLES[name]
            partitions = [pa.field(column.name, pa.string()) for column in PARTITIONS]
            columns = [*partitions, *table.schema(measured[name].values())]
            _create_content(connection, name, columns)
            # Every table with layers and heads also has the name that people write, L5H1.
            has_label = {"layer", "head"} <= {*table.schema().names}
            label = ", 'L' || layer || 'H' || head AS label" if has_label else ""
            connection.execute(_view(f"internal.{name}", source_sql(SOURCES[name], [])))
            connection.execute(_view(f"main.{name}", f"SELECT *{label} FROM internal.{name}"))
        elif name in SOURCES:
            connection.execute(_view(f"internal.{name}", source_sql(SOURCES[name], [])))
        elif name in OF_DOCUMENTS:
            connection.execute(_view(f"internal.{name}", _documents_sql(OF_DOCUMENTS[name])))
        else:
            _create_content(connection, name, run_tables.schema_of(name))
            connection.execute(_view(f"main.{name}", f"FROM internal.{name}_content"))
    connection.commit()


def _documents_sql(sequences: str) -> str:
    # Where all is rolled up, the unrolled sequences read nothing.
    at_an_end = AT_AN_END if sequences == UNROLLED_SEQUENCES.name else ""
    return f"""
        SELECT
            run_id, intervention, sequence, pile_set_name,
            CASE
                WHEN count(*) OVER (PARTITION BY run_id, intervention, document) > 1 {at_an_end}
                THEN document
            END AS document
        FROM internal.{sequences}
        WINDOW in_order AS (PARTITION BY run_id, intervention ORDER BY sequence)"""


def _create_content(
    connection: duckdb.DuckDBPyConnection, name: str, columns: Iterable[pa.Field]
) -> None:
    # Seven times as fast as a copy of an Arrow table without rows.
    connection.execute(f"CREATE TABLE internal.{name}_content ({_sql_columns(columns)})")


def _view(name: str, sql: str) -> str:
    return f"CREATE VIEW {name} AS {sql}"


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
