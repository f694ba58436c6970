"""What statistics, profiles, predictions and weight statistics have in common: each is one function
that documents itself.

The function's name is that of a column or of a value, its parameters name what it reads, and its
docstring is its documentation everywhere: the first line is the meaning, the second paragraph the
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
    compute: Callable[..., Tensor]
    parameters: tuple[str, ...]
    unit: str
    source: str
    meaning: str
    formula: str
    defined: Callable[..., Any] | None = None
    """Says where it has a value; everywhere if there is no such rule."""
    of_directions: bool = False
    """Whether it reads nothing but directions, as a cosine does: a vector of zeros has none."""

    undefined: ClassVar[str] = "NULL"
    """What there is where it has no value."""

    @property
    def undefined_when(self) -> str:
        """When it has no value, in words; empty where it always has one."""
        rules: list[str] = []
        if self.defined is not None:
            rule = first_paragraph(self.defined)
            rules.append(f"{self.undefined} unless {rule.rstrip('.')}")
        if self.of_directions:
            rules.append("NULL if one of its vectors is zero")
        return "; ".join(rules)

    @property
    def conditions(self) -> tuple[str, ...]:
        """What the rule reads that says where it has a value."""
        return () if self.defined is None else parameters_of(self.defined)

    @property
    def description(self) -> str:
        """Meaning, formula and when it has no value, on one line, as it rides in Parquet and SQL."""
        said = f"{self.meaning} {' '.join(self.formula.split())}"
        return "; ".join(part for part in (said, self.undefined_when) if part)

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say of it."""
        kept = ("unit", "source", "meaning", "formula", "description")
        return {name: getattr(self, name) for name in kept}

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it: the facts, and a fingerprint of its code."""
        return self.facts | {"fingerprint": self.fingerprint}

    @cached_property
    def listed(self) -> bool:
        """Whether its value is a list."""
        return is_list(self.facts)

    def exists(self, rotary: bool) -> bool:
        """Whether a model has it at all, given whether its positions rotate q and k."""
        return True

    @property
    def fingerprint(self) -> str:
        """Changes if and only if the formula's code changes; comments, layout and prose do not
        count.
        """
        return fingerprint(self.compute, *([self.defined] if self.defined else []))


@dataclass(frozen=True, kw_only=True)
class Ranged(Formula):
    """A formula whose values lie between two bounds."""

    range: tuple[float, float]

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say of it. JSON does not have infinity, so an open
        end of the range is null.
        """
        return super().facts | {
            "range": [bound if math.isfinite(bound) else None for bound in self.range]
        }


@dataclass(frozen=True, kw_only=True)
class Along(Formula):
    """A formula with a value for every place on an axis, and no rows where it has none."""

    axis: str
    undefined: ClassVar[str] = "no rows"

    @property
    def facts(self) -> dict[str, Any]:
        """What columns, comments and manifests say of it."""
        return super().facts | {"axis": self.axis}

    def exists(self, rotary: bool) -> bool:
        """Whether a model has it at all, given whether its positions rotate q and k."""
        return self.defined is None or bool(self.defined(rotary))


F = TypeVar("F", bound=Formula)


def described(
    function: Callable[..., Tensor],
    kind: str,
    registry: Mapping[str, Formula],
    reads: str,
    known: Mapping[str, str],
) -> dict[str, Any]:
    """What a function says of itself: name, code, parameters, meaning and formula; a wrong one
    raises `ValueError`.

    `kind` it is of, `registry` it goes to, and it reads some of `known`, each of which is a
    `reads`.
    """
    what = f"{kind} {function.__name__!r}"
    if function.__name__ in registry:
        raise ValueError(f"{what} is defined twice")
    parameters = parameters_of(function)
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(f"{what}: {unknown(reads, parameter, known)}")
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    if len(paragraphs) < 2:
        raise ValueError(
            f"{what}: its docstring needs a first line (meaning) and a formula paragraph"
        )
    fields = {"name": function.__name__, "compute": function, "parameters": parameters}
    return fields | {"meaning": " ".join(paragraphs[0].split()), "formula": paragraphs[1]}


def is_list(facts: Mapping[str, Any]) -> bool:
    """Whether a formula's value is a list: along an axis, or with a number for every token."""
    return bool(facts.get("per_token")) or facts.get("axis", "none") != "none"


def first_paragraph(function: Callable[..., Any]) -> str:
    """What a function's docstring says first, on one line."""
    return " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())


def checked_axis(axis: str, axes: Iterable[str], what: str) -> str:
    """An axis, if there is such a one."""
    if axis not in axes:
        raise ValueError(f"{what}: {unknown('axis', axis, axes)}")
    return axis


def chosen(
    wanted: Iterable[str], registry: Mapping[str, F], field: str, kind: str
) -> tuple[F, ...]:
    """The formulas that a field of a scan names, in registry order."""
    names = list(wanted)
    for name in names:
        if name not in registry:
            raise ScanError(f"{field}: {unknown(kind, name, registry)}")
    return tuple(formula for formula in registry.values() if formula.name in names)


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's parameters; every layer of every batch asks for them."""
    return tuple(inspect.signature(function).parameters)


def evaluate(function: Callable[..., Tensor], activations: Mapping[str, Any]) -> Tensor:
    """Call a formula, or its `defined` rule, with the activations it names."""
    return function(*(activations[name] for name in parameters_of(function)))
