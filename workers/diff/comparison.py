"""Two models on the same tokens: which steps of which layers differ, and what that does.

Each layer of the second model gets the input of the same layer of the first, so a fault in one
layer does not make all later ones differ; and each step within it what the same step was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.diff.causes import UNLIKE, Cause, Evidence, by_contributions, cause_of
from headcount.workers.diff.layer_steps import (
    JOINT,
    LayerTrace,
    Step,
    named_parts,
    note_attention,
    recorded,
    steps_of,
    whole_step,
)
from headcount.workers.diff.noise import NoiseFloor, one_thread
from headcount.workers.diff.number_grids import FORMATS, rounding_of
from headcount.workers.diff.side import Side, WholePass, built, given_stream, swept
from headcount.workers.model.attention_facts import Attend, AttentionFacts
from headcount.workers.model.bare_modules import ATTENTION, PROJECTIONS, child_of
from headcount.workers.model.info.model_info import ModelInfo
from headcount.workers.model.model import Model

SIZES = ("n_layers", "n_heads", "d_head", "d_model", "d_vocab")
LAYER_SEQUENCES = 4  # of each kind of input that every layer is compared on
BATCH = 2  # sequences in a pass
UNEMBEDDED = 24  # positions of a sequence whose logits are compared

EXPLAINED_BY = {"layer types": ("pattern", "rotation"), "tied": ("unembedding",)}
"""Quantities that a cause of several layers explains; one that is not named explains all."""

Show = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Departure:
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
    rounding: str = ""  # the number format that explains it
    cause: Cause | None = None


@dataclass
class Comparison:
    """What was found."""

    departures: list[Departure] = field(default_factory=list)
    head_changes: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by sequence
    losses: dict[str, Tensor] = field(default_factory=dict)  # [A or B, sequence] of each input
    noise: NoiseFloor = field(default_factory=NoiseFloor)

    @property
    def faults(self) -> list[Departure]:
        """What no rounding explains."""
        return [departure for departure in self.departures if not departure.rounding]

    @property
    def causes(self) -> dict[Cause, list[int]]:
        """What faults look like, and in which layers; none outside of the layers."""
        causes: dict[Cause, list[int]] = {}
        for fault in self.faults:
            layers = causes.setdefault(fault.cause or UNLIKE, [])
            if fault.layer is not None and fault.layer not in layers:
                layers.append(fault.layer)
        return causes

    @property
    def rounding(self) -> str:
        """The coarsest format that explains a departure; empty if none does."""
        roundings = {departure.rounding for departure in self.departures} - {""}
        return max(roundings, key=FORMATS.index, default="")

    @property
    def verdict(self) -> str:
        """Whether it is the same model: same, rounding or different."""
        return "different" if self.faults else "rounding" if self.rounding else "same"


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
    """Compares two models; `compare` does it."""

    def __init__(self, a: Model, b: Model, show: Show) -> None:
        check_sizes(a.info, b.info)
        self.a, self.b, self.show = Side("A", a), Side("B", b), show
        self.found = Comparison()
        self.located: set[int] = set()  # layers whose steps have been compared
        self.done, self.all = 0, 1  # layers that have been run, and will be

    def compare(self, inputs: Mapping[str, Tensor]) -> Comparison:
        """Compare on sequences `[sequence pos]` of the same length, by the name of the input."""
        n_layers = len(self.a.model.blocks)
        heads = [list(tokens[:LAYER_SEQUENCES]) for tokens in inputs.values()]
        mixed = [tokens for row in zip(*heads, strict=False) for tokens in row]
        batches = torch.stack(mixed).split(BATCH)
        rest = [tokens.split(BATCH) for tokens in inputs.values()]
        self.all = n_layers * (4 + 4 * len(batches) + 2 * sum(map(len, rest)))
        with torch.inference_mode():
            self._measure_noise(batches[0])
            for batch in batches:
                self._compare_layers(batch)
            self._compare_embeddings()
            for name, tokens in inputs.items():
                self.found.losses[name] = self._losses(name, tokens)
        self._name_causes()
        return self.found

    def _tell(self, words: str, layers: int) -> None:
        self.done += layers
        self.show(words, min(1.0, self.done / self.all))

    # Noise

    def _measure_noise(self, tokens: Tensor) -> None:
        """A against itself: other batches, threads, and order of summation."""
        noise, a = self.found.noise, self.a
        with one_thread():
            alone = a.run(tokens[:1])
        n_layers = len(a.model.blocks)

        def note(layer: int, trace: LayerTrace) -> None:
            self._tell(f"measuring the noise of A against itself, layer {layer} of {n_layers}", 3)
            with one_thread():
                first = trace.of_first()
                noise.note([self._whole_layer(a, alone, layer, first, built)[0]])
                noise.note(steps_of(a, alone, layer, first, built)[0])

        whole = self._traced(tokens, note)
        with one_thread():
            noise.note(self._end_steps(a, alone, tokens[:1], whole))
        noise.note([whole_step("embedding", whole.first_stream[:1], alone.first_stream)])

    # Layers

    def _traced(self, tokens: Tensor, on_layer: Callable[[int, LayerTrace], None]) -> WholePass:
        """A pass of A that hands over what each layer computes, and forgets it."""
        traces: dict[int, tuple[LayerTrace, ExitStack]] = {}
        blocks = self.a.model.blocks

        def begin(layer: int, _module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            trace, hooks = LayerTrace(given_stream(args, kwargs).clone()), ExitStack()
            hooks.enter_context(recorded(blocks[layer], trace))
            traces[layer] = trace, hooks

        def end(layer: int, _module: nn.Module, _args: object, output: Any) -> None:  # noqa: ANN401
            trace, hooks = traces.pop(layer)
            hooks.close()
            trace.result = (output[0] if isinstance(output, tuple | list) else output).clone()
            on_layer(layer, trace)

        def around(hooks: ExitStack) -> None:
            for layer, block in enumerate(blocks):
                before = block.register_forward_pre_hook(partial(begin, layer), with_kwargs=True)
                hooks.enter_context(before)
                hooks.enter_context(block.register_forward_hook(partial(end, layer)))

        def attend(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
            ((trace, _),) = traces.values()
            return note_attention(trace, swept)(q, k, v, facts)

        return self.a.run(tokens, around, attend)

    def _compare_layers(self, tokens: Tensor) -> None:
        theirs = self.b.run(tokens)
        n_layers = len(self.a.model.blocks)

        def compare(layer: int, trace: LayerTrace) -> None:
            self._tell(f"comparing layer {layer} of {n_layers}", 3)
            whole, z = self._whole_layer(self.b, theirs, layer, trace, swept)
            self._note_heads(layer, trace, z)
            if layer in self.located:
                return
            if self._departs(whole) or not self._same_windows(layer):
                self.located.add(layer)
                self._locate(layer, trace, theirs, whole)

        ours = self._traced(tokens, compare)
        first = whole_step("embedding", ours.first_stream, theirs.first_stream)
        for step in (first, *self._end_steps(self.b, theirs, tokens, ours)):
            is_known = any(one.quantity == step.quantity for one in self.found.departures)
            if self._departs(step) and not is_known:
                self._note(None, step, None)

    def _whole_layer(
        self, side: Side, whole: WholePass, layer: int, trace: LayerTrace, attend: Attend
    ) -> tuple[Step, Tensor | None]:
        """A layer of a side as one step, and its z."""
        own = LayerTrace(trace.stream)
        result = side.run_layer(whole, layer, trace.stream, note_attention(own, attend))
        ours, theirs = map(side.model.stream, (trace.result, result))
        return whole_step("layer", ours, theirs), own.attention.get("z")

    def _same_windows(self, layer: int) -> bool:
        """Whether windows agree, which the input may be too short to show."""
        ours, theirs = self._facts(layer)
        if ours is None or theirs is None:
            return True
        longest = min(self.a.model.info.n_ctx, self.b.model.info.n_ctx)
        return min(ours.window or longest, longest) == min(theirs.window or longest, longest)

    def _facts(self, layer: int) -> tuple[AttentionFacts | None, AttentionFacts | None]:
        return self.a.model.facts(layer), self.b.model.facts(layer)

    def _note_heads(self, layer: int, trace: LayerTrace, theirs: Tensor | None) -> None:
        """How far z of each head is from A's, as a share of A's, in each sequence."""
        ours = trace.attention.get("z")
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return
        change = (theirs - ours).norm(dim=(1, 3)) / ours.norm(dim=(1, 3)).clamp(min=1e-30)
        for head in range(change.shape[1]):
            known = self.found.head_changes.get((layer, head), change.new_empty(0))
            self.found.head_changes[layer, head] = torch.cat([known, change[:, head]])

    def _departs(self, step: Step) -> bool:
        return float(step.sizes().max()) > self.found.noise.limit(step.key)

    def _locate(self, layer: int, trace: LayerTrace, theirs: WholePass, whole: Step) -> None:
        """Find the steps of a layer that differ, each from A's own inputs."""
        self._tell(f"locating the difference in layer {layer}", 1)
        steps, rotation = steps_of(self.b, theirs, layer, trace, swept)
        before = len(self.found.departures)
        is_other_window = not self._same_windows(layer)
        for step in steps:
            if self._departs(step) or (step.quantity == "pattern" and is_other_window):
                self._note(layer, step, trace, (trace.rotation, rotation))
        if len(self.found.departures) == before and self._departs(whole):
            self._note(layer, whole, trace)

    # What lies before and behind the layers

    def _end_steps(
        self, side: Side, whole: WholePass, tokens: Tensor, ours: WholePass
    ) -> Iterator[Step]:
        """The last norm, the unembedding and what follows it, from what A's were given."""
        count = len(tokens)
        normed = side.normed_of(whole, tokens, ours.last_stream[:count])
        yield whole_step("final norm", ours.normed[:count], normed)
        places = torch.linspace(0, tokens.shape[1] - 1, UNEMBEDDED).long()
        rows = ours.normed[:count, places]
        own = self.a.model.unembed(rows)
        yield whole_step("unembedding", own, side.model.unembed(rows))
        logits = [each.model.changed_logits(own)[0] for each in (self.a, side)]
        yield whole_step("final soft cap", *logits)

    def _compare_embeddings(self) -> None:
        """Compare the rows of tokens that the input lacks."""
        if any(departure.quantity == "embedding" for departure in self.found.departures):
            return
        tokens = torch.arange(self.a.model.info.d_vocab)[None]
        (ours,), (theirs,) = (side.model.modules("embed") for side in (self.a, self.b))
        step = whole_step("embedding", ours(tokens), theirs(tokens))
        if step.ours.shape == step.theirs.shape and self._departs(step):
            self._note(None, step, None)

    def _losses(self, name: str, tokens: Tensor) -> Tensor:
        """Mean loss of each sequence by A and by B."""
        losses: list[Tensor] = []
        for start in range(0, len(tokens), BATCH):
            batch = tokens[start : start + BATCH]
            words = f"losses on {name}, sequence {start} of {len(tokens)}"
            pair: list[Tensor] = []
            for side in (self.a, self.b):
                self._tell(words, len(side.model.blocks))
                pair.append(side.losses(side.run(batch).normed, batch))
            losses.append(torch.stack(pair))
        return torch.cat(losses, 1)

    # What is said of it

    def _note(
        self,
        layer: int | None,
        step: Step,
        trace: LayerTrace | None,
        rotations: tuple[Any, Any] = (None, None),
    ) -> None:
        limit = self.found.noise.limit(step.key)
        sizes = step.sizes()  # [batch pos head]
        is_other = sizes > limit
        heads = tuple(is_other.any(0).any(0).nonzero().flatten().tolist() * (sizes.shape[2] > 1))
        is_position = is_other.any(2).any(0)
        rounding = "" if step.is_input and step.module else self._rounding(layer, step, trace)
        ours, theirs = (module_of(side.model, layer, step) for side in (self.a, self.b))
        evidence = Evidence(step, heads, (ours, theirs), trace, rotations=rotations)
        if layer is not None:
            blocks = tuple(side.model.blocks[layer] for side in (self.a, self.b))
            evidence = replace(evidence, blocks=blocks, facts=self._facts(layer))
        if not rounding:
            evidence = by_contributions(evidence)
        departure = Departure(
            layer, step.quantity, step.module, step.is_input, evidence.heads,
            evidence.ours.shape[2], int(is_position.int().argmax()),
            float(is_position.float().mean()), float(sizes.max()), limit, rounding,
            None if rounding else cause_of(evidence),
        )  # fmt: skip
        self.found.departures.append(departure)

    def _rounding(self, layer: int | None, step: Step, trace: LayerTrace | None) -> str:
        """The format by which the weights of a step are rounded; empty if none explains them."""
        if layer is None:
            own, other = (_outside_weights(side.model) for side in (self.a, self.b))
            return (step.quantity != "final soft cap" and rounding_of(own, other)) or ""
        if step.quantity in ("rotation", "pattern", "residual stream", "layer"):
            return ""
        ours, theirs = (module_of(side.model, layer, step) for side in (self.a, self.b))
        if ours is None or theirs is None:
            return ""
        # What smaller modules put out has been compared by itself.
        compared = set(trace.outputs) if trace else set[str]()
        if step.module and any(name.startswith(f"{step.module}.") for name in compared):
            return ""
        return rounding_of(dict(ours.named_parameters()), dict(theirs.named_parameters())) or ""

    def _name_causes(self) -> None:
        """Put what only several layers together show in the place of causes of a layer, and all
        departures in the order of the model.
        """
        whole_model = self._cause_of_layers()

        def named(departure: Departure) -> Departure:
            whole = whole_model.get(departure.layer)
            if whole is None or departure.quantity not in EXPLAINED_BY.get(
                whole.kind, (departure.quantity,)
            ):
                return departure
            return replace(departure, cause=whole)

        # Other tokens may have shown a layer before an earlier one.
        self.found.departures = sorted(map(named, self.found.departures), key=_place)

    def _cause_of_layers(self) -> dict[int | None, Cause]:
        faulty = sorted({one.layer for one in self.found.faults if one.layer is not None})
        causes: dict[int | None, Cause] = {}
        if _is_tied(self.b.model) and not _is_tied(self.a.model):
            causes[None] = Cause("tied", "the unembedding is the embedding, and A's another matrix")
        for layer in faulty:
            if (other := self._layer_with_the_weights_of(layer)) is not None:
                sentence = "layers lie in another order, or twice"
                causes[layer] = Cause("layer order", f"{sentence}: layer {layer} is A's {other}")
        n_layers = len(self.a.model.blocks)
        windows = [tuple(f and f.window for f in self._facts(n)) for n in range(n_layers)]
        ours, theirs = ([pair[side] for pair in windows] for side in (0, 1))
        is_mixed = len({*ours}) == 2 and {*ours} == {*theirs}
        if is_mixed and ours != theirs:
            is_inverted = all(one != other for one, other in windows)
            how = "inverted" if is_inverted else "in another order"
            cause = Cause("layer types", f"layers with and without a window are {how}")
            causes |= {layer: cause for layer in faulty if windows[layer][0] != windows[layer][1]}
        return causes

    def _layer_with_the_weights_of(self, layer: int) -> int | None:
        """The layer of A that has the weights of a layer of B, if it is another one."""
        theirs = [weight for weight in self.b.model.blocks[layer].parameters() if weight.dim() > 1]
        for other, block in enumerate(self.a.model.blocks):
            ours = [weight for weight in block.parameters() if weight.dim() > 1]
            is_other = other != layer and len(ours) == len(theirs) > 0
            if is_other and all(map(torch.equal, ours, theirs)):
                return other
        return None


def _place(departure: Departure) -> float:
    if departure.layer is not None:
        return departure.layer
    return -1 if departure.quantity == "embedding" else math.inf


def module_of(model: Model, layer: int | None, step: Step) -> nn.Module | None:
    """The module that makes a step, or what takes part in it."""
    if layer is None:
        if step.quantity == "unembedding":
            return model.modules("unembed")[0]
        if step.quantity == "embedding":
            return model.modules("embed")[0]
        return _final_norm(model) if step.quantity == "final norm" else None
    block = model.blocks[layer]
    if step.module:
        return named_parts(block).get(step.module)
    # q, k and v that one module makes, or one each.
    attention = child_of(block, ATTENTION)
    names = (*JOINT, *PROJECTIONS.get(step.quantity.upper(), ()))
    return None if attention is None else child_of(attention, names)


def _is_tied(model: Model) -> bool:
    unembedding, embedding = (
        model.modules(name)[0]._parameters.get("weight") for name in ("unembed", "embed")
    )
    return unembedding is not None and embedding is not None and unembedding.equal(embedding)


def _outside_weights(model: Model) -> dict[str, Tensor]:
    """The weights that belong to no layer."""
    inside = {id(weight) for block in model.blocks for weight in block.parameters()}
    return {name: w for name, w in model.bare.named_parameters() if id(w) not in inside}


def _final_norm(model: Model) -> nn.Module | None:
    inside = {id(module) for block in model.blocks for module in block.modules()}
    norms: Iterable[nn.Module] = (
        module
        for name, module in model.bare.named_modules()
        if id(module) not in inside and ("norm" in name or name.rpartition(".")[2].startswith("ln"))
    )
    return next(iter([*norms][-1:]), None)
