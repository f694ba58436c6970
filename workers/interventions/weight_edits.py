"""Edits of weights: made in place, undone and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.interventions.intervention_registry import (
    EDITABLE_EMBEDDINGS,
    BoundIntervention,
    BoundPart,
)
from workers.model.loading import LoadedModel


def needs_bridge(model: LoadedModel, bound: BoundIntervention) -> str | None:
    """Why only the bridge sees an edit; none if the bare modules see it too."""
    names = _shared_parameters(model)
    for part in bound.weight_parts:
        weight = _weights(model, part)[0].tensor
        if weight.untyped_storage().data_ptr() not in names:
            return f"the modules do not share {part.target} with the bridge"
    for part in bound.activation_parts:
        if part.target in ("q", "k") and _rotates(model):
            return f"{part.target} is edited before its rotation"
        if model.hides(part.target):
            return f"no module puts out {part.target}"
    return None


def _rotates(model: LoadedModel) -> bool:
    return any("hook_rot_" in name for name in model.bridge.hook_dict)


def check_targets(model: LoadedModel, bound: BoundIntervention) -> None:
    """Refuse an intervention that edits what a model does not have."""
    bound.edits(model)
    for part in bound.weight_parts:
        part.function_for(model)
        _weights(model, part)


@contextmanager
def edited_weights(model: LoadedModel, bound: BoundIntervention) -> Iterator[None]:
    """Apply edits of weights; afterwards restore them and verify what the engines read."""
    edits: list[tuple[BoundPart, EditableWeight, Tensor]] = []
    # All of them are made from the untouched model, before the first is applied.
    functions = [(part, part.function_for(model)) for part in bound.weight_parts]
    readers = _readers(model, bound)
    before = {name: _checksum(read()) for name, read in readers.items()}
    try:
        for part, function in functions:
            for weight in _weights(model, part):
                edited = function(weight.tensor, {"layer": weight.layer})
                edits.append((part, weight, weight.tensor.clone()))
                weight.tensor.copy_(edited)
                if not torch.equal(getattr(weight.owner, part.target), edited):
                    raise ModelError(f"{model.info.name}: {part.target} cannot be edited in place")
        yield
    finally:
        for _, weight, original in reversed(edits):
            weight.tensor.copy_(original)
        for name, read in readers.items():
            if _checksum(read()) != before[name]:
                raise ModelError(
                    f"{model.info.name}: {name} was not restored after {bound.intervention}"
                )


@dataclass(frozen=True)
class EditableWeight:
    """A tensor that is edited in place."""

    layer: int | None
    owner: Any
    """The module that shows it."""
    tensor: Tensor


def _weights(model: LoadedModel, part: BoundPart) -> list[EditableWeight]:
    """The tensors that a part edits."""
    if part.target in EDITABLE_EMBEDDINGS:
        owners: list[tuple[int | None, Any]] = [(None, model.bridge)]
    else:
        layers = range(model.info.n_layers) if part.layer is None else [part.layer]
        owners = [(layer, model.bridge.blocks[layer].attn) for layer in layers]
    weights: list[EditableWeight] = []
    for layer, owner in owners:
        tensor = getattr(owner, part.target, None)
        if not isinstance(tensor, Tensor):
            where = "" if layer is None else f"layer {layer} has "
            raise ModelError(
                f"{model.info.name}: {where}no {part.target} for {part.registered.name} to edit"
            )
        weights.append(EditableWeight(layer, owner, tensor))
    return weights


def _shared_parameters(model: LoadedModel) -> dict[int, str]:
    """Names of the bare modules' parameters, by the place of their storage."""
    return {p.untyped_storage().data_ptr(): name for name, p in model.bare.named_parameters()}


def _readers(model: LoadedModel, bound: BoundIntervention) -> dict[str, Callable[[], Tensor]]:
    """Ways to what the engines read of the weights that are edited, each by its name.

    A weight is looked up anew with each call. The tensor that was edited would not tell whether the
    model still uses it.
    """
    names = _shared_parameters(model)
    readers: dict[str, Callable[[], Tensor]] = {}
    for part in bound.weight_parts:
        for weight in _weights(model, part):
            name = names.get(weight.tensor.untyped_storage().data_ptr())
            if name is not None:
                readers[name] = lambda name=name: model.bare.get_parameter(name)
            place = "" if weight.layer is None else f"layer {weight.layer}: "
            readers[place + part.target] = lambda weight=weight, part=part: getattr(
                weight.owner, part.target
            )
    return readers


def _checksum(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
