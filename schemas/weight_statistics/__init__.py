"""The statistics of the `weights` table, a file per family; importing this package registers them
all.
"""

from headcount.schemas.weight_statistics import (
    biases,
    composition,
    copying,
    geometry,
    position_vectors,
)
from headcount.schemas.weight_statistics.weight_registry import (
    KIND,
    WEIGHT_STATISTICS,
    WeightStatistic,
    weight,
)

__all__ = [
    "KIND",
    "WEIGHT_STATISTICS",
    "WeightStatistic",
    "biases",
    "composition",
    "copying",
    "geometry",
    "position_vectors",
    "weight",
]
