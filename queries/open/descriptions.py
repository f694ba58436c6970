"""What views and columns mean. The database holds it as comments, which dashboards show."""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

from headcount.queries.open import run_tables
from headcount.queries.sql_text import quoted_name, text_literal
from headcount.schemas.files.tables import OF_HEAD, PARTITIONS, PROFILES, SEQUENCES, Column
from headcount.schemas.scans.kinds import TABLES

VIEWS = {
    **{table.name: table.description for table in TABLES.values()},
    "runs": "One row per run: what was scanned, with which model, and how far it got.",
    "shards": "One row per shard: done, missing or damaged, and who measured it.",
    "statistics": "One row per statistic: unit, range, meaning, formula and source.",
    "formulas": "One row per formula of every kind: the table it fills, unit, meaning and source.",
}
"""Description of every view that is not a `.sql` file."""


def _column_texts(columns: run_tables.ColumnTypes) -> dict[str, str]:
    return {column: text for column, (_, text) in columns.items()}


_PROFILE_COLUMNS = {name: column.description for name, column in PROFILES.own.items()}

DOCUMENTS = (
    "Documents of these sequences. A sequence is of the one with most of its tokens; of synthetic "
    "input each is one of its own."
)

_SUMMARY_COLUMNS = {
    "count": "Sequences on which the statistic is defined.",
    "undefined": "Sequences on which it is NULL.",
    "mean": "Mean over the sequences on which it is defined.",
    "sd": "Standard deviation over these sequences. NULL for a single one.",
    "standard_error": "Standard error of the mean, over documents, as the sequences of one are not "
    "independent. sd / √count if no document has two. NULL for a single document.",
    "documents": DOCUMENTS,
    "minimum": "Smallest value.",
    "maximum": "Largest value.",
}

COLUMNS_OF_VIEWS: dict[str, dict[str, str]] = {
    "runs": _column_texts(run_tables.RUNS),
    "shards": _column_texts(run_tables.SHARDS),
    "statistics": _column_texts(run_tables.STATISTICS),
    "formulas": _column_texts(run_tables.FORMULAS),
    **{
        table.name: {name: column.description for name, column in table.own.items()}
        for table in TABLES.values()
    },
    "profile_means": {
        **_PROFILE_COLUMNS,
        "count": "Sequences, over all shards.",
        "mean": "Mean over the sequences of all shards.",
        "sd": "Standard deviation over the sequences. NULL for a single one.",
        "standard_error": "Standard error of the mean, over sequences if no document has two of "
        "them: sd / √count. Else over shards, whose means are all that is kept: too small if "
        "documents are about as long as shards.",
        "groups": "Sequences or shards that standard_error takes for independent.",
    },
    "head_summaries": _SUMMARY_COLUMNS,
    "subset_summaries": _SUMMARY_COLUMNS,
    "ranking": _SUMMARY_COLUMNS,
    "head_card": _SUMMARY_COLUMNS,
    "contrasts": {
        "standard_error": "Standard error of the difference, over documents; too large if both "
        "groups have sequences of a document. NULL for a group of a single document.",
    },
    "distributions": {
        "bin": "Number of the bin. It depends on the statistic alone, so bins of one add up.",
        "low": "Low end of the bin.",
        "high": "High end of the bin.",
        "count": "Sequences whose value is in the bin.",
    },
    "head_quantiles": {
        **{
            f"p{percent:02}": f"Value that {percent} % of the sequences do not exceed."
            for percent in (1, 5, 25, 50, 75, 95, 99)
        },
        "width": "Width of the bin that holds p50: it is off by less.",
    },
}
"""What columns mean in one view, by view. Elsewhere the same name may mean something else."""

SHARED_COLUMNS = {
    **{c.name: c.description for c in (*PARTITIONS, *OF_HEAD, *SEQUENCES.columns)},
    **{name: _column_texts(run_tables.RUNS)[name] for name in ("model", "n_ctx")},
    "label": "Layer and head as people write them, L5H1. NULL if all heads share the values.",
    "statistic": "Statistic that the row is about.",
    "pairs": "Sequences on which both sides are defined.",
    "change": "Mean over the pairs of one side minus the other.",
    "standard_error": "Standard error of the mean change, over documents. NULL for a single one.",
    "documents": DOCUMENTS,
    "untouched": "Mean over the pairs without an intervention.",
    "intervened": "Mean over the pairs under the intervention.",
    "other_run": "Run that run_id is compared with.",
    "other": "Mean over the pairs in other_run.",
    "this": "Mean over the pairs in run_id.",
    "sink_rate": "Share of sequences with sink_alpha above 0.3.",
}
"""What columns mean in every other view."""

PREFIXES = {
    "mean_": "Mean over sequences: ",
    "sd_": "Standard deviation over sequences: ",
    "se_": "Standard error, over documents, of the mean over sequences: ",
    "max_": "Largest mean of a head: ",
}
"""What views put before the name of a column that they sum up, and what it means."""


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
    measured_anywhere: dict[str, str] = {}
    for columns in measured.values():
        measured_anywhere |= _texts(columns)
    all_columns = connection.execute("""
        SELECT table_name, column_name FROM duckdb_columns()
        WHERE schema_name = 'main' AND NOT internal
    """).fetchall()
    for view, column in all_columns:
        # The nearer description wins: that of the view itself, then of its table, then of any.
        texts = measured_anywhere | SHARED_COLUMNS
        texts |= _texts(measured.get(view, {})) | COLUMNS_OF_VIEWS.get(view, {})
        text = texts.get(column) or _summary_text(column, measured_anywhere)
        if text:
            name = f"{quoted_name(view)}.{quoted_name(column)}"
            comments.append(f"COMMENT ON COLUMN {name} IS {text_literal(text)}")
    # In one transaction: 700 of them would take half as long again.
    connection.execute("BEGIN TRANSACTION")
    for comment in comments:
        connection.execute(comment)
    connection.execute("COMMIT")


def _texts(columns: Mapping[str, Column]) -> dict[str, str]:
    return {name: column.description for name, column in columns.items()}


def _summary_text(column: str, texts: Mapping[str, str]) -> str | None:
    """What a column means that sums up another one, such as `mean_entropy`."""
    for prefix, words in PREFIXES.items():
        text = texts.get(column.removeprefix(prefix))
        if column.startswith(prefix) and text:
            return words + text
    return None
