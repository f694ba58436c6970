"""The statistics of the `weights` table, a file per family; importing this package registers them
all.
"""

from collections.abc import Iterable

from headcount.schemas.errors import ScanError
from headcount.schemas.files.tables import WEIGHTS
from headcount.schemas.formula_registries import WEIGHT_STATISTICS
from headcount.schemas.formulas import Formula
from headcount.schemas.registry import import_files
from headcount.schemas.scans.kind import Kind, ScanFacts

import_files(__name__, __path__)


def _refuse_processed_weights(_: Iterable[Formula], scan: ScanFacts) -> None:
    """Weight statistics describe trained weights, and folded weights are not the trained ones."""
    if scan.weight_processing != "raw":
        raise ScanError(
            "weight_statistics: these are of the weights as trained, so they expect "
            f"weight_processing = 'raw', got {scan.weight_processing!r}; leave them out or set "
            "weight_processing = 'raw'"
        )


KIND = Kind(
    field="weight_statistics",
    meaning="Statistics of the weights alone, in the weights table: a list of names. Default: "
    "none.",
    registry=WEIGHT_STATISTICS,
    table=WEIGHTS,
    computed="from the weights",
    named_by="weight",
    check=_refuse_processed_weights,
    page="weights.md",
)
