"""The statistics of the `heads` table, a file per family; importing this package registers them
all.
"""

from headcount.schemas.formulas import evaluate
from headcount.schemas.statistics import (
    decomposition,
    diagonals,
    head_results,
    labels,
    matching,
    mixing,
    norms,
    reach,
    residual,
    scores,
    shape,
    sink,
)
from headcount.schemas.statistics.statistic_registry import (
    KIND,
    LAYER_VALUES,
    STATISTICS,
    Statistic,
    statistic,
)

__all__ = [
    "KIND",
    "LAYER_VALUES",
    "STATISTICS",
    "Statistic",
    "decomposition",
    "diagonals",
    "evaluate",
    "labels",
    "matching",
    "mixing",
    "norms",
    "reach",
    "head_results",
    "residual",
    "scores",
    "shape",
    "sink",
    "statistic",
]
