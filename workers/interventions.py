"""Edits of the model: a function whose one parameter names what it edits, and whose name is the value of `intervention`.

The parameter is a weight of the attention layers (`W_Q [head d_model d_head]`, `b_Q [head d_head]`, …) or an activation
(`resid_pre`, `q`, `k`, `v`, `attn_scores`, `pattern`, `z`, `resid_post`, axes as in `schemas.statistics.ACTIVATIONS`).
The function returns the edited tensor and leaves its argument alone; it is applied in every layer.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.errors import ModelError, ScanError, unknown
from workers.loading import LoadedModel

WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
ACTIVATIONS = ("resid_pre", "q", "k", "v", "attn_scores", "pattern", "z", "resid_post")


@dataclass(frozen=True)
class Intervention:
    """A registered intervention; `target` is empty where nothing is edited."""

    name: str
    edit: Callable[..., Tensor | None]
    target: str
    meaning: str


INTERVENTIONS: dict[str, Intervention] = {}


def intervention(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Register a function as an intervention."""
    parameters = list(inspect.signature(function).parameters)
    target = parameters[0] if parameters else ""
    if len(parameters) > 1 or target not in ("", *WEIGHTS, *ACTIVATIONS):
        raise ValueError(f"intervention {function.__name__!r}: {unknown('target', target, WEIGHTS + ACTIVATIONS)}")
    meaning = inspect.cleandoc(function.__doc__ or "").split("\n")[0]
    INTERVENTIONS[function.__name__] = Intervention(function.__name__, function, target, meaning)
    return function


@intervention
def none() -> None:
    """The untouched model."""


@intervention
def zero_query_bias(b_Q: Tensor) -> Tensor:
    """The query bias is set to zero (Ran-Milo et al. 2026, intervention b)."""
    return torch.zeros_like(b_Q)


@intervention
def zero_first_value(v: Tensor) -> Tensor:
    """The value vector at position 0 is set to zero, so that attention to the sink moves nothing."""
    edited = v.clone()
    edited[:, 0] = 0
    return edited


def find_intervention(name: str) -> Intervention:
    """The intervention of that name."""
    if name not in INTERVENTIONS:
        raise ScanError(f"interventions: {unknown('intervention', name, INTERVENTIONS)}")
    return INTERVENTIONS[name]


def needs_bridge(model: LoadedModel, intervention: Intervention) -> bool:
    """Whether only the bridge sees the edit: one of activations, or of weights that the bridge holds in copies."""
    if intervention.target not in WEIGHTS:
        return intervention.target != ""
    shared = {p.untyped_storage().data_ptr() for p in model.bare.parameters()}
    weight = getattr(model.bridge.blocks[0].attn, intervention.target, None)
    return isinstance(weight, Tensor) and weight.untyped_storage().data_ptr() not in shared


@contextmanager
def edited_weights(model: LoadedModel, intervention: Intervention) -> Iterator[None]:
    """Apply an edit of weights in every layer; afterwards restore them and verify their checksum."""
    if intervention.target not in WEIGHTS:
        yield
        return
    saved: list[tuple[Tensor, Tensor]] = []
    try:
        for layer in range(model.info.n_layers):
            weight = getattr(model.bridge.blocks[layer].attn, intervention.target, None)
            if not isinstance(weight, Tensor):
                raise ModelError(
                    f"{model.info.name}: layer {layer} has no {intervention.target} for {intervention.name} to edit"
                )
            edited = intervention.edit(weight)
            assert edited is not None
            saved.append((weight, weight.clone()))
            weight.copy_(edited)
            if not torch.equal(getattr(model.bridge.blocks[layer].attn, intervention.target), edited):
                raise ModelError(f"{model.info.name}: {intervention.target} of layer {layer} cannot be edited in place")
        yield
    finally:
        for weight, original in saved:
            weight.copy_(original)
            if _checksum(weight) != _checksum(original):
                raise ModelError(f"{model.info.name}: {intervention.target} was not restored after {intervention.name}")


def _checksum(weight: Tensor) -> str:
    return hashlib.sha256(weight.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
