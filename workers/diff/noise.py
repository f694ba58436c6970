"""How far a model is from itself if the same numbers are added up in another order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist, fmean, median_high, stdev

import torch

from headcount.workers.diff.passes import Place
from headcount.workers.diff.steps import Step

FALSE_ALARMS = 0.01  # chance of one or more among everything that is compared
LEAST = torch.finfo(torch.float32).eps  # relative size below which no difference is told apart
LEAST_SPREAD = 0.2  # of decimal logarithms: a floor seen once or twice has none


class NoiseFloor:
    """The largest difference of each kind of step from itself, over all layers."""

    def __init__(self) -> None:
        self.sizes: dict[Place, list[float]] = {}  # by place in a layer
        self.comparisons = 0  # that a false alarm could come from

    def note(self, steps: Iterable[Step]) -> None:
        """Take in steps of which both sides are the same model."""
        for step in steps:
            sizes = step.sizes()  # [batch pos head]
            self.comparisons += sizes.shape[2]
            largest = sizes.flatten(0, 1).max(0).values.clamp(min=LEAST)
            of_layer = step.place._replace(layer=None)
            self.sizes.setdefault(of_layer, []).extend(largest.tolist())

    def limit(self, place: Place) -> float:
        """The difference that noise stays below, in all comparisons together."""
        logs = [math.log10(size) for size in self.sizes.get(place._replace(layer=None), [LEAST])]
        spread = max(LEAST_SPREAD, stdev(logs) if len(logs) > 1 else 0.0)
        deviations = NormalDist().inv_cdf(1 - FALSE_ALARMS / max(1, self.comparisons))
        return 10 ** (fmean(logs) + deviations * spread)

    @property
    def middle(self) -> float:
        """The middle of all differences."""
        return median_high(size for sizes in self.sizes.values() for size in sizes)
