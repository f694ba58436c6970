"""What an intervention changes while a model runs: functions of activations, each in one layer or in all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

ACTIVATIONS: dict[str, str] = {
    "embed": "token embeddings [batch pos d_model]",
    "pos_embed": "position embeddings as they are added [batch pos d_model]; batch may be 1",
    "resid_pre": "residual stream before the layer [batch pos d_model]",
    "q": "queries before any rotation [batch pos head d_head]",
    "k": "keys before any rotation [batch pos head d_head]",
    "v": "values [batch pos head d_head]",
    "attn_scores": "scores, scaled; those of future keys are masked afterwards [batch head query key]",
    "pattern": "attention pattern [batch head query key]",
    "z": "Σ_k A[q,k] v[k], before W_O [batch pos head d_head]",
    "attn_out": "what the attention adds to the stream [batch pos d_model]",
    "mlp_out": "what the MLP adds to the stream [batch pos d_model]",
    "resid_post": "residual stream after the layer [batch pos d_model]",
}
"""Every activation that can be edited, with its TransformerLens axes."""

WHOLE_PATTERN = ("attn_scores", "pattern")
"""Activations that exist only where a pattern is built."""


@dataclass(frozen=True)
class Edit:
    """A function of one activation, which returns another and leaves its argument alone."""

    target: str
    function: Callable[[Tensor], Tensor]
    layer: int | None = None
    """The layer it is for; none means all of them."""


class Edits:
    """Edits in the order in which they are applied."""

    def __init__(self, edits: Iterable[Edit] = ()) -> None:
        self.edits = tuple(edits)

    def touch(self, name: str, layer: int | None = None) -> bool:
        """Whether an activation is edited, in a layer where it has one."""
        return any(e.target == name and (layer is None or e.layer in (None, layer)) for e in self.edits)

    def apply(self, name: str, layer: int | None, value: Tensor) -> Tensor:
        """An activation as edited; itself where nothing edits it."""
        for edit in self.edits:
            if edit.target == name and (layer is None or edit.layer in (None, layer)):
                value = edit.function(value)
        return value

    def dense_layers(self, n_layers: int) -> list[int]:
        """Layers whose pattern has to be built."""
        return [layer for layer in range(n_layers) if any(self.touch(name, layer) for name in WHOLE_PATTERN)]
