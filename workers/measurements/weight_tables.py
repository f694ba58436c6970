"""The `weights` table: statistics of untouched weights, which need no input."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from headcount.schemas.errors import MeasureError
from headcount.schemas.files.parquet import table_of
from headcount.schemas.formula_kinds import LAYER_WEIGHTS, MODEL_WEIGHTS
from headcount.schemas.formulas import Formula, Kind, evaluate
from headcount.schemas.scans.kinds import schema_of_rows
from headcount.schemas.scans.measured_heads import MeasuredHeads
from headcount.schemas.scans.scan import Scan
from headcount.schemas.weight_statistics.geometry import centred
from headcount.workers.model.circuit import effective_positions
from headcount.workers.model.model import Model

Weights = dict[str, Tensor]
"""Weights by the names that statistics read, float64."""

EARLIER_HEAD = "earlier head"
"""The axis of statistics of pairs of heads."""

LARGE = 1e6
"""Size of the vectors that a norm is asked with: its ε is nothing beside their square."""

VOCABULARY_CHUNK = 8192
"""Tokens whose embeddings are held in float64 at a time."""


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
    kind: Kind,
    statistics: Sequence[Formula],
    heads: MeasuredHeads,
) -> pa.Table:
    """One row per statistic × layer × head × index, in that order.

    A statistic has no rows if the model does not have a weight that it reads.
    """
    schema = schema_of_rows(kind, statistics)
    existing = [statistic for statistic in statistics if statistic.exists(model.rotary)]
    values = _values(model, existing, heads)
    rows: list[pa.Table] = []
    for statistic in existing:
        blocks = values[statistic.name]
        # The heads of one layer have more earlier heads than those of another.
        if statistic.axis == EARLIER_HEAD:
            rows += [_rows_of_pairs(kind, statistic, block, heads, schema) for block in blocks]
        elif blocks:
            stacked = torch.stack([block.values for block in blocks]).numpy()
            rows.append(_rows(kind, statistic, stacked, heads, schema))
    if not rows:
        return schema.empty_table()
    return pa.concat_tables(rows).combine_chunks()


class _Block(NamedTuple):
    """What a statistic is in a layer."""

    values: Tensor
    """`[head …]`, or without heads; `[head earlier_head]` by pair of heads."""
    layer: int
    earlier_layer: int | None = None


def _values(
    model: Model, statistics: Sequence[Formula], heads: MeasuredHeads
) -> dict[str, list[_Block]]:
    """By statistic, its value in each measured layer, or one value for the whole model.

    By pair of heads, there is a value for each earlier layer.
    """
    names = {name for statistic in statistics for name in statistic.parameters}
    values: dict[str, list[_Block]] = {statistic.name: [] for statistic in statistics}
    with torch.inference_mode():
        model_weights = _model_weights(model, names.intersection(MODEL_WEIGHTS))
        if "copying_eigenvalues" in names:
            model_weights |= _token_product(model)
        _check_finite(model_weights, model.info.name)
        for layer in heads.layers:
            layer_weights = _layer_weights(model, layer, names.intersection(LAYER_WEIGHTS))
            _check_finite(layer_weights, f"{model.info.name}: layer {layer}")
            if "copying_eigenvalues" in names:
                layer_weights |= _copying_eigenvalues(model, layer, model_weights)
            weights = model_weights | layer_weights
            # A statistic of the whole model has one value, computed with the first layer.
            is_first_layer = layer == heads.layers[0]
            for statistic in statistics:
                has_its_weights = all(name in weights for name in statistic.parameters)
                if has_its_weights and (_is_layered(statistic) or is_first_layer):
                    value = evaluate(statistic.function, weights).cpu()
                    values[statistic.name].append(_Block(value, layer))
            _add_pairs(model, layer, weights, statistics, values)
    return values


def _add_pairs(
    model: Model,
    layer: int,
    weights: Weights,
    statistics: Sequence[Formula],
    values: dict[str, list[_Block]],
) -> None:
    """Evaluate what runs over the heads of earlier layers, one earlier layer at a time."""
    by_pair = [statistic for statistic in statistics if statistic.axis == EARLIER_HEAD]
    for earlier_layer in range(layer) if by_pair else ():
        earlier = _layer_weights(model, earlier_layer, {"read_V", "W_O"})
        _check_finite(earlier, f"{model.info.name}: layer {earlier_layer}")
        both = weights | {f"earlier_{name}": weight for name, weight in earlier.items()}
        for statistic in by_pair:
            if all(name in both for name in statistic.parameters):
                value = evaluate(statistic.function, both).cpu()
                values[statistic.name].append(_Block(value, layer, earlier_layer))


def _layer_weights(model: Model, layer: int, names: Iterable[str]) -> Weights:
    """Those of a layer's weights that it has, repeated where query heads share them."""
    n_heads = model.info.n_heads
    weights: Weights = {}
    for name in names:
        raw = model.layer_weight(layer, name.replace("read_", "W_"))
        if raw is None:
            continue
        weight = raw.double().repeat_interleave(n_heads // len(raw), 0)  # [head …]
        if name.startswith("read_"):
            weight = _read_through(model.modules("normed"), layer, weight)
        if weight is not None:
            weights[name] = weight
    return weights


def _read_through(norms: Sequence[nn.Module], number: int, weight: Tensor) -> Tensor | None:
    """A matrix `[… d_model column]` with the linear part of the norm before it; None if the norm is
    not known.

    The norm is asked instead of read, because families keep gains in different ways.
    """
    if number >= len(norms):
        return None
    norm = copy.deepcopy(norms[number]).double()
    # Of mean 0 and mean square 1, so a norm keeps it but for its gain.
    signs = weight.new_ones(weight.shape[-2])
    signs[1::2] = -1
    signs -= signs.mean()
    signs /= signs.square().mean().sqrt()
    # Zeros show what the norm adds, signs its gain, a constant whether it subtracts the mean.
    probes = torch.stack([0 * signs, LARGE * signs, torch.full_like(signs, LARGE)])
    of_zero, of_signs, of_constant = norm(probes[None])[0].double()
    gain = (of_signs - of_zero) / signs  # [d_model]
    read = gain[:, None] * weight
    subtracts_mean = (of_constant - of_zero).abs().max() < 1e-3 * gain.abs().max()
    # x less its mean, times M, is x times M less the mean of M's rows.
    return read - read.mean(-2, keepdim=True) if subtracts_mean else read


def _token_product(model: Model) -> Weights:
    """`read_U W_E` `[d_model d_model]`, in pieces of the vocabulary; empty if it is not known."""
    embedding, unembedding = model.embedding, model.unembedding
    if embedding is None or unembedding is None:
        return {}
    shape = (unembedding.shape[0], embedding.shape[1])
    product = torch.zeros(shape, dtype=torch.float64, device=embedding.device)
    for first in range(0, len(embedding), VOCABULARY_CHUNK):
        tokens = slice(first, first + VOCABULARY_CHUNK)
        product += unembedding[:, tokens].double() @ embedding[tokens].double()
    read = _read_through(model.modules("normed_final"), 0, product)
    return {} if read is None else {"read_U W_E": read}


def _copying_eigenvalues(model: Model, layer: int, model_weights: Weights) -> Weights:
    """Real parts and sizes of the eigenvalues of `W_E read_V W_O read_U` that are not 0.

    AB and BA have the same eigenvalues but for zeros, so those of `W_O read_U W_E read_V` do.
    """
    weights = _layer_weights(model, layer, {"read_V", "W_O"})
    if len(weights) < 2 or "read_U W_E" not in model_weights:
        return {}
    # [head d_head d_head]
    product = weights["W_O"] @ model_weights["read_U W_E"] @ weights["read_V"]
    eigenvalues = torch.linalg.eigvals(product.cpu())
    return {"copying_eigenvalues": torch.stack([eigenvalues.real, eigenvalues.abs()], dim=-1)}


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
    # [component d_model], the largest first
    *_, axes = torch.linalg.svd(deviations, full_matrices=False)
    coordinates = deviations @ axes[:3].T
    largest = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True))  # [1 component]
    return coordinates * largest.sign()


def _check_finite(weights: Weights, where: str) -> None:
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise MeasureError(
                f"{where}: {name} is not finite; expected finite numbers: look at the weights, or "
                "leave out weight_statistics"
            )


def _rows(
    kind: Kind,
    statistic: Formula,
    values: np.ndarray,
    heads: MeasuredHeads,
    schema: pa.Schema,
) -> pa.Table:
    """The rows of a statistic.

    Its values are `[layer]`, then `[head]` if it is of each head, then its own axis if it has one.
    They are of all heads of these layers. If it is not layered, one layer stands for all.
    """
    assert kind.named_by is not None
    own_axes = [] if statistic.axis == "none" else [statistic.axis]
    is_by_head = values.ndim == 2 + len(own_axes)
    axes = ["layer", "head", *own_axes] if is_by_head else ["layer", *own_axes]
    # In the order of the memory.
    indices_of_axes = [index.ravel() for index in np.indices(values.shape)]
    indices = dict(zip(axes, indices_of_axes, strict=True))
    # All heads of a layer are computed at once; only the measured ones have rows.
    if is_by_head:
        is_measured = np.zeros((len(heads.layers), heads.n_heads), bool)
        for layer_index, measured_heads in enumerate(heads.by_layer.values()):
            is_measured[layer_index, list(measured_heads)] = True
        in_table = is_measured[indices["layer"], indices["head"]]
    else:
        in_table = np.ones(values.size, bool)
    indices["layer"] = np.array(heads.layers)[indices["layer"]]
    columns: dict[str, Any] = {
        **{axis: index[in_table] for axis, index in indices.items()},
        kind.named_by: [statistic.name] * int(in_table.sum()),
        "value": values.ravel()[in_table],
    }
    if not _is_layered(statistic):
        del columns["layer"]
    return table_of(columns, schema)


def _rows_of_pairs(
    kind: Kind,
    statistic: Formula,
    block: _Block,
    heads: MeasuredHeads,
    schema: pa.Schema,
) -> pa.Table:
    """The rows of the measured heads of a layer, each with every head of one earlier layer."""
    assert kind.named_by is not None
    measured = np.array(heads.by_layer[block.layer])
    values = block.values.numpy()[measured]  # [measured head, earlier head]
    later_head, earlier_head = (index.ravel() for index in np.indices(values.shape))
    columns: dict[str, Any] = {
        "layer": np.full(values.size, block.layer),
        "head": measured[later_head],
        "earlier_layer": np.full(values.size, block.earlier_layer),
        "earlier_head": earlier_head,
        kind.named_by: [statistic.name] * values.size,
        "value": values.ravel(),
    }
    return table_of(columns, schema)


def _is_layered(statistic: Formula) -> bool:
    """Whether every layer has its own values."""
    return any(name in LAYER_WEIGHTS for name in statistic.parameters)
