"""A step of two models, both given the same, and the passes in which steps are compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from headcount.workers.diff.passes import (
    JOINT,
    NOTHING,
    OWN_Z,
    Place,
    Side,
    parts_of,
    run_visited,
    swept,
    visit_logits,
)
from headcount.workers.model.attention_facts import Attend, AttentionFacts
from headcount.workers.model.bare_modules import ATTENTION, PROJECTIONS, child_of
from headcount.workers.model.model import Model

LEFT = 0.05  # share of a difference that an explanation may leave

IN_HEADS = ("q", "k", "v", "z", "QK norm", "rotation", "pattern", OWN_Z)

Record = dict[Place, Tensor]
"""What a model computes at each place of a pass."""


@dataclass(frozen=True)
class Step:
    """What two models, A and B, make at a place of what A was given."""

    place: Place
    models: tuple[Model, Model]
    ours: Tensor  # by A: `[batch pos head d]`
    theirs: Tensor  # by B
    z: Tensor | None = None  # that the module projects: `[batch pos head d_v]`; None if it does not
    heads: tuple[int, ...] = ()  # that differ; empty if there are no heads

    def sizes(self) -> Tensor:
        """The difference relative to ours `[batch pos head]`, or to ours at a middle position."""
        difference, size = (self.theirs - self.ours).norm(dim=-1), self.ours.norm(dim=-1)
        middle = size.flatten(0, 1).median(0).values
        return difference / torch.maximum(size, middle).clamp(min=1e-30)

    def by_contributions(self) -> Step:
        """What each head adds to the attention's output, in the place of the sum of all."""
        if self.z is None or self.weights_by_head is None:
            return self
        pair = [torch.einsum("bphd,hdm->bphm", self.z, heads) for heads in self.weights_by_head]
        return replace(self, ours=pair[0], theirs=pair[1])

    # What makes it

    @cached_property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The layer in both models; none outside of the layers."""
        layer = self.place.layer
        return () if layer is None else tuple(model.blocks[layer] for model in self.models)

    @cached_property
    def facts(self) -> tuple[AttentionFacts | None, ...]:
        """What the layer's attention is in both models."""
        layer = self.place.layer
        return tuple(None if layer is None else model.facts(layer) for model in self.models)

    @cached_property
    def modules(self) -> list[nn.Module | None]:
        """The module of both models that makes it, or is given it."""
        if self.place.layer is None:
            return [_outside_module(model, self.place.quantity) for model in self.models]
        if self.place.module:
            return [parts_of(block).get(self.place.module) for block in self.blocks]
        # q, k and v that one module makes, or one each.
        names = (*JOINT, *PROJECTIONS.get(self.place.quantity.upper(), ()))
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

    @property
    def weights_by_head(self) -> list[Tensor] | None:
        """What projects each head out of the attention, `[head d_v d_model]` in both models."""
        if self.z is None or self.weights is None:
            return None
        # PyTorch stores `[out in]`, Conv1D of transformers `[in out]`.
        is_linear = type(self.modules[0]) is nn.Linear
        n_heads = self.z.shape[2]
        return [(w.T if is_linear else w).unflatten(0, (n_heads, -1)) for w in self.weights]

    # Whether a prediction from A's explains B's

    def fits(self, predicted: Tensor) -> bool:
        """Whether what is predicted from ours explains theirs."""
        return _explains(predicted, self.ours, self.theirs)

    def fits_weight(self, predicted: Tensor) -> bool:
        """Whether what is predicted from our weight explains theirs."""
        return self.weights is not None and _explains(predicted, *self.weights)


def _explains(predicted: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    is_alike = predicted.shape == theirs.shape
    return is_alike and bool((theirs - predicted).norm() <= LEFT * (theirs - ours).norm())


def record_of(side: Side, tokens: Tensor, inside: Collection[int] = ()) -> Record:
    """What a model computes; of modules that are called once, in the layers it looks into."""
    record: Record = {}

    def note(place: Place, tensor: Tensor) -> Tensor:
        record[place] = NOTHING if place in record else tensor.clone()
        return tensor

    normed = run_visited(side, tokens, note, inside)
    if not inside:
        visit_logits(side.model, normed, note)
    return record


def steps_between(
    a: Model,
    record: Record,
    b: Side,
    tokens: Tensor,
    inside: Collection[int] = (),
    attend: Attend = swept,
) -> list[Step]:
    """The steps of B, each from what A was given, by A's record of these tokens or more.

    What B puts out is replaced by what A put out, so a step hands its difference to no other.
    """
    steps: list[Step] = []

    def compare(place: Place, theirs: Tensor) -> Tensor:
        ours = record.get(place, NOTHING)[: len(tokens)]
        if ours.shape != theirs.shape:
            return theirs
        # Of the layers before those that are looked into, nothing is asked.
        if not inside or place.layer in inside:
            d_head = a.info.d_head if place.quantity in IN_HEADS else 0
            pair = _by_head(ours, d_head), _by_head(theirs.clone(), d_head)
            steps.append(Step(place, (a, b.model), *pair, _projected_by(place, record)))
        return theirs if place.quantity == OWN_Z else ours.clone()

    normed = run_visited(b, tokens, compare, inside, attend)
    if not inside:
        visit_logits(b.model, normed, compare)
    return steps


def _projected_by(place: Place, record: Record) -> Tensor | None:
    """The z that a module projects; None if it does something else, or z is changed before it."""
    if place.quantity != "attention output":
        return None
    z = record.get(Place(place.layer, "pattern"))
    given = record.get(place._replace(quantity="z", is_input=True))
    is_z = z is not None and given is not None and given.equal(z.flatten(2))
    return z if is_z else None


def _by_head(tensor: Tensor, d_head: int) -> Tensor:
    """`[batch pos d]` as `[batch pos head d_head]`, of one head where there are none."""
    if tensor.dim() == 4:
        return tensor
    has_heads = d_head and tensor.shape[-1] % d_head == 0
    return tensor.unflatten(-1, (-1, d_head if has_heads else tensor.shape[-1]))


def _outside_module(model: Model, quantity: str) -> nn.Module | None:
    """The module that makes a step outside of the layers."""
    if quantity in ("embedding", "unembedding"):
        return model.modules(quantity.removesuffix("ding"))[0]
    if quantity != "final norm":
        return None
    inside = {id(module) for block in model.blocks for module in block.modules()}
    norms = [
        module
        for name, module in model.bare.named_modules()
        if id(module) not in inside and ("norm" in name or name.rpartition(".")[2].startswith("ln"))
    ]
    return norms[-1] if norms else None
