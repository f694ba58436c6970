"""What statistics, profiles, predictions and weight statistics have in common: each is one function
that documents itself.

The function's name is that of a column or of a value, its parameters name what it reads, and its
docstring is its documentation everywhere: the first line is the meaning, the second paragraph the
formula.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, TypeVar

from schemas.errors import ScanError, unknown
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
        return () if self.defined is None else tuple(inspect.signature(self.defined).parameters)

    @property
    def description(self) -> str:
        """Meaning, formula and when it has no value, on one line, as it rides in Parquet and SQL."""
        said = f"{self.meaning} {' '.join(self.formula.split())}"
        return "; ".join(part for part in (said, self.undefined_when) if part)

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        kept = ("unit", "source", "meaning", "formula", "description", "fingerprint")
        return {name: getattr(self, name) for name in kept}

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
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it; JSON has no infinity, so an open end of the range is
        null.
        """
        return super().record | {
            "range": [bound if math.isfinite(bound) else None for bound in self.range]
        }


@dataclass(frozen=True, kw_only=True)
class Along(Formula):
    """A formula with a value for every place on an axis, and no rows where it has none."""

    axis: str
    undefined: ClassVar[str] = "no rows"

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        return super().record | {"axis": self.axis}


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
    parameters = tuple(inspect.signature(function).parameters)
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


def evaluate(function: Callable[..., Tensor], activations: Mapping[str, Any]) -> Tensor:
    """Call a formula, or its `defined` rule, with the activations it names."""
    return function(*(activations[name] for name in inspect.signature(function).parameters))


def fingerprint(*functions: Callable[..., Any]) -> str:
    """Changes if and only if the functions' code changes, that of the helpers of ours they call
    included.
    """
    return hashlib.sha256("\n".join(map(_code, functions)).encode()).hexdigest()[:12]


def _code(function: Any, owner: type | None = None, above: frozenset[Any] = frozenset()) -> str:
    """The code of a function and of what it calls of ours, without docstrings and what errors say.

    `owner` is its class, `above` are its callers.
    """
    assert isinstance(function, FunctionType)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named = [function.__globals__.get(name) for name in sorted(names - {function.__name__})]
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    above = above | {function}
    helpers = [_code(f, None, above) for f in map(_plain, named) if _is_ours(f) and f not in above]
    for kind in [
        *(c for c in named if isinstance(c, type) and c.__module__.startswith("workers.")),
        owner,
    ]:
        methods = (_plain(m) for name, m in vars(kind).items() if name in used) if kind else ()
        helpers += [_code(m, kind, above) for m in methods if _is_ours(m) and m not in above]
    constants = [repr(value) for value in named if isinstance(value, int | float | str)]
    closed_over = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return "\n".join([ast.unparse(tree), *closed_over, *constants, *helpers])


def _plain(value: Any) -> Any:
    """The function behind a cache, a property or a class method."""
    for name in ("__wrapped__", "__func__", "fget", "func"):
        value = getattr(value, name, value)
    return value


def _is_ours(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__.startswith(("schemas.", "workers."))
