"""What runs a model and shows its activations: the protocol that both engines satisfy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from typing import Literal, NotRequired, Protocol, TypedDict

from torch import Tensor

from schemas.commits import Method
from schemas.statistics import LAYER_VALUES
from workers.engine.dense_pattern import DensePattern
from workers.engine.edits import Edits
from workers.engine.fused_pattern import FusedPattern
from workers.engine.token_pairs import TokenPairs
from workers.model.model import Model


class Activations(TypedDict):
    """What is known of a layer at its end, by the names of `schemas.statistics.LAYER_VALUES`, in
    float32 at least. Earlier, what comes later is missing.
    """

    resid_pre: Tensor
    """`[batch pos d_model]`."""
    q: Tensor
    """`[batch pos head d_head]`, as it is multiplied: after any rotation."""
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
    """What the tokens alone say, where the caller of `run` has asked for it."""
    successors: NotRequired[TokenPairs]
    """The same."""


OnLayer = Callable[[int, Activations], None]
"""Called as `on_layer(layer, activations)`, layer by layer.

The dense engine calls it once a layer, the fused one after the attention and again, with
`resid_post`, at the end of the layer. What `keep` does not name is forgotten in between, and
nothing outlives its layer.
"""

OnFinal = Callable[[Tensor], None]
"""Called with the stream after the last norm `[batch pos d_model]`, where somebody wants to know
what is predicted.
"""

Attention = Literal["tiles", "kernel", "matrix"]
"""What computes a pattern: tiles of scores, the GPU's kernel, or the whole matrix."""


class Done(Exception):
    """Raised after the last layer: what follows (final norm, unembedding) is not needed."""


class Engine(Protocol):
    """Runs a model under edits of activations."""

    @property
    def name(self) -> Literal["fused", "dense"]: ...

    @property
    def model(self) -> Model: ...

    @property
    def edits(self) -> Edits: ...

    @property
    def attention(self) -> Attention:
        """What computes the patterns, except in layers where an edit needs them built."""
        ...

    def run(
        self,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        keep: Container[str] = LAYER_VALUES,
        on_final: OnFinal | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        """One forward pass over tokens `[batch pos]` that shows some layers, or all of them; it
        ends with the last of these, or before the unembedding if `on_final`.
        """
        ...

    def edited(self, edits: Edits) -> Engine:
        """The same engine with other edits of activations."""
        ...

    def method(self, intervention: str, depth: int) -> Method:
        """How this engine measures under its edits, which are those of the intervention, in a pass
        through so many layers.
        """
        ...
