"""The tokens of a sequence that a statistic is about."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headcount.schemas.statistics import STATISTICS

RECEIVED = "attention_received_by_key"  # the curve that says which token receives attention

WORDS_OF_MARKS = {
    "first key": "The framed token is the first one, key 0.",
    "successors": "Framed tokens follow an earlier copy of a token that comes again.",
    "copies": "Framed tokens come again later.",
}
"""What a page says of the tokens that a statistic marks (`Formula.marks`)."""


@dataclass(frozen=True)
class Marks:
    """The keys of a sequence that a statistic is about."""

    keys: list[int]
    meaning: str  # what a page says of them


def marked_keys(statistic: str, tokens: Sequence[int], received: Sequence[float] | None) -> Marks:
    """The keys of a sequence that a statistic is about: those that the registry says.

    For other statistics it is the key that receives most, if what keys receive was measured.

    >>> marked_keys("sink_mass", [5, 6, 7], None).keys, marked_keys("entropy", [5], [0.9]).keys
    ([0], [0])
    >>> marked_keys("sink_position", [5, 6, 7], None).keys
    []
    >>> marked_keys("induction_score", [5, 6, 7, 5], None).keys
    [1]
    >>> marked_keys("duplicate_score", [5, 6, 7, 5], None).keys
    [0]
    """
    # A statistic with options has their values behind its name.
    function_name = re.sub(r"(_-?\d[\d.]*)+$", "", statistic)
    functions = {formula.function_name: formula for formula in STATISTICS.values()}
    marks = functions[function_name].marks if function_name in functions else ""
    if marks:
        copies = [] if marks == "first key" else _earlier_copies(tokens)
        keys = [key + 1 for key in copies] if marks == "successors" else copies
        return Marks([0] if marks == "first key" else sorted({*keys}), WORDS_OF_MARKS[marks])
    if received:
        # What is undefined receives nothing.
        most = max(range(len(received)), key=lambda key: received[key] or 0.0)
        return Marks([most], "The framed token receives most attention.")
    return Marks([], "")


def _earlier_copies(tokens: Sequence[int]) -> list[int]:
    """The positions whose token comes again later."""
    last_position: dict[int, int] = {}
    copies: list[int] = []
    for position, token in enumerate(tokens):
        if token in last_position:
            copies.append(last_position[token])
        last_position[token] = position
    return copies
