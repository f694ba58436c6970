"""What a difference looks like: each cause is a signature, a function of the step that differs.

A signature predicts what B would compute if it had the fault, from what A computes, or reads the
fault off the modules of both. It returns a sentence if that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headcount.workers.diff.passes import QK_NORM, WHOLE, parts_of
from headcount.workers.diff.steps import LEFT, Step, windows_of
from headcount.workers.model.rotations import Rotation

Signature = Callable[[Step], str | None]

CAUSES: dict[str, Signature] = {}
"""Signatures by kind, in the order in which they are tried."""

UNKNOWN = "unlike anything known"


@dataclass(frozen=True)
class Cause:
    """What a difference looks like: a kind, which --allow takes, and a sentence."""

    kind: str
    sentence: str


def cause_of(step: Step) -> Cause:
    """The first cause that fits."""
    for kind, signature in CAUSES.items():
        if sentence := signature(step):
            return Cause(kind, sentence)
    return Cause(UNKNOWN, "no known cause leaves this")


def cause(kind: str) -> Callable[[Signature], Signature]:
    """Register the signature of a kind."""

    def register(signature: Signature) -> Signature:
        CAUSES[kind] = signature
        return signature

    return register


# What has no weights: the attention's facts, rotations, functions


@cause("layer types")
def _layer_types(step: Step) -> str | None:
    layer = step.place.layer
    if layer is None or step.place.quantity not in ("pattern", "rotation"):
        return None
    ours, theirs = map(windows_of, step.models)
    is_mixed = len({*ours}) == 2 and {*ours} == {*theirs}
    if not is_mixed or ours[layer] == theirs[layer]:
        return None
    is_inverted = all(one != other for one, other in zip(ours, theirs, strict=True))
    how = "inverted" if is_inverted else "in another order"
    return f"layers with and without a window are {how}"


def _of_facts(kind: str, name: str, subject: str, value: str, absent: str = "") -> None:
    """Register a fact of the attention, which explains another pattern."""

    @cause(kind)
    def signature(step: Step) -> str | None:
        ours, theirs = (facts and getattr(facts, name) for facts in step.facts)
        is_same = ours == theirs or (ours and theirs and math.isclose(ours, theirs, rel_tol=1e-4))
        if step.place.quantity != "pattern" or is_same:
            return None
        words = [absent if fact is None else value.format(fact) for fact in (theirs, ours)]
        return f"{subject} {words[0]}, and A's {words[1]}"


_of_facts("window", "window", "a query sees", "the last {:,} keys", "all keys")
_of_facts("attention scale", "scale", "q·k is multiplied by", "{:.4g}")
_of_facts("soft cap", "soft_cap", "scores are", "capped at {:g}", "not capped")


@cause("final soft cap")
def _final_soft_cap(step: Step) -> str | None:
    is_there = step.place.quantity == "final soft cap"
    return "logits are scaled or capped otherwise than A's" if is_there else None


def _turns(rotation: Rotation) -> Tensor:
    """How far each pair of components turns from one position to the next."""
    cos, sin = rotation.cos[0].double(), rotation.sin[0].double()  # [pos angle]
    half = cos.shape[1] // 2
    # The angle of a pair stands twice: in both halves, or at both neighbours.
    is_halves = cos[:, :half].equal(cos[:, half:])
    cos, sin = ((x[:, :half] if is_halves else x[:, ::2]) for x in (cos, sin))
    angles = torch.atan2(sin[:2], cos[:2])
    return angles[1] - angles[0]


@cause("rotation")
def _rotation(step: Step) -> str | None:
    ours, theirs = (facts and facts.rotation for facts in step.facts)
    if step.place.quantity != "rotation":
        return None
    if ours is None or theirs is None:
        return f"q and k are {'not ' if theirs is None else ''}rotated by their positions"
    turns, their_turns = _turns(ours), _turns(theirs)
    if turns.shape != their_turns.shape:
        widths = theirs.cos.shape[-1], ours.cos.shape[-1]
        return f"{widths[0]} components are rotated, and {widths[1]} of A's"
    ratios = their_turns / turns
    # The turns of a base are base^(-i / count).
    places = torch.arange(len(ratios)) / len(ratios)
    bases = [float(each[-1]) ** (-1 / float(places[-1])) for each in (turns, their_turns)]
    if (ratios / (bases[0] / bases[1]) ** places - 1).abs().max() < 1e-2 and ratios[-1] != 1:
        return f"the rotary base is {bases[1]:,.0f}, and A's {bases[0]:,.0f}"
    is_other = (ratios - 1).abs() > 1e-4
    if not is_other.any():
        return "the angles are A's, and pair other components or have another length"
    most, least = float(ratios[is_other].max()), float(ratios[is_other].min())
    times = f"{least:.4g}"
    if not math.isclose(most, least, rel_tol=1e-3):
        times += f" to {most:.4g}"
    return f"{int(is_other.sum())} of {len(ratios)} rotary frequencies are {times} times A's"


def _has_weights(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


@cause("activation function")
def _activation(step: Step) -> str | None:
    if step.place.quantity != "MLP" or any(map(_has_weights, step.modules)):
        return None
    ours, theirs = (type(module).__name__ for module in step.modules)
    is_other = ours != theirs
    return f"the MLP's activation function is {theirs}, and A's {ours}" if is_other else None


@cause("QK norm")
def _qk_norm(step: Step) -> str | None:
    if step.place.quantity not in ("q", "k", "rotation", "pattern"):
        return None

    def names(block: nn.Module) -> set[str]:
        # A module without weights may stand in its place.
        parts = parts_of(block).items()
        return {n for n, part in parts if n.rpartition(".")[2] in QK_NORM and _has_weights(part)}

    ours, theirs = map(names, step.blocks)
    verb = "lost" if ours > theirs else "added"
    return f"the norm of queries and keys is {verb}" if ours != theirs else None


# Weights that are A's in another arrangement


@cause("exchanged")
def _exchanged(step: Step) -> str | None:
    """The weight of another module of A, as of gate and up, or of the same one in another layer."""
    a = step.models[0]
    own = step.place.module or step.place.quantity
    for layer, block in enumerate(a.blocks):
        for name, part in parts_of(block).items():
            if step.has_weight_of(part):
                if layer != step.place.layer:
                    return f"it has weights of A's layer {layer}"
                return f"{own} has the weight of A's {name}"
    is_tied = step.place.quantity == "unembedding" and step.has_weight_of(a.modules("embed")[0])
    return "the unembedding is A's embedding" if is_tied else None


@cause("vocabulary order")
def _vocabulary(step: Step) -> str | None:
    quantity = step.place.quantity
    if quantity not in ("embedding", "unembedding") or step.weights is None:
        return None
    sums = [weight.double().sum(1).sort().values for weight in step.weights]
    is_moved = sums[0].allclose(sums[1], rtol=1e-6, atol=1e-9)
    return f"the {quantity} has A's rows in another order" if is_moved else None


@cause("transposed")
def _transposed(step: Step) -> str | None:
    if step.weights is None or step.weights[0].dim() != 2:
        return None
    is_transposed = step.fits_weight(step.weights[0].T)
    return f"the weight of {step.place.module} is transposed" if is_transposed else None


@cause("rows in another order")
def _rows(step: Step) -> str | None:
    if step.place.quantity not in ("q", "k"):
        return None
    halves = step.ours.unflatten(-1, (2, -1)).mT.flatten(-2)
    pairs = step.ours.unflatten(-1, (-1, 2)).mT.flatten(-2)
    if step.fits(halves) or step.fits(pairs):
        return "rotated components are paired in another order, llama.cpp's or Meta's"
    return None


@cause("heads")
def _heads(step: Step) -> str | None:
    """Heads that are those of other places: exchanged, or copies of one another."""
    flat, their_flat = (x.permute(2, 0, 1, 3).flatten(1) for x in (step.ours, step.theirs))
    distances = torch.cdist(their_flat, flat) / flat.norm(dim=1)
    nearest = distances.argmin(1).tolist()
    moved = [head for head, other in enumerate(nearest) if other != head]
    if not moved or distances.amin(1).max() > LEFT:
        return None
    what = "groups of keys and values" if step.place.quantity in ("k", "v") else "heads"
    pairs = ", ".join(f"{head} is A's {nearest[head]}" for head in moved[:4])
    verb = "copies of others" if len({*nearest}) < len(nearest) else "in another order"
    return f"{what} are {verb}: {pairs}{' …' if len(moved) > 4 else ''}"


# What is added or multiplied


def _in_heads(step: Step) -> str:
    """Where some heads alone differ, which."""
    if not step.heads or len(step.heads) == step.ours.shape[2]:
        return ""
    return f" in head{'s' if len(step.heads) > 1 else ''} {', '.join(map(str, step.heads))}"


def _is_shift(step: Step, *axes: int) -> bool:
    """Whether the same is added along some axes of `[batch pos head d]`."""
    return step.fits(step.ours + (step.theirs - step.ours).mean(axes))


@cause("bias")
def _bias(step: Step) -> str | None:
    if not _is_shift(step, 0, 1):
        return None
    ours, theirs = (bias is not None and bool(bias.any()) for bias in step.parameters("bias"))
    verb = "lost" if ours > theirs else "added" if theirs > ours else "another than A's"
    return f"the bias of {step.place.quantity} is {verb}{_in_heads(step)}"


@cause("position embeddings")
def _positions(step: Step) -> str | None:
    """Learned positions that begin one later or earlier."""
    if step.place.quantity != "embedding" or len(step.ours) < 2 or not _is_shift(step, 0):
        return None
    return "what is added to the embeddings of each position differs"


@cause("scale")
def _scale(step: Step) -> str | None:
    # The stream is a sum, of which one part may be scaled.
    if step.place.quantity in ("residual stream", WHOLE):
        return None
    heads = list(step.heads) or slice(None)
    ours, theirs = step.ours[:, :, heads], step.theirs[:, :, heads]
    # The weight alone may be scaled, or the bias with it.
    biases = [torch.zeros_like(ours[0, 0])]
    own = step.parameters("bias")[0]
    if own is not None and own.numel() == step.ours[0, 0].numel():
        biases.insert(0, own.view(step.ours.shape[2:])[heads])
    for bias in biases:
        centred = ours - bias
        factor = float(((theirs - bias) * centred).sum() / centred.square().sum().clamp(min=1e-30))
        if (theirs - bias - factor * centred).norm() <= LEFT * (theirs - ours).norm():
            size = "0" if abs(factor) < 1e-3 else f"{factor:.4g} times A's"
            return f"{step.place.quantity} is {size}{_in_heads(step)}"
    return None


EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""What libraries call the epsilon of a norm."""


@cause("norm")
def _norm(step: Step) -> str | None:
    if not step.place.quantity.endswith("norm"):
        return None
    if step.weights is not None:
        if any(step.fits_weight(step.weights[0] + one) for one in (1, -1)):
            return "the weight of the norm is off by 1, as if 1 + weight were taken for weight"
        return None
    epsilons = [vars(m).get(name) for m in step.modules if m for name in EPSILONS]
    ours, *others = [epsilon for epsilon in epsilons if epsilon is not None] or [None]
    if not others or ours == others[0]:
        return None
    return f"the epsilon of the norm is {others[0]:g}, and A's {ours:g}"


LARGEST_RANKED = 4096  # rows or columns of a weight whose difference is decomposed
RANKS, OF_RANK = 8, 0.999  # a low rank is this part of the full one, and has this share of it


@cause("adapter")
def _adapter(step: Step) -> str | None:
    """A difference of low rank, as adapters are."""
    if step.weights is None or step.weights[0].dim() != 2:
        return None
    difference = step.weights[1] - step.weights[0]
    if max(difference.shape) > LARGEST_RANKED:
        return None
    squares = torch.linalg.svdvals(difference).square()
    rank = 1 + int((squares.cumsum(0) < OF_RANK * squares.sum()).sum())
    # A few rows or columns have a low rank by themselves.
    if rank > min(int(difference.any(axis).sum()) for axis in (0, 1)) // RANKS:
        return None
    what = f"the weight of {step.place.quantity} differs by a matrix of rank {rank}"
    return f"{what}, as if an adapter were merged twice or not at all"
