"""What runs a model and shows its activations: the protocol that both engines satisfy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from typing import Literal, NotRequired, Protocol, TypedDict

from torch import Tensor

from headcount.schemas.files.commit import Method
from headcount.schemas.statistics import LAYER_VALUES
from headcount.workers.engine.changes import Changes
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.model.model import Model


class Activations(TypedDict):
    """What is known of a layer at its end, by the names of `schemas.statistics.LAYER_VALUES`.

    Numbers are float32 at least. Before the end of the layer, what comes later is missing.
    """

    resid_pre: Tensor
    """`[batch pos d_model]`."""
    q: Tensor
    """`[batch pos head d_head]`, as it is multiplied: after any rotation."""
    unrotated_q: NotRequired[Tensor]
    """The same before any rotation, and after any norm of queries."""
    k: Tensor
    """The same, repeated where query heads share it."""
    v: Tensor
    """The same."""
    pattern: FusedPattern | DensePattern
    z: Tensor
    """`[batch pos head d_head]`."""
    resid_post: Tensor
    """`[batch pos d_model]`."""
    copies: NotRequired[TokenPairs]
    """Earlier copies of each token, if the caller of `run` passed them as `matches`."""
    successors: NotRequired[TokenPairs]
    """What follows them, likewise."""


OnLayer = Callable[[int, Activations], None]
"""Called as `on_layer(layer, activations)`, layer by layer.

The dense engine calls it once a layer. The fused engine calls it after the attention, while q, k
and v are in the cache, and again at the end of the layer, with `resid_post`. In between it forgets
what `read_late` does not name. Nothing outlives its layer.
"""

OnFinal = Callable[[Tensor], None]
"""Called with the stream after the last norm `[batch pos d_model]`, from which predictions are
made.
"""

Attention = Literal["tiles", "kernel", "matrix"]
"""What computes a pattern: tiles of scores, the GPU's kernel, or the whole matrix."""


class StopPass(Exception):
    """Ends a forward pass where nothing that follows is needed, as the final norm and unembedding.

    Hooks cannot return from the model's code, so they raise. Every engine catches it.
    """


class Engine(Protocol):
    """Runs a model under changes of activations."""

    @property
    def name(self) -> Literal["fused", "dense"]:
        """The engine's name in scans and commits."""
        ...

    @property
    def model(self) -> Model:
        """The model that it runs."""
        ...

    @property
    def changes(self) -> Changes:
        """The changes of activations that every pass makes."""
        ...

    @property
    def attention(self) -> Attention:
        """What computes the patterns, except in layers where a change needs them built."""
        ...

    def run(
        self,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        read_late: Container[str] = LAYER_VALUES,
        on_final: OnFinal | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        """One forward pass over tokens `[batch pos]` that shows some layers, by default all.

        It ends with the last of these layers. If there is `on_final`, it goes through all layers
        and ends before the unembedding.
        """
        ...

    def changed(self, changes: Changes) -> Engine:
        """The same engine with other changes of activations."""
        ...

    def method(self, intervention: str, depth: int) -> Method:
        """How this engine measures under its changes, in a pass through the first `depth` layers.

        The changes are those of the intervention.
        """
        ...
