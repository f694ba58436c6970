"""What a profile is: one function whose name is the value of column `profile` and whose parameters
are activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, get_args

from schemas import tables
from schemas.errors import ScanError
from schemas.formulas import Along, checked_axis, read_definition
from schemas.kind import Kind, ScanFacts
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

P = ParamSpec("P")


def profile(
    *, axis: Axis, unit: str, source: str, defined: Callable[..., bool] | None = None
) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
    """Register a function as a profile of the `profiles` table.

    It returns `[batch head index]`, or `[batch index]` where all heads of a layer share the values;
    along axis "pair", `[batch head query key]`, of which the keys k ≤ q are kept. Every entry of
    every sequence must be a number: what has no value (a query with no such lag) is no entry.
    `defined` takes `rotary` and says whether a model has the profile at all.
    """

    def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
        name = function.__name__
        fields = read_definition(function, "profile", PROFILES, "activation", LAYER_VALUES)
        fields["axis"] = checked_axis(axis, get_args(Axis), f"profile {name!r}")
        PROFILES[name] = Profile(**fields, unit=unit, source=source, defined=defined)
        return function

    return register


def _refuse_long_pairs(profiles: Iterable[Profile], scan: ScanFacts) -> None:
    """Pairs of a query and a key are too many numbers where sequences are long."""
    for p in profiles:
        if p.axis == "pair" and scan.n_ctx > MOST_PAIRED:
            raise ScanError(
                f"profiles: {p.name} keeps every pair of a query and a key, so it expects "
                f"n_ctx <= {MOST_PAIRED}, got {scan.n_ctx}; lower n_ctx or leave it out"
            )


KIND = Kind(
    field="profiles",
    word="profile",
    meaning="Profiles (means by key, query, lag or pair) of the profiles table: a list of names. "
    "Default: none.",
    registry=PROFILES,
    table=tables.PROFILES,
    computed="in every layer",
    averaged=True,
    named_by="profile",
    check=_refuse_long_pairs,
    page="profiles.md",
    introduction="""\
# Profiles

Numbers along an axis, named in a scan's `profiles` and `curves`. The table `profiles` keeps their mean and spread over the
sequences of a shard, one row per layer × head × entry; the view `profile_means` merges shards. The table `curves` keeps them of
every sequence, as lists. Symbols are those of [statistics.md](statistics.md). This page is generated from the functions in
`schemas/profiles/` by `make docs`.
""",
)
