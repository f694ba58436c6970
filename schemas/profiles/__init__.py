"""The profiles of the `profiles` table, a file per family; importing this package registers them
all.
"""

from collections.abc import Iterable

from headcount.schemas.errors import ScanError
from headcount.schemas.files import tables
from headcount.schemas.formula_registries import PROFILES
from headcount.schemas.formulas import Formula
from headcount.schemas.registry import import_files
from headcount.schemas.scans.kind import Kind, ScanFacts

import_files(__name__, __path__)

MOST_PAIRED = 256
"""Longest sequences whose pairs are stored: 256 · 257 / 2 = 32,896 pairs in every head."""


def _refuse_long_pairs(profiles: Iterable[Formula], scan: ScanFacts) -> None:
    """Long sequences have too many pairs of a query and a key to store."""
    for pair_profile in profiles:
        if pair_profile.axis == "pair" and scan.n_ctx > MOST_PAIRED:
            raise ScanError(
                f"profiles: {pair_profile.name} keeps every pair of a query and a key, so it "
                f"expects n_ctx <= {MOST_PAIRED}, got {scan.n_ctx}; lower n_ctx or leave it out"
            )


KIND = Kind(
    field="profiles",
    meaning="Profiles (means by key, query, lag, pair, dimension or component) of the profiles "
    "table: a list of names. Default: none.",
    registry=PROFILES,
    table=tables.PROFILES,
    computed="in every layer",
    averaged=True,
    named_by="profile",
    check=_refuse_long_pairs,
    page="profiles.md",
)
