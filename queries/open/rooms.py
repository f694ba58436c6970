"""The doors of the rooms that most questions do not enter, by name: a module is imported when a
question needs what stands behind its door.

Whoever reads how a named query is answered from whole files on a disk need not read these.
"""

REGISTER_STORES = "queries.open.stores.register_stores"
COMMITTED_OBJECTS = "queries.open.stores.committed_objects"
"""Of runs in object stores."""

COMPARED = "queries.open.compared_files.compared"
"""Of files that no query has read before."""

QUERIES_OF_RUNS = "queries.open.run_queries.queries_of_runs"
"""Of runs that bring queries of their own."""

CREATE_ROLLUP_VIEWS = "queries.open.rollup_views.create_rollup_views"
"""Of queries over histograms and sums of every statistic."""

DESCRIBE_VIEWS = "queries.open.comments.describe_views"
COLUMN_FACTS = "queries.open.column_facts.column_facts"
"""Of whoever asks what columns mean: dashboards, and files that carry it."""

WHY_EMPTY = "queries.open.column_facts.why_empty"
KINDS = "schemas.kinds.KINDS"
"""Of answers without rows, and of columns that no run measured."""

CHECK_VALUES = "queries.ask.known_values.check_values"
"""Of queries that are called with values."""

TIMES_OF = "schemas.files.arrow_values.times_of"
"""Of answers with dates and times."""

QUERY_ERROR = "queries.ask.mistakes.query_error"
EXPLAINED = "queries.ask.mistakes.explained"
"""Of queries that DuckDB refuses."""

WRITERS = {
    "csv": "queries.ask.text_formats.write_csv",
    "json": "queries.ask.text_formats.write_json",
    "jsonl": "queries.ask.text_formats.write_json_lines",
    "markdown": "queries.ask.text_formats.write_markdown",
}
"""Of the formats of an answer as text that are no table."""

WRITE_FILE = "queries.ask.answer_files.write_file"
RUN_MODELS = "workers.run_model.RunModels"
WRITE_TOKENS_AS_TEXT = "queries.ask.token_texts.write_tokens_as_text"
"""Of answers that become files, and of tokens that become text."""
