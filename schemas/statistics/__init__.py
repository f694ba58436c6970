"""The statistics of the `heads` table, a file per family; importing this package registers them all."""

from schemas.statistics import matching, norms, scores, shape, sink
from schemas.statistics.registry import ACTIVATIONS, STATISTICS, Statistic, evaluate, select, statistic

__all__ = [
    "ACTIVATIONS",
    "STATISTICS",
    "Statistic",
    "evaluate",
    "matching",
    "norms",
    "scores",
    "select",
    "shape",
    "sink",
    "statistic",
]
