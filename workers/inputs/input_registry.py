"""Input families: a function whose name is the family and whose keyword-only parameters are its
options in a scan.

A synthetic family takes a `Draw` and returns one sequence, plain or `Labelled`; all randomness
comes from the draw, so sequence i depends on (seed, i, options) alone. A corpus family takes
nothing but options and returns a `Corpus`.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import ValidationError, create_model

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.files.fingerprints import fingerprint
from headcount.schemas.registry import first_paragraph
from headcount.schemas.scans.scan import Scan
from headcount.schemas.scans.values import OPTIONS, by_key, wrong_value
from headcount.workers.inputs.corpus.corpus import Corpus, Tokenizer, choice


@dataclass(frozen=True)
class Labelled:
    """A sequence whose positions have names; the query of a labelled layout is its last token."""

    tokens: np.ndarray
    labels: Mapping[str, int | Sequence[int] | np.ndarray]
    """One or more positions by label. The beginning-of-sequence token is not counted. A position
    has at most one label.
    """

    def names(self, family: str) -> list[str]:
        """The label of every position, "" if it has none. A wrong label raises `ScanError`."""
        names = [""] * len(self.tokens)
        for label, positions in self.labels.items():
            if not isinstance(label, str) or not label:
                raise ScanError(
                    f"input family {family}: a label is a string with something in it, got "
                    f"{label!r}"
                )
            is_one = not isinstance(positions, list | tuple | range | np.ndarray)
            several: Iterable[Any] = [positions] if is_one else positions
            for position in several:
                problem = _problem_of_position(label, position, names)
                if problem is not None:
                    raise ScanError(f"input family {family}: {problem}")
                names[position] = label
        return names


def _problem_of_position(label: str, position: object, names: Sequence[str]) -> str | None:
    """Why a label cannot stand at a position beside those that stand already; None if it can."""
    # A bool is an int to Python.
    if isinstance(position, bool) or not isinstance(position, int | np.integer):
        return f"label {label!r} needs whole positions, got {position!r}"
    if not 0 <= position < len(names):
        return f"label {label!r} at position {position}, expected 0 to {len(names) - 1}"
    other_label = names[int(position)]
    if other_label:
        return f"position {position} has two labels, {other_label!r} and {label!r}; expected one"
    return None


def _no_tokenizer() -> Tokenizer:
    raise ScanError(
        "input: this family needs the model's tokenizer, and the draw was made without one"
    )


@dataclass(frozen=True)
class Draw:
    """What one synthetic sequence is made from."""

    rng: np.random.Generator
    length: int
    """Tokens to return: n_ctx, less the beginning-of-sequence token."""
    ordinary: np.ndarray
    """Token ids of the vocabulary without the special tokens."""
    sequence: int = 0
    """Index of the sequence in the scan."""
    load_tokenizer: Callable[[], Tokenizer] = _no_tokenizer
    """Returns the model's tokenizer. Loaded on demand, because a model may have none."""

    @classmethod
    def of(
        cls,
        seed: int,
        sequence: int,
        stream: str,
        length: int,
        ordinary: np.ndarray,
        load_tokenizer: Callable[[], Tokenizer] = _no_tokenizer,
    ) -> Draw:
        """The draw of one sequence of a scan."""
        # All three enter the seed, so sequences are independent of each other and of their order.
        rng = np.random.default_rng(
            np.random.SeedSequence([seed, sequence, zlib.crc32(stream.encode())])
        )
        return cls(rng, length, ordinary, sequence, load_tokenizer)

    def ids(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """The ordinary token ids in `low .. high-1`."""
        return self.ordinary[
            (self.ordinary >= low) & (self.ordinary < (high if high is not None else np.inf))
        ]

    def tokens(
        self, count: int, low: int = 0, high: int | None = None, distinct: bool = False
    ) -> np.ndarray:
        """`count` token ids, drawn uniformly from the ordinary ones in `low .. high-1`.

        With `distinct` none is drawn twice.
        """
        ids = self.ids(low, high)
        if len(ids) < (count if distinct else 1):
            end = "" if high is None else f" and below high = {high}"
            raise ScanError(
                f"input: ordinary token ids from low = {low} on{end}: expected "
                f"{count if distinct else 1} or more, got {len(ids)}; widen low and high"
            )
        return self.rng.choice(ids, size=count, replace=not distinct)


@dataclass(frozen=True)
class InputFamily:
    """A registered family."""

    name: str
    function: Callable[..., Any]
    meaning: str
    synthetic: bool
    stream: str
    """Families of one stream draw the same numbers for the same seed and sequence."""
    partner: str | None = None
    """The family whose sequence of the same number is the partner, from whose run an intervention
    may take something.
    """
    is_endless: bool = False
    """Whether a family of text has as many sequences as a scan asks for."""
    refuse: Callable[[dict[str, Any]], str | None] | None = None
    """Says what is wrong with the options as a whole; None if nothing is."""

    @property
    def labels_tokens(self) -> bool:
        """Whether its sequences are `Labelled`."""
        return inspect.signature(self.function, eval_str=True).return_annotation is Labelled

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it.

        The fingerprint of a corpus family covers the code that lists files. The code that reads
        them is covered by the fingerprint of all code.
        """
        functions = [self.function]
        if self.partner is not None:
            functions.append(INPUTS[self.partner].function)
        code = fingerprint(*functions)
        # Another stream draws other numbers with the same code.
        return {
            "meaning": self.meaning,
            "fingerprint": code if self.stream == self.name else f"{code}-{self.stream}",
        }

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The options: the family's, then those that every family of text has."""
        own_options = keyword_parameters(self.function)
        return own_options if self.synthetic else own_options + CHOICE

    def corpus(self, options: dict[str, Any]) -> Corpus:
        """The corpus of a family of text, its files listed."""
        choice_options = {p.name: options[p.name] for p in CHOICE}
        own_options = {name: options[name] for name in options if name not in choice_options}
        return replace(self.function(**own_options), choice=choice(**choice_options))

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with every default filled in; a wrong one raises `ScanError`."""
        # A model of pydantic checks the types that the function's signature declares.
        fields: Any = {
            p.name: (p.annotation, ... if p.default is p.empty else p.default)
            for p in self.parameters
        }
        model = create_model("Options", __config__=OPTIONS, **fields)
        try:
            checked_options = model(**options).model_dump()
        except ValidationError as error:
            problems_by_option = by_key(error)
            lines = [
                self._explain(option, problems, fields)
                for option, problems in problems_by_option.items()
            ]
            raise ScanError("\n".join(lines)) from None
        if self.refuse is not None:
            problem = self.refuse(checked_options)
            if problem:
                raise ScanError(problem)
        if not self.synthetic:
            # Made only to be checked, before any file is listed.
            choice(**{p.name: checked_options[p.name] for p in CHOICE})
        return checked_options

    def _explain(self, key: str, problems: list[Any], known: Iterable[str]) -> str:
        """A line about an option that is wrong."""
        match problems[0]["type"]:
            case "extra_forbidden" if key in Scan.model_fields:
                return f"input.{key}: {key} is a field of the scan; move it above [input]"
            case "extra_forbidden":
                return f"input.{key}: {unknown(f'option of {self.name}', key, known)}"
            case "missing":
                return f"input.{key}: missing; the family {self.name} needs it"
            case _:
                return wrong_value(f"input.{key}", problems)


def keyword_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The keyword-only parameters of a function, which are the options of what it registers."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


CHOICE = keyword_parameters(choice)
"""Options that every family of text has."""

INPUTS: dict[str, InputFamily] = {}


def input_family(
    function: Callable[..., Any] | None = None,
    *,
    stream: str | None = None,
    partner: str | None = None,
    is_endless: bool = False,
    refuse: Callable[[dict[str, Any]], str | None] | None = None,
) -> Callable[..., Any]:
    """Register a function as an input family.

    `stream` names the family whose random numbers it shares. `partner` names a family of the same
    stream and options, whose sequences are its partners. `refuse` says what is wrong with options
    that are right one by one.
    """
    if function is None:
        options: dict[str, Any] = {"stream": stream, "partner": partner}
        return partial(input_family, **options, is_endless=is_endless, refuse=refuse)
    name = function.__name__
    if name in INPUTS:
        raise ValueError(f"input family {name!r} is defined twice")
    parameters = inspect.signature(function).parameters.values()
    # Only a synthetic family has a positional parameter: the draw.
    synthetic = any(p.kind is not p.KEYWORD_ONLY for p in parameters)
    meaning = first_paragraph(function)
    INPUTS[name] = InputFamily(
        name, function, meaning, synthetic, stream or name, partner, is_endless, refuse
    )
    return function


def find_input(name: str) -> InputFamily:
    """The input family of that name."""
    if name not in INPUTS:
        raise ScanError(f"input.family: {unknown('input family', name, INPUTS)}")
    return INPUTS[name]
