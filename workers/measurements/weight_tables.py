"""The `weights` table: statistics of untouched weights, which need no input."""

import copy
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import torch
from torch import Tensor, nn

from headcount.schemas.errors import MeasureError
from headcount.schemas.formula_kinds import LAYER_WEIGHTS, MODEL_WEIGHTS
from headcount.schemas.formulas import Formula, Kind, evaluate
from headcount.schemas.kinds import schema_of_rows
from headcount.schemas.measured_heads import MeasuredHeads
from headcount.schemas.scans.scan import Scan
from headcount.schemas.weight_statistics.geometry import centred
from headcount.workers.measurements.results import rows_by_name
from headcount.workers.model.circuit import effective_positions
from headcount.workers.model.model import Model

Weights = dict[str, Tensor]  # weights by the names that statistics read, float64
EARLIER_HEAD = "earlier head"  # the axis of statistics of pairs of heads
LARGE = 1e6  # size of the vectors that a norm is asked with: its ε is nothing beside their square
VOCABULARY_CHUNK = 8192  # tokens whose embeddings are held in float64 at a time


def tables_of_weights(model: Model, scan: Scan) -> dict[str, pa.Table]:
    """What a scan asks of the weights, by table."""
    heads = scan.measured_heads(model.info)
    with torch.inference_mode():
        return {
            kind.table.name: _weights_table(model, kind, scan.formulas(kind), heads)
            for kind in scan.kinds("from the weights")
        }


def _weights_table(
    model: Model, kind: Kind, statistics: Sequence[Formula], heads: MeasuredHeads
) -> pa.Table:
    """One row per statistic × layer × head × index; none if the model lacks a weight."""
    schema = schema_of_rows(kind, statistics)
    existing = [statistic for statistic in statistics if statistic.exists(model.rotary)]
    rows: dict[str, list[pa.Table]] = {statistic.name: [] for statistic in existing}
    for layer, earlier, weights in _weights_by_layer(model, existing, heads.layers):
        of_layer = MeasuredHeads(heads.n_heads, {layer: heads.by_layer[layer]})
        for statistic in existing:
            # A statistic of the whole model has one value, computed with the first layer.
            is_layered = any(name in LAYER_WEIGHTS for name in statistic.parameters)
            is_due = is_layered or layer == heads.layers[0]
            by_pair = statistic.axis == EARLIER_HEAD
            if (
                not is_due
                or by_pair != bool(earlier)
                or not weights.keys() >= {*statistic.parameters}
            ):
                continue
            values = evaluate(statistic.function, weights).cpu().numpy()
            axes = [] if statistic.axis == "none" else [statistic.axis.replace(" ", "_")]
            if values.ndim > len(axes):
                # All heads of a layer are computed at once; only the measured ones have rows.
                axes = ["head", *axes]
                values = values[of_layer.numbers[0]]
            if is_layered:
                axes = ["layer", *axes]
                values = values[None]
            columns = {"value": values}
            rows[statistic.name].append(
                rows_by_name(kind, statistic.name, axes, columns, of_layer, schema, **earlier)
            )
    tables = [table for of_statistic in rows.values() for table in of_statistic]
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _weights_by_layer(
    model: Model, statistics: Sequence[Formula], layers: Iterable[int]
) -> Iterator[tuple[int, dict[str, int], Weights]]:
    """What statistics read in each layer, and beside each earlier layer if one is about pairs.

    The second value is the number of the earlier layer by its column, empty without one.
    """
    names = {name for statistic in statistics for name in statistic.parameters}
    by_pair = any(statistic.axis == EARLIER_HEAD for statistic in statistics)
    model_weights = _model_weights(model, names.intersection(MODEL_WEIGHTS))
    if "copying_eigenvalues" in names:
        model_weights |= _token_product(model)
    _check_finite(model_weights, model.info.name)
    for layer in layers:
        layer_weights = _layer_weights(model, layer, names.intersection(LAYER_WEIGHTS))
        _check_finite(layer_weights, f"{model.info.name}: layer {layer}")
        if "copying_eigenvalues" in names:
            layer_weights |= _copying_eigenvalues(model, layer, model_weights)
        weights = model_weights | layer_weights
        yield layer, {}, weights
        for earlier_layer in range(layer) if by_pair else ():
            earlier = _layer_weights(model, earlier_layer, {"read_V", "W_O"})
            _check_finite(earlier, f"{model.info.name}: layer {earlier_layer}")
            both = {f"earlier_{name}": weight for name, weight in earlier.items()}
            yield layer, {"earlier_layer": earlier_layer}, weights | both


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
    embedding, unembedding = model.embedding(), model.unembedding()
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
    positions = model.positions()
    if not names or positions is None:
        return {}
    W_pos = positions.double()
    weights = {"W_pos": W_pos}
    if "effective" in names and model.knows_first_mlp():
        # Copies, because `double` would change the model's own MLP.
        first_mlps = [copy.deepcopy(mlp).double() for mlp in model.modules("first_mlp")]
        weights["effective"] = effective_positions(W_pos, first_mlps)
    if "components" in names and min(positions.shape) >= 3:
        # Coordinates [pos component] along the three largest principal components.
        deviations = centred(W_pos)
        deviations = deviations - deviations.mean(0)
        *_, axes = torch.linalg.svd(deviations, full_matrices=False)  # [component d_model]
        coordinates = deviations @ axes[:3].T
        # The sign of a component is arbitrary, so its largest coordinate is made positive.
        largest = coordinates.gather(0, coordinates.abs().argmax(0, keepdim=True))  # [1 component]
        weights["components"] = coordinates * largest.sign()
    return {name: weights[name] for name in names if name in weights}


def _check_finite(weights: Weights, where: str) -> None:
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise MeasureError(
                f"{where}: {name} is not finite; expected finite numbers: look at the weights, or "
                "leave out weight_statistics"
            )
