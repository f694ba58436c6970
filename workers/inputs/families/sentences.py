"""Sentences of a template with names: indirect object identification (Wang et al. 2022)."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import compress
from typing import Literal

import numpy as np

from headcount.schemas.errors import ScanError
from headcount.workers.inputs.corpus.corpus import Tokenizer
from headcount.workers.inputs.input_registry import Draw, Labelled, input_family

TEMPLATE = "When {1} and {2} went to the store, {3} gave a drink to"
PLACES = ("{1}", "{2}", "{3}")  # where a template has its three names

NAMES = (
    "Mary", "John", "Tom", "James", "Dan", "Martin", "Amy", "David", "Michael", "Sarah", "Emily",
    "Paul", "Mark", "Anna", "Kate", "Laura", "Peter", "Alice", "Robert", "Linda", "Jack", "Susan",
    "George", "Emma", "Henry", "Lucy", "Simon", "Jane", "Andrew", "Rachel", "Adam", "Grace",
    "Kevin", "Maria", "Steven", "Julia", "Brian", "Lisa", "Daniel",
)  # fmt: skip
"""Common first names. Each is one token to GPT-2 with a space before it."""

NAMES_DRAWN = 5  # two for the sentence, three for its partner

Order = Literal["ABBA", "BABA", "both"]


@input_family(partner="ioi_other_names")
def ioi(
    draw: Draw, *, order: Order = "both", template: str = TEMPLATE, names: list[str] | None = None
) -> Labelled:
    """`When A and B went to the store, B gave a drink to`: which name comes next? (Wang et al.
    2022, indirect object identification).

    A is the right answer. Labels: "IO" on A, "S1" and "S2" on B. The probability of A is
    `final_probabilities[list_position(labels, 'IO')]`. With GPT-2's tokenizer n_ctx is 15 with BOS.
    The partner is the sequence of `ioi_other_names`.

    * `order`: "ABBA" names A first and "BABA" names B first. "both" is either, equally often.
    * `template`: a text with the places {1}, {2} and {3} for names. B stands at {3}.
    * `names`: at least five names that are one token each in the template. By default 39 common
      first names are tried.
    """
    (a, b, *_), is_abba = _drawn_names(draw, order, template, names)
    if is_abba:
        return _sentence(draw, template, names, {"IO": a, "S1": b, "S2": b})
    return _sentence(draw, template, names, {"S1": b, "IO": a, "S2": b})


@input_family(stream="ioi", partner="ioi")
def ioi_other_names(
    draw: Draw, *, order: Order = "both", template: str = TEMPLATE, names: list[str] | None = None
) -> Labelled:
    """`When D and E went to the store, F gave a drink to`: the sentence of `ioi` with three other
    names, so that no name stands twice and none is the answer (Wang et al. 2022).

    The partner is the sequence of `ioi`. The names are labelled "N1", "N2" and "N3".
    """
    (_, _, *others), _ = _drawn_names(draw, order, template, names)
    return _sentence(draw, template, names, dict(zip(("N1", "N2", "N3"), others, strict=True)))


def _drawn_names(
    draw: Draw, order: Order, template: str, names: list[str] | None
) -> tuple[list[str], bool]:
    """The names of a sequence and of its partner, and whether the answer comes first."""
    found = [template.find(place) for place in PLACES]
    if -1 in found or found != sorted(found) or template.count("{") != len(PLACES):
        raise ScanError(
            f"input.template: expected the places {', '.join(PLACES)} in this order, got {template}"
        )
    fitting, _ = _fitting(template, tuple(names or NAMES), draw.load_tokenizer())
    drawn = draw.rng.choice(fitting, NAMES_DRAWN, replace=False).tolist()
    # Drawn in every order, so that sequences of all orders have the same names.
    is_first = bool(draw.rng.random() < 0.5)
    return drawn, is_first if order == "both" else order == "ABBA"


def _sentence(
    draw: Draw, template: str, names: list[str] | None, name_of_label: dict[str, str]
) -> Labelled:
    """The tokens of a template with names, each of which has a label."""
    tokenizer = draw.load_tokenizer()
    tokens = tokenizer.encode(_filled(template, name_of_label.values()))
    draw.check_length("the sentence", len(tokens))
    _, positions = _fitting(template, tuple(names or NAMES), tokenizer)
    return Labelled(np.array(tokens), dict(zip(name_of_label, positions, strict=True)))


@lru_cache(maxsize=4)
def _fitting(
    template: str, names: tuple[str, ...], tokenizer: Tokenizer
) -> tuple[list[str], list[int]]:
    """The names that are one token each in a template, and the positions of the three names."""
    sentences = tokenizer.encode_many([_filled(template, (name,) * 3) for name in names])
    # A name of several tokens makes its sentence longer.
    shortest = min(map(len, sentences))
    fits = [len(tokens) == shortest for tokens in sentences]
    # The sentences differ where they have their names: at three positions if these are one token.
    table = np.array(list(compress(sentences, fits)))
    positions = np.flatnonzero((table != table[0]).any(0)).tolist()
    if len(table) < NAMES_DRAWN or len(positions) != len(PLACES):
        raise ScanError(
            f"input.names: expected {NAMES_DRAWN} or more names that the model's tokenizer takes "
            f"for one token each in {template!r}, got too few in {', '.join(names)}"
        )
    return list(compress(names, fits)), positions


def _filled(template: str, names: Iterable[str]) -> str:
    for place, name in zip(PLACES, names, strict=True):
        template = template.replace(place, name)
    return template
