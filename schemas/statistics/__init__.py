"""The statistics of the `heads` table, a file per family; importing this package registers them
all.
"""

from headcount.schemas.files.tables import HEADS
from headcount.schemas.formula_registries import STATISTICS
from headcount.schemas.registry import import_files
from headcount.schemas.scans.kind import Kind

import_files(__name__, __path__)

KIND = Kind(
    field="statistics",
    meaning="Columns of the heads table: standard, all, or a list of names, in which these words "
    "and options may stand, as in distant_mass(4,64).",
    registry=STATISTICS,
    table=HEADS,
    computed="in every layer",
    sets={"standard": lambda statistic: statistic.standard, "all": lambda _: True},
    default="standard",
    page="statistics.md",
)
