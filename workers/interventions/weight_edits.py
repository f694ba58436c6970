"""Edits of weights: made in place, undone and verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from schemas.errors import ModelError
from workers.interventions.intervention_registry import EDITABLE_EMBEDDINGS, Intervention, Part
from workers.model.model import EditableWeight, Model


def needs_bridge(model: Model, intervention: Intervention) -> bool:
    """Whether only the bridge sees an edit: of weights that it holds in copies, what it rotates, or
    what no module puts out.
    """
    weights = [_weights(model, part)[0] for part in intervention.weights()]
    copies = any(not weight.in_bare for _, weight in weights)
    targets = {part.target for part in intervention.parts}
    rotated = model.rotary and not targets.isdisjoint({"q", "k"})
    return copies or rotated or any(model.hides(target) for target in targets)


def check_targets(model: Model, intervention: Intervention) -> None:
    """Refuse an intervention that edits what a model does not have."""
    intervention.edits(model)
    for part in intervention.weights():
        part.bind(model)
        _weights(model, part)


@contextmanager
def edited_weights(model: Model, intervention: Intervention) -> Iterator[None]:
    """Apply edits of weights; afterwards restore them and verify their checksum."""
    saved: list[tuple[Tensor, Tensor, Part]] = []
    # All of them are made from the untouched model, before the first is applied.
    functions = [(part, part.bind(model)) for part in intervention.weights()]
    try:
        for part, function in functions:
            for layer, weight in _weights(model, part):
                edited = function(weight.tensor, {"layer": layer})
                saved.append((weight.tensor, weight.tensor.clone(), part))
                weight.tensor.copy_(edited)
                if not torch.equal(weight.read(), edited):
                    raise ModelError(f"{model.info.name}: {part.target} cannot be edited in place")
        yield
    finally:
        for weight, original, part in reversed(saved):
            weight.copy_(original)
            if _checksum(weight) != _checksum(original):
                raise ModelError(
                    f"{model.info.name}: {part.target} was not restored after {intervention.name}"
                )


def _weights(model: Model, part: Part) -> list[tuple[int | None, EditableWeight]]:
    """The weights that a part edits, with their layers."""
    layers: Iterable[int | None] = range(model.info.n_layers)
    if part.target in EDITABLE_EMBEDDINGS:
        layers = [None]
    elif part.layer is not None:
        layers = [part.layer]
    weights: list[tuple[int | None, EditableWeight]] = []
    for layer in layers:
        weight = model.editable_weight(part.target, layer)
        if weight is None:
            where = "" if layer is None else f"layer {layer} has "
            raise ModelError(
                f"{model.info.name}: {where}no {part.target} for {part.registered.name} to edit"
            )
        weights.append((layer, weight))
    return weights


def _checksum(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
