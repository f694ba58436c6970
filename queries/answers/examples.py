"""The sequences in which a head is most and least active, as excerpts of their text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from headcount.queries.answers.head_curves import Array
from headcount.queries.answers.marks import RECEIVED, marked_keys
from headcount.queries.answers.section import Section
from headcount.queries.ask.asking import Record, RunDatabase
from headcount.queries.open.sql_text import quoted_name
from headcount.schemas.errors import HeadcountError
from headcount.schemas.measured_heads import Head
from headcount.workers.run_model import RunModels

MOST, LEAST = 3, 1  # sequences of each kind that a card shows
EXCERPT_TOKENS = 44  # tokens of an excerpt
TOKENS_BEFORE_MARK = 14  # tokens of an excerpt that stand before the first marked one

EXAMPLE_STATISTICS = (
    "sink_mass",
    "induction_score",
    "previous_token_score",
    "duplicate_score",
    "entropy",
)
"""Statistics that a page shows examples of: the first four of them that a run measured."""

MOST_EXAMPLE_STATISTICS = 4

NO_TOKENIZER = "Tokens are shown as numbers: the tokenizer of the run was not at hand."
"""The error itself would tell readers of a page about the places on a machine."""

HeadKey: TypeAlias = tuple[str, int, int]  # a statistic, a layer and a head


@dataclass
class Excerpt:
    """A piece of a sequence, and what a head attends to in it."""

    sequence: int
    value: float
    start: int  # position of its first token in the sequence
    length: int  # tokens of the whole sequence
    tokens: list[str]  # text of each token, or its number if no tokenizer is at hand
    marked: list[int]  # indices of the tokens that the statistic is about
    marks: str  # what these are
    weights: list[float] | None  # attention that each token receives; None if not measured
    pile_set_name: str | None


@dataclass
class Examples:
    """Excerpts by statistic and head."""

    most: dict[HeadKey, list[Excerpt]] = field(default_factory=dict[HeadKey, list[Excerpt]])
    least: dict[HeadKey, list[Excerpt]] = field(default_factory=dict[HeadKey, list[Excerpt]])
    note: str = ""  # Why tokens are numbers. Empty if they are text.


def example_statistics(measured: Iterable[str]) -> list[str]:
    """The statistics whose examples a page shows."""
    names = set(measured)
    chosen = [name for name in EXAMPLE_STATISTICS if name in names]
    return chosen[:MOST_EXAMPLE_STATISTICS]


def strongest_heads(means: Array, count: int) -> list[Head]:
    """The heads with the largest means. An undefined mean is no mean."""
    # Stable: of equal means the first head wins, so that a page is the same every time.
    order = np.argsort(-np.where(np.isnan(means), -np.inf, means), axis=None, kind="stable")
    cells = zip(*np.unravel_index(order[:count], means.shape), strict=True)
    heads = [Head(int(layer), int(head)) for layer, head in cells]
    return [head for head in heads if not np.isnan(means[head])]


def read_examples(
    database: RunDatabase,
    section: Section,
    heads: dict[str, list[Head]],
    models: RunModels | None = None,
) -> Examples:
    """Examples of some heads, by statistic."""
    examples = Examples(note="" if models else NO_TOKENIZER)
    found: list[tuple[str, HeadKey, Record]] = []
    for statistic, some_heads in heads.items():
        # SQL has no empty list for IN.
        sql = extremes_sql(section, statistic, some_heads) if some_heads else "FROM range(0)"
        for row in database.records(sql):
            key = statistic, row["layer"], row["head"]
            most = {one["sequence"] for one in row["most"]}
            # With few sequences, the least active would be among the most active again.
            least = [one for one in row["least"] if one["sequence"] not in most]
            found += [("most", key, one) for one in row["most"]]
            found += [("least", key, one) for one in least]
    if not found:
        return examples

    numbers = ", ".join(map(str, sorted({one["sequence"] for *_, one in found})))
    sql = f"""
        SELECT sequence, pile_set_name, tokens
        FROM sequences{section.condition} AND sequence IN ({numbers}) AND tokens IS NOT NULL
    """
    sequences = {row["sequence"]: row for row in database.records(sql)}
    # The attention that each token receives, by layer, head and sequence.
    received: dict[tuple[int, int, int], list[float]] = {}
    if RECEIVED in database.columns("curves"):
        cells = ", ".join(map(str, sorted({(*key[1:], one["sequence"]) for _, key, one in found})))
        sql = f"""
            SELECT layer, head, sequence, {RECEIVED} AS received
            FROM curves{section.condition} AND (layer, head, sequence) IN ({cells})
        """
        for row in database.records(sql):
            received[row["layer"], row["head"], row["sequence"]] = row["received"]

    texts: dict[int, list[str]] = {}
    for group, key, extreme in found:
        sequence: int = extreme["sequence"]
        if sequence not in sequences:
            continue
        tokens: list[int] = sequences[sequence]["tokens"]
        if sequence not in texts:
            texts[sequence] = _text(tokens, section.facts.run_id, models, examples)
        weights = received.get((*key[1:], sequence))
        marks = marked_keys(key[0], tokens, weights)
        marked = marks.keys
        # Around the first marked token. Near the end it begins earlier and stays full.
        first = max(0, min(marked) - TOKENS_BEFORE_MARK) if marked else 0
        start = min(first, max(0, len(tokens) - EXCERPT_TOKENS))
        stop = min(len(tokens), start + EXCERPT_TOKENS)
        excerpt = Excerpt(
            sequence,
            extreme["value"],
            start,
            len(tokens),
            texts[sequence][start:stop],
            [position - start for position in marked if start <= position < stop],
            marks.meaning,
            weights[start:stop] if weights else None,
            sequences[sequence]["pile_set_name"],
        )
        by_key = examples.most if group == "most" else examples.least
        by_key.setdefault(key, []).append(excerpt)
    return examples


def _text(
    tokens: list[int], run_id: str, models: RunModels | None, examples: Examples
) -> list[str]:
    """The text of each token, or the numbers of the tokens, and then a note says why."""
    # A tokenizer that failed once is not tried for every sequence.
    if models is not None and not examples.note:
        try:
            return models[run_id].texts(tokens)
        # A machine that only reads runs has neither the model nor what reads tokenizers.
        except (HeadcountError, ImportError):
            examples.note = NO_TOKENIZER
    return [f"{token} " for token in tokens]


def extremes_sql(section: Section, statistic: str, heads: Sequence[Head]) -> str:
    """The sequences in which a statistic of some heads is largest and smallest."""
    value = quoted_name(statistic)
    pairs = ", ".join(f"({head.layer}, {head.head})" for head in heads)
    entry = f"{{'sequence': sequence, 'value': {value}}}"
    # Among equal values the first sequence wins, so that a page is the same every time.
    return f"""
        SELECT
            layer, head,
            arg_max({entry}, {{'value': {value}, 'place': -sequence}}, {MOST}) AS most,
            arg_min({entry}, {{'value': {value}, 'place': sequence}}, {LEAST}) AS least
        FROM heads{section.condition} AND {value} IS NOT NULL AND (layer, head) IN ({pairs})
        GROUP BY layer, head
    """
