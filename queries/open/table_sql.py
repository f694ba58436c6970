"""The committed rows of a table, as SQL that reads the files of runs."""

import re
from dataclasses import dataclass

from headcount.queries.open.run import Run
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.tables import HEADS, PARTITION_NAMES, SEQUENCES, Table


@dataclass(frozen=True)
class Source:
    """Committed rows of a table: all, or those that roll-ups do not have."""

    name: str  # the name of its view in the schema `internal`
    table: Table
    unrolled: bool = False


UNROLLED_HEADS = Source("unrolled_heads", HEADS, unrolled=True)
UNROLLED_SEQUENCES = Source("unrolled_sequences", SEQUENCES, unrolled=True)

SOURCES = {
    **{name: Source(name, table) for name, table in TABLES.items()},
    **{source.name: source for source in (UNROLLED_HEADS, UNROLLED_SEQUENCES)},
}
"""Everything that is read from files, by the name of its view."""


def source_sql(source: Source, runs: list[Run]) -> str:
    """The rows of a source: one `read_parquet` for all runs with the same columns.

    `union_by_name` would open every file whenever a query is planned (20,000 files: 3 s). This
    opens one file per call.
    """
    # An empty table comes first, so that columns and types are there before the first commit.
    table = source.table
    selects = [f"FROM internal.{table.name}_content"]
    files_by_columns: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        files = run.files(table.name, source.unrolled)
        files_by_columns.setdefault(run.own_columns[table.name], []).extend(files)
    for columns, files in sorted(files_by_columns.items()):
        if files:
            names = ", ".join(map(quoted_name, [*PARTITION_NAMES, *table.own, *columns]))
            # Without hive_types, DuckDB would read a run named like a number or a date as one.
            selects.append(
                f"SELECT {names} FROM "
                f"read_parquet({_path_list(files)}, "
                "hive_partitioning = true, hive_types = {'run_id': VARCHAR, 'intervention': "
                "VARCHAR})"
            )
    # BY NAME: what one run did not measure is NULL in its rows.
    return " UNION ALL BY NAME ".join(selects)


def path_pattern(path: str) -> str:
    """A path as a pattern in SQL that matches nothing else, whatever characters the path has."""
    return text_literal(_escaped(path))


def _path_list(paths: list[str]) -> str:
    """Paths as a list in SQL, each as a pattern that matches nothing else."""
    # DuckDB binds a list of 100,000 texts in a second, and one text that it splits in a tenth.
    lines = "\n".join(paths)
    if lines.count("\n") == len(paths) - 1:
        return f"string_split({text_literal(_escaped(lines))}, chr(10))"
    # A path has a line break in it.
    return f"[{', '.join(map(path_pattern, paths))}]"


def _escaped(text: str) -> str:
    # A pattern reads [*] as a star and [[] as a bracket.
    return re.sub(r"[*?\[]", r"[\g<0>]", text)
