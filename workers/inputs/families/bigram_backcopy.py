"""Bigram-Backcopy: a chain of bigrams in which a trigger is followed by the token before it (Guo et
al. 2024).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from headcount.schemas.errors import ScanError
from headcount.schemas.values import Share
from headcount.workers.inputs.corpus.text_files import read_text
from headcount.workers.inputs.input_registry import Draw, Labelled, input_family

BUNDLED_TEXT = "bundled:backcopy-3l-mini"
"""Instead of a text: the table that this model and the other small ones were trained on."""

Alphabet = Literal["sorted", "tokenizer"]
Variant = Literal["backcopy", "markov", "dormant_markov", "interpolate", "uniform"]

Array = Any  # an array of numpy or a tensor of torch: a chain is followed with either


@dataclass(frozen=True, eq=False)
class Bigrams:
    """How often each symbol follows each other one. A symbol is the number of a row."""

    symbols: tuple[str, ...]  # the characters; empty if the table is not made from a text
    unigram: np.ndarray  # [symbol], P(first symbol of the sequence)
    rows: np.ndarray  # [symbol next], P(next | symbol)
    triggers: frozenset[int]
    first_id: int = 0  # token id of the first symbol, if ids are in the order of the symbols

    @property
    def start(self) -> np.ndarray:
        """`[symbol]`, the unigram distribution without the triggers."""
        without_triggers = self.unigram.copy()
        without_triggers[list(self.triggers)] = 0
        return without_triggers / without_triggers.sum()

    def is_trigger(self, symbols: np.ndarray) -> np.ndarray:
        """Which of the symbols are triggers."""
        return np.isin(symbols, list(self.triggers))


class Chain(NamedTuple):
    """What symbols are drawn from, in arrays of numpy or in tensors of torch."""

    rows: Array
    """`[symbol next]`, cumulative. The last row, behind those of the symbols, is that of the
    beginning of the sequence.
    """
    wakes: Array  # `[symbol]`, whether the next symbol depends on the one before this one
    copies: bool  # whether the earlier symbol is copied; else the next is drawn from its row


@input_family
def backcopy(
    draw: Draw,
    *,
    text: str,
    triggers: int = 3,
    variant: Variant = "backcopy",
    mix: Share | None = None,
    alphabet: Alphabet = "sorted",
) -> Labelled:
    """Bigram-Backcopy: characters follow the bigrams of a `text`, a trigger is followed by the
    token before it (Guo et al. 2024).

    The triggers, labelled "trigger", are the most frequent characters of the text. The first token
    is drawn by its frequency, and is no trigger except in `markov` and `dormant_markov`.

    * `text`: a file, or `bundled:backcopy-3l-mini`, the table that this model was trained on:
      triggers 1 to 3, others 4 to 64.
    * `triggers`: how many characters are triggers.
    * `variant`: what follows a trigger. `markov`: its own bigram. `dormant_markov`: the bigram of
      the token before it. `interpolate`: a copy with probability `mix`, else its own bigram.
      `uniform`: no copy; all tokens are drawn uniformly from those that can follow, but no trigger
      after a trigger.
    * `mix`: a probability. The variant `interpolate` needs it, the others do not allow it.
    * `alphabet`: the token of a character. `sorted`: its place among the sorted characters of the
      text (special tokens must have higher ids). `tokenizer`: what the model's tokenizer makes of
      it.
    """
    if (variant == "interpolate") != (mix is not None):
        raise ScanError(
            f"input.mix: expected with variant = 'interpolate' only, got mix = {mix} and variant = "
            f"{variant!r}"
        )
    table = bigrams_of(text, triggers)
    ids = _ids(draw, table, text, alphabet)
    uniforms = draw.rng.random(draw.length)
    is_copied = draw.rng.random(draw.length) < (1.0 if mix is None else mix)
    symbols = np.array(follow(chain_of(table, variant), uniforms, is_copied))
    return Labelled(ids[symbols], {"trigger": np.flatnonzero(table.is_trigger(symbols))})


@input_family
def backcopy_test(
    draw: Draw, *, text: str, triggers: int = 3, alphabet: Alphabet = "sorted"
) -> Labelled:
    """All tokens of Bigram-Backcopy except the triggers, in order, then token i: does it wake a
    head? (Guo et al. 2024).

    i is the number of the sequence, modulo the number of tokens. The last position is labelled
    "trigger" if its token is one.
    """
    table = bigrams_of(text, triggers)
    ids = _ids(draw, table, text, alphabet)
    others = np.flatnonzero(~table.is_trigger(np.arange(len(ids))))
    symbols = np.append(others, draw.sequence % len(ids))
    draw.check_length("backcopy_test", len(symbols))
    return Labelled(ids[symbols], {"trigger": np.flatnonzero(table.is_trigger(symbols))})


@lru_cache(maxsize=4)
def bigrams_of(text: str, triggers: int) -> Bigrams:
    """The bigrams of a text file, or the table of the bundled model.

    The triggers are its most frequent characters, `triggers` of them.
    """
    if text == BUNDLED_TEXT:
        return _bundled(triggers)
    # In UTF-32 every character is one number, so numpy can count them.
    code_points = np.frombuffer(read_text(text).encode("utf-32-le"), np.uint32)
    characters, symbols, counts = np.unique(code_points, return_inverse=True, return_counts=True)
    n_symbols = len(characters)
    if not 1 <= triggers < n_symbols:
        raise ScanError(
            f"input.triggers: expected 1 to {n_symbols - 1}, of the {n_symbols} characters of "
            f"{text}, got {triggers}"
        )
    unigram = counts / counts.sum()
    pairs = np.zeros((n_symbols, n_symbols))
    np.add.at(pairs, (symbols[:-1], symbols[1:]), 1)
    # Nothing follows a character that occurs only at the very end. It gets the unigrams.
    pairs[pairs.sum(1) == 0] = unigram
    rows = pairs / pairs.sum(1, keepdims=True)
    most_frequent = np.argsort(-counts, kind="stable")[:triggers].tolist()
    return Bigrams(tuple(map(chr, characters.tolist())), unigram, rows, frozenset(most_frequent))


def _bundled(triggers: int) -> Bigrams:
    """61 symbols whose rows are drawn at random, and three triggers.

    Each trigger follows each of the 61 with probability 0.05.
    """
    if triggers != 3:
        raise ScanError(f"input.triggers: {BUNDLED_TEXT} has 3, got {triggers}; leave it out")
    trigger_share = 0.15
    rows = np.zeros((64, 64))
    rows[:3, 3:] = 1 / 61
    # RandomState, because its stream is frozen across numpy versions.
    rows[3:, 3:] = (1 - trigger_share) * np.random.RandomState(0).dirichlet(np.full(61, 0.08), 61)
    rows[3:, :3] = trigger_share / 3
    # The first token is drawn like one that follows a trigger: any of the 61.
    return Bigrams((), rows[0], rows, frozenset({0, 1, 2}), first_id=1)


@lru_cache(maxsize=4)
def chain_of(table: Bigrams, variant: Variant = "backcopy") -> Chain:
    """The chain of a variant."""
    copies = variant in ("backcopy", "interpolate")
    rows = table.rows
    # The last one is the beginning, which is no trigger.
    is_trigger = table.is_trigger(np.arange(len(rows) + 1))
    if variant == "uniform":
        # Uniform over what can follow, but no trigger after a trigger.
        can_follow = (rows > 0) & ~(is_trigger[:-1, None] & is_trigger[:-1])  # [symbol next]
        if not can_follow.any(1).all():
            raise ScanError(
                "input.variant: 'uniform' needs triggers that others follow; take fewer triggers, "
                "or another text"
            )
        rows = can_follow / can_follow.sum(1, keepdims=True)
    # If triggers copy, the first token is none, because it would have nothing to copy.
    first_row = table.unigram if variant in ("markov", "dormant_markov") else table.start
    cumulative = np.vstack([rows, first_row]).cumsum(1)
    # Rounding may leave the last sum below 1. Divided by it, every number below 1 falls on a symbol
    # that can occur.
    cumulative /= cumulative[:, -1:]
    return Chain(cumulative, is_trigger & (copies or variant == "dormant_markov"), copies)


def follow(chain: Chain, uniforms: Array, is_copied: Array) -> list[Array]:
    """Symbols by position, each drawn from the row that the symbols before it call for.

    `uniforms` are numbers in [0, 1): the symbol is where the number falls in the cumulative row.
    `is_copied` says whether a copy happens at a position if a trigger stands before it. Both are
    `[pos …]`; further axes are sequences, which are followed side by side.
    """
    symbols: list[Array] = []
    # -1 stands for the beginning of the sequence: the last row of the chain.
    second_last = last = -1
    for uniform, may_copy in zip(uniforms, is_copied, strict=True):
        wakes = chain.wakes[last]
        # `wakes` picks one of two symbols by arithmetic, because it may be an array.
        drawn_after = last if chain.copies else last + wakes * (second_last - last)
        symbol = (chain.rows[drawn_after] <= uniform[..., None]).sum(-1)
        if chain.copies:
            symbol = symbol + (wakes & may_copy) * (second_last - symbol)
        symbols.append(symbol)
        second_last, last = last, symbol
    return symbols


def _ids(draw: Draw, table: Bigrams, text: str, alphabet: Alphabet) -> np.ndarray:
    """The token id of every symbol."""
    ids = table.first_id + np.arange(len(table.unigram))
    if alphabet == "tokenizer":
        if not table.symbols:
            raise ScanError(f"input.alphabet: {text} has tokens and no characters; leave it out")
        encoded = draw.load_tokenizer().encode_many(list(table.symbols))
        for symbol, tokens in zip(table.symbols, encoded, strict=True):
            if len(tokens) != 1:
                raise ScanError(
                    f"input.alphabet: the character {symbol!r} of {text} is {len(tokens)} tokens "
                    "to the model's tokenizer, expected 1"
                )
        ids = np.array(encoded)[:, 0]
    not_ordinary = ids[~np.isin(ids, draw.ordinary)]
    if len(not_ordinary):
        first_ids = ", ".join(map(str, not_ordinary[:3])) + (" …" if len(not_ordinary) > 3 else "")
        raise ScanError(
            f"input.text: {text} needs the token ids {ids.min()} to {ids.max()}, and "
            f"{first_ids} of them are no ordinary tokens of the model: its vocabulary is too "
            "small, or they are special; take the model that the task was made for, or another "
            "alphabet"
        )
    return ids
