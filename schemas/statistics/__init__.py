"""The statistics of the `heads` table, a file per family; importing this package registers them
all.
"""

from schemas.formulas import evaluate
from schemas.statistics import (
    decomposition,
    diagonals,
    head_results,
    labels,
    matching,
    norms,
    residual,
    scores,
    shape,
    sink,
)
from schemas.statistics.statistic_registry import (
    LAYER_VALUES,
    STATISTICS,
    Statistic,
    select,
    statistic,
)

__all__ = [
    "LAYER_VALUES",
    "STATISTICS",
    "Statistic",
    "decomposition",
    "diagonals",
    "evaluate",
    "labels",
    "matching",
    "norms",
    "head_results",
    "residual",
    "scores",
    "select",
    "shape",
    "sink",
    "statistic",
]
