"""What a weight statistic is: a function of the weights alone.

Its name is a value of column `weight`. Its parameters are weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, get_args

from headcount.schemas.errors import ScanError
from headcount.schemas.files.tables import WEIGHTS
from headcount.schemas.formulas import Along, checked_axis, read_definition
from headcount.schemas.pattern import Tensor
from headcount.schemas.scans.kind import Kind, ScanFacts

Axis = Literal["dimension", "position", "earlier head", "none"]
"""What a weight statistic runs over: coordinates of the residual stream, positions, the heads of
earlier layers, or nothing.
"""

LAYER_WEIGHTS: dict[str, str] = {
    "W_Q": "query projection [head d_model d_head]",
    "W_K": "key projection [head d_model d_head], repeated where query heads share it",
    "b_Q": "query bias [head d_head]",
    "b_K": "key bias [head d_head], repeated where query heads share it",
    "W_O": "output projection [head d_head d_model]",
    "read_Q": "W_Q as the stream meets it, with the norm before it [head d_model d_head]",
    "read_K": "W_K as the stream meets it, repeated where query heads share it",
    "read_V": "W_V as the stream meets it, repeated where query heads share it",
    "earlier_read_V": "read_V of an earlier layer",
    "earlier_W_O": "W_O of an earlier layer",
    "copying_eigenvalues": "eigenvalues of W_E read_V W_O read_U that are not 0, read_U with the "
    "last norm: real parts and sizes [head d_head 2]",
}
"""Weights that each layer has, and what is made of them.

A norm multiplies each coordinate by a gain, and LayerNorm subtracts the mean of the coordinates
before. Both are linear, so a matrix that reads the stream takes them over: read = N W, with
N = (I - 11ᵀ/D) diag(gain), or diag(gain) if the norm keeps the mean. The division by the length of
the stream remains.
"""

MODEL_WEIGHTS: dict[str, str] = {
    "W_pos": "position embeddings [pos d_model]",
    "components": "W_pos, centred over coordinates and positions, along its three largest "
    "principal components [pos component]",
    "effective": "effective positions EPE[j] = W_pos[j] + MLP_0(W_pos[j]), without a norm [pos "
    "d_model]",
}
"""Weights that a model has once. A statistic is undefined if the model lacks a weight it reads."""


@dataclass(frozen=True, kw_only=True)
class WeightStatistic(Along):
    """A registered weight statistic: values of column `weight`."""

    @property
    def layered(self) -> bool:
        """Whether every layer has its own values."""
        return any(name in LAYER_WEIGHTS for name in self.parameters)


WEIGHT_STATISTICS: dict[str, WeightStatistic] = {}

P = ParamSpec("P")


def weight(
    *,
    axis: Axis,
    unit: str,
    source: str,
    defined: Callable[..., bool] | None = None,
    of_directions: bool = False,
) -> Callable[[Callable[P, Tensor]], Callable[P, Any]]:
    """Register a function as a statistic of the table `weights`.

    Its parameters are names of `LAYER_WEIGHTS` and `MODEL_WEIGHTS`, in float64. It returns
    `[head index]`, or `[head]` along axis "none". If heads share the values, the axis of heads is
    left out.

    defined: a rule that takes `rotary` and says whether a model has the statistic. A statistic is
    also undefined if the model lacks a weight that it reads.
    of_directions: it reads only directions, as a cosine does. Then it is NULL too if one of its
    vectors is zero.
    """

    def register(function: Callable[P, Tensor]) -> Callable[P, Any]:
        name = function.__name__
        fields = read_definition(
            function, "weight statistic", WEIGHT_STATISTICS, "weight", LAYER_WEIGHTS | MODEL_WEIGHTS
        )
        fields["axis"] = checked_axis(axis, get_args(Axis), f"weight statistic {name!r}")
        WEIGHT_STATISTICS[name] = WeightStatistic(
            **fields, unit=unit, source=source, defined=defined, of_directions=of_directions
        )
        return function

    return register


def _refuse_processed_weights(_: Iterable[WeightStatistic], scan: ScanFacts) -> None:
    """Weight statistics describe trained weights, and folded weights are not the trained ones."""
    if scan.weight_processing != "raw":
        raise ScanError(
            "weight_statistics: these are of the weights as trained, so they expect "
            f"weight_processing = 'raw', got {scan.weight_processing!r}; leave them out or set "
            "weight_processing = 'raw'"
        )


KIND = Kind(
    field="weight_statistics",
    word="weight statistic",
    meaning="Statistics of the weights alone, in the weights table: a list of names. Default: "
    "none.",
    registry=WEIGHT_STATISTICS,
    table=WEIGHTS,
    computed="from the weights",
    named_by="weight",
    check=_refuse_processed_weights,
    page="weights.md",
    introduction="""\
# Weight statistics

What the untouched weights say without any input, named in a scan's `weight_statistics`: rows of the
table `weights`, in float64, written once per run. This page is generated from
`schemas/weight_statistics/` by `make docs`.

Where an effective position EPE is read, MLP_0 takes W_pos[j] without the norm before it.
""",
)
