"""Bigram-Backcopy: a chain of bigrams in which a trigger is followed by the token before it (Guo et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from schemas.errors import ScanError
from workers.inputs.registry import Draw, Labelled, input_family
from workers.inputs.source import read_text

BUNDLED = "bundled:backcopy-3l-mini"
"""In the place of a text: the table of that model's own recipe."""

Alphabet = Literal["sorted", "tokenizer"]
Variant = Literal["backcopy", "markov", "dormant_markov", "interpolate"]


@dataclass(frozen=True)
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

    @cached_property
    def cumulative(self) -> dict[str, np.ndarray]:
        """Cumulative distributions; the last is 1, so that every number below 1 falls on a symbol that can occur."""
        tables = {"start": self.start, "unigram": self.unigram, "rows": self.rows}
        sums = {name: table.cumsum(-1) for name, table in tables.items()}
        return {name: table / table[..., -1:] for name, table in sums.items()}

    def is_trigger(self, symbols: np.ndarray) -> np.ndarray:
        """Which of the symbols are triggers."""
        return np.isin(symbols, list(self.triggers))


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
    """Bigram-Backcopy: characters follow the bigrams of a `text`, a trigger is followed by the token before it (Guo et al. 2024).

    The triggers are the most frequent characters of the text. The first token is a unigram, no trigger. Variants differ
    in what follows a trigger: `markov` its own bigram; `dormant_markov` the bigram of the token before it;
    `interpolate` a copy with probability `mix`, else its own bigram. In `markov` and `dormant_markov` the first token
    may be a trigger. Triggers are labelled "trigger" in every variant.

    `alphabet` says which token a character is: `sorted`, its place among the sorted characters of the text (BOS and
    other special tokens must have higher ids); `tokenizer`, what the model's tokenizer makes of it.
    `text = "bundled:backcopy-3l-mini"` is the table that this model was trained on: triggers 1 to 3, others 4 to 64.
    """
    if (variant == "interpolate") != (mix is not None):
        raise ScanError(
            f"input.mix: expected with variant = 'interpolate' only, got mix = {mix} and variant = {variant!r}"
        )
    if mix is not None and not 0 <= mix <= 1:
        raise ScanError(f"input.mix: expected a probability, 0 to 1, got {mix}")
    table = bigrams_of(text, triggers)
    ids = _ids(draw, table, text, alphabet)
    symbols = _chain(draw, table, variant, mix)
    return Labelled(ids[symbols], {"trigger": np.flatnonzero(table.is_trigger(symbols))})


@input_family
def backcopy_test(draw: Draw, *, text: str, triggers: int = 3, alphabet: Alphabet = "sorted") -> Labelled:
    """All tokens of Bigram-Backcopy but the triggers, in order, then token i: does it wake a head? (Guo et al. 2024).

    i is the index of the sequence; after the last token the sequences begin again with the first. Options as in
    `backcopy`. The last position is labelled "trigger" where it is one.
    """
    table = bigrams_of(text, triggers)
    ids = _ids(draw, table, text, alphabet)
    others = np.flatnonzero(~table.is_trigger(np.arange(len(ids))))
    if draw.length != len(others) + 1:
        raise ScanError(
            f"n_ctx: backcopy_test has {len(others) + 1} tokens besides the beginning-of-sequence token, the sequence has "
            f"room for {draw.length}; change n_ctx by {len(others) + 1 - draw.length:+d}"
        )
    symbols = np.append(others, draw.sequence % len(ids))
    return Labelled(ids[symbols], {"trigger": np.flatnonzero(table.is_trigger(symbols))})


@lru_cache(maxsize=4)
def bigrams_of(text: str, triggers: int) -> Bigrams:
    """The bigrams of a text file, its `triggers` most frequent characters, or the table of the bundled model."""
    if text == BUNDLED:
        return _bundled(triggers)
    points = np.frombuffer(read_text(text).encode("utf-32-le"), np.uint32)
    characters, codes, counts = np.unique(points, return_inverse=True, return_counts=True)
    n = len(characters)
    if not 1 <= triggers < n:
        raise ScanError(f"input.triggers: expected 1 to {n - 1}, of the {n} characters of {text}, got {triggers}")
    unigram = counts / counts.sum()
    pairs = np.bincount(codes[:-1] * n + codes[1:], minlength=n * n).reshape(n, n).astype(float)
    # A character that occurs only at the very end is followed by nothing.
    pairs[pairs.sum(1) == 0] = unigram
    most_frequent = np.argsort(-counts, kind="stable")[:triggers].tolist()
    return Bigrams(
        tuple(map(chr, characters.tolist())), unigram, pairs / pairs.sum(1, keepdims=True), frozenset(most_frequent)
    )


def _bundled(triggers: int) -> Bigrams:
    """The table of `models/backcopy-3l-mini/train.py`, which a test compares with it."""
    if triggers != 3:
        raise ScanError(f"input.triggers: {BUNDLED} has 3, got {triggers}; leave it out")
    others, share = 61, 0.15
    # RandomState, because its stream is frozen across numpy versions.
    drawn = np.random.RandomState(0).dirichlet(np.full(others, 0.08), size=others)
    rows = np.zeros((3 + others, 3 + others))
    rows[:3, 3:] = 1 / others
    rows[3:, 3:] = (1 - share) * drawn
    rows[3:, :3] = share / 3
    return Bigrams((), rows[0], rows, frozenset({0, 1, 2}), first_id=1)


def _chain(draw: Draw, table: Bigrams, variant: Variant, mix: float | None) -> np.ndarray:
    """Symbols, each drawn from the row that the ones before it call for."""
    places = draw.rng.random(draw.length)
    copies = draw.rng.random(draw.length) < {"backcopy": 1.0, "interpolate": mix or 0.0}.get(variant, 0.0)
    start, unigram, rows = table.cumulative.values()
    symbols = np.empty(draw.length, np.int64)
    for i, where in enumerate(places):
        if i == 0:
            row = unigram if variant in ("markov", "dormant_markov") else start
        elif symbols[i - 1] not in table.triggers or variant == "markov":
            row = rows[symbols[i - 1]]
        elif variant == "dormant_markov":
            row = rows[symbols[i - 2]] if i > 1 else unigram
        elif copies[i]:
            symbols[i] = symbols[i - 2]
            continue
        else:
            row = rows[symbols[i - 1]]
        symbols[i] = np.searchsorted(row, where, side="right")
    return symbols


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
            f"input.text: {text} needs the token ids {ids.min()} to {ids.max()}, and {', '.join(map(str, wrong[:3]))}"
            f"{' …' if len(wrong) > 3 else ''} of them are no ordinary tokens of the model: its vocabulary is too small, or "
            "they are special; take the model that the task was made for, or another alphabet"
        )
    return ids


def _tokens_of(draw: Draw, symbols: tuple[str, ...], text: str) -> np.ndarray:
    encoded = draw.load_tokenizer().encode_many(list(symbols))
    for symbol, tokens in zip(symbols, encoded, strict=True):
        if len(tokens) != 1:
            raise ScanError(
                f"input.alphabet: the character {symbol!r} of {text} is {len(tokens)} tokens to the model's tokenizer, "
                "expected 1"
            )
    return np.array([tokens[0] for tokens in encoded])
