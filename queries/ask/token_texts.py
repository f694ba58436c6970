"""Text in place of tokens, in an answer."""

import pyarrow as pa

from headcount.queries.ask.answers import Answer
from headcount.schemas.errors import QueryError
from headcount.workers.run_model import RunModels

TOKENS_COLUMN = "tokens"  # the column that is written as text


def write_tokens_as_text(answer: Answer, models: RunModels, run_ids: list[str]) -> None:
    """Have an answer give text in place of tokens. `run_ids` are all runs that were opened."""
    schema = answer.schema
    if TOKENS_COLUMN not in schema.names or not pa.types.is_list(schema.field(TOKENS_COLUMN).type):
        raise QueryError(
            f"--text writes the column {TOKENS_COLUMN} as text, and the answer has none; select "
            "it, for instance: SELECT run_id, sequence, tokens FROM sequences"
        )
    # Without run_id a row does not say which model's tokenizer reads it.
    has_run_ids = "run_id" in schema.names
    if not has_run_ids and len(run_ids) != 1:
        raise QueryError(
            f"--text: these are {len(run_ids)} runs, whose models may read tokens differently; "
            "select run_id beside tokens"
        )
    place = schema.get_field_index(TOKENS_COLUMN)
    field = pa.field(TOKENS_COLUMN, pa.string())

    def with_text(batch: pa.RecordBatch) -> pa.RecordBatch:
        token_lists = batch.column(place).to_pylist()
        runs = batch.column("run_id").to_pylist() if has_run_ids else run_ids * len(token_lists)
        # Both may be NULL, for example after an outer join in the query. So is the text then.
        texts = [
            None if run_id is None or tokens is None else models[run_id].text(tokens)
            for run_id, tokens in zip(runs, token_lists, strict=True)
        ]
        return batch.set_column(place, field, pa.array(texts, pa.string()))

    answer.schema = schema.set(place, field)
    answer.change = with_text
