"""The sequences in which a head is most and least active, and excerpts of their text."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, NonNegativeInt

from headcount.queries.answers.head_curves import Array
from headcount.queries.answers.marks import RECEIVED, marked_keys
from headcount.queries.answers.page_queries import (
    Answer,
    Brushes,
    Head,
    Header,
    Query,
    Statement,
    Statistics,
    by_column,
    where,
)
from headcount.queries.answers.run_facts import RunFacts, in_order
from headcount.queries.open.sql_text import quoted_name
from headcount.schemas.errors import HeadcountError, QueryError
from headcount.workers.run_model import RunModels

MOST_SEQUENCES = 20  # sequences that one query names at most
MOST, LEAST = 3, 1  # of each head, where sequences of many are asked for

EXCERPT_TOKENS = 44  # tokens of an excerpt
TOKENS_BEFORE_MARK = 14  # tokens of an excerpt that stand before the first marked one

Heads = Annotated[tuple[Head, ...], Field(max_length=MOST_SEQUENCES)]

NO_TOKENIZER = "Tokens are shown as numbers: the tokenizer of the run was not at hand."
"""The error itself would tell readers of a page about the places on a machine."""

MOST_EXAMPLE_STATISTICS = 4


def example_statistics(measured: Iterable[str]) -> list[str]:
    """The statistics whose examples a page shows."""
    names = set(measured)
    return [name for name in in_order("example") if name in names][:MOST_EXAMPLE_STATISTICS]


def strongest_heads(means: Array, count: int) -> list[Head]:
    """The heads with the largest means. An undefined mean is no mean."""
    # Stable: of equal means the first head wins, so that a page is the same every time.
    order = np.argsort(-np.where(np.isnan(means), -np.inf, means), axis=None, kind="stable")
    cells = zip(*np.unravel_index(order[:count], means.shape), strict=True)
    heads = [Head(layer=int(layer), head=int(head)) for layer, head in cells]
    return [head for head in heads if not np.isnan(means[head.layer, head.head])]


class Extremes(Query):
    """The sequences in which a statistic of a head is highest or lowest, or a few of each of some
    heads.
    """

    kind: Literal["extremes"]
    head: Head | None = None
    heads: Heads = ()  # instead of one
    statistic: str
    statistics: Statistics  # statistics that are shown beside it
    brushes: Brushes = ()
    lowest: bool = False

    def statements(self, facts: RunFacts) -> list[Statement]:
        """The first sequences of the head by value, and where each comes from."""
        # Every sequence counts, also in a large run: a sample would lack the extremes.
        conditions = self.conditions(facts, sampled=False)
        conditions += [brush.condition(facts) for brush in self.brushes]
        value = quoted_name(self.statistic)
        conditions.append(f"{value} IS NOT NULL")
        if self.heads:
            return [self._of_many(conditions)]
        # Each once: the statistic may also be one of those shown beside it.
        names = dict.fromkeys((self.statistic, *self.statistics))
        direction = "ASC" if self.lowest else "DESC"
        order = f"ORDER BY {value} {direction}, sequence"
        return [
            Statement(
                f'SELECT extremes.*, pile_set_name AS subset, file, "row" FROM '
                f"(SELECT sequence, {', '.join(map(quoted_name, names))} FROM heads"
                f"{where(conditions)} {order} LIMIT {MOST_SEQUENCES}) AS extremes "
                # Joined after the limit: only these few are looked up. A join keeps no order.
                'LEFT JOIN (SELECT sequence, pile_set_name, file, "row" FROM sequences'
                f"{where(self.scope.conditions_on_run)}) USING (sequence) {order} "
                # Links to a file of a benchmark repeat its sequences.
                f"LIMIT {MOST_SEQUENCES}"
            )
        ]

    def _of_many(self, conditions: Sequence[str]) -> Statement:
        """The first few sequences of each head, without the files of this machine."""
        value = quoted_name(self.statistic)
        cells = ", ".join(f"({head.layer}, {head.head})" for head in self.heads)
        entry = f"{{'sequence': sequence, 'value': {value}}}"
        # Among equal values the first sequence wins, so that a page is the same every time.
        sign, few = ("", LEAST) if self.lowest else ("-", MOST)
        extreme = "arg_min" if self.lowest else "arg_max"
        place = f"{{'value': {value}, 'place': {sign}sequence}}"
        return Statement(
            f"SELECT layer, head, rank, entry.sequence, entry.value AS {value}, "
            "pile_set_name AS subset FROM ("
            "SELECT layer, head, unnest(entries) AS entry, "
            "generate_subscripts(entries, 1) AS rank FROM ("
            f"SELECT layer, head, {extreme}({entry}, {place}, {few}) AS entries "
            f"FROM heads{where([*conditions, f'(layer, head) IN ({cells})'])} "
            "GROUP BY layer, head)) AS extremes LEFT JOIN (SELECT sequence, pile_set_name "
            f"FROM sequences{where(self.scope.conditions_on_run)}) AS known "
            "ON known.sequence = extremes.entry.sequence ORDER BY layer, head, rank"
        )

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object for each sequence, or columns of a table of some heads."""
        return by_column(tables[0].to_pydict()) if self.heads else super().answer(facts, tables)


class Texts(Query):
    """The tokens of some sequences, in the order in which they are named."""

    kind: Literal["texts"]
    sequences: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MOST_SEQUENCES)]
    heads: Heads = ()  # for each sequence one: then with what each token receives in it
    first: Annotated[int, Field(ge=1, le=100_000)] = 100_000  # so many tokens of each
    statistic: str | None = None  # the statistic whose keys are marked

    def check(self, facts: RunFacts) -> None:
        """Refuse heads that are not as many as the sequences, too."""
        super().check(facts)
        if self.heads and len(self.heads) != len(self.sequences):
            raise QueryError(
                f"heads: expected one for each of {len(self.sequences)} sequences, "
                f"got {len(self.heads)}"
            )

    def _has_weights(self, facts: RunFacts) -> bool:
        return bool(self.heads) and facts.keeps_received

    def reads_rows(self, facts: RunFacts) -> bool:
        """Tokens are in another table, but curves are as large as the rows."""
        return self._has_weights(facts)

    def statements(self, facts: RunFacts) -> list[Statement]:
        """The token ids of each sequence, and what each receives."""
        # SQL has no empty list for IN, and nothing equals NULL.
        numbers = ", ".join(map(str, sorted({*self.sequences}))) or "NULL"
        conditions = [*self.scope.conditions_on_run, f"sequence IN ({numbers})"]
        # Whole sequences: whether a key is marked may depend on tokens far behind it.
        tokens = f"SELECT sequence, n_tokens, tokens FROM sequences{where(conditions)}"
        if not self._has_weights(facts):
            return [Statement(tokens)]
        cells = ", ".join(sorted({f"({', '.join(map(str, cell))})" for cell in self._cells}))
        of_cells = where([*conditions, f"(layer, head, sequence) IN ({cells})"])
        columns = f"layer, head, sequence, {RECEIVED} AS received"
        return [Statement(tokens), Statement(f"SELECT {columns} FROM curves{of_cells}")]

    @property
    def _cells(self) -> list[tuple[int, int, int]]:
        pairs = zip(self.heads, self.sequences, strict=True)
        return [(head.layer, head.head, sequence) for head, sequence in pairs]

    def answer(self, facts: RunFacts, tables: Sequence[pa.Table]) -> Answer:
        """One object for each sequence that the run has: its tokens from a little before the first
        one that is marked, and the marks among them.
        """
        stored = {row["sequence"]: row for row in tables[0].to_pylist() if row["tokens"]}
        received = {
            (row["layer"], row["head"], row["sequence"]): row["received"]
            for table in tables[1:]
            for row in table.to_pylist()
        }
        rows: list[Header] = []
        cells = self._cells if self.heads else [(None, None, number) for number in self.sequences]
        for layer, head, number in cells:
            if number not in stored:
                continue
            tokens = stored[number]["tokens"]
            weights = received.get((layer, head, number))
            marks = marked_keys(self.statistic or "", tokens, weights)
            before = min(marks.keys, default=0) - TOKENS_BEFORE_MARK
            # Near the end it begins earlier and stays full.
            start = max(0, min(before, len(tokens) - self.first))
            shown = slice(start, start + self.first)
            row = stored[number] | {
                "tokens": tokens[shown],
                "start": start,
                "marked": [key - start for key in marks.keys if 0 <= key - start < self.first],
                "marks": marks.meaning,
            }
            of_head = {"layer": layer, "head": head, "weights": weights and weights[shown]}
            rows.append(row | of_head if self.heads else row)
        return Answer({"rows": rows})


def with_texts(
    answer: Answer, models: RunModels | None, run_id: str, note: str | None = None
) -> Answer:
    """The answer with the text of its tokens, or with their numbers and why, or a note instead."""
    rows: list[Header] = answer.header["rows"]
    header: Header = {}
    texts: dict[tuple[int, ...], list[str]] = {}
    try:
        if models is None:
            raise QueryError("no model is at hand")
        for row in rows:
            # Heads share sequences.
            key = tuple(row["tokens"])
            texts[key] = texts.get(key) or models[run_id].texts(row["tokens"])
    # A machine that only reads runs has neither the model nor what reads tokenizers.
    except (HeadcountError, ImportError) as error:
        texts.clear()
        header["note"] = note or f"token numbers are shown: {error}"
    read = [
        row | {"tokens": texts.get(tuple(row["tokens"]), list(map(str, row["tokens"])))}
        for row in rows
    ]
    return replace(answer, header=answer.header | {"rows": read} | header)
