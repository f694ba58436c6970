"""Two models on the same tokens: which steps of which layers differ, and what that does.

Each layer of B gets the input of the same layer of A, so a fault in one layer does not make all
later ones differ. In a layer that differs, each step gets what A's step was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.workers.diff.causes import Cause, cause_of
from headcount.workers.diff.noise import NoiseFloor
from headcount.workers.diff.number_grids import FORMATS, rounding_between
from headcount.workers.diff.passes import OWN_Z, Place, run_unseen
from headcount.workers.diff.steps import Step, steps_between, windows_of
from headcount.workers.engine.prediction_inputs import next_token_losses
from headcount.workers.model.model import Model
from headcount.workers.model.model_info import ModelInfo

SIZES = ("n_layers", "n_heads", "d_head", "d_model", "d_vocab")
LAYER_SEQUENCES = 4  # of each kind of input that every layer is compared on
BATCH = 2  # sequences in a pass
LAYERS_AT_ONCE = 8  # that are looked into in one pass, which holds all that they compute
LOSS_POSITIONS = 128  # of a sequence whose loss is taken: vocabularies may be large

Show = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Fault:
    """A step that is not A's, given what A's was given."""

    layer: int | None  # None outside of the layers
    quantity: str
    module: str
    is_input: bool  # whether it is what the module is given
    heads: tuple[int, ...]  # that differ
    n_heads: int
    first_position: int
    positions: float  # share that differs
    size: float  # largest difference, relative to the quantity
    limit: float  # below which it would be noise
    cause: Cause


@dataclass
class Comparison:
    """What was found."""

    rounded: dict[str, list[str]] = field(default_factory=dict)  # names of weights by their format
    faults: list[Fault] = field(default_factory=list)  # beside that
    head_changes: dict[int, Tensor] = field(default_factory=dict)  # [sequence head] by layer
    losses: dict[str, Tensor] = field(default_factory=dict)  # [A or B, sequence] of each input
    noise: NoiseFloor = field(default_factory=NoiseFloor)

    @property
    def causes(self) -> dict[Cause, list[int]]:
        """What faults look like, and in which layers; none outside of the layers."""
        causes: dict[Cause, list[int]] = {}
        for fault in self.faults:
            layers = causes.setdefault(fault.cause, [])
            if fault.layer is not None and fault.layer not in layers:
                layers.append(fault.layer)
        return causes

    @property
    def rounding(self) -> str:
        """The coarsest format to which a weight is rounded; empty if none is."""
        return max(self.rounded, key=FORMATS.index, default="")

    @property
    def verdict(self) -> str:
        """Whether it is the same model: same, rounding or different."""
        return "different" if self.faults else "rounding" if self.rounded else "same"


def check_sizes(a: ModelInfo, b: ModelInfo) -> None:
    """Refuse models whose layers, heads or vocabularies do not correspond."""
    for name in SIZES:
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours != theirs:
            raise ModelError(
                f"{name} is {ours:,} in A and {theirs:,} in B; expected two forms of one model, "
                "of which every layer and head can be compared"
            )


class Comparer:
    """Compares two models of the same sizes; `compare` does it."""

    def __init__(self, a: Model, b: Model, show: Show) -> None:
        self.a, self.b, self.show = a, b, show
        for model in (a, b):
            if model.attention_problem is not None:
                raise ModelError(
                    f"{model.info.path}: {model.attention_problem}; expected a causal language "
                    "model that the fused engine measures, as headcount doctor --model says"
                )
            if not model.modules("unembed"):
                raise ModelError(f"{model.info.path}: no unembedding, so there are no predictions")
        self.found = Comparison()

    def compare(self, inputs: Mapping[str, Tensor]) -> Comparison:
        """Compare on sequences `[sequence pos]` of the same length, by the name of the input."""
        # Each pass has sequences of every input.
        samples = torch.stack([tokens[:LAYER_SEQUENCES] for tokens in inputs.values()], 1)
        batches = samples.flatten(0, 1).split(BATCH)
        with torch.inference_mode():
            for name, tokens in inputs.items():
                self.found.losses[name] = self._losses(name, tokens)
            for batch in batches:
                self._compare_heads(batch)
            self._undo_rounding()
            self._measure_noise(batches[0])
            for batch in batches:
                self._compare_layers(batch)
            self._compare_embeddings()
        # Other tokens may have shown a layer before an earlier one.
        self.found.faults.sort(key=_order)
        return self.found

    def _compare_heads(self, tokens: Tensor) -> None:
        """How far z of each head is from A's, as a share of A's, in each sequence."""
        self._tell("comparing heads")
        changes = self.found.head_changes
        for step in steps_between(self.a, self.b, tokens):
            layer = step.place.layer
            if layer is not None and step.place.quantity == OWN_Z:
                size = step.ours.norm(dim=(1, 3)).clamp(min=1e-30)
                change = (step.theirs - step.ours).norm(dim=(1, 3)) / size  # [batch head]
                changes[layer] = torch.cat([changes.get(layer, change[:0]), change])

    def _undo_rounding(self) -> None:
        """Put A's weights in the place of B's that are A's but for rounding. What then differs is
        no rounding.
        """
        self._tell("comparing weights")
        ours, theirs = (
            dict(model.bare.named_parameters(remove_duplicate=False)) for model in (self.a, self.b)
        )
        for name in (name for name in ours if name in theirs):
            pair = ours[name], theirs[name]
            if pair[0].shape != pair[1].shape or pair[0].equal(pair[1]):
                continue
            if rounding := rounding_between(*pair):
                self.found.rounded.setdefault(rounding, []).append(name)
                pair[1].copy_(pair[0])

    def _measure_noise(self, tokens: Tensor) -> None:
        """A against itself: another batch, one thread, and another order of summation."""
        for inside in ((), *_groups(range(len(self.a.blocks)))):
            self._tell("measuring the noise of A against itself", inside)
            self.found.noise.note(steps_between(self.a, self.a, tokens, inside, as_noise=True))

    def _compare_layers(self, tokens: Tensor) -> None:
        self._tell("comparing all layers")
        known = {
            fault.quantity if fault.layer is None else fault.layer for fault in self.found.faults
        }
        wholes: dict[int, Step] = {}  # of layers that are to be looked into
        for step in steps_between(self.a, self.b, tokens):
            layer, quantity = step.place.layer, step.place.quantity
            is_new = (quantity if layer is None else layer) not in known
            if quantity == OWN_Z or not is_new:
                continue
            if layer is None and self._departs(step):
                self._note(step)
            if layer is not None and (self._departs(step) or self._has_other_window(layer)):
                wholes[layer] = step
        for inside in _groups([*wholes]):
            self._tell("locating the difference", inside)
            located: set[int | None] = set()
            for step in steps_between(self.a, self.b, tokens, inside):
                if self._departs(step):
                    self._note(step)
                    located.add(step.place.layer)
            for layer in inside:
                if layer not in located:
                    self._note(wholes[layer])

    def _departs(self, step: Step) -> bool:
        # The input may be too short to show a window.
        is_masked = step.place.quantity == "pattern" and self._has_other_window(step.place.layer)
        return is_masked or float(step.sizes().max()) > self.found.noise.limit(step.place)

    def _has_other_window(self, layer: int | None) -> bool:
        assert layer is not None
        longest = min(self.a.info.n_ctx, self.b.info.n_ctx)
        windows = [windows_of(model)[layer] or longest for model in (self.a, self.b)]
        return min(windows[0], longest) != min(windows[1], longest)

    def _note(self, step: Step) -> None:
        """Say what differs, and what it looks like."""
        sizes, limit = step.sizes(), self.found.noise.limit(step.place)  # [batch pos head]
        is_position = (sizes > limit).any(2).any(0)
        step = step.by_head()
        n_heads = step.ours.shape[2]
        is_head = (step.sizes() > limit).any(0).any(0)
        step = replace(step, heads=tuple(is_head.nonzero().flatten().tolist() * (n_heads > 1)))
        self.found.faults.append(
            Fault(
                *step.place, step.heads, n_heads,
                first_position=int(is_position.int().argmax()),
                positions=float(is_position.float().mean()),
                size=float(sizes.max()), limit=limit, cause=cause_of(step),
            )
        )  # fmt: skip

    def _compare_embeddings(self) -> None:
        """Compare the embeddings of tokens that the input lacks."""
        if any(fault.quantity == "embedding" for fault in self.found.faults):
            return
        models = self.a, self.b
        tokens = torch.arange(self.a.info.d_vocab)[None]
        ours, theirs = (model.modules("embed")[0](tokens)[:, :, None] for model in models)
        step = Step(Place(None, "embedding"), models, ours, theirs)
        if ours.shape == theirs.shape and self._departs(step):
            self._note(step)

    def _losses(self, name: str, tokens: Tensor) -> Tensor:
        """Mean loss of each sequence, at positions spread evenly over it: `[A or B, sequence]`."""
        last = tokens.shape[1] - 1
        positions = torch.linspace(0, last - 1, min(last, LOSS_POSITIONS)).round().long()
        losses: list[Tensor] = []
        for start, batch in zip(range(0, len(tokens), BATCH), tokens.split(BATCH), strict=True):
            self._tell(f"losses on {name}, sequence {start} of {len(tokens)}")
            for model in (self.a, self.b):
                rows = run_unseen(model, batch)[:, positions].flatten(0, 1)
                of_rows = next_token_losses(model, rows, batch[:, positions + 1].flatten())
                losses.append(of_rows.view(len(batch), -1).mean(1))
        return torch.stack([torch.cat(losses[side::2]) for side in (0, 1)])

    def _tell(self, words: str, layers: Sequence[int] = ()) -> None:
        where = f", layers {layers[0]} to {layers[-1]}" if layers else ""
        self.show(f"{words}{where}", None)


def _groups(layers: Sequence[int]) -> list[Sequence[int]]:
    """Layers that are looked into together."""
    starts = range(0, len(layers), LAYERS_AT_ONCE)
    return [layers[start : start + LAYERS_AT_ONCE] for start in starts]


def _order(fault: Fault) -> float:
    if fault.layer is not None:
        return fault.layer
    return -1 if fault.quantity == "embedding" else math.inf
