"""What statistics, profiles, predictions and weight statistics share: each is one function.

The function's name is the name of a column or of a value. Its parameters name what it reads. Its
docstring is the documentation everywhere: the first paragraph is the meaning, the second the
formula.

Keyword-only parameters with a default are options. A scan writes them in their order,
`distant_mass(4,64)`, and a choice of options is a formula of its own, `distant_mass_4_64`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.files.fingerprints import fingerprint
from headcount.schemas.pattern import Tensor
from headcount.schemas.scans.intervention import Argument, parse_intervention
from headcount.schemas.scans.values import in_toml, problem_of

Options: TypeAlias = tuple[tuple[str, Argument], ...]
"""The options of a formula with their names, in order: whole numbers and names."""


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A registered function and everything that is derived from it."""

    name: str
    """The column or the value: the function's name, and its options behind it."""
    options: Options = ()
    """Every option of the function, with a value."""
    compute: Callable[..., Any]
    parameters: tuple[str, ...]
    unit: str
    source: str
    meaning: str
    formula: str
    defined: Callable[..., Any] | None = None
    """Rule that says where the formula has a value; without a rule it always has one."""
    of_directions: bool = False
    """Whether it reads only directions, as a cosine does. A vector of zeros has no direction."""
    missing: str = ""
    """What a layer may lack so that it has no value there: the end of the sentence "NULL if …"."""

    undefined: ClassVar[str] = "NULL"
    """What is stored if it has no value."""

    @property
    def undefined_when(self) -> str:
        """When it has no value, in words; empty if it always has one."""
        rules: list[str] = []
        if self.defined is not None:
            # The rule's docstring is the end of the sentence "NULL unless …".
            rule = first_paragraph(self.defined)
            rules.append(f"{self.undefined} unless {rule.rstrip('.')}")
        if self.of_directions:
            rules.append("NULL if a vector is zero")
        if self.missing:
            rules.append(f"NULL if {self.missing}")
        return "; ".join(rules)

    @property
    def function(self) -> str:
        """Name of the function, as a scan writes it: the name without the options behind it."""
        # The column of a function without a name is what the options put behind it, `_4_64`.
        return self.name.removesuffix(column_name("", self.options))

    @property
    def text(self) -> str:
        """How a scan names it, in canonical form: the same formula always has the same text."""
        arguments = ",".join(str(value) for _, value in self.options)
        return f"{self.function}({arguments})" if arguments else self.function

    def with_arguments(self, arguments: Sequence[Argument], what: str) -> Self:
        """The formula of the same function with other options; those not given keep their value.

        `what` begins the line of a `ScanError` about wrong arguments.
        """
        parameters = options_of(self.compute)
        if len(arguments) > len(parameters):
            takes = f"at most {', '.join(parameters)}" if parameters else "no options"
            raise ScanError(f"{what}: {self.function} takes {takes}, got {in_toml(arguments)}")
        chosen = dict(self.options)
        for (name, parameter), argument in zip(parameters.items(), arguments, strict=False):
            if expected := problem_of(parameter.annotation, argument):
                raise ScanError(
                    f"{what}: {name} of {self.function}: expected {expected}, got "
                    f"{in_toml(argument)}"
                )
            chosen[name] = argument
        options = tuple(chosen.items())
        return replace(self, options=options, name=column_name(self.function, options))

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of what the rule `defined` reads."""
        return () if self.defined is None else parameters_of(self.defined)

    @property
    def description(self) -> str:
        """Meaning, formula and when it has no value, on one line, for Parquet and SQL."""
        meaning_and_formula = f"{self.meaning} {' '.join(self.formula.split())}"
        options = ", ".join(f"{name} = {value}" for name, value in self.options)
        texts = (meaning_and_formula, options, self.undefined_when)
        return "; ".join(text for text in texts if text)

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it."""
        names = ("unit", "source", "meaning", "formula", "description")
        return {name: getattr(self, name) for name in names}

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps: the facts, the options and a fingerprint of the code."""
        options = {"function": self.function, "options": dict(self.options)} if self.options else {}
        return self.facts | options | {"fingerprint": self.fingerprint}

    @cached_property
    def listed(self) -> bool:
        """Whether its value is a list."""
        return is_list(self.facts)

    def exists(self, rotary: bool) -> bool:
        """Whether a model has the formula at all; `rotary`: whether positions rotate q and k."""
        return True

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the formula's code; comments, layout and prose do not count."""
        functions = [self.compute, self.defined] if self.defined else [self.compute]
        return fingerprint(*functions)


@dataclass(frozen=True, kw_only=True)
class Ranged(Formula):
    """A formula whose values lie between two bounds."""

    range: tuple[float, float]

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it.

        JSON does not have infinity, so an open end of the range is null.
        """
        bounds = [bound if math.isfinite(bound) else None for bound in self.range]
        return super().facts | {"range": bounds}


@dataclass(frozen=True, kw_only=True)
class Along(Formula):
    """A formula with a value for every place on an axis, and no rows if it has no values."""

    axis: str
    undefined: ClassVar[str] = "no rows"

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it."""
        return super().facts | {"axis": self.axis}

    def exists(self, rotary: bool) -> bool:
        """Whether a model has the formula at all; `rotary`: whether positions rotate q and k."""
        return self.defined is None or bool(self.defined(rotary))


F = TypeVar("F", bound=Formula)


def read_definition(
    function: Callable[..., Tensor],
    kind: str,
    registry: Mapping[str, Formula],
    input_word: str,
    inputs: Mapping[str, str],
    may_have_options: bool = False,
) -> dict[str, Any]:
    """The fields of `Formula` that a function defines: name, code, parameters, meaning, formula.

    `registry` is the one that it will belong to, and `kind` the word for its formulas. It may read
    `inputs`, each of which is called an `input_word` in errors. A function that breaks these rules
    raises `ValueError`. Its options have their defaults.
    """
    what = f"{kind} {function.__name__!r}"
    for option, parameter in options_of(function).items():
        if problem_of(parameter.annotation, parameter.default) is not None:
            raise ValueError(
                f"{what}: option {option!r} needs a default of its type, got {parameter.default!r}"
            )
    options = tuple((option, each.default) for option, each in options_of(function).items())
    if options and not may_have_options:
        raise ValueError(f"{what}: a {kind} has no options, got {', '.join(dict(options))}")
    name = column_name(function.__name__, options)
    # With options, the column has another name than the function, and neither may be taken.
    if name in registry or any(f.function == function.__name__ for f in registry.values()):
        raise ValueError(f"{what} is defined twice")
    parameters = parameters_of(function)
    for parameter in parameters:
        if parameter not in inputs:
            raise ValueError(f"{what}: {unknown(input_word, parameter, inputs)}")
    # Meaning, formula, and perhaps more paragraphs, which the pages have too.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    if len(paragraphs) < 2:
        raise ValueError(
            f"{what}: its docstring needs a first line (meaning) and a formula paragraph"
        )
    return {
        "name": name,
        "options": options,
        "compute": function,
        "parameters": parameters,
        "meaning": " ".join(paragraphs[0].split()),
        "formula": paragraphs[1],
    }


def is_list(facts: Mapping[str, Any]) -> bool:
    """Whether a formula's value is a list: along an axis, or with a number for every token."""
    return bool(facts.get("per_token")) or facts.get("axis", "none") != "none"


def notes_of(function: Callable[..., Any]) -> list[str]:
    """The paragraphs of a formula's docstring behind its formula, each on one line, no examples."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")[2:]
    return [" ".join(text.split()) for text in paragraphs if not text.startswith(">>>")]


def first_paragraph(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring, on one line."""
    return " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())


def checked_axis(axis: str, axes: Iterable[str], what: str) -> str:
    """`axis` itself; raises `ValueError` if it is not one of `axes`."""
    if axis not in axes:
        raise ValueError(f"{what}: {unknown('axis', axis, axes)}")
    return axis


def find_formula(text: str, registry: Mapping[str, F], field: str, kind: str) -> F:
    """The formula that a text in a field of a scan names: `entropy`, `distant_mass(4,64)`.

    A column's name is a text too, if the registry has this column.
    """
    if text in registry:
        return registry[text]
    # The bare name of a function with options means its defaults, which the registry holds.
    by_function = {formula.function: formula for formula in registry.values()}
    if text in by_function:
        return by_function[text]
    function, parenthesis, _ = text.partition("(")
    function = function.strip()
    if function not in by_function:
        raise ScanError(f"{field}: {unknown(kind, function or text, by_function)}")
    formula = by_function[function]
    # Options are written as those of an intervention, of which several may be joined by `+`.
    try:
        parts = [part.arguments for part in parse_intervention(text).parts]
    except ScanError:
        parts = []
    if not parenthesis or len(parts) != 1:
        raise ScanError(f"{field}: expected {formula.text}, with your options, got {text!r}")
    return formula.with_arguments(parts[0], field)


def column_name(function: str, options: Options) -> str:
    """The name of a formula: of its function, and of the values of all options behind it.

    >>> column_name("distant_mass", (("sink", 4), ("recent", 64)))
    'distant_mass_4_64'
    """
    return "_".join([function, *(str(value) for _, value in options)])


@cache
def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function by name: its options."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a function reads; cached, because every layer of every batch needs them."""
    names = inspect.signature(function).parameters
    return tuple(name for name in names if name not in options_of(function))


# `schemas` does not know torch, but its callers pass torch tensors in and get one back.
def evaluate(
    function: Callable[..., Tensor],
    activations: Mapping[str, Any],
    options: Options = (),
) -> Any:  # noqa: ANN401
    """The value of a formula, or of its `defined` rule, on the activations that it names.

    A rule takes only some of a formula's options. Without options, the defaults hold.
    """
    values = (activations[name] for name in parameters_of(function))
    own_options = options_of(function)
    return function(*values, **{name: value for name, value in options if name in own_options})
