"""Edits of weights: made in place, undone and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.interventions.intervention_registry import EDITABLE_EMBEDDINGS, Intervention, Part
from workers.model.loading import LoadedModel


def needs_bridge(model: LoadedModel, intervention: Intervention) -> bool:
    """Whether only the bridge sees an edit: of weights that it holds in copies, what it rotates, or
    what no module puts out.
    """
    shared = {p.untyped_storage().data_ptr() for p in model.bare.parameters()}
    weights = [
        weight for part in intervention.weights() for *_, weight in _weights(model, part)[:1]
    ]
    copies = any(w.untyped_storage().data_ptr() not in shared for w in weights)
    rotated = {part.target for part in intervention.parts} & {"q", "k"} and _rotates(model)
    hidden = any(model.hides(part.target) for part in intervention.parts)
    return copies or bool(rotated) or hidden


def _rotates(model: LoadedModel) -> bool:
    return any("hook_rot_" in name for name in model.bridge.hook_dict)


def check_targets(model: LoadedModel, intervention: Intervention) -> None:
    """Refuse an intervention that edits what a model does not have."""
    intervention.edits(model)
    for part in intervention.weights():
        part.bind(model)
        _weights(model, part)


@contextmanager
def edited_weights(model: LoadedModel, intervention: Intervention) -> Iterator[None]:
    """Apply edits of weights; afterwards restore them and verify their checksum."""
    saved: list[tuple[Tensor, Tensor, Part]] = []
    # All of them are made from the untouched model, before the first is applied.
    functions = [(part, part.bind(model)) for part in intervention.weights()]
    try:
        for part, function in functions:
            for layer, owner, weight in _weights(model, part):
                edited = function(weight, {"layer": layer})
                saved.append((weight, weight.clone(), part))
                weight.copy_(edited)
                if not torch.equal(getattr(owner, part.target), edited):
                    raise ModelError(f"{model.info.name}: {part.target} cannot be edited in place")
        yield
    finally:
        for weight, original, part in reversed(saved):
            weight.copy_(original)
            if _checksum(weight) != _checksum(original):
                raise ModelError(
                    f"{model.info.name}: {part.target} was not restored after {intervention.name}"
                )


def _weights(model: LoadedModel, part: Part) -> list[tuple[int | None, Any, Tensor]]:
    """The tensors that a part edits, with their layers and the modules that show them."""
    if part.target in EDITABLE_EMBEDDINGS:
        owners: list[tuple[int | None, Any]] = [(None, model.bridge)]
    else:
        layers = range(model.info.n_layers) if part.layer is None else [part.layer]
        owners = [(layer, model.bridge.blocks[layer].attn) for layer in layers]
    found: list[tuple[int | None, Any, Tensor]] = []
    for layer, owner in owners:
        weight = getattr(owner, part.target, None)
        if not isinstance(weight, Tensor):
            where = "" if layer is None else f"layer {layer} has "
            raise ModelError(
                f"{model.info.name}: {where}no {part.target} for {part.registered.name} to edit"
            )
        found.append((layer, owner, weight))
    return found


def _checksum(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
