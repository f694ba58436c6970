"""The profiles of the `profiles` table, a file per family; importing this package registers them
all.
"""

from headcount.schemas.files import tables
from headcount.schemas.formula_registries import PROFILES
from headcount.schemas.registry import import_files
from headcount.schemas.scans.kind import Kind

import_files(__name__, __path__)

KIND = Kind(
    field="profiles",
    meaning="Profiles (means by key, query, lag, pair, dimension or component) of the profiles "
    "table: a list of names. Default: none.",
    registry=PROFILES,
    table=tables.PROFILES,
    computed="in every layer",
    averaged=True,
    named_by="profile",
    page="profiles.md",
)

CURVES_KIND = Kind(
    field="curves",
    meaning="Profiles stored for each sequence instead of averaged, list columns of the curves "
    "table: a list of names. Default: none. Pair profiles are not allowed.",
    registry=PROFILES,
    table=tables.CURVES,
    computed="in every layer",
    page="profiles.md",
)
