"""What statistics, profiles, predictions and weight statistics share: each is one function.

The function's name is the name of a column or of a value. Its parameters name what it reads. Its
docstring is the documentation everywhere: the first paragraph is the meaning, the second the
formula.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar

from schemas.errors import ScanError, unknown
from schemas.fingerprints import fingerprint
from schemas.pattern import Tensor


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A registered function and everything that is derived from it."""

    name: str
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
            rules.append("NULL if one of its vectors is zero")
        if self.missing:
            rules.append(f"NULL if {self.missing}")
        return "; ".join(rules)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of what the rule `defined` reads."""
        return () if self.defined is None else parameters_of(self.defined)

    @property
    def description(self) -> str:
        """Meaning, formula and when it has no value, on one line, for Parquet and SQL."""
        meaning_and_formula = f"{self.meaning} {' '.join(self.formula.split())}"
        return "; ".join(text for text in (meaning_and_formula, self.undefined_when) if text)

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say about it."""
        names = ("unit", "source", "meaning", "formula", "description")
        return {name: getattr(self, name) for name in names}

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps: the facts, and a fingerprint of the code."""
        return self.facts | {"fingerprint": self.fingerprint}

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
) -> dict[str, Any]:
    """The fields of `Formula` that a function defines: name, code, parameters, meaning, formula.

    `registry` is the one that it will belong to, and `kind` the word for its formulas. It may read
    `inputs`, each of which is called an `input_word` in errors. A function that breaks these rules
    raises `ValueError`.
    """
    what = f"{kind} {function.__name__!r}"
    if function.__name__ in registry:
        raise ValueError(f"{what} is defined twice")
    parameters = parameters_of(function)
    for parameter in parameters:
        if parameter not in inputs:
            raise ValueError(f"{what}: {unknown(input_word, parameter, inputs)}")
    # Meaning, formula, and perhaps more paragraphs, which are only for readers of the code.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    if len(paragraphs) < 2:
        raise ValueError(
            f"{what}: its docstring needs a first line (meaning) and a formula paragraph"
        )
    return {
        "name": function.__name__,
        "compute": function,
        "parameters": parameters,
        "meaning": " ".join(paragraphs[0].split()),
        "formula": paragraphs[1],
    }


def is_list(facts: Mapping[str, Any]) -> bool:
    """Whether a formula's value is a list: along an axis, or with a number for every token."""
    return bool(facts.get("per_token")) or facts.get("axis", "none") != "none"


def first_paragraph(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring, on one line."""
    return " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())


def checked_axis(axis: str, axes: Iterable[str], what: str) -> str:
    """`axis` itself; raises `ValueError` if it is not one of `axes`."""
    if axis not in axes:
        raise ValueError(f"{what}: {unknown('axis', axis, axes)}")
    return axis


def named_formulas(
    names: Iterable[str], registry: Mapping[str, F], field: str, kind: str
) -> tuple[F, ...]:
    """The formulas that a field of a scan names, in registry order."""
    wanted = list(names)
    for name in wanted:
        if name not in registry:
            raise ScanError(f"{field}: {unknown(kind, name, registry)}")
    return tuple(formula for formula in registry.values() if formula.name in wanted)


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters; cached, because every layer of every batch needs them."""
    return tuple(inspect.signature(function).parameters)


# `schemas` does not know torch, but its callers pass torch tensors in and get one back.
def evaluate(function: Callable[..., Tensor], activations: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The value of a formula, or of its `defined` rule, on the activations that it names."""
    return function(*(activations[name] for name in parameters_of(function)))
