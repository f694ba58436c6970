"""What a statistic is: one function whose name is the column and whose parameters are the activations it reads.

The function's docstring is its documentation everywhere: the first line is the meaning, the second paragraph the formula.
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
from typing import Any, TypeVar

from schemas.errors import ScanError, unknown
from schemas.pattern import Tensor

ACTIVATIONS: dict[str, str] = {
    "pattern": "attention pattern, asked by question (schemas.pattern)",
    "q": "queries [batch pos head d_head], after any rotation",
    "k": "keys [batch pos head d_head], repeated where query heads share them",
    "v": "values [batch pos head d_head], likewise",
    "z": "Σ_k A[q,k] v[k], before W_O [batch pos head d_head]",
    "resid_pre": "residual stream before the layer [batch pos d_model]",
    "resid_post": "residual stream after the layer [batch pos d_model]",
    "b_Q": "query bias [head d_head], zero where the model has none",
    "b_K": "key bias [head d_head], likewise, repeated where query heads share it",
    "W_O": "output projection [head d_head d_model]",
    "rotary": "whether the model rotates q and k by their positions",
    "tokens": "token ids [batch pos]",
    "labels": "positions that the input family labels, a mask [batch pos] by label",
    "copies": "for every query, the earlier keys that hold the same token",
    "successors": "for every query, the keys that follow an earlier copy of its token",
}
"""Every name a statistic may take as a parameter, with its TransformerLens axes."""


@dataclass(frozen=True)
class Statistic:
    """A registered statistic: the function and everything that is derived from it."""

    name: str
    compute: Callable[..., Tensor]
    parameters: tuple[str, ...]
    unit: str
    range: tuple[float, float]
    source: str
    meaning: str
    formula: str
    chance: bool
    defined: Callable[..., Tensor] | None
    standard: bool
    """Whether a scan measures it unless told otherwise."""

    @property
    def undefined_when(self) -> str:
        """When the column is NULL, in words; empty where it always has a value."""
        return "" if self.defined is None else f"NULL unless {_first_line(self.defined)}"

    @property
    def description(self) -> str:
        """Meaning, formula and NULL rule on one line, as it rides in Parquet and SQL."""
        formula = " ".join(self.formula.split())
        return " ".join(part for part in (self.meaning, f"{formula};", self.undefined_when) if part).rstrip(";")

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it; JSON has no infinity, so an open end of the range is null."""
        return {
            "unit": self.unit,
            "range": [bound if math.isfinite(bound) else None for bound in self.range],
            "source": self.source,
            "meaning": self.meaning,
            "formula": self.formula,
            "description": self.description,
            "chance": self.chance,
            "fingerprint": self.fingerprint,
        }

    @property
    def fingerprint(self) -> str:
        """Changes if and only if the formula's code changes; comments, layout and prose do not count."""
        return fingerprint_of(self.compute, *([self.defined] if self.defined else []))


STATISTICS: dict[str, Statistic] = {}

F = TypeVar("F", bound=Callable[..., Tensor])


def statistic(
    *,
    unit: str,
    range: tuple[float, float] = (0.0, math.inf),
    source: str,
    chance: bool = False,
    defined: Callable[..., Tensor] | None = None,
    standard: bool = True,
) -> Callable[[F], F]:
    """Register a function as a statistic of the `heads` table.

    It returns `[batch head]`, or `[batch]` where all heads of a layer share the value. `chance` also records what
    uniform attention would score (table `sequences`, column `chance_<name>`). `defined` takes activations too and says,
    per sequence, where the statistic has a value; elsewhere the column is NULL. What few scans need is not `standard`.
    """

    def register(function: F) -> F:
        name = function.__name__
        if name in STATISTICS:
            raise ValueError(f"statistic {name!r} is defined twice")
        parameters = activations_of(function, f"statistic {name!r}")
        meaning, formula = documentation_of(function, f"statistic {name!r}")
        STATISTICS[name] = Statistic(
            name, function, parameters, unit, range, source, meaning, formula, chance, defined, standard
        )
        return function

    return register


def select(wanted: str | Iterable[str]) -> tuple[Statistic, ...]:
    """The statistics of a scan, in registry order: `"standard"`, `"all"`, or names."""
    names = [s.name for s in STATISTICS.values() if wanted == "all" or (wanted == "standard" and s.standard)]
    names = names or list(wanted)
    for name in names:
        if name not in STATISTICS:
            raise ScanError(f"statistics: {unknown('statistic', name, STATISTICS)}")
    return tuple(s for s in STATISTICS.values() if s.name in names)


def evaluate(function: Callable[..., Tensor], activations: Mapping[str, Any]) -> Tensor:
    """Call a statistic, or its `defined` rule, with the activations it names."""
    return function(*(activations[name] for name in inspect.signature(function).parameters))


def activations_of(function: Callable[..., Any], what: str) -> tuple[str, ...]:
    """The activations that a function names as its parameters; `what` it is, for messages."""
    parameters = tuple(inspect.signature(function).parameters)
    for parameter in parameters:
        if parameter not in ACTIVATIONS:
            raise ValueError(f"{what}: {unknown('activation', parameter, ACTIVATIONS)}")
    return parameters


def documentation_of(function: Callable[..., Any], what: str) -> tuple[str, str]:
    """Meaning and formula: the first two paragraphs of a function's docstring."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    if len(paragraphs) < 2:
        raise ValueError(f"{what}: its docstring needs a first line (meaning) and a formula paragraph")
    return paragraphs[0], paragraphs[1]


def fingerprint_of(*functions: Callable[..., Any]) -> str:
    """Changes if and only if the functions' code changes; comments, layout and prose do not count."""
    return hashlib.sha256("\n".join(map(_code, functions)).encode()).hexdigest()[:12]


def _first_line(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "").split("\n")[0].rstrip(".")


def _code(function: Callable[..., Any]) -> str:
    """The code of a function and of the `schemas` functions it calls, without docstrings."""
    assert isinstance(function, FunctionType)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    called = [function.__globals__.get(name) for name in sorted(names - {function.__name__})]
    helpers = [_code(f) for f in called if isinstance(f, FunctionType) and f.__module__.startswith("schemas.")]
    closed_over = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return "\n".join([ast.unparse(tree), *closed_over, *helpers])
