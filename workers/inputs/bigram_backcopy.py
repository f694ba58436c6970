"""Bigram-Backcopy: a chain of bigrams in which a trigger is followed by the token before it (Guo et
al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from schemas.errors import ScanError
from workers.inputs.input_registry import Draw, Labelled, input_family
from workers.inputs.text_files import read_text

BUNDLED_TEXT = "bundled:backcopy-3l-mini"
"""In the place of a text: the table that this model and the other small ones were trained on."""

Alphabet = Literal["sorted", "tokenizer"]
Variant = Literal["backcopy", "markov", "dormant_markov", "interpolate", "uniform"]


@dataclass(frozen=True, eq=False)
class Bigrams:
    """What follows what; a symbol is a row."""

    symbols: tuple[str, ...]
    """Characters; none where the table is not of a text."""
    unigram: np.ndarray
    """`[symbol]`, what follows the beginning of the sequence."""
    rows: np.ndarray
    """`[symbol next]`, P(next | symbol)."""
    triggers: frozenset[int]
    first_id: int = 0
    """Token id of the first symbol, where ids are in the order of the symbols."""

    @property
    def start(self) -> np.ndarray:
        """`[symbol]`, the unigram distribution without the triggers."""
        others = self.unigram.copy()
        others[list(self.triggers)] = 0
        return others / others.sum()

    def is_trigger(self, symbols: np.ndarray) -> np.ndarray:
        """Which of the symbols are triggers."""
        return np.isin(symbols, list(self.triggers))


class Chain(NamedTuple):
    """What symbols are drawn from, in arrays of numpy or in tensors of torch."""

    rows: Any
    """`[symbol next]`, cumulative; behind the symbols stands the row of the beginning of the
    sequence.
    """
    wakes: Any
    """`[symbol]`, whether what follows depends on the symbol before it."""
    copies: bool
    """Whether that symbol is then copied, or its row drawn from."""


@input_family
def backcopy(
    draw: Draw,
    *,
    text: str,
    triggers: int = 3,
    variant: Variant = "backcopy",
    mix: float | None = None,
    alphabet: Alphabet = "sorted",
) -> Labelled:
    """Bigram-Backcopy: characters follow the bigrams of a `text`, a trigger is followed by the
    token before it (Guo et al. 2024).

    The triggers are the most frequent characters of the text. The first token is a unigram, no
    trigger. Variants differ in what follows a trigger: `markov` its own bigram; `dormant_markov`
    the bigram of the token before it; `interpolate` a copy with probability `mix`, else its own
    bigram. In `markov` and `dormant_markov` the first token may be a trigger. `uniform` copies
    nothing: the next token is drawn uniformly from the tokens that can follow the current one, and
    a trigger is never followed by a trigger. Triggers are labelled "trigger" in every variant.

    `alphabet` says which token a character is: `sorted`, its place among the sorted characters of
    the text (BOS and other special tokens must have higher ids); `tokenizer`, what the model's
    tokenizer makes of it. `text = "bundled:backcopy-3l-mini"` is the table that this model was
    trained on: triggers 1 to 3, others 4 to 64.

    * `triggers`: how many characters are triggers.
    * `mix`: a probability, for the variant `interpolate` alone, which needs it.
    """
    if (variant == "interpolate") != (mix is not None):
        raise ScanError(
            f"input.mix: expected with variant = 'interpolate' only, got mix = {mix} and variant = "
            f"{variant!r}"
        )
    if mix is not None and not 0 <= mix <= 1:
        raise ScanError(f"input.mix: expected a probability, 0 to 1, got {mix}")
    table = bigrams_of(text, triggers)
    ids = _ids(draw, table, text, alphabet)
    places = draw.rng.random(draw.length)
    copied = draw.rng.random(draw.length) < (1.0 if mix is None else mix)
    symbols = np.array(follow(chain_of(table, variant), places, copied))
    return Labelled(ids[symbols], {"trigger": np.flatnonzero(table.is_trigger(symbols))})


@input_family
def backcopy_test(
    draw: Draw, *, text: str, triggers: int = 3, alphabet: Alphabet = "sorted"
) -> Labelled:
    """All tokens of Bigram-Backcopy but the triggers, in order, then token i: does it wake a head?
    (Guo et al. 2024).

    i is the index of the sequence; after the last token the sequences begin again with the first.
    Options as in `backcopy`. The last position is labelled "trigger" where it is one.
    """
    table = bigrams_of(text, triggers)
    ids = _ids(draw, table, text, alphabet)
    others = np.flatnonzero(~table.is_trigger(np.arange(len(ids))))
    if draw.length != len(others) + 1:
        raise ScanError(
            f"n_ctx: backcopy_test has {len(others) + 1} tokens besides the beginning-of-sequence "
            f"token, the sequence has room for {draw.length}; change n_ctx by "
            f"{len(others) + 1 - draw.length:+d}"
        )
    symbols = np.append(others, draw.sequence % len(ids))
    return Labelled(ids[symbols], {"trigger": np.flatnonzero(table.is_trigger(symbols))})


@lru_cache(maxsize=4)
def bigrams_of(text: str, triggers: int) -> Bigrams:
    """The bigrams of a text file, its `triggers` most frequent characters, or the table of the
    bundled model.
    """
    if text == BUNDLED_TEXT:
        return _bundled(triggers)
    points = np.frombuffer(read_text(text).encode("utf-32-le"), np.uint32)
    characters, codes, counts = np.unique(points, return_inverse=True, return_counts=True)
    n = len(characters)
    if not 1 <= triggers < n:
        raise ScanError(
            f"input.triggers: expected 1 to {n - 1}, of the {n} characters of {text}, got "
            f"{triggers}"
        )
    unigram = counts / counts.sum()
    pairs = np.bincount(codes[:-1] * n + codes[1:], minlength=n * n).reshape(n, n).astype(float)
    # A character that occurs only at the very end is followed by nothing.
    pairs[pairs.sum(1) == 0] = unigram
    most_frequent = np.argsort(-counts, kind="stable")[:triggers].tolist()
    return Bigrams(
        tuple(map(chr, characters.tolist())),
        unigram,
        pairs / pairs.sum(1, keepdims=True),
        frozenset(most_frequent),
    )


def _bundled(triggers: int) -> Bigrams:
    """61 characters whose rows are drawn at random, and three triggers that follow each of them
    with probability 0.05.
    """
    if triggers != 3:
        raise ScanError(f"input.triggers: {BUNDLED_TEXT} has 3, got {triggers}; leave it out")
    others, share = 61, 0.15
    # RandomState, because its stream is frozen across numpy versions.
    drawn = np.random.RandomState(0).dirichlet(np.full(others, 0.08), size=others)
    rows = np.zeros((3 + others, 3 + others))
    rows[:3, 3:] = 1 / others
    rows[3:, 3:] = (1 - share) * drawn
    rows[3:, :3] = share / 3
    return Bigrams((), rows[0], rows, frozenset({0, 1, 2}), first_id=1)


@lru_cache(maxsize=4)
def chain_of(table: Bigrams, variant: Variant = "backcopy") -> Chain:
    """The chain of a variant."""
    copies = variant in ("backcopy", "interpolate")
    rows = _uniform_rows(table) if variant == "uniform" else table.rows
    first = table.unigram if variant in ("markov", "dormant_markov") else table.start
    # The last sum is made 1, so that every number below 1 falls on a symbol that can occur.
    sums = np.vstack([rows, first]).cumsum(1)
    wakes = table.is_trigger(np.arange(len(sums))) & (copies or variant == "dormant_markov")
    return Chain(sums / sums[:, -1:], wakes, copies)


def follow(chain: Chain, places: Any, copied: Any) -> list[Any]:
    """Symbols by position, each drawn from the row that the ones before it call for.

    A symbol is where a number of `places`, uniform in [0, 1), falls in its row; `copied` says
    whether a copy happens there. Both are `[pos …]`: further axes are sequences.
    """
    symbols: list[Any] = []
    before = last = -1
    for place, copy in zip(places, copied, strict=True):
        wakes = chain.wakes[last]
        source = last if chain.copies else last + wakes * (before - last)
        row = chain.rows[source]
        # The same number, faster for one sequence.
        symbol = (
            (row <= place[..., None]).sum(-1) if place.ndim else row.searchsorted(place, "right")
        )
        if chain.copies:
            symbol = symbol + (wakes & copy) * (before - symbol)
        symbols.append(symbol)
        before, last = last, symbol
    return symbols


def _uniform_rows(table: Bigrams) -> np.ndarray:
    follows = table.rows > 0
    triggers = table.is_trigger(np.arange(len(follows)))
    follows &= ~(triggers[:, None] & triggers)
    if not follows.any(1).all():
        raise ScanError(
            "input.variant: 'uniform' needs triggers that others follow; take fewer triggers, or "
            "another text"
        )
    return follows / follows.sum(1, keepdims=True)


def _ids(draw: Draw, table: Bigrams, text: str, alphabet: Alphabet) -> np.ndarray:
    """The token id of every symbol."""
    if alphabet == "sorted":
        ids = table.first_id + np.arange(len(table.unigram))
    elif table.symbols:
        ids = _tokens_of(draw, table.symbols, text)
    else:
        raise ScanError(f"input.alphabet: {text} has tokens and no characters; leave it out")
    wrong = ids[~np.isin(ids, draw.ordinary)]
    if len(wrong):
        raise ScanError(
            f"input.text: {text} needs the token ids {ids.min()} to {ids.max()}, and "
            f"{', '.join(map(str, wrong[:3]))}{' …' if len(wrong) > 3 else ''} of them are no "
            "ordinary tokens of the model: its vocabulary is too small, or they are special; take "
            "the model that the task was made for, or another alphabet"
        )
    return ids


def _tokens_of(draw: Draw, symbols: tuple[str, ...], text: str) -> np.ndarray:
    encoded = draw.load_tokenizer().encode_many(list(symbols))
    for symbol, tokens in zip(symbols, encoded, strict=True):
        if len(tokens) != 1:
            raise ScanError(
                f"input.alphabet: the character {symbol!r} of {text} is {len(tokens)} tokens to "
                "the model's tokenizer, expected 1"
            )
    return np.array([tokens[0] for tokens in encoded])
