"""A step of two models, both given the same, and the passes in which steps are compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from headcount.workers.diff.passes import (
    JOINT,
    NOTHING,
    OWN_Z,
    Place,
    built,
    parts_of,
    quantity_of,
    run_visited,
)
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.bare_modules import ATTENTION, PROJECTIONS, child_of
from headcount.workers.model.model import Model

LEFT = 0.05  # share of a difference that an explanation may leave

IN_HEADS = ("q", "k", "v", "z", "QK norm", "rotation", "pattern", OWN_Z)

OUTPUTS = (*PROJECTIONS["O"], "c_proj")
"""Names of modules that project z out of the attention."""


@dataclass(frozen=True)
class Step:
    """What two models, A and B, make at a place of what A was given."""

    place: Place
    models: tuple[Model, Model]
    ours: Tensor  # by A: `[batch pos head d]`
    theirs: Tensor  # by B
    heads: tuple[int, ...] = ()  # that differ; empty if there are no heads

    def sizes(self) -> Tensor:
        """The difference relative to ours `[batch pos head]`, or to ours at a middle position."""
        difference, size = (self.theirs - self.ours).norm(dim=-1), self.ours.norm(dim=-1)
        middle = size.flatten(0, 1).median(0).values
        return difference / torch.maximum(size, middle).clamp(min=1e-30)

    def by_head(self) -> Step:
        """The same where heads show: of the attention's output, a sum, they do in the weights."""
        is_output = self.place.module.rpartition(".")[2] in OUTPUTS
        if self.place.quantity != "attention output" or not is_output or self.weights is None:
            return self
        # PyTorch stores `[out in]`, Conv1D of transformers `[in out]`.
        weights = [w.T if type(self.modules[0]) is nn.Linear else w for w in self.weights]
        n_heads = self.models[0].info.n_heads
        if weights[0].shape[0] % n_heads > 0:
            return self
        ours, theirs = (w.unflatten(0, (n_heads, -1)).transpose(0, 1)[None] for w in weights)
        return replace(self, ours=ours, theirs=theirs)  # [1 d_v head d_model]

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The layer in both models; none outside of the layers."""
        layer = self.place.layer
        return [] if layer is None else [model.blocks[layer] for model in self.models]

    @cached_property
    def facts(self) -> list[AttentionFacts | None]:
        """What the layer's attention is in both models."""
        layer = self.place.layer
        return [None if layer is None else model.facts(layer) for model in self.models]

    @cached_property
    def modules(self) -> list[nn.Module | None]:
        """The module of both models that makes it, or is given it."""
        place = self.place
        if place.layer is None:
            return [_outside_module(model, place.quantity) for model in self.models]
        if place.module:
            return [parts_of(block).get(place.module) for block in self.blocks]
        # q, k and v that one module makes, or one each.
        names = (*JOINT, *PROJECTIONS.get(place.quantity.upper(), ()))
        attentions = [child_of(block, ATTENTION) for block in self.blocks]
        return [each and child_of(each, names) for each in attentions]

    def parameters(self, name: str) -> list[Tensor | None]:
        """A parameter of the module in both models."""
        return [None if module is None else module._parameters.get(name) for module in self.modules]

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor] | None:
        """The weight of the module in both models, if they differ and have one shape."""
        ours, theirs = self.parameters("weight")
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.equal(theirs):
            return None
        return ours, theirs

    def fits(self, predicted: Tensor) -> bool:
        """Whether what is predicted from ours explains theirs."""
        return _explains(predicted, self.ours, self.theirs)

    def fits_weight(self, predicted: Tensor) -> bool:
        """Whether what is predicted from our weight explains theirs."""
        return self.weights is not None and _explains(predicted, *self.weights)

    def has_weight_of(self, module: nn.Module) -> bool:
        """Whether B has the weight of another module of A."""
        weight = module._parameters.get("weight")
        if weight is None or self.weights is None or weight.shape != self.weights[0].shape:
            return False
        # The first row is soon compared, and tells of most weights.
        first = [each[:1] for each in (weight, *self.weights)]
        return _explains(*first) and self.fits_weight(weight)


def steps_between(
    a: Model, b: Model, tokens: Tensor, inside: Collection[int] = (), *, as_noise: bool = False
) -> list[Step]:
    """The steps of B, each from what A was given: whole layers, or those in the layers `inside`.

    What B puts out is replaced by what A put out, so a step hands its difference to no other.
    `as_noise`: B has another batch, one thread, and another order of summation.
    """
    record: dict[Place, Tensor] = {}
    steps: list[Step] = []

    def note(place: Place, tensor: Tensor) -> Tensor:
        # What a module computes in several calls is no one step.
        record[place] = NOTHING if place in record else tensor.clone()
        return tensor

    def compare(place: Place, theirs: Tensor) -> Tensor:
        ours = record.get(place, NOTHING)[: len(theirs)]
        if ours.shape != theirs.shape:
            return theirs
        # Of the layers before those that are looked into, nothing is asked.
        if not inside or place.layer in inside:
            d_head = a.info.d_head if place.quantity in IN_HEADS else None
            step = Step(place, (a, b), _in_heads(ours, d_head), _in_heads(theirs.clone(), d_head))
            steps.append(step)
        return theirs if place.quantity == OWN_Z else ours.clone()

    run_visited(a, tokens, note, inside)
    if as_noise:
        with one_thread():
            run_visited(b, tokens[:1], compare, inside, built)
    else:
        run_visited(b, tokens, compare, inside)
    return steps


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, PyTorch adds up on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def windows_of(model: Model) -> list[int | None]:
    """The window of each layer; None if there is none."""
    facts = map(model.facts, range(model.info.n_layers))
    return [None if of_layer is None else of_layer.window for of_layer in facts]


def _explains(predicted: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    is_alike = predicted.shape == theirs.shape
    return is_alike and bool((theirs - predicted).norm() <= LEFT * (theirs - ours).norm())


def _in_heads(tensor: Tensor, d_head: int | None) -> Tensor:
    """`[batch pos d]` as `[batch pos head d_head]`, of one head where there are none."""
    if tensor.dim() == 4:
        return tensor
    if d_head is None or tensor.shape[-1] % d_head > 0:
        return tensor[:, :, None]
    return tensor.unflatten(-1, (-1, d_head))


def _outside_module(model: Model, quantity: str) -> nn.Module | None:
    """The module that makes a step outside of the layers."""
    if quantity == "final norm":
        inside = {id(module) for block in model.blocks for module in block.modules()}
        outside = [item for item in model.bare.named_modules() if id(item[1]) not in inside]
        norms = [m for name, m in outside if quantity_of(name.rpartition(".")[2], False) == "norm"]
        return norms[-1] if norms else None
    name = {"embedding": "embed", "unembedding": "unembed"}.get(quantity)
    return None if name is None else model.modules(name)[0]
