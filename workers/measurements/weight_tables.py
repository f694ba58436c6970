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
    """One row per statistic × layer × head × index, in that order; none if the model does not have
    the weights.
    """
    possible = [s for s in statistics if s.exists(model.rotary)]
    read = {name for s in possible for name in s.parameters}
    values: dict[str, list[Tensor]] = {s.name: [] for s in possible}
    with torch.inference_mode():
        shared = _finite(_model_weights(model, read.intersection(MODEL_WEIGHTS)), model.info.name)
        for layer in heads.layers:
            own = _layer_weights(model, layer, read.intersection(LAYER_WEIGHTS))
            weights = shared | _finite(own, f"{model.info.name}: layer {layer}")
            for s in possible:
                readable = all(name in weights for name in s.parameters)
                if readable and (s.layered or layer == heads.layers[0]):
                    values[s.name].append(evaluate(s.compute, weights).cpu())
    rows = [
        _rows(kind, s, torch.stack(values[s.name]).numpy(), heads)
        for s in possible
        if values[s.name]
    ]
    return pa.concat_tables(rows or [kind.table.schema().empty_table()]).combine_chunks()


def _layer_weights(model: Model, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of a layer's weights that it has, repeated where query heads share them."""
    n_heads = model.info.n_heads
    weights = {name: model.layer_weight(layer, name) for name in names}
    return {
        name: weight.double().repeat_interleave(n_heads // len(weight), 0)
        for name, weight in weights.items()
        if weight is not None
    }


def _model_weights(model: Model, names: set[str]) -> dict[str, Tensor]:
    """Those of the weights outside the layers that the model has."""
    positions = model.positions
    if not names or positions is None:
        return {}
    found = {"W_pos": positions.double()}
    mlps = model.modules("mlp_out")[:1]
    if "effective" in names and not model.hides("mlp_out"):
        found["effective"] = effective_positions(
            found["W_pos"], [copy.deepcopy(mlp).double() for mlp in mlps]
        )
    if "components" in names and min(positions.shape) >= 3:
        found["components"] = _components(found["W_pos"])
    return {name: found[name] for name in names if name in found}


def _components(W_pos: Tensor) -> Tensor:
    """Coordinates `[pos component]` along the three largest principal components, of each of which
    the largest is positive.
    """
    rows = centred(W_pos)
    rows = rows - rows.mean(0)
    *_, axes = torch.linalg.svd(rows, full_matrices=False)
    found = rows @ axes[:3].T
    largest = found.gather(0, found.abs().argmax(0, keepdim=True))
    return found * largest.sign()


def _finite(weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise MeasureError(
                f"{where}: {name} is not finite; expected finite numbers: look at the weights, or "
                "leave out weight_statistics"
            )
    return weights


def _rows(
    kind: Kind[WeightStatistic],
    statistic: WeightStatistic,
    values: np.ndarray,
    heads: MeasuredHeads,
) -> pa.Table:
    """The rows of a statistic whose values are `[layer head index]`, one layer standing for all if
    it is not layered. The values are of all heads of these layers.
    """
    assert kind.named_by is not None
    axes = ["layer", *(["head"] if values.ndim == 2 + (statistic.axis != "none") else [])]
    axes += [] if statistic.axis == "none" else [statistic.axis]
    at = dict(zip(axes, (a.ravel() for a in np.indices(values.shape)), strict=True))
    if "head" in at:
        measured = np.zeros((len(heads.layers), heads.n_heads), bool)
        for place, some in enumerate(heads.by_layer.values()):
            measured[place, list(some)] = True
        kept = measured[at["layer"], at["head"]]
    else:
        kept = np.ones(values.size, bool)
    at["layer"] = np.array(heads.layers)[at["layer"]]
    columns: dict[str, Any] = {
        **{axis: index[kept] for axis, index in at.items()},
        kind.named_by: [statistic.name] * int(kept.sum()),
        "value": values.ravel()[kept],
    }
    if not statistic.layered:
        del columns["layer"]
    return table_of(columns, kind.table.schema())
