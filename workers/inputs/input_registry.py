"""Input families: a function whose name is the family and whose keyword-only parameters are its
options in a scan.

A synthetic family takes a `Draw` and returns one sequence, plain or `Labelled`; all randomness
comes from the draw, so sequence i depends on (seed, i, options) alone. A corpus family takes
nothing but options and returns a `Corpus`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from headcount.schemas.errors import HeadcountError, ScanError, counted
from headcount.schemas.fingerprints import fingerprint
from headcount.schemas.plugins import line_of_error
from headcount.schemas.registry import Entry, Option, Registry, options_of
from headcount.schemas.scans.scan import Scan
from headcount.schemas.values import Count, TokenId
from headcount.workers.inputs.corpus.corpus import Corpus, Tokenizer, choice

CHOICE = options_of(choice)  # options that every family of text has


def token_range(*, low: TokenId = 0, high: Count | None = None) -> None:
    """Options of families that draw tokens. The draw has them, and follows them."""


def random_tokens(*, low: TokenId = 0, high: Count | None = None, distinct: bool = False) -> None:
    """The same, and whether no token is drawn twice."""


def different_tokens(*, low: TokenId = 0, high: Count | None = None, distinct: bool = True) -> None:
    """The same of families whose tokens differ unless a scan says otherwise."""


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
            several = np.atleast_1d(positions)
            # An empty list is one of floats to numpy.
            is_whole = several.ndim == 1 and (not several.size or several.dtype.kind in "iu")
            for position in several.tolist() if is_whole else [-1]:
                is_free = 0 <= position < len(names) and not names[position]
                if not is_free or not isinstance(label, str) or not label:
                    raise ScanError(
                        f"input family {family}: label {label!r} at {positions!r}: expected a "
                        f"name, and positions from 0 to {len(names) - 1} without another label"
                    )
                names[position] = label
        return names


@dataclass(frozen=True)
class Draw:
    """What one synthetic sequence is made from."""

    rng: np.random.Generator
    length: int  # tokens to return: n_ctx, less the beginning-of-sequence token
    ordinary: np.ndarray  # token ids of the vocabulary without the special tokens
    sequence: int  # index of the sequence in the scan
    load_tokenizer: Callable[[], Tokenizer]  # called on demand: a model may have none
    low: int = 0
    high: int | None = None
    distinct: bool = False  # of the scan: whether no token is drawn twice

    def ids(self, least: int = 1, without: ArrayLike = ()) -> np.ndarray:
        """The ordinary token ids in `low .. high-1`, but for some; too few are refused."""
        ids = self.ordinary[self.ordinary >= self.low]
        is_below = ids < (np.inf if self.high is None else self.high)
        ids = ids[is_below & ~np.isin(ids, without)]
        if len(ids) < least:
            end = "" if self.high is None else f" and below high = {self.high}"
            end += ", but for those that are taken" if np.size(without) else ""
            raise ScanError(
                f"input: ordinary token ids from low = {self.low} on{end}: expected {least} or "
                f"more, got {len(ids)}; widen low and high"
            )
        return ids

    def tokens(
        self, count: int, *, distinct: bool | None = None, without: ArrayLike = ()
    ) -> np.ndarray:
        """`count` of these ids but for those `without`, drawn uniformly.

        Whether none is drawn twice is `distinct`, or what the scan says.
        """
        distinct = self.distinct if distinct is None else distinct
        ids = self.ids(count if distinct else 1, without)
        return self.rng.choice(ids, size=count, replace=not distinct)

    def check_length(self, what: str, length: int) -> None:
        """Refuse a sequence that is not as long as what it is to hold."""
        if length != self.length:
            raise ScanError(
                f"n_ctx: {what} has {counted(length, 'token')} besides the beginning-of-sequence "
                f"token, the sequence has room for {self.length}; change n_ctx by "
                f"{length - self.length:+d}"
            )

    def check_room(self, what: str, least: int, advice: str = "") -> None:
        """Refuse a sequence that is too short for what needs so many tokens."""
        if least > self.length:
            raise ScanError(
                f"n_ctx: {what} {least} tokens besides the beginning-of-sequence token, got "
                f"{self.length}; raise n_ctx{advice}"
            )


@dataclass(frozen=True, kw_only=True)
class InputFamily(Entry):
    """A registered family."""

    stream: str = ""
    """Families of one stream draw the same numbers for the same seed and sequence; a family
    without one has its own.
    """
    draws: Callable[..., None] | None = None  # has options of the draw, as `token_range` does
    partner: str | None = None
    """The family whose sequence of the same number is the partner, from whose run an intervention
    may take something; it has the same stream and options.
    """
    is_endless: bool = False  # whether it counts the text's tokens and draws without end

    @property
    def synthetic(self) -> bool:
        """Whether its sequences are drawn: only then it reads something, the draw."""
        return bool(self.parameters)

    @cached_property
    def own_options(self) -> dict[str, Option]:
        """Its options by name, but for those that every family of text has."""
        return options_of(self.function) | (options_of(self.draws) if self.draws else {})

    @cached_property
    def options(self) -> dict[str, Option]:
        """All of its options by name."""
        return self.own_options | ({} if self.synthetic else CHOICE)

    @property
    def labels_tokens(self) -> bool:
        """Whether its sequences are `Labelled`."""
        return inspect.signature(self.function, eval_str=True).return_annotation is Labelled

    @property
    def code(self) -> tuple[Callable[..., Any], ...]:
        """The functions that decide its values: its own, and its partner's."""
        partners = [] if self.partner is None else [INPUTS[self.partner].function]
        return (self.function, *partners)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of its code, of its partner's and, if it reads text, of what lists files."""
        code = fingerprint(*self.code)
        # Another stream draws other numbers with the same code.
        return f"{code}-{self.stream}" if self.stream else code

    def sequence(self, draw: Draw, options: Mapping[str, Any]) -> np.ndarray | Labelled:
        """One sequence of a synthetic family."""
        try:
            return self.function(draw, **{n: options[n] for n in options_of(self.function)})
        except Exception as error:
            line = line_of_error(error)
            if isinstance(error, HeadcountError) or not line:
                raise
            raise ScanError(f"{line}: {self.name}: {type(error).__name__}: {error}") from error

    def corpus(self, options: Mapping[str, Any], seed: int) -> Corpus:
        """The corpus of a family of text, its files listed."""
        chosen = choice(**{name: options[name] for name in CHOICE}).resolved(seed)
        corpus = self.function(**{name: options[name] for name in self.own_options})
        return replace(corpus, choice=chosen)

    def check(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options with every default filled in; a wrong one raises `ScanError`."""
        for name in options:
            if name in Scan.model_fields and name not in self.options:
                raise ScanError(
                    f"input.{name}: {name} is a field of the scan; move it above [input]"
                )
        checked = INPUTS.bind(self, named=options, field="input", subject="input.OPTION")
        if not self.synthetic:
            # Made only to be checked, before any file is listed.
            chosen = choice(**{name: checked[name] for name in CHOICE})
            for option, value in (("shuffle", chosen.shuffle), ("skip", chosen.skip)):
                if self.is_endless and value:
                    raise ScanError(
                        f"input.{option}: {self.name} counts the tokens of all documents, so their "
                        "order means nothing; leave it out"
                    )
        return checked


INPUTS = Registry[InputFamily]("input family")


def input_family(
    function: Callable[..., Any] | None = None,
    **facts: Any,  # noqa: ANN401 - fields of `InputFamily`
) -> Callable[..., Any]:
    """Register a function as an input family, with fields of `InputFamily`."""
    if function is None:
        return partial(input_family, **facts)
    return INPUTS.add(InputFamily(function=function, **facts)).function
