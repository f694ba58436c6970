"""What a profile is: a function with a value for each place on an axis, such as each key.

Its name is a value of column `profile`. Its parameters are activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, get_args

from headcount.schemas.errors import ScanError
from headcount.schemas.files import tables
from headcount.schemas.formulas import Along, checked_axis, read_definition
from headcount.schemas.pattern import Tensor
from headcount.schemas.scans.kind import Kind, ScanFacts
from headcount.schemas.statistics.statistic_registry import LAYER_VALUES

Axis = Literal[
    "key", "query", "lag", "pair", "dimension", "component", "pair of components", "candidate"
]
"""What a profile runs over.

Keys, queries, lags d = q-k, pairs of a query and a key k ≤ q, coordinates of the residual stream,
components of a head's queries, pairs of components i ≤ j, or the candidates of a search.
"""

PAIRED_AXES = ("pair", "pair of components")
"""Axes along which a profile is a matrix, of which one triangle is stored."""

MOST_PAIRED = 256
"""Longest sequences whose pairs are stored: 256 · 257 / 2 = 32,896 pairs in every head."""


@dataclass(frozen=True, kw_only=True)
class Profile(Along):
    """A registered profile: values of column `profile`."""


PROFILES: dict[str, Profile] = {}

P = ParamSpec("P")


def profile(
    *, axis: Axis, unit: str, source: str, defined: Callable[..., bool] | None = None
) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
    """Register a function as a profile of the table `profiles`.

    It returns `[batch head index]`, or `[batch index]` if all heads of a layer share the values.
    Along axis "pair" it returns `[batch head query key]`, of which the pairs k ≤ q are stored.
    Along axis "pair of components" it returns `[batch head i j]`, of which i ≤ j are stored.

    Every entry of every sequence must be a number. An entry that would have no value (a query with
    no such lag) must not be in the array. `defined` is a rule that takes `rotary` and says whether
    a model has the profile at all.
    """

    def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
        name = function.__name__
        fields = read_definition(function, "profile", PROFILES, "activation", LAYER_VALUES)
        fields["axis"] = checked_axis(axis, get_args(Axis), f"profile {name!r}")
        PROFILES[name] = Profile(**fields, unit=unit, source=source, defined=defined)
        return function

    return register


def _refuse_long_pairs(profiles: Iterable[Profile], scan: ScanFacts) -> None:
    """Long sequences have too many pairs of a query and a key to store."""
    for pair_profile in profiles:
        if pair_profile.axis == "pair" and scan.n_ctx > MOST_PAIRED:
            raise ScanError(
                f"profiles: {pair_profile.name} keeps every pair of a query and a key, so it "
                f"expects n_ctx <= {MOST_PAIRED}, got {scan.n_ctx}; lower n_ctx or leave it out"
            )


KIND = Kind(
    field="profiles",
    word="profile",
    meaning="Profiles (means by key, query, lag, pair, dimension or component) of the profiles "
    "table: a list of names. Default: none.",
    registry=PROFILES,
    table=tables.PROFILES,
    computed="in every layer",
    averaged=True,
    named_by="profile",
    check=_refuse_long_pairs,
    page="profiles.md",
    introduction="""\
# Profiles

Numbers along an axis, named in a scan's `profiles` and `curves`. The table `profiles` has their
mean and spread over the sequences of a shard, one row per layer × head × entry, which the view
`profile_means` merges. The table `curves` has the numbers of every sequence, as lists. Symbols:
[statistics.md](statistics.md). This page is generated from `schemas/profiles/` by `make docs`.
""",
)
