"""Where each token of a text looks, in one head: the run's own model reads a stored sequence again,
or a prompt.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, NonNegativeInt

from headcount.queries.answers.marks import RECEIVED, marked_keys
from headcount.queries.answers.page_queries import (
    Answer,
    Array,
    Head,
    Header,
    Query,
    RunFacts,
    Statement,
)
from headcount.queries.answers.page_queries import where as where_clause
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.workers.run_model import RunModels

SHOWN_TOKENS = 256  # tokens of a sequence in one answer, which has a weight for each pair of them
TOKENS_BEFORE_MARK = 64  # tokens that stand before the first marked one, if the beginning is cut
MOST_LETTERS = 50_000  # of a prompt


class Attention(Query):
    """The tokens of a stored sequence or a prompt, and the attention of each to those before it.

    Arrays, if the model is at hand: weights [query key] of the shown tokens; what each of them
    gives key 0 and other keys before the shown ones [query 2]; what each receives on average of
    the queries of the whole sequence that see it [key]. Weights of a query add up to 1 over the
    whole sequence, and are NaN behind a window.
    """

    kind: Literal["attention"]
    head: Head
    sequence: NonNegativeInt | None = None
    prompt: Annotated[str, Field(max_length=MOST_LETTERS)] | None = None
    statistic: str | None = None  # the statistic whose keys are marked
    start: NonNegativeInt | None = None  # first token that is shown; None: before a marked one

    def check(self, facts: RunFacts) -> None:
        """Refuse a query about nothing, or about two texts, too."""
        super().check(facts)
        if (self.sequence is None) == (self.prompt is None):
            raise QueryError("attention: expected a sequence or a prompt")

    def reads_rows(self, facts: RunFacts) -> bool:
        """Only curves are as large as the rows."""
        return self.prompt is None and RECEIVED in facts.kept_curves

    def statements(self, facts: RunFacts) -> list[Statement]:
        """The tokens, and what each receives if the run kept that. None for a prompt."""
        if self.prompt is not None:
            return []
        of_sequence = [*self.scope.conditions_on_run, f"sequence = {self.sequence}"]
        tokens = f"SELECT tokens FROM sequences{where_clause(of_sequence)}"
        if RECEIVED not in facts.kept_curves:
            return [Statement(tokens)]
        of_head = where_clause([*of_sequence, *self.head.conditions])
        return [Statement(tokens), Statement(f"SELECT {RECEIVED} FROM curves{of_head}")]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object: the whole sequence, with what was stored of it. None for a prompt."""
        if self.prompt is not None:
            return Answer({"rows": []})
        stored = [table[0][0].as_py() if len(table) else None for table in tables]
        tokens, received = stored[0], stored[1] if len(stored) > 1 else None
        if not tokens:
            raise QueryError(f"run {facts.run_id} has no tokens of sequence {self.sequence}")
        return Answer({"rows": [{"tokens": tokens, "received": received}]})

    def with_weights(self, answer: Answer, models: RunModels) -> Answer:
        """The shown tokens with their weights, or with a line that says why there are none."""
        header, arrays = dict(answer.header), ()
        try:
            if self.prompt is not None:
                tokens = models[self.scope.run_id].tokens_of(self.prompt)
                header["rows"] = [{"tokens": tokens, "received": None}]
            (row,) = header["rows"]
            arrays = self._weights(row["tokens"], self._shown(row), models)
        except HeadcountError as error:
            header["why"] = f"where tokens look is not shown: {error}"
        except ImportError as error:
            header["why"] = (
                f"where tokens look is not shown: needs {error.name}, which is not installed: in "
                "headcount's folder, pip install -e '.[scan]'"
            )
        header["rows"] = [self._cut(row) for row in header["rows"]]
        return Answer(header, arrays)

    def _shown(self, row: Header) -> range:
        """Which tokens of a text are shown."""
        tokens, received = row["tokens"], row["received"]
        start = self.start
        if start is None:
            marked = marked_keys(self.statistic, tokens, received).keys if self.statistic else []
            start = max(0, min(marked, default=0) - TOKENS_BEFORE_MARK)
        start = min(start, max(0, len(tokens) - SHOWN_TOKENS))
        return range(start, min(len(tokens), start + SHOWN_TOKENS))

    def _cut(self, row: Header) -> Header:
        """What is shown of a text."""
        shown = self._shown(row)
        cut = slice(shown.start, shown.stop)
        return {
            "start": shown.start,
            "n_tokens": len(row["tokens"]),
            "tokens": row["tokens"][cut],
            "received": row["received"] and row["received"][cut],
        }

    def _weights(self, tokens: list[int], shown: range, models: RunModels) -> tuple[Array, ...]:
        model = models[self.scope.run_id]
        # One model at a time is in memory. A list, because other threads may open models.
        for other in list(models.opened_models.values()):
            if other is not model:
                other.loaded = None
        rows: list[Array] = []
        outside: list[tuple[float, float]] = []
        received = np.zeros(len(tokens))
        seen = np.zeros(len(tokens))

        def read_row(query: int, row: Array) -> None:
            given = np.nan_to_num(row)
            received[:] += given
            seen[: query + 1] += ~np.isnan(row[: query + 1])
            if query in shown:
                rows.append(row[shown.start : shown.stop])
                outside.append((given[0], given[1 : shown.start].sum()) if shown.start else (0, 0))

        place = self.head.layer, self.head.head
        intervention = self.scope.intervention
        model.read_pattern(self.sequence, tokens, place, intervention, "auto", read_row)
        of_keys = (received / seen)[shown.start : shown.stop]
        return np.array(rows, np.float32), np.array(outside, np.float32), of_keys
