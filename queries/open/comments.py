"""What views and columns mean, as comments of the database, which dashboards show."""

from collections import ChainMap
from collections.abc import Iterator, Mapping

import duckdb

from headcount.queries.open.descriptions import PREFIXES, TEXTS
from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.tables import OF_HEAD, PARTITIONS, PROFILES, SEQUENCES, Column

COLUMNS_OF_VIEWS: dict[str, dict[str, str]] = {
    **{
        name: {column: text for column, (_, text) in TEXTS["tables"][name].items()}
        for name in ("runs", "shards", "statistics", "formulas")
    },
    **{
        table.name: {name: column.description for name, column in table.own.items()}
        for table in TABLES.values()
    },
    **dict.fromkeys(
        ("head_summaries", "subset_summaries", "ranking", "head_card"), TEXTS["summaries"]
    ),
    **TEXTS["columns"],
}
COLUMNS_OF_VIEWS["profile_means"] = {
    name: column.description for name, column in PROFILES.own.items()
} | TEXTS["columns"]["profile_means"]
"""What columns mean in one view, by view. Elsewhere the same name may mean something else."""

SHARED_COLUMNS: dict[str, str] = {
    **{c.name: c.description for c in (*PARTITIONS, *OF_HEAD, *SEQUENCES.columns)},
    **{name: TEXTS["tables"]["runs"][name][1] for name in ("model", "n_ctx")},
    **TEXTS["shared"],
}
"""What columns mean in every other view."""


def describe_views(
    connection: duckdb.DuckDBPyConnection,
    descriptions: Mapping[str, str],
    measured: Mapping[str, Mapping[str, Column]],
) -> None:
    """Write what views and their columns mean into the database, as comments."""
    comments = [
        f"COMMENT ON VIEW {quoted_name(view)} IS {text_literal(description)}"
        for view, description in descriptions.items()
    ]
    for view, column, text in column_texts(connection, measured):
        name = f"{quoted_name(view)}.{quoted_name(column)}"
        comments.append(f"COMMENT ON COLUMN {name} IS {text_literal(text)}")
    # In one transaction: 700 of them would take half as long again.
    connection.begin()
    for comment in comments:
        connection.execute(comment)
    connection.commit()


def column_texts(
    connection: duckdb.DuckDBPyConnection, measured: Mapping[str, Mapping[str, Column]]
) -> Iterator[tuple[str, str, str]]:
    """View, column and what it means, of the views that are there."""
    texts_of_tables = {
        table: {name: column.description for name, column in columns.items()}
        for table, columns in measured.items()
    }
    measured_anywhere: dict[str, str] = {}
    for texts in texts_of_tables.values():
        measured_anywhere |= texts
    all_columns = connection.execute("""
        SELECT table_name, column_name FROM duckdb_columns()
        WHERE schema_name = 'main' AND NOT internal
    """).fetchall()
    for view, column in all_columns:
        # The nearer description wins: that of the view itself, then of its table, then of any.
        texts = ChainMap(
            COLUMNS_OF_VIEWS.get(view, {}),
            texts_of_tables.get(view, {}),
            SHARED_COLUMNS,
            measured_anywhere,
        )
        if text := texts.get(column) or _summary_text(column, measured_anywhere):
            yield view, column, text


def _summary_text(column: str, texts: Mapping[str, str]) -> str | None:
    """What a column means that sums up another one, such as `mean_entropy`."""
    for prefix, words in PREFIXES.items():
        text = texts.get(column.removeprefix(prefix))
        if column.startswith(prefix) and text:
            return words + text
    return None
