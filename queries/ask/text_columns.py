"""The column `tokens` of an answer, written as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from headcount.queries.ask.answers import Answer
from headcount.schemas.errors import QueryError
from headcount.workers.run_model import RunModels

TOKENS_COLUMN = "tokens"


@dataclass
class TextAnswer(Answer):
    """An answer whose tokens are text."""

    models: RunModels | None = None
    only_run: str | None = None
    """The run of all rows, if the answer does not have the column `run_id`."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        schema = super().schema
        column_index = schema.get_field_index(TOKENS_COLUMN)
        return schema.set(column_index, pa.field(TOKENS_COLUMN, pa.string()))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as Arrow batches."""
        assert self.models is not None
        for batch in super().batches():
            token_lists: list[list[int] | None] = batch.column(TOKENS_COLUMN).to_pylist()
            if self.only_run is not None:
                run_ids = [self.only_run] * len(token_lists)
            else:
                run_ids = batch.column("run_id").to_pylist()
            # Both may be NULL, for example after an outer join in the query. So is the text then.
            texts: list[str | None] = []
            for run_id, tokens in zip(run_ids, token_lists, strict=True):
                if tokens is None or run_id is None:
                    texts.append(None)
                else:
                    texts.append(self.models[run_id].text(tokens))
            columns = list(batch.columns)
            columns[batch.schema.get_field_index(TOKENS_COLUMN)] = pa.array(texts, pa.string())
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def with_text(answer: Answer, models: RunModels, run_ids: list[str]) -> TextAnswer:
    """An answer with text in place of tokens. `run_ids` are all runs that were opened."""
    names = answer.schema.names
    if TOKENS_COLUMN not in names or not pa.types.is_list(answer.schema.field(TOKENS_COLUMN).type):
        raise QueryError(
            f"--text writes the column {TOKENS_COLUMN} as text, and the answer has none; select "
            "it, for instance: SELECT run_id, sequence, tokens FROM sequences"
        )
    # Without run_id a row does not say which model's tokenizer reads it.
    if "run_id" not in names and len(run_ids) != 1:
        raise QueryError(
            f"--text: these are {len(run_ids)} runs, whose models may read tokens differently; "
            "select run_id beside tokens"
        )
    only_run = None if "run_id" in names else run_ids[0]
    return TextAnswer(
        answer.patience,
        answer.reader,
        answer.facts,
        models=models,
        only_run=only_run,
    )
