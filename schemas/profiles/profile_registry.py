"""What a profile is: one function whose name is the value of column `profile` and whose parameters
are activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from schemas.errors import ScanError
from schemas.formulas import Along, checked_axis, chosen, described
from schemas.pattern import Tensor
from schemas.statistics.statistic_registry import LAYER_VALUES

Axis = Literal["key", "query", "lag", "pair"]
"""What a profile runs over: keys, queries, lags d = q-k, or pairs of a query and a key k ≤ q."""

MOST_PAIRED = 64
"""Longest sequences whose pairs are kept: 64 · 65 / 2 = 2,080 of them in every head."""


@dataclass(frozen=True, kw_only=True)
class Profile(Along):
    """A registered profile: values of column `profile`."""


PROFILES: dict[str, Profile] = {}

F = TypeVar("F", bound=Callable[..., Tensor])


def profile(
    *, axis: Axis, unit: str, source: str, defined: Callable[..., bool] | None = None
) -> Callable[[F], F]:
    """Register a function as a profile of the `profiles` table.

    It returns `[batch head index]`, or `[batch index]` where all heads of a layer share the values;
    along axis "pair", `[batch head query key]`, of which the keys k ≤ q are kept. Every entry of
    every sequence must be a number: what has no value (a query with no such lag) is no entry.
    `defined` takes `rotary` and says whether a model has the profile at all.
    """

    def register(function: F) -> F:
        name = function.__name__
        fields = described(function, "profile", PROFILES, "activation", LAYER_VALUES)
        fields["axis"] = checked_axis(axis, get_args(Axis), f"profile {name!r}")
        PROFILES[name] = Profile(**fields, unit=unit, source=source, defined=defined)
        return function

    return register


def select_curves(wanted: Iterable[str]) -> tuple[Profile, ...]:
    """The profiles that a scan keeps of every sequence, in registry order; those along pairs are
    too many numbers.
    """
    found = chosen(wanted, PROFILES, "curves", "profile")
    for name in (p.name for p in found if p.axis == "pair"):
        raise ScanError(
            f"curves: {name} has a number for every pair of a query and a key, too many to keep of every sequence; "
            "ask for it in profiles, which keep the mean"
        )
    return found


def select_profiles(wanted: Iterable[str], n_ctx: int) -> tuple[Profile, ...]:
    """The profiles of a scan, in registry order; those along pairs refuse long sequences."""
    found = chosen(wanted, PROFILES, "profiles", "profile")
    for name in (p.name for p in found if p.axis == "pair" and n_ctx > MOST_PAIRED):
        raise ScanError(
            f"profiles: {name} keeps every pair of a query and a key, so it expects n_ctx <= {MOST_PAIRED}, "
            f"got {n_ctx}; lower n_ctx or leave it out"
        )
    return found
