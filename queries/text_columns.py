"""The column `tokens` of an answer, written as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from queries.answers import Answer
from queries.run_models import RunModels
from schemas.errors import QueryError

COLUMN = "tokens"


@dataclass
class TextAnswer(Answer):
    """An answer whose tokens are text."""

    models: RunModels | None = None
    only_run: str | None = None
    """The run of all rows, where the answer has no column that says it."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""
        schema = super().schema
        place = schema.get_field_index(COLUMN)
        return schema.set(place, pa.field(COLUMN, pa.string()))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, as Arrow batches."""
        for batch in super().batches():
            columns = list(batch.columns)
            columns[batch.schema.get_field_index(COLUMN)] = self._texts(batch)
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _texts(self, batch: pa.RecordBatch) -> pa.Array:
        tokens = batch.column(COLUMN).to_pylist()
        runs = (
            [self.only_run] * len(tokens)
            if self.only_run is not None
            else batch.column("run_id").to_pylist()
        )
        assert self.models is not None
        texts = [
            None if row is None or run is None else self.models[run].text(row)
            for run, row in zip(runs, tokens, strict=True)
        ]
        return pa.array(texts, pa.string())


def with_text(answer: Answer, models: RunModels, runs: list[str]) -> TextAnswer:
    """An answer with text in place of tokens; `runs` are all that were opened."""
    names = answer.schema.names
    if COLUMN not in names or not pa.types.is_list(answer.schema.field(COLUMN).type):
        raise QueryError(
            f"--text writes the column {COLUMN} as text, and the answer has none; select it, for "
            "instance: SELECT run_id, sequence, tokens FROM sequences"
        )
    if "run_id" not in names and len(runs) != 1:
        raise QueryError(
            f"--text: these are {len(runs)} runs, whose models may read tokens differently; select "
            "run_id beside tokens"
        )
    only = None if "run_id" in names else runs[0]
    return TextAnswer(answer.patience, answer.reader, answer.facts, models=models, only_run=only)
