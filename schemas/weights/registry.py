"""What a weight statistic is: one function whose name is the value of column `weight` and whose parameters are weights.

The function's docstring is its documentation, as for a profile: the first line is the meaning, the second paragraph the
formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from schemas.errors import ScanError, unknown
from schemas.pattern import Tensor
from schemas.profiles.registry import rule_of
from schemas.statistics.registry import documentation_of, fingerprint_of

Axis = Literal["dimension", "position", "none"]
"""What a weight statistic runs over: coordinates of the residual stream, positions, or nothing."""

LAYER_WEIGHTS: dict[str, str] = {
    "W_Q": "query projection [head d_model d_head]",
    "W_K": "key projection [head d_model d_head], repeated where query heads share it",
    "b_Q": "query bias [head d_head]",
    "b_K": "key bias [head d_head], repeated where query heads share it",
}
"""Weights that every layer has its own of."""

MODEL_WEIGHTS: dict[str, str] = {
    "W_pos": "position embeddings [pos d_model]",
    "effective": "effective positions EPE[j] = W_pos[j] + MLP_0(W_pos[j]), without a norm [pos d_model]",
}
"""Weights that a model has once. What a model has not makes the statistics that read it undefined."""


@dataclass(frozen=True)
class WeightStatistic:
    """A registered weight statistic: the function and everything that is derived from it."""

    name: str
    compute: Callable[..., Tensor]
    parameters: tuple[str, ...]
    axis: Axis
    unit: str
    source: str
    meaning: str
    formula: str
    defined: Callable[..., bool] | None

    @property
    def layered(self) -> bool:
        """Whether every layer has its own values."""
        return any(name in LAYER_WEIGHTS for name in self.parameters)

    @property
    def description(self) -> str:
        """Meaning, formula and when there are no rows on one line."""
        text = f"{self.meaning} {' '.join(self.formula.split())}"
        return text if self.defined is None else f"{text}; no rows unless {rule_of(self.defined)}"

    @property
    def record(self) -> dict[str, Any]:
        """What a run's manifest keeps of it."""
        return {
            "axis": self.axis,
            "unit": self.unit,
            "source": self.source,
            "meaning": self.meaning,
            "formula": self.formula,
            "description": self.description,
            "fingerprint": self.fingerprint,
        }

    @property
    def fingerprint(self) -> str:
        """Changes if and only if the formula's code changes."""
        return fingerprint_of(self.compute, *([self.defined] if self.defined else []))


WEIGHT_STATISTICS: dict[str, WeightStatistic] = {}

F = TypeVar("F", bound=Callable[..., Tensor])


def weight(*, axis: Axis, unit: str, source: str, defined: Callable[..., bool] | None = None) -> Callable[[F], F]:
    """Register a function as a statistic of the `weights` table.

    Its parameters are names of `LAYER_WEIGHTS` and `MODEL_WEIGHTS`, in float64. It returns `[head index]`, or `[head]` along
    axis "none", and without the axis of heads where heads share the values. `defined` takes `rotary` and says whether a
    model has the statistic; one that reads a weight that the model has not is undefined too. NaN, for 0/0, becomes NULL.
    """

    def register(function: F) -> F:
        name = function.__name__
        if name in WEIGHT_STATISTICS:
            raise ValueError(f"weight statistic {name!r} is defined twice")
        if axis not in get_args(Axis):
            raise ValueError(f"weight statistic {name!r}: {unknown('axis', axis, get_args(Axis))}")
        parameters = tuple(inspect.signature(function).parameters)
        for parameter in parameters:
            if parameter not in LAYER_WEIGHTS | MODEL_WEIGHTS:
                raise ValueError(
                    f"weight statistic {name!r}: {unknown('weight', parameter, LAYER_WEIGHTS | MODEL_WEIGHTS)}"
                )
        meaning, formula = documentation_of(function, f"weight statistic {name!r}")
        WEIGHT_STATISTICS[name] = WeightStatistic(
            name, function, parameters, axis, unit, source, meaning, formula, defined
        )
        return function

    return register


def select_weight_statistics(wanted: Iterable[str]) -> tuple[WeightStatistic, ...]:
    """The weight statistics of a scan, in registry order."""
    names = list(wanted)
    for name in names:
        if name not in WEIGHT_STATISTICS:
            raise ScanError(f"weight_statistics: {unknown('weight statistic', name, WEIGHT_STATISTICS)}")
    return tuple(s for s in WEIGHT_STATISTICS.values() if s.name in names)
