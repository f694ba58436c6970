"""Curves: profiles that are stored for every sequence, as list columns of the table `curves`."""

from __future__ import annotations

from collections.abc import Iterable

from headcount.schemas.errors import ScanError
from headcount.schemas.files.tables import CURVES
from headcount.schemas.formula_registries import PROFILES
from headcount.schemas.formulas import Formula
from headcount.schemas.scans.kind import Kind, ScanFacts


def _refuse_pairs(curves: Iterable[Formula], _scan: ScanFacts) -> None:
    """Pair profiles have too many numbers to store for every sequence."""
    for curve in curves:
        if curve.axis == "pair":
            raise ScanError(
                f"curves: {curve.name} has a number for every pair of a query and a key, too many "
                "to keep of every sequence; ask for it in profiles, which keep the mean"
            )


KIND = Kind(
    field="curves",
    meaning="Profiles stored for each sequence instead of averaged, list columns of the curves "
    "table: a list of names. Default: none. Pair profiles are not allowed.",
    registry=PROFILES,
    table=CURVES,
    computed="in every layer",
    check=_refuse_pairs,
    page="profiles.md",
)
