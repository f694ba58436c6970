"""The statistics of the `weights` table, a file per family; importing this package registers them
all.
"""

from schemas.weight_statistics import biases, geometry, position_vectors
from schemas.weight_statistics.weight_registry import (
    WEIGHT_STATISTICS,
    WeightStatistic,
    select_weight_statistics,
    weight,
)

__all__ = [
    "WEIGHT_STATISTICS",
    "WeightStatistic",
    "biases",
    "geometry",
    "position_vectors",
    "select_weight_statistics",
    "weight",
]
