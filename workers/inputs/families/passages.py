"""Passages and a query about one of them: what re-rankers ask of attention."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from headcount.schemas.errors import ScanError, counted
from headcount.schemas.scans.values import Count, Index, TokenId
from headcount.workers.inputs.families.needles import place_of, text_tokens
from headcount.workers.inputs.input_registry import Draw, Labelled, input_family

Passages = Annotated[int, Field(ge=2)]


def _wrong_together(options: dict[str, Any]) -> str | None:
    """What is wrong with the gold passage or a text, given the other options; None if nothing."""
    gold, last = options["gold"], options["passages"] - 1
    if gold is not None and gold > last:
        return f"input.gold: expected 0 to {last}, the numbers of the passages, got {gold}"
    text = options["text"]
    for name, default in (("low", 0), ("high", None), ("distinct", False)):
        # They are about random tokens.
        if text is not None and options[name] != default:
            return f"input.{name}: expected without a text only, got text = {text!r}; leave out one"
    return None


@input_family(refuse=_wrong_together)
def passages(
    draw: Draw,
    *,
    passages: Passages = 4,
    query: Count = 8,
    gold: Index | None = None,
    shuffled: bool = False,
    text: str | None = None,
    low: TokenId = 0,
    high: Count | None = None,
    distinct: bool = False,
) -> Labelled:
    """Several passages, then a query made of tokens of one of them (after Zhang et al. 2025,
    query-focused retrieval heads).

    Labels: "gold" on the passage that the query is from, "other" on the other passages, "query" on
    the query. The lengths of passages differ by one token at most.

    * `passages`: how many there are.
    * `query`: tokens of the query.
    * `gold`: the number of the gold passage, from 0. Default: the number of the sequence modulo
      `passages`.
    * `shuffled`: whether the query is random tokens of the gold passage in random order, instead of
      a part of it.
    * `text`: a file, or `bundled:LICENSE`, of which the passages are pieces that do not overlap,
      instead of random tokens.
    * `distinct`: whether no token of the passages occurs twice. Like `low` and `high`, not allowed
      with a `text`.
    """
    what = f"{counted(passages, 'passage')} that hold a query of {counted(query, 'token')}"
    least, advice = (passages + 1) * query, ", or lower passages or query"
    draw.check_room(f"{what} and the query need", least, advice)
    # The first `extra` passages are one token longer.
    length, extra = divmod(draw.length - query, passages)
    lengths = [length + (number < extra) for number in range(passages)]
    ends = np.cumsum(lengths).tolist()
    if text is None:
        blocks = np.split(draw.tokens(ends[-1], low, high, distinct), ends[:-1])
    else:
        blocks = _pieces_of_text(draw, text, lengths)
    gold_number = draw.sequence % passages if gold is None else gold
    gold_passage = blocks[gold_number]
    if shuffled:
        question = draw.rng.choice(gold_passage, query, replace=False)
    else:
        first = int(draw.rng.integers(len(gold_passage) - query + 1))
        question = gold_passage[first : first + query]

    positions = np.arange(ends[-1])
    is_gold = (positions >= ends[gold_number] - len(gold_passage)) & (positions < ends[gold_number])
    labels = {"gold": positions[is_gold], "other": positions[~is_gold]}
    labels["query"] = np.arange(ends[-1], draw.length)
    return Labelled(np.concatenate([*blocks, question]), labels)


def _pieces_of_text(draw: Draw, text: str, lengths: list[int]) -> list[np.ndarray]:
    """Pieces of a text that do not overlap, each within one text of the file."""
    longest = max(lengths)
    documents = text_tokens(text, draw.load_tokenizer())
    # Every text is cut into pieces of one length, of which some are chosen.
    counts = [len(tokens) // longest for tokens in documents]
    if sum(counts) < len(lengths):
        raise ScanError(
            f"input.text: expected {len(lengths)} pieces of {longest} tokens, {text} has "
            f"{sum(counts)}; lower n_ctx, or take a longer text"
        )
    pieces: list[np.ndarray] = []
    numbers = draw.rng.choice(sum(counts), len(lengths), replace=False).tolist()
    for number, length in zip(numbers, lengths, strict=True):
        document, piece = place_of(number, counts)
        pieces.append(documents[document][piece * longest :][:length])
    return pieces
