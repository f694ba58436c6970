"""The statistics of the `weights` table, a file per family; importing this package registers them
all.
"""

from headcount.schemas.files.tables import WEIGHTS
from headcount.schemas.formula_registries import WEIGHT_STATISTICS
from headcount.schemas.registry import import_files
from headcount.schemas.scans.kind import Kind

import_files(__name__, __path__)

KIND = Kind(
    field="weight_statistics",
    meaning="Statistics of the weights alone, in the weights table: a list of names. Default: "
    "none.",
    registry=WEIGHT_STATISTICS,
    table=WEIGHTS,
    computed="from the weights",
    named_by="weight",
    page="weights.md",
)
