"""Where each token of a stored sequence looks, in one head: the run's own model runs it again."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeInt

from headcount.queries.answers.marks import RECEIVED, marked_keys
from headcount.queries.answers.page_queries import Answer, Array, Head, Query, RunFacts, Statement
from headcount.queries.answers.page_queries import where as where_clause
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.workers.run_model import RunModels

SHOWN_TOKENS = 256  # tokens of a sequence in one answer, which has a weight for each pair of them
TOKENS_BEFORE_MARK = 64  # tokens that stand before the first marked one, if the beginning is cut


class Attention(Query):
    """The tokens of a sequence, and the attention of each to those before it.

    Arrays, if the model is at hand: weights [query key] of the shown tokens; what each of them
    gives key 0 and other keys before the shown ones [query 2]; what each receives on average of
    the queries of the whole sequence that see it [key]. Weights of a query add up to 1 over the
    whole sequence, and are NaN behind a window.
    """

    kind: Literal["attention"]
    head: Head
    sequence: NonNegativeInt
    statistic: str | None = None  # the statistic whose keys are marked
    start: NonNegativeInt | None = None  # first token that is shown; None: before a marked one

    def reads_rows(self, facts: RunFacts) -> bool:
        """Only curves are as large as the rows."""
        return RECEIVED in facts.kept_curves

    def statements(self, facts: RunFacts) -> list[Statement]:
        """The tokens, and what each receives if the run kept that."""
        of_sequence = [*self.scope.conditions_on_run, f"sequence = {self.sequence}"]
        tokens = f"SELECT tokens FROM sequences{where_clause(of_sequence)}"
        if RECEIVED not in facts.kept_curves:
            return [Statement(tokens)]
        of_head = where_clause([*of_sequence, *self.head.conditions])
        return [Statement(tokens), Statement(f"SELECT {RECEIVED} FROM curves{of_head}")]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object: the whole sequence, with what was stored of it."""
        stored = [table[0][0].as_py() if len(table) else None for table in tables]
        tokens, received = stored[0], stored[1] if len(stored) > 1 else None
        if not tokens:
            raise QueryError(f"run {facts.run_id} has no tokens of sequence {self.sequence}")
        marked = marked_keys(self.statistic, tokens, received).keys if self.statistic else []
        row = {"n_tokens": len(tokens), "tokens": tokens, "received": received}
        return Answer({"rows": [row], "first_mark": min(marked, default=0)})

    def with_weights(self, answer: Answer, models: RunModels) -> Answer:
        """The answer with the weights of the shown tokens, or with a line that says why not."""
        (row,) = answer.header["rows"]
        length = row["n_tokens"]
        start = self.start
        if start is None:
            start = max(0, answer.header["first_mark"] - TOKENS_BEFORE_MARK)
        start = min(start, max(0, length - SHOWN_TOKENS))
        shown = range(start, min(length, start + SHOWN_TOKENS))
        received = row["received"] and row["received"][start : shown.stop]
        cut = {"start": start, "n_tokens": length, "received": received}
        cut["tokens"] = row["tokens"][start : shown.stop]
        try:
            return Answer(
                answer.header | {"rows": [cut]}, self._weights(row["tokens"], shown, models)
            )
        except HeadcountError as error:
            why = str(error)
        except ImportError as error:
            why = (
                f"needs {error.name}, which is not installed: in headcount's folder, "
                "pip install -e '.[scan]'"
            )
        why = f"where tokens look is not shown: {why}"
        return Answer(answer.header | {"rows": [cut], "why": why})

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
