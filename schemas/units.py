"""The values of formulas: the type that a formula returns says their unit and their bounds.

`def sink_mass(pattern: Pattern) -> Probability` is a tensor of probabilities.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_args

if TYPE_CHECKING:
    from headcount.schemas.pattern import Tensor


@dataclass(frozen=True)
class Values:
    """The unit of numbers, and the bounds between which they lie."""

    unit: str
    low: float = 0
    high: float = math.inf


ANY = (-math.inf, math.inf)

AbsoluteValue = Annotated["Tensor", Values("absolute value")]
Component = Annotated["Tensor", Values("component", *ANY)]
Coordinate = Annotated["Tensor", Values("coordinate", *ANY)]
Cosine = Annotated["Tensor", Values("cosine", -1, 1)]
Dimensions = Annotated["Tensor", Values("dimensions")]
DotProduct = Annotated["Tensor", Values("dot product", *ANY)]
FrobeniusNorm = Annotated["Tensor", Values("Frobenius norm")]
Keys = Annotated["Tensor", Values("keys")]
Length = Annotated["Tensor", Values("length along a direction", *ANY)]
Logit = Annotated["Tensor", Values("logit", *ANY)]
Logits = Annotated["Tensor", Values("logits", *ANY)]
LogitSpread = Annotated["Tensor", Values("logits")]
Nats = Annotated["Tensor", Values("nats")]
NatsPerToken = Annotated["Tensor", Values("nats per token", *ANY)]  # a difference of mean losses
Norm = Annotated["Tensor", Values("euclidean norm")]
Position = Annotated["Tensor", Values("position")]
Probability = Annotated["Tensor", Values("probability", 0, 1)]
Rank = Annotated["Tensor", Values("rank", 1)]
ScaledLogits = Annotated["Tensor", Values("logits times √d_head", *ANY)]
"""Scores before they are divided by √d_head."""
ScaledLogitLead = Annotated["Tensor", Values("logits times √d_head")]
Share = Annotated["Tensor", Values("share", -1, 1)]
ShareOfMaximum = Annotated["Tensor", Values("share of the maximum", 0, 1)]
ShareOfNorm = Annotated["Tensor", Values("share of the norm", 0, 1)]
ShareOfNorms = Annotated["Tensor", Values("share of the sum of norms", 0, 1)]
ShareOfQueries = Annotated["Tensor", Values("share of queries", 0, 1)]
ShareOfSquaredNorm = Annotated["Tensor", Values("share of the squared norm", 0, 1)]
ShareOfTokens = Annotated["Tensor", Values("share of tokens", 0, 1)]
SquaredComponent = Annotated["Tensor", Values("squared component", *ANY)]
Tokens = Annotated["Tensor", Values("tokens")]


@cache
def values_of(function: Callable[..., Any]) -> Values:
    """The values that a function returns; raises `ValueError` if its type does not say them.

    Cached, because every column of every batch is held to its bounds.
    """
    for part in get_args(inspect.signature(function, eval_str=True).return_annotation):
        if isinstance(part, Values):
            return part
    raise ValueError(
        f"{function.__name__}: expected a type of schemas.units, which says the unit, as what it "
        "returns"
    )
