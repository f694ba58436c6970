"""What a difference looks like: each cause is a signature, a function of the evidence.

A signature predicts what the other model would compute if it had the fault, from what ours
computes. It fits if it leaves a twentieth of the difference at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from headcount.workers.diff.layer_steps import QK_NORM, LayerTrace, Step, named_parts
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.rotations import Rotation

LEFT = 0.05  # share of a difference that a cause may leave unexplained
ALIKE = 0.02  # relative difference of two numbers that are the same

Signature = Callable[["Evidence"], str | None]

CAUSES: dict[str, Signature] = {}
"""Signatures by kind, in the order in which they are tried."""

OF_LAYERS = ("tied", "layer order", "layer types")
OF_TEXTS = ("tokenizer", "bos")
UNKNOWN = "unlike anything known"


@dataclass(frozen=True)
class Cause:
    """What a difference looks like: a kind, which --allow takes, and a sentence."""

    kind: str
    sentence: str

    def __post_init__(self) -> None:
        assert self.kind in (*CAUSES, *OF_LAYERS, *OF_TEXTS, UNKNOWN), self.kind


UNLIKE = Cause(UNKNOWN, "no known cause leaves this")


@dataclass(frozen=True)
class Evidence:
    """One step that differs, and what is known of both models."""

    step: Step
    heads: tuple[int, ...]  # that differ; empty if the step has none
    modules: tuple[nn.Module | None, nn.Module | None]  # that make the step, ours and theirs
    trace: LayerTrace | None = None
    blocks: tuple[nn.Module, ...] = ()  # the layer of both; none outside of the layers
    facts: tuple[AttentionFacts | None, AttentionFacts | None] = (None, None)
    rotations: tuple[Rotation | None, Rotation | None] = (None, None)

    @property
    def ours(self) -> Tensor:
        """By our model: `[batch pos head d]`."""
        return self.step.ours

    @property
    def theirs(self) -> Tensor:
        """By theirs."""
        return self.step.theirs

    def fits(self, predicted: Tensor) -> bool:
        """Whether what is predicted from ours explains theirs."""
        difference = (self.theirs - self.ours).norm()
        return bool((self.theirs - predicted).norm() <= LEFT * difference)

    def parameters(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """A parameter of the module, ours and theirs."""
        ours, theirs = (None if m is None else m._parameters.get(name) for m in self.modules)
        return ours, theirs

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor] | None:
        """The weight of the module, ours and theirs, if they differ and have one shape."""
        ours, theirs = self.parameters("weight")
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.equal(theirs):
            return None
        return ours, theirs

    @property
    def bias(self) -> Tensor:
        """Our module's bias in the shape of the step; 0 if it has none."""
        bias, _ = self.parameters("bias")
        if bias is None or bias.numel() != self.ours[0, 0].numel():
            return torch.zeros(self.ours.shape[2:])
        return bias.view(self.ours.shape[2:])

    @property
    def in_heads(self) -> str:
        """Where some heads alone differ, which."""
        if not self.heads or len(self.heads) == self.ours.shape[2]:
            return ""
        return f" in head{'s' if len(self.heads) > 1 else ''} {', '.join(map(str, self.heads))}"


def cause(kind: str) -> Callable[[Signature], Signature]:
    """Register the signature of a kind; it returns a sentence if it fits."""

    def register(signature: Signature) -> Signature:
        CAUSES[kind] = signature
        return signature

    return register


def cause_of(evidence: Evidence) -> Cause | None:
    """The first cause that fits."""
    for kind, signature in CAUSES.items():
        if sentence := signature(evidence):
            return Cause(kind, sentence)
    return None


def _by_head(evidence: Evidence, n_heads: int) -> list[Tensor]:
    """What projects each head out of the attention, ours and theirs: `[head d_v d_model]`."""
    # PyTorch stores `[out in]`, Conv1D of transformers `[in out]`.
    is_linear = type(evidence.modules[0]) is nn.Linear
    weights = [w.T if is_linear else w for w in evidence.weights or ()]
    return [weight.unflatten(0, (n_heads, -1)) for weight in weights]


def by_contributions(evidence: Evidence) -> Evidence:
    """What each head adds to the attention's output, in the place of the sum of all."""
    step, trace = evidence.step, evidence.trace
    if step.quantity != "attention output" or trace is None or evidence.weights is None:
        return evidence
    z, given = trace.attention.get("z"), trace.inputs.get(step.module)
    if z is None or given is None or not given.equal(z.flatten(2)):
        return evidence
    pair = _by_head(evidence, z.shape[2])
    parts = [torch.einsum("bphd,hdm->bphm", z, heads) for heads in pair]
    differing = tuple(h for h in range(z.shape[2]) if not pair[0][h].equal(pair[1][h]))
    return replace(evidence, step=replace(step, ours=parts[0], theirs=parts[1]), heads=differing)


# What has no weights: the attention's facts, rotations, functions


def _differing(evidence: Evidence, name: str) -> tuple[float | None, float | None] | None:
    """A fact of the attention, theirs and ours, if it explains another pattern."""
    ours, theirs = evidence.facts
    if evidence.step.quantity != "pattern" or ours is None or theirs is None:
        return None
    pair = getattr(theirs, name), getattr(ours, name)
    if None in pair:
        return pair if pair != (None, None) else None
    return None if math.isclose(*pair, rel_tol=1e-4) else pair


@cause("window")
def _window(evidence: Evidence) -> str | None:
    if (pair := _differing(evidence, "window")) is None:
        return None
    theirs, ours = pair
    words = ["all keys" if w is None else f"the last {w:,} keys" for w in pair]
    off = f" (off by {theirs - ours:+d})" if ours and theirs and abs(ours - theirs) < 3 else ""
    return f"a query sees {words[0]}, and A's {words[1]}{off}"


@cause("attention scale")
def _attention_scale(evidence: Evidence) -> str | None:
    pair = _differing(evidence, "scale")
    return pair and f"q·k is multiplied by {pair[0]:.4g}, and A's by {pair[1]:.4g}"


@cause("soft cap")
def _soft_cap(evidence: Evidence) -> str | None:
    if evidence.step.quantity == "final soft cap":
        return "logits are scaled or capped otherwise than A's"
    if (pair := _differing(evidence, "soft_cap")) is None:
        return None
    theirs, ours = ("not capped" if cap is None else f"capped at {cap:g}" for cap in pair)
    return f"scores are {theirs}, and A's {ours}"


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
def _rotation(evidence: Evidence) -> str | None:
    ours, theirs = evidence.rotations
    if evidence.step.quantity != "rotation":
        return None
    if ours is None or theirs is None:
        return f"q and k are {'not ' if theirs is None else ''}rotated by their positions"
    turns, their_turns = _turns(ours), _turns(theirs)
    if turns.shape != their_turns.shape:
        widths = theirs.cos.shape[-1], ours.cos.shape[-1]
        return f"{widths[0]} components are rotated, and {widths[1]} of A's"
    ratios = their_turns / turns
    if (ratios - 1).abs().max() < 1e-4:
        return "the angles are A's, and pair other components or have another length"
    if (ratios - ratios[0]).abs().max() < 1e-3 * ratios[0].abs():
        return f"positions are multiplied by {float(ratios[0]):.4g} (linear scaling)"
    # The turns of a base are base^(-i / count).
    places = torch.arange(len(ratios)) / len(ratios)
    bases = [float(each[-1]) ** (-1 / float(places[-1])) for each in (turns, their_turns)]
    if (ratios / (bases[0] / bases[1]) ** places - 1).abs().max() < 1e-2:
        return f"the rotary base is {bases[1]:,.0f}, and A's {bases[0]:,.0f}"
    scaled = int(((ratios - 1).abs() > 1e-3).sum())
    return f"{scaled} of {len(ratios)} rotary frequencies are scaled, as for longer contexts"


@cause("activation function")
def _activation(evidence: Evidence) -> str | None:
    ours, theirs = evidence.modules
    is_function = not any(any(True for _ in m.parameters()) for m in evidence.modules if m)
    if evidence.step.quantity != "MLP" or not is_function or type(ours) is type(theirs):
        return None
    names = type(theirs).__name__, type(ours).__name__
    return f"the MLP's activation function is {names[0]}, and A's {names[1]}"


# Weights


@cause("QK norm")
def _qk_norm(evidence: Evidence) -> str | None:
    if evidence.step.quantity not in ("q", "k", "rotation", "pattern"):
        return None
    # A module without weights may stand in its place.
    ours, theirs = (
        {name for name, part in named_parts(block).items() if any(True for _ in part.parameters())}
        for block in evidence.blocks
    )
    for names, verb in ((ours - theirs, "lost"), (theirs - ours, "added")):
        if any(name.rpartition(".")[2] in QK_NORM for name in names):
            return f"the norm of queries and keys is {verb}"
    return None


@cause("exchanged")
def _exchanged(evidence: Evidence) -> str | None:
    """The weight of another module of our layer, as of gate and up."""
    if evidence.weights is None or not evidence.blocks:
        return None
    _, theirs = evidence.weights
    for name, part in named_parts(evidence.blocks[0]).items():
        weight = part._parameters.get("weight")
        if weight is None or theirs.shape != weight.shape:
            continue
        if (theirs - weight).norm() <= LEFT * weight.norm():
            own = evidence.step.module or evidence.step.quantity
            return None if name == own else f"{own} has the weight of A's {name}"
    return None


@cause("vocabulary order")
def _vocabulary(evidence: Evidence) -> str | None:
    """The rows of the embedding, in another order."""
    if evidence.step.quantity not in ("embedding", "unembedding") or evidence.weights is None:
        return None
    sums = [weight.double().sum(1).sort().values for weight in evidence.weights]
    is_moved = sums[0].allclose(sums[1], rtol=1e-6, atol=1e-9)
    return f"the {evidence.step.quantity} has A's rows in another order" if is_moved else None


@cause("transposed")
def _transposed(evidence: Evidence) -> str | None:
    if evidence.weights is None:
        return None
    ours, theirs = evidence.weights
    if ours.dim() != 2 or ours.shape[0] != ours.shape[1]:
        return None
    if (ours.T - theirs).norm() > ALIKE * ours.norm():
        return None
    return f"the weight of {evidence.step.module} is transposed"


@cause("rows in another order")
def _rows(evidence: Evidence) -> str | None:
    if evidence.step.quantity not in ("q", "k"):
        return None
    halves = evidence.ours.unflatten(-1, (2, -1)).mT.flatten(-2)
    pairs = evidence.ours.unflatten(-1, (-1, 2)).mT.flatten(-2)
    if evidence.fits(halves) or evidence.fits(pairs):
        return "rotated components are paired in another order, llama.cpp's or Meta's"
    return None


@cause("heads")
def _heads(evidence: Evidence) -> str | None:
    """Heads that are those of other places: exchanged, or copies of one another."""
    pair = [x.permute(2, 0, 1, 3) for x in (evidence.ours, evidence.theirs)]
    # What heads add up to depends on z. Which of them are exchanged shows in their weights.
    if evidence.step.quantity == "attention output" and evidence.weights is not None:
        pair = _by_head(evidence, len(pair[0]))
    flat, their_flat = (x.flatten(1) for x in pair)
    distances = torch.cdist(their_flat, flat) / flat.norm(dim=1)
    nearest = distances.argmin(1).tolist()
    moved = [head for head, other in enumerate(nearest) if other != head]
    if not moved or distances.amin(1).max() > LEFT:
        return None
    what = "groups of keys and values" if evidence.step.quantity in ("k", "v") else "heads"
    pairs = ", ".join(f"{head} is A's {nearest[head]}" for head in moved[:4])
    verb = "copies of others" if len({*nearest}) < len(nearest) else "in another order"
    return f"{what} are {verb}: {pairs}{' …' if len(moved) > 4 else ''}"


@cause("bias")
def _bias(evidence: Evidence) -> str | None:
    shift = (evidence.theirs - evidence.ours).mean((0, 1))
    if not evidence.fits(evidence.ours + shift):
        return None
    ours, theirs = (bias is not None and bool(bias.any()) for bias in evidence.parameters("bias"))
    verb = "lost" if ours > theirs else "added" if theirs > ours else "another than A's"
    return f"the bias of {evidence.step.quantity} is {verb}{evidence.in_heads}"


@cause("scale")
def _scale(evidence: Evidence) -> str | None:
    # The stream is a sum, of which one part may be scaled.
    if evidence.step.quantity in ("residual stream", "layer"):
        return None
    heads = list(evidence.heads) or slice(None)
    ours, theirs = evidence.ours[:, :, heads], evidence.theirs[:, :, heads]
    subject = f"{evidence.step.quantity} is"
    if theirs.norm() <= 1e-3 * ours.norm():
        return f"{subject} 0{evidence.in_heads}"
    # The weight alone may be scaled, or the bias with it.
    own = evidence.bias[heads]
    for bias in (own, torch.zeros_like(own)):
        centred = ours - bias
        factor = float(((theirs - bias) * centred).sum() / centred.square().sum().clamp(min=1e-30))
        if (theirs - bias - factor * centred).norm() <= LEFT * (theirs - ours).norm():
            return f"{subject} {factor:.4g} times A's{evidence.in_heads}"
    return None


EPSILONS = ("variance_epsilon", "eps", "epsilon")
"""What libraries call the epsilon of a norm."""


@cause("norm")
def _norm(evidence: Evidence) -> str | None:
    if not evidence.step.quantity.endswith("norm"):
        return None
    if evidence.weights is not None:
        ours, theirs = evidence.weights
        if ((theirs - ours).abs() - 1).abs().max() < ALIKE:
            return "the weight of the norm is off by 1, as if 1 + weight were taken for weight"
        return None
    epsilons = [vars(m).get(name) for m in evidence.modules if m for name in EPSILONS]
    own, *others = [epsilon for epsilon in epsilons if epsilon is not None] or [None]
    if not others or own == others[0]:
        return None
    return f"the epsilon of the norm is {others[0]:g}, and A's {own:g}"


@cause("position embeddings")
def _positions(evidence: Evidence) -> str | None:
    """Learned positions that begin one later or earlier: the same shift in every sequence."""
    difference = evidence.theirs - evidence.ours
    if evidence.step.quantity != "embedding" or len(difference) < 2:
        return None
    is_of_positions = evidence.fits(evidence.ours + difference.mean(0))
    return "what is added to the embeddings of each position differs" if is_of_positions else None


LARGEST_RANKED = 4096  # rows or columns of a weight whose difference is decomposed
RANKS, OF_RANK = 8, 0.999  # a low rank is this part of the full one, and has this share of it


@cause("adapter")
def _adapter(evidence: Evidence) -> str | None:
    """A difference of low rank, as adapters are."""
    if evidence.weights is None:
        return None
    ours, theirs = evidence.weights
    if ours.dim() != 2 or max(ours.shape) > LARGEST_RANKED:
        return None
    difference = theirs - ours
    squares = torch.linalg.svdvals(difference).square()
    rank = 1 + int((squares.cumsum(0) < OF_RANK * squares.sum()).sum())
    # A few rows or columns have a low rank by themselves.
    if rank > min(int(difference.any(axis).sum()) for axis in (0, 1)) // RANKS:
        return None
    what = f"the weight of {evidence.step.quantity} differs by a matrix of rank {rank}"
    return f"{what}, as if an adapter were merged twice or not at all"
