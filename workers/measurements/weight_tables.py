"""The `weights` table: statistics of untouched weights, which need no input."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from schemas.errors import MeasureError
from schemas.formulas import evaluate
from schemas.kind import Kind
from schemas.measured_heads import MeasuredHeads
from schemas.parquet import table_of
from schemas.scan import Scan
from schemas.weight_statistics import WeightStatistic
from schemas.weight_statistics.geometry import centred
from schemas.weight_statistics.weight_registry import LAYER_WEIGHTS, MODEL_WEIGHTS
from workers.model.circuit import effective_positions
from workers.model.model import Model

Weights = dict[str, Tensor]
"""Weights by the names that statistics read, float64."""


def tables_of_weights(model: Model, scan: Scan) -> dict[str, pa.Table]:
    """What a scan asks of the weights, by table."""
    return {
        kind.table.name: weights_table(
            model, kind, scan.formulas(kind), scan.measured_heads(model.info)
        )
        for kind in scan.kinds("from the weights")
    }


def weights_table(
    model: Model,
    kind: Kind[WeightStatistic],
    statistics: Sequence[WeightStatistic],
    heads: MeasuredHeads,
) -> pa.Table:
    """One row per statistic × layer × head × index, in that order.

    A statistic has no rows if the model does not have a weight that it reads.
    """
    existing = [statistic for statistic in statistics if statistic.exists(model.rotary)]
    values = _values(model, existing, heads)
    rows = [
        _rows(kind, statistic, torch.stack(values[statistic.name]).numpy(), heads)
        for statistic in existing
        if values[statistic.name]
    ]
    if not rows:
        return kind.table.schema().empty_table()
    return pa.concat_tables(rows).combine_chunks()


def _values(
    model: Model, statistics: Sequence[WeightStatistic], heads: MeasuredHeads
) -> dict[str, list[Tensor]]:
    """By statistic, its value in each measured layer, or one value for the whole model."""
    weight_names = {name for statistic in statistics for name in statistic.parameters}
    values: dict[str, list[Tensor]] = {statistic.name: [] for statistic in statistics}
    with torch.inference_mode():
        model_weights = _model_weights(model, weight_names.intersection(MODEL_WEIGHTS))
        _check_finite(model_weights, model.info.name)
        for layer in heads.layers:
            layer_weights = _layer_weights(model, layer, weight_names.intersection(LAYER_WEIGHTS))
            _check_finite(layer_weights, f"{model.info.name}: layer {layer}")
            weights = model_weights | layer_weights
            # A statistic of the whole model has one value, computed with the first layer.
            is_first_layer = layer == heads.layers[0]
            for statistic in statistics:
                has_its_weights = all(name in weights for name in statistic.parameters)
                if has_its_weights and (statistic.layered or is_first_layer):
                    values[statistic.name].append(evaluate(statistic.compute, weights).cpu())
    return values


def _layer_weights(model: Model, layer: int, names: Iterable[str]) -> Weights:
    """Those of a layer's weights that it has, repeated where query heads share them."""
    n_heads = model.info.n_heads
    weights = {name: model.layer_weight(layer, name) for name in names}
    return {
        name: weight.double().repeat_interleave(n_heads // len(weight), 0)
        for name, weight in weights.items()
        if weight is not None
    }


def _model_weights(model: Model, names: set[str]) -> Weights:
    """Those of the weights outside the layers that the model has."""
    positions = model.positions
    if not names or positions is None:
        return {}
    W_pos = positions.double()
    weights = {"W_pos": W_pos}
    if "effective" in names and not model.hides("mlp_out"):
        # Copies, because `double` would change the model's own MLP.
        first_mlps = [copy.deepcopy(mlp).double() for mlp in model.modules("mlp_out")[:1]]
        weights["effective"] = effective_positions(W_pos, first_mlps)
    if "components" in names and min(positions.shape) >= 3:
        weights["components"] = _components(W_pos)
    return {name: weights[name] for name in names if name in weights}


def _components(W_pos: Tensor) -> Tensor:
    """Coordinates `[pos component]` along the three largest principal components.

    The sign of a component is arbitrary, so its largest coordinate is made positive.
    """
    rows = centred(W_pos)
    deviations = rows - rows.mean(0)
    *_, axes = torch.linalg.svd(deviations, full_matrices=False)
    coordinates = deviations @ axes[:3].T
    largest = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True))
    return coordinates * largest.sign()


def _check_finite(weights: Weights, where: str) -> None:
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise MeasureError(
                f"{where}: {name} is not finite; expected finite numbers: look at the weights, or "
                "leave out weight_statistics"
            )


def _rows(
    kind: Kind[WeightStatistic],
    statistic: WeightStatistic,
    values: np.ndarray,
    heads: MeasuredHeads,
) -> pa.Table:
    """The rows of a statistic.

    Its values are `[layer]`, then `[head]` if it is of each head, then its own axis if it has one.
    They are of all heads of these layers. If it is not layered, one layer stands for all.
    """
    assert kind.named_by is not None
    own_axes = [] if statistic.axis == "none" else [statistic.axis]
    is_by_head = values.ndim == 2 + len(own_axes)
    axes = ["layer", "head", *own_axes] if is_by_head else ["layer", *own_axes]
    places = [place.ravel() for place in np.indices(values.shape)]
    indices = dict(zip(axes, places, strict=True))
    # All heads of a layer are computed at once; only the measured ones have rows.
    if is_by_head:
        is_measured = np.zeros((len(heads.layers), heads.n_heads), bool)
        for place, measured_heads in enumerate(heads.by_layer.values()):
            is_measured[place, list(measured_heads)] = True
        in_table = is_measured[indices["layer"], indices["head"]]
    else:
        in_table = np.ones(values.size, bool)
    indices["layer"] = np.array(heads.layers)[indices["layer"]]
    columns: dict[str, Any] = {
        **{axis: index[in_table] for axis, index in indices.items()},
        kind.named_by: [statistic.name] * int(in_table.sum()),
        "value": values.ravel()[in_table],
    }
    if not statistic.layered:
        del columns["layer"]
    return table_of(columns, kind.table.schema())
