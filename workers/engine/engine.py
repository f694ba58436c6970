"""What runs a model and shows its activations: what both engines have in common."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal, NotRequired, Protocol, Self, TypedDict

from torch import Tensor

from headcount.schemas.files.commit import Method
from headcount.schemas.formula_kinds import LAYER_VALUES
from headcount.schemas.pattern import Pattern
from headcount.workers.engine.changes import Changes
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.model.model import Model, at_least_float32


class LayerPattern(Pattern, Protocol):
    """A pattern as an engine makes it: formulas ask it, and measurements choose heads of it."""

    @property
    def hidden(self) -> Tensor | None:
        """True where a change hides a key `[batch head query key]`; None if nothing does."""
        ...

    def only(self, heads: Sequence[int]) -> Self:
        """The same pattern of some heads alone."""
        ...


class Activations(TypedDict):
    """What is known of a layer at its end, by the names of `schemas.formula_kinds.LAYER_VALUES`.

    Numbers are float32 at least. Before the end of the layer, what comes later is missing.
    """

    resid_pre: Tensor  # `[batch pos d_model]`
    q: Tensor  # `[batch pos head d_head]`, as it is multiplied: after any rotation
    unrotated_q: NotRequired[Tensor]  # the same before any rotation, and after any norm of queries
    k: Tensor  # the same, repeated where query heads share it
    v: Tensor  # the same
    pattern: LayerPattern
    z: Tensor  # `[batch pos head d_head]`
    resid_post: Tensor  # `[batch pos d_model]`
    dz: NotRequired[Tensor]  # `schemas.formula_kinds.GRADIENTS`, behind the backward pass
    dv: NotRequired[Tensor]
    direct_dz: NotRequired[Tensor | None]  # None where it is not known
    logit_dz: NotRequired[Tensor | None]
    logit_parts: NotRequired[Tensor | None]
    copies: NotRequired[TokenPairs]  # earlier copies of each token, if `run` got `matches`
    successors: NotRequired[TokenPairs]  # what follows them, likewise


OnLayer = Callable[[int, Activations], None]
"""Called as `on_layer(layer, activations)`, layer by layer.

The dense engine calls it once a layer. The fused engine calls it after the attention, while q, k
and v are in the cache, and again at the end of the layer, with `resid_post`. In between it forgets
what `read_late` does not name. Nothing outlives its layer.
"""

OnFinal = Callable[[Tensor], None]  # takes the last norm's output `[batch pos d_model]`


class StopPass(Exception):
    """Ends a forward pass that is not needed further: hooks cannot return from the model's code."""


class Engine(ABC):
    """Runs a model under changes of activations, and shows its layers."""

    name: Literal["fused", "dense"]
    attention: Literal["tiles", "kernel", "matrix"]
    """What computes the patterns, except in layers where a change needs them built: tiles of
    scores, the GPU's kernel, or the whole matrix.
    """

    def __init__(self, model: Model, precision: str, changes: Changes | None = None) -> None:
        self.model = model
        self.precision = precision
        self.changes = changes or Changes()

    def changed(self, changes: Changes) -> Self:
        """The same engine with other changes of activations."""
        engine = copy.copy(self)
        engine.changes = changes
        return engine

    def built_layers(self, depth: int) -> list[int]:
        """Layers whose pattern is built for a change alone, in a pass through the first `depth`."""
        return self.changes.dense_layers(depth)

    def method(self, intervention: str, depth: int) -> Method:
        """How it measures under an intervention, in a pass through the first `depth` layers."""
        return Method(
            intervention=intervention,
            engine=self.name,
            precision=self.precision,
            attention=self.attention,
            built_layers=self.built_layers(depth),
        )

    def run(self, request: "PassRequest") -> None:
        """One forward pass that shows some layers, by default all.

        It ends with the last of these layers. If there is `on_final`, it goes through all layers
        and ends before the unembedding. If `gradients` are asked for (`GRADIENTS`), a backward pass
        follows, and layers are shown once more with them: only the gradient engine has it.
        """
        if request.layers is None:
            request = replace(request, layers=self.model.info.attention_layers_or_all)
        with suppress(StopPass):
            self.run_pass(request)

    @abstractmethod
    def run_pass(self, request: "PassRequest") -> None:
        """The forward pass of `run`, which may end with `StopPass`."""


@dataclass(frozen=True, kw_only=True)
class PassRequest:
    """What is asked of one forward pass."""

    tokens: Tensor  # `[batch pos]`
    matches: Mapping[str, TokenPairs] = field(default_factory=dict[str, TokenPairs])
    on_layer: OnLayer = lambda _layer, _activations: None
    read_late: Container[str] = frozenset(LAYER_VALUES)
    on_final: OnFinal | None = None
    layers: Collection[int] | None = None  # that are shown; None means all that attend
    gradients: frozenset[str] = frozenset()

    @property
    def shown_layers(self) -> Collection[int]:
        """The layers that are shown."""
        assert self.layers is not None, "Engine.run fills it in"
        return self.layers

    def ends_with(self, layer: int) -> bool:
        """Whether nothing after a layer is asked for."""
        # If no layer is shown, the pass is for its end alone.
        return self.on_final is None and layer == max(self.shown_layers, default=-1)

    def end(self, stream: Tensor) -> None:
        """Hand over the stream before the unembedding, where the pass ends."""
        if self.on_final is not None:
            self.on_final(at_least_float32(stream))
        raise StopPass
