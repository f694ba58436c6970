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

from schemas.errors import ScanError, unknown
from schemas.fingerprints import fingerprint
from schemas.formulas import first_paragraph
from schemas.scan import Scan
from schemas.values import OPTIONS, by_key, wrong_value
from workers.inputs.corpus import Corpus, Tokenizer, choice


@dataclass(frozen=True)
class Labelled:
    """A sequence whose positions have names; the query of a labelled layout is its last token."""

    tokens: np.ndarray
    labels: Mapping[str, int | Sequence[int] | np.ndarray]
    """Position or positions by label, the beginning-of-sequence token not counted; a position has
    at most one label.
    """

    def names(self, family: str) -> list[str]:
        """The label of every position, "" where there is none; wrong labels raise `ScanError`."""
        names = [""] * len(self.tokens)
        for label, where in self.labels.items():
            if not isinstance(label, str) or not label:
                raise ScanError(
                    f"input family {family}: a label is a string with something in it, got "
                    f"{label!r}"
                )
            for position in (
                where if isinstance(where, list | tuple | range | np.ndarray) else [where]
            ):
                if isinstance(position, bool) or not isinstance(position, int | np.integer):
                    raise ScanError(
                        f"input family {family}: label {label!r} needs whole positions, got "
                        f"{position!r}"
                    )
                if not 0 <= position < len(names):
                    last = len(names) - 1
                    raise ScanError(
                        f"input family {family}: label {label!r} at position {position}, expected "
                        f"0 to {last}"
                    )
                if names[position]:
                    both = f"{names[position]!r} and {label!r}"
                    raise ScanError(
                        f"input family {family}: position {position} has two labels, {both}; "
                        "expected one"
                    )
                names[position] = label
        return names


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
    """Token ids of the vocabulary, special tokens left out."""
    sequence: int = 0
    """Index of the sequence in the scan."""
    load_tokenizer: Callable[[], Tokenizer] = _no_tokenizer
    """Gives the model's tokenizer; a model may have none."""

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
        """`count` token ids, uniform over the ordinary ones in `low .. high-1`; `distinct` draws
        none twice.
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
    """The family whose sequence of the same number is the partner, for interventions that take
    something from its run.
    """
    refuse: Callable[[dict[str, Any]], str | None] | None = None
    """Says what is wrong with its options together; none if nothing is."""

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it; of a corpus, the code that lists it, not the one that
        reads it.
        """
        code = fingerprint(
            self.function, *([INPUTS[self.partner].function] if self.partner else [])
        )
        return {
            "meaning": self.meaning,
            "fingerprint": code if self.stream == self.name else f"{code}-{self.stream}",
        }

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The options, those that every family of text has last."""
        signature = inspect.signature(self.function, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        return own if self.synthetic else own + CHOICE

    def corpus(self, options: dict[str, Any]) -> Corpus:
        """The corpus of a family of text, its files listed."""
        common = {p.name: options[p.name] for p in CHOICE}
        own = {name: value for name, value in options.items() if name not in common}
        return replace(self.function(**own), choice=choice(**common))

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with every default resolved; a wrong one raises `ScanError`."""
        fields: Any = {
            p.name: (p.annotation, ... if p.default is p.empty else p.default)
            for p in self.parameters
        }
        model = create_model("Options", __config__=OPTIONS, **fields)
        try:
            checked = model(**options).model_dump()
        except ValidationError as error:
            found = by_key(error).items()
            raise ScanError(
                "\n".join(self._explain(key, problems, fields) for key, problems in found)
            ) from None
        if problem := self.refuse and self.refuse(checked):
            raise ScanError(problem)
        if not self.synthetic:
            choice(**{p.name: checked[p.name] for p in CHOICE})
        return checked

    def _explain(self, key: str, problems: list[Any], known: Iterable[str]) -> str:
        match problems[0]["type"]:
            case "extra_forbidden" if key in Scan.model_fields and key not in known:
                return f"input.{key}: {key} is a field of the scan; move it above [input]"
            case "extra_forbidden":
                return f"input.{key}: {unknown(f'option of {self.name}', key, known)}"
            case "missing":
                return f"input.{key}: missing; the family {self.name} needs it"
            case _:
                return wrong_value(f"input.{key}", problems)


CHOICE = list(inspect.signature(choice, eval_str=True).parameters.values())
"""Options that every family of text has."""

INPUTS: dict[str, InputFamily] = {}


def input_family(
    function: Callable[..., Any] | None = None,
    *,
    stream: str | None = None,
    partner: str | None = None,
    refuse: Callable[[dict[str, Any]], str | None] | None = None,
) -> Callable[..., Any]:
    """Register a function as an input family; `stream` names the family whose draws it shares.

    `partner` names one of the same stream and options, whose sequences are the partners of its own.
    `refuse` says what is wrong with options that are right one by one.
    """
    if function is None:
        return partial(input_family, stream=stream, partner=partner, refuse=refuse)
    name = function.__name__
    if name in INPUTS:
        raise ValueError(f"input family {name!r} is defined twice")
    parameters = inspect.signature(function).parameters.values()
    synthetic = any(p.kind is not p.KEYWORD_ONLY for p in parameters)
    meaning = first_paragraph(function)
    INPUTS[name] = InputFamily(name, function, meaning, synthetic, stream or name, partner, refuse)
    return function


def find_input(name: str) -> InputFamily:
    """The input family of that name."""
    if name not in INPUTS:
        raise ScanError(f"input.family: {unknown('input family', name, INPUTS)}")
    return INPUTS[name]
