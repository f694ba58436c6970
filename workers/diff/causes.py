"""What a difference looks like: each cause is a signature, a function of the evidence.

A signature predicts what the other model would compute if it had the fault, from what ours
computes. It fits if it leaves a twentieth of the difference at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcount.workers.diff.layer_steps import QK_NORM, LayerTrace, Step
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.rotations import Rotation

LEFT = 0.05  # share of a difference that a cause may leave unexplained
ALIKE = 0.02  # relative difference of two numbers that are the same
MOST_SCALE = 1e3


@dataclass(frozen=True)
class Cause:
    """What a difference looks like: a kind, which --allow takes, and a sentence."""

    kind: str
    sentence: str


@dataclass(frozen=True)
class Evidence:
    """One step of a layer that differs, and what is known of both layers."""

    step: Step
    heads: tuple[int, ...]  # that differ; empty if the step has none
    modules: tuple[nn.Module | None, nn.Module | None]  # that make the step, ours and theirs
    base: nn.Module | None = None  # the same of what our model was trained from, if it is known
    trace: LayerTrace | None = None
    facts: tuple[AttentionFacts | None, AttentionFacts | None] = (None, None)
    rotations: tuple[Rotation | None, Rotation | None] = (None, None)
    parts: Mapping[str, nn.Module] = field(default_factory=dict)  # of our layer, by name
    their_parts: Mapping[str, nn.Module] = field(default_factory=dict)

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

    @property
    def bias(self) -> Tensor:
        """Our module's bias in the shape of the step; 0 if it has none."""
        bias, _ = self.parameters("bias")
        if bias is None or bias.numel() != self.ours[0, 0].numel():
            return torch.zeros(())
        return bias.view(self.ours.shape[2:])


Signature = Callable[[Evidence], str | None]

CAUSES: dict[str, Signature] = {}
"""Signatures by kind, in the order in which they are tried."""


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


def number(value: float) -> str:
    """A factor or a size in four digits."""
    return f"{value:.4g}"


def in_heads(evidence: Evidence) -> str:
    """Where some heads alone differ, which."""
    heads, n_heads = evidence.heads, evidence.ours.shape[2]
    if not heads or len(heads) == n_heads:
        return ""
    return f" in head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"


def by_contributions(evidence: Evidence) -> Evidence:
    """What each head adds to the attention's output, in the place of the sum of all."""
    ours, theirs = evidence.parameters("weight")
    step, trace = evidence.step, evidence.trace
    if step.quantity != "attention output" or trace is None or ours is None or theirs is None:
        return evidence
    z, given = trace.attention.get("z"), trace.inputs.get(step.module)
    if z is None or given is None or not given.equal(z.flatten(2)) or ours.shape != theirs.shape:
        return evidence
    # PyTorch stores `[out in]`, Conv1D of transformers `[in out]`.
    pair = [w.T if type(evidence.modules[0]) is nn.Linear else w for w in (ours, theirs)]
    heads = [weight.unflatten(0, (z.shape[2], -1)) for weight in pair]  # [head d_v d_model]
    parts = [torch.einsum("bphd,hdm->bphm", z, weight) for weight in heads]
    differing = tuple(h for h in range(z.shape[2]) if not heads[0][h].equal(heads[1][h]))
    if not differing:
        return evidence
    return replace(evidence, step=replace(step, ours=parts[0], theirs=parts[1]), heads=differing)


# The attention: facts, which have no weights


@cause("window")
def _window(evidence: Evidence) -> str | None:
    ours, theirs = (None if f is None else f.window for f in evidence.facts)
    if evidence.step.quantity != "pattern" or ours == theirs:
        return None
    words = ["all keys" if w is None else f"the last {w:,} keys" for w in (theirs, ours)]
    off = f" (off by {theirs - ours:+d})" if ours and theirs and abs(ours - theirs) < 3 else ""
    return f"a query sees {words[0]}, and A's {words[1]}{off}"


@cause("attention scale")
def _attention_scale(evidence: Evidence) -> str | None:
    ours, theirs = evidence.facts
    if evidence.step.quantity != "pattern" or ours is None or theirs is None:
        return None
    if math.isclose(ours.scale, theirs.scale, rel_tol=1e-4):
        return None
    return f"q·k is multiplied by {number(theirs.scale)}, and A's by {number(ours.scale)}"


@cause("soft cap")
def _soft_cap(evidence: Evidence) -> str | None:
    if evidence.step.quantity == "final soft cap":
        return "logits are scaled or capped otherwise than A's"
    caps = [None if f is None else f.soft_cap for f in evidence.facts]
    if evidence.step.quantity != "pattern" or caps[0] == caps[1]:
        return None
    ours, theirs = ("not capped" if cap is None else f"capped at {cap:g}" for cap in caps)
    return f"scores are {theirs}, and A's {ours}"


@cause("sink or slopes")
def _sink_or_slopes(evidence: Evidence) -> str | None:
    ours, theirs = evidence.facts
    if evidence.step.quantity != "pattern" or ours is None or theirs is None:
        return None
    for name, words in (("sink", "learned sinks"), ("slopes", "ALiBi's slopes")):
        pair = getattr(ours, name), getattr(theirs, name)
        if any(one is None for one in pair) != all(one is None for one in pair):
            return f"{words} are {'lost' if pair[1] is None else 'added'}"
        if pair[0] is not None and not pair[0].allclose(pair[1], rtol=1e-4):
            return f"{words} are others than A's"
    return None


# Rotations


def _turns(rotation: Rotation) -> Tensor | None:
    """How far each pair of components turns from one position to the next, and at the first."""
    cos, sin = rotation.cos[0].double(), rotation.sin[0].double()  # [pos angle]
    if len(cos) < 2:
        return None
    half = cos.shape[1] // 2
    if cos.shape[1] > 1 and cos[:, :half].equal(cos[:, half:]):
        cos, sin = cos[:, :half], sin[:, :half]
    elif cos.shape[1] > 1 and cos[:, ::2].equal(cos[:, 1::2]):
        cos, sin = cos[:, ::2], sin[:, ::2]
    angles = torch.atan2(sin[:2], cos[:2])
    return torch.stack([angles[0], angles[1] - angles[0]])


def _base(frequencies: Tensor) -> float:
    """The base of f_i = base^(-i / count)."""
    count = len(frequencies)
    return math.exp(-math.log(float(frequencies[-1])) * count / (count - 1))


@cause("rotation")
def _rotation(evidence: Evidence) -> str | None:
    ours, theirs = evidence.rotations
    if evidence.step.quantity != "rotation":
        return None
    if ours is None or theirs is None:
        return f"q and k are {'not ' if theirs is None else ''}rotated by their positions"
    turns, their_turns = (_turns(rotation) for rotation in (ours, theirs))
    if turns is None or their_turns is None or turns.shape != their_turns.shape:
        widths = theirs.cos.shape[-1], ours.cos.shape[-1]
        return f"{widths[0]} components are rotated, and {widths[1]} of A's"
    (first, each), (their_first, their_each) = turns, their_turns
    ratios = their_each / each
    if (their_first - first).abs().max() > 1e-4:
        return "positions begin elsewhere than A's: each token has the angles of another position"
    if (ratios - 1).abs().max() < 1e-4:
        return "the angles are A's, and pair other components or have another length"
    if (ratios - ratios[0]).abs().max() < 1e-3 * ratios[0].abs():
        return f"positions are multiplied by {number(float(ratios[0]))} (linear scaling)"
    bases = _base(each), _base(their_each)
    places = torch.arange(len(ratios)) / len(ratios)
    straight = (bases[0] / bases[1]) ** places
    if (ratios / straight - 1).abs().max() < 1e-2:
        return f"the rotary base is {bases[1]:,.0f}, and A's {bases[0]:,.0f}"
    lowered = int(((ratios - 1).abs() > 1e-3).sum())
    return f"{lowered} of {len(ratios)} rotary frequencies are scaled, as for longer contexts"


# Weights and what lies between them


@cause("QK norm")
def _qk_norm(evidence: Evidence) -> str | None:
    if evidence.step.quantity not in ("q", "k", "rotation", "pattern"):
        return None
    ours, theirs = evidence.parts.keys(), evidence.their_parts.keys()
    for names, verb in ((ours - theirs, "lost"), (theirs - ours, "added")):
        if any(name.rpartition(".")[2] in QK_NORM for name in names):
            return f"the norm of queries and keys is {verb}"
    return None


@cause("merged")
def _merged(evidence: Evidence) -> str | None:
    """What training changed is there twice, or not at all."""
    weights = *evidence.parameters("weight"), getattr(evidence.base, "weight", None)
    ours, theirs, base = weights
    if (
        ours is None
        or theirs is None
        or base is None
        or not ours.shape == theirs.shape == base.shape
    ):
        return None
    trained = ours - base
    for times, words in ((2.0, "twice what A changed in its base"), (0.0, "the base's, unchanged")):
        is_left = (theirs - base - times * trained).norm() <= LEFT * trained.norm()
        if is_left and trained.any():
            return f"the weight of {evidence.step.quantity} is {words}"
    return None


@cause("exchanged")
def _exchanged(evidence: Evidence) -> str | None:
    """The weight of another module of our layer, as of gate and up."""
    _, theirs = evidence.parameters("weight")
    for name, part in evidence.parts.items():
        weight = part._parameters.get("weight")
        if weight is None or theirs is None or weight.shape != theirs.shape:
            continue
        if name != evidence.step.module and (theirs - weight).norm() <= LEFT * weight.norm():
            return f"{evidence.step.module or evidence.step.quantity} has the weight of A's {name}"
    return None


@cause("vocabulary order")
def _vocabulary(evidence: Evidence) -> str | None:
    """The rows of the embedding, in another order."""
    ours, theirs = evidence.parameters("weight")
    if evidence.step.quantity not in ("embedding", "unembedding") or ours is None or theirs is None:
        return None
    if ours.shape != theirs.shape or ours.equal(theirs):
        return None
    sums = [weight.double().sum(1).sort().values for weight in (ours, theirs)]
    is_moved = sums[0].allclose(sums[1], rtol=1e-6, atol=1e-9)
    return f"the {evidence.step.quantity} has A's rows in another order" if is_moved else None


@cause("zeros")
def _zeros(evidence: Evidence) -> str | None:
    part = _of_heads(evidence)
    is_zero = part[1].norm() <= 1e-3 * part[0].norm()
    return f"{evidence.step.quantity} is 0{in_heads(evidence)}" if is_zero else None


def _of_heads(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Ours and theirs in the heads that differ, or all of it."""
    heads = list(evidence.heads) or slice(None)
    return evidence.ours[:, :, heads], evidence.theirs[:, :, heads]


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
    ours, theirs = evidence.ours, evidence.theirs
    n_heads = ours.shape[2]
    if n_heads < 2:
        return None
    flat, their_flat = (x.permute(2, 0, 1, 3).flatten(1) for x in (ours, theirs))
    distances = torch.cdist(their_flat, flat) / flat.norm(dim=1)
    nearest = distances.argmin(1).tolist()
    moved = [head for head in range(n_heads) if nearest[head] != head]
    if not moved or distances.gather(1, torch.tensor(nearest)[:, None]).max() > LEFT:
        return None
    what = "groups of keys and values" if evidence.step.quantity in ("k", "v") else "heads"
    pairs = ", ".join(f"{head} is A's {nearest[head]}" for head in moved[:4])
    verb = "in another order" if sorted(nearest) == list(range(n_heads)) else "copies of others"
    return f"{what} are {verb}: {pairs}{' …' if len(moved) > 4 else ''}"


@cause("bias")
def _bias(evidence: Evidence) -> str | None:
    shift = (evidence.theirs - evidence.ours).mean((0, 1))
    if not evidence.fits(evidence.ours + shift):
        return None
    ours, theirs = (
        weight is not None and bool(weight.any()) for weight in evidence.parameters("bias")
    )
    verb = {(True, False): "lost", (False, True): "added"}.get((ours, theirs), "another than A's")
    return f"the bias of {evidence.step.quantity} is {verb}{in_heads(evidence)}"


@cause("scale")
def _scale(evidence: Evidence) -> str | None:
    ours, theirs = _of_heads(evidence)
    own = evidence.bias
    own = own[list(evidence.heads) or slice(None)] if own.dim() else own
    # The weight alone may be scaled, or the bias with it.
    for bias in (own, torch.zeros(())):
        centred = ours - bias
        factor = float(((theirs - bias) * centred).sum() / centred.square().sum().clamp(min=1e-30))
        is_left = (theirs - bias - factor * centred).norm() <= LEFT * (theirs - ours).norm()
        if is_left and 1 / MOST_SCALE < abs(factor) < MOST_SCALE:
            what = evidence.step.quantity
            return f"{what} is {number(factor)} times A's{in_heads(evidence)}"
    return None


EPSILONS = ("variance_epsilon", "eps", "epsilon")


@cause("norm")
def _norm(evidence: Evidence) -> str | None:
    if evidence.step.quantity not in ("norm", "QK norm", "final norm"):
        return None
    ours, theirs = evidence.parameters("weight")
    if ours is not None and theirs is not None and ours.shape == theirs.shape:
        shift = theirs - ours
        if (shift.abs() - 1).abs().max() < ALIKE:
            return "the weight of the norm is off by 1, as if 1 + weight were taken for weight"
        if not ours.equal(theirs):
            return "the weight of the norm is another than A's"
    # As libraries call it.
    own, other = (
        next((getattr(m, name) for name in EPSILONS if hasattr(m, name)), None)
        for m in evidence.modules
    )
    if own is not None and other is not None and own != other:
        return f"the epsilon of the norm is {other:g}, and A's {own:g}"
    factors = (evidence.ours * evidence.theirs).sum(-1, keepdim=True)
    factors = factors / evidence.ours.square().sum(-1, keepdim=True).clamp(min=1e-30)
    if evidence.fits(evidence.ours * factors):
        return "each position is scaled otherwise: another epsilon of the norm"
    return "another kind of norm"


@cause("transposed")
def _transposed(evidence: Evidence) -> str | None:
    ours, theirs = evidence.parameters("weight")
    if ours is None or theirs is None or ours.dim() != 2 or ours.shape != theirs.mT.shape:
        return None
    is_turned = (ours.mT - theirs).norm() <= ALIKE * ours.norm()
    return f"the weight of {evidence.step.module} is transposed" if is_turned else None


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "GELU": F.gelu, "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"), "SiLU": F.silu,
    "ReLU": F.relu, "squared ReLU": lambda x: F.relu(x).square(),
}  # fmt: skip


@cause("activation function")
def _activation(evidence: Evidence) -> str | None:
    step = evidence.step
    if step.quantity != "MLP" or evidence.trace is None:
        return None
    inputs = evidence.trace.inputs.get(step.module)
    has_weight = evidence.modules[0] is None or any(True for _ in evidence.modules[0].parameters())
    if step.is_input or has_weight or inputs is None or inputs.numel() != step.ours.numel():
        return None
    distances = {
        name: float((function(inputs).reshape(step.theirs.shape) - step.theirs).norm())
        for name, function in ACTIVATIONS.items()
    }
    nearest = min(distances, key=lambda name: distances[name])
    is_near = distances[nearest] <= LEFT * (step.theirs - step.ours).norm()
    return f"the MLP's activation function is another{f', {nearest}' if is_near else ''}"


@cause("position embeddings")
def _positions(evidence: Evidence) -> str | None:
    """Learned positions that begin one later or earlier: the same shift in every sequence."""
    if evidence.step.quantity != "embedding":
        return None
    difference = evidence.theirs - evidence.ours
    is_of_positions = len(difference) > 1 and evidence.fits(evidence.ours + difference.mean(0))
    return "what is added to the embeddings of each position differs" if is_of_positions else None


LARGEST_RANKED = 4096  # rows or columns of a weight whose difference is decomposed
RANKS, OF_RANK = 8, 0.999  # a low rank is this part of the full one, and has this share of it


@cause("adapter")
def _adapter(evidence: Evidence) -> str | None:
    """A difference of low rank, as adapters are."""
    ours, theirs = evidence.parameters("weight")
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dim() != 2:
        return None
    if max(ours.shape) > LARGEST_RANKED or ours.equal(theirs):
        return None
    squares = torch.linalg.svdvals(theirs - ours).square()
    shares = squares.cumsum(0) / squares.sum()
    rank = 1 + int((shares < OF_RANK).sum())
    if rank > min(ours.shape) // RANKS:
        return None
    what = f"the weight of {evidence.step.quantity} differs by a matrix of rank {rank}"
    return f"{what}, as if an adapter were merged twice or not at all"
