"""What a profile is: one function whose name is the value of column `profile` and whose parameters are activations.

The function's docstring is its documentation, as for a statistic: the first line is the meaning, the second paragraph the
formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from schemas.errors import ScanError, unknown
from schemas.pattern import Tensor
from schemas.statistics.registry import activations_of, documentation_of, fingerprint_of

Axis = Literal["key", "query", "lag", "pair"]
"""What a profile runs over: keys, queries, lags d = q-k, or pairs of a query and a key k ≤ q."""

MOST_PAIRED = 64
"""Longest sequences whose pairs are kept: 64 · 65 / 2 = 2,080 of them in every head."""


@dataclass(frozen=True)
class Profile:
    """A registered profile: the function and everything that is derived from it."""

    name: str
    compute: Callable[..., Tensor]
    parameters: tuple[str, ...]
    axis: Axis
    unit: str
    source: str
    meaning: str
    formula: str
    defined: Callable[..., bool] | None

    @property
    def description(self) -> str:
        """Meaning, formula and when there are no rows on one line."""
        text = f"{self.meaning} {' '.join(self.formula.split())}"
        return text if self.defined is None else f"{text}; no rows unless {rule_of(self.defined)}"

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        return {
            "axis": self.axis,
            "unit": self.unit,
            "source": self.source,
            "meaning": self.meaning,
            "formula": self.formula,
            "description": self.description,
            "fingerprint": self.fingerprint,
        }

    @property
    def fingerprint(self) -> str:
        """Changes if and only if the formula's code changes."""
        return fingerprint_of(self.compute, *([self.defined] if self.defined else []))


PROFILES: dict[str, Profile] = {}

F = TypeVar("F", bound=Callable[..., Tensor])


def profile(*, axis: Axis, unit: str, source: str, defined: Callable[..., bool] | None = None) -> Callable[[F], F]:
    """Register a function as a profile of the `profiles` table.

    It returns `[batch head index]`, or `[batch index]` where all heads of a layer share the values; along axis "pair",
    `[batch head query key]`, of which the keys k ≤ q are kept. Every entry of every sequence must be a number: what has no
    value (a query with no such lag) is no entry. `defined` takes `rotary` and says whether a model has the profile at all.
    """

    def register(function: F) -> F:
        name = function.__name__
        if name in PROFILES:
            raise ValueError(f"profile {name!r} is defined twice")
        if axis not in get_args(Axis):
            raise ValueError(f"profile {name!r}: {unknown('axis', axis, get_args(Axis))}")
        parameters = activations_of(function, f"profile {name!r}")
        meaning, formula = documentation_of(function, f"profile {name!r}")
        PROFILES[name] = Profile(name, function, parameters, axis, unit, source, meaning, formula, defined)
        return function

    return register


def rule_of(defined: Callable[..., Any]) -> str:
    """What a `defined` rule says, in words."""
    return inspect.cleandoc(defined.__doc__ or "").partition("\n")[0].rstrip(".")


def select_profiles(wanted: Iterable[str], n_ctx: int) -> tuple[Profile, ...]:
    """The profiles of a scan, in registry order; those along pairs refuse long sequences."""
    names = list(wanted)
    for name in names:
        if name not in PROFILES:
            raise ScanError(f"profiles: {unknown('profile', name, PROFILES)}")
        if PROFILES[name].axis == "pair" and n_ctx > MOST_PAIRED:
            raise ScanError(
                f"profiles: {name} keeps every pair of a query and a key, so it expects n_ctx <= {MOST_PAIRED}, "
                f"got {n_ctx}; lower n_ctx or leave it out"
            )
    return tuple(p for p in PROFILES.values() if p.name in names)
