"""Layouts: random tokens in an order that asks one question, with a label on every token that the
question is about.

A layout is a list of symbols. A symbol stands for one token, and it labels its positions. "-X" is
the token of X without the label, and "" is a token that occurs nowhere else. The last token is the
query.

By default all tokens of a sequence differ, so that a label means one token. The sources draw with
replacement from large vocabularies, which is `distinct = false`.
"""

from collections.abc import Sequence

import numpy as np

from headcount.schemas.errors import ScanError
from headcount.schemas.values import SubSequence
from headcount.workers.inputs.input_registry import Draw, Labelled, different_tokens, input_family


@input_family(draws=different_tokens)
def abac(draw: Draw, *, second: int) -> Labelled:
    """`R A B R… A C R… A`: which of two continuations of A the last A calls for (Farrell 2023).

    * `second`: the position of the second A, counted with BOS at 0, even if the scan has no BOS and
      everything stands one position earlier. The source has n_ctx = 13 and `second` from 4 to 10.
    """
    draw.check_room("abac needs", 6)
    last_second = draw.length - 2
    if not 4 <= second <= last_second:
        raise ScanError(
            f"input.second: expected 4 to {last_second}, so that the second A and its C stand "
            f"between the first and the last; got {second}"
        )
    # The layout has no BOS, so its positions are one less than those of the source.
    layout = [""] * draw.length
    layout[1:3] = "A", "B"
    layout[second - 1 : second + 1] = "A", "C"
    layout[-1] = "A"
    return _lay_out(draw, layout, "ABC")


@input_family(draws=different_tokens)
def induction_pos0(draw: Draw) -> Labelled:
    """`A B R… A`: induction whose first A is the first token of the text (Farrell 2023)."""
    draw.check_room("induction_pos0 needs", 3)
    return _lay_out(draw, ["A", "B", *[""] * (draw.length - 3), "A"], "AB")


@input_family(partner="ngram_corrupt", draws=different_tokens)
def ngram_overlap(draw: Draw, *, n: SubSequence = 3) -> Labelled:
    """`A X… B C X… D A X…`: two sub-sequences of `n` tokens share a middle; the last asks for B
    (Farrell 2023).

    3n-1 tokens besides BOS. The n-2 tokens of the middle are X1, X2, … The partner is the sequence
    of `ngram_corrupt`.
    """
    return _ngrams(draw, n, "AB CD A")


@input_family(stream="ngram_overlap", partner="ngram_overlap", draws=different_tokens)
def ngram_corrupt(draw: Draw, *, n: SubSequence = 3) -> Labelled:
    """`A X… B C X… D C X…`: `ngram_overlap` with the last A made C, which asks for D.

    The tokens are those of `ngram_overlap` for the same seed and sequence, the partner.
    """
    return _ngrams(draw, n, "AB CD C")


@input_family(stream="ngram_overlap", draws=different_tokens)
def ngram_reversed(draw: Draw, *, n: SubSequence = 3) -> Labelled:
    """`C X… D A X… B A X…`: `ngram_overlap`, the same tokens, with the first two sub-sequences
    exchanged.
    """
    return _ngrams(draw, n, "CD AB A")


@input_family(draws=different_tokens)
def ngram_order(draw: Draw, *, random_context: bool = False) -> Labelled:
    """`A X2 X1 B C X1 X2 D`, twice, then `X2 A X1`: does the order of the context matter? (Farrell
    2023).

    X1 was followed by B and by X2 twice each. The two tokens before the query are those before B,
    in the other order. The label X2 is only on the X2 that follow X1, the rivals of B. 19 tokens
    besides BOS.

    * `random_context`: whether these two tokens are random, as in the source's saved notebook.
    """
    passage = ["A", "-X2", "X1", "B", "C", "X1", "X2", "D"]
    context = ["-R1", "-R2"] if random_context else ["-X2", "A"]
    # R1 and R2 are always drawn, so both versions have the same other tokens.
    symbols = ("A", "B", "C", "D", "X1", "X2", "R1", "R2")
    return _lay_out(draw, [*passage, *passage, *context, "X1"], symbols)


def _ngrams(draw: Draw, n: int, ends: str) -> Labelled:
    """Sub-sequences that share a middle of n-2 tokens.

    `ends` has the first and the last token of each, for example "AB CD A" for `A X… B C X… D A X…`:
    the last sub-sequence is the question, so it has no last token.
    """
    middle = [f"X{i + 1}" for i in range(n - 2)]
    layout: list[str] = []
    for first, *last in ends.split():
        layout += [first, *middle, *last]
    return _lay_out(draw, layout, ("A", "B", "C", "D", *middle))


def _lay_out(draw: Draw, layout: Sequence[str], symbols: Sequence[str]) -> Labelled:
    """A sequence of the layout, with its labels.

    A token is drawn for each of `symbols`, even if the symbol does not occur, so that families of
    one stream get the same tokens.
    """
    draw.check_length("the layout", len(layout))
    # All at once, so that `distinct` holds for symbols and filling together.
    drawn = draw.tokens(len(symbols) + layout.count(""))
    token_of_symbol = dict(zip(symbols, drawn, strict=False))
    fresh_tokens = iter(drawn[len(symbols) :])
    tokens = [
        token_of_symbol[symbol.removeprefix("-")] if symbol else next(fresh_tokens)
        for symbol in layout
    ]
    labels: dict[str, list[int]] = {}
    for position, symbol in enumerate(layout):
        if symbol and not symbol.startswith("-"):
            labels.setdefault(symbol, []).append(position)
    return Labelled(np.array(tokens), labels)
