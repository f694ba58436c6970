"""What an intervention changes while a model runs: functions of activations, by layer or in all."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from headcount.schemas.errors import ScanError

CHANGEABLE_ACTIVATIONS: dict[str, str] = {
    "embed": "token embeddings [batch pos d_model]",
    "pos_embed": "position embeddings as they are added [batch pos d_model]; batch may be 1",
    "rotary_positions": "positions by which queries and keys are rotated [pos]",
    "resid_pre": "residual stream before the layer [batch pos d_model]",
    "key_input": "what the projection of keys reads [batch pos d_model]",
    "q": "queries before any rotation [batch pos head d_head]",
    "k": "keys before any rotation [batch pos head d_head]",
    "v": "values [batch pos head d_head]",
    "rot_k": "keys after any rotation, as queries meet them [batch pos head d_head]",
    "attn_scores": "scores, scaled; those of future keys are masked afterwards [batch head query "
    "key]",
    "pattern": "attention pattern [batch head query key]",
    "z": "Σ_k A[q,k] v[k], before W_O [batch pos head d_head]",
    "attn_out": "what the attention adds to the stream [batch pos d_model]",
    "mlp_out": "what the MLP adds to the stream [batch pos d_model]",
    "resid_post": "residual stream after the layer [batch pos d_model]",
}
"""Every activation that can be changed, with its TransformerLens axes, in the order of a pass."""

EMBEDDINGS = ("embed", "pos_embed", "rotary_positions")  # activations before the first layer
PROJECTIONS = ("q", "k", "v")  # made at once: a change of one cannot read the others
WHOLE_PATTERN = ("attn_scores", "pattern")  # exist only where a pattern is built

READABLE_ACTIVATIONS = ("resid_pre", "q", "k", "v", "pattern", "z")
"""Activations that a change of a later one may read, as statistics see them: a pattern to ask."""

PARTNER = "partner"  # read by a change that wants its own target from the run on the partner
LABELS = "labels"  # read by a change that wants to know which tokens the input family has labelled
Index = int | slice | EllipsisType | Tensor | list[int]  # selects places along an axis


def readable(target: str) -> tuple[str, ...]:
    """What a change may read besides its target.

    >>> readable("v")
    ('tokens', 'layer', 'partner', 'labels', 'resid_pre')
    >>> readable("pattern")
    ('tokens', 'layer', 'partner', 'labels', 'resid_pre', 'q', 'k', 'v')
    """
    order = list(CHANGEABLE_ACTIVATIONS)
    # What is made at the same time as the target does not exist yet when the change is made.
    made_at = target
    if target in PROJECTIONS:
        made_at = PROJECTIONS[0]
    elif target in WHOLE_PATTERN:
        made_at = WHOLE_PATTERN[0]
    earlier = [name for name in READABLE_ACTIVATIONS if order.index(name) < order.index(made_at)]
    return ("tokens", "layer", PARTNER, LABELS, *earlier)


@dataclass(frozen=True)
class Streaming:
    """Heads whose queries see the first keys and the last ones, and none between."""

    sink: int  # how many of the first keys every query sees
    recent: int  # how many keys a query sees up to its own
    heads: Mapping[int, tuple[int, ...]]  # query heads by layer, ascending; other layers have none


@dataclass(frozen=True)
class Change:
    """A function of one activation and of what it reads by name; it changes no argument."""

    target: str
    function: Callable[[Tensor, Mapping[str, Any]], Tensor]
    layer: int | None = None  # the layer it is for; none means all of them
    reads: frozenset[str] = frozenset()
    streaming: Streaming | None = None  # what a change of scores hides, if it does nothing more

    def touches(self, name: str, layer: int | None) -> bool:
        """Whether it changes an activation, in a layer if the activation belongs to one."""
        return self.target == name and (layer is None or self.is_in(layer))

    def is_in(self, layer: int) -> bool:
        """Whether it changes something in a layer."""
        if self.streaming is not None:
            return layer in self.streaming.heads
        return self.layer in (None, layer)


class Changes:
    """Changes in the order in which they are applied."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self.changes = tuple(changes)
        self.reads = frozenset[str]().union(*(change.reads for change in self.changes))

    def touch(self, name: str, layer: int | None = None) -> bool:
        """Whether an activation is changed, in a layer if the activation belongs to one."""
        return any(change.touches(name, layer) for change in self.changes)

    def touch_layer(self, layer: int) -> bool:
        """Whether anything is changed in a layer."""
        return any(
            change.is_in(layer) and change.target not in EMBEDDINGS for change in self.changes
        )

    def apply(
        self, name: str, layer: int | None, value: Tensor, readable_values: Mapping[str, Any]
    ) -> Tensor:
        """An activation as changes leave it; the same tensor if nothing changes it."""
        changed = value
        for change in self.changes:
            if change.touches(name, layer):
                # Each change gets what the one before it left.
                changed = change.function(changed, {**readable_values, "layer": layer})
        return changed

    def streaming(self, layer: int) -> Streaming | None:
        """What the one change of a layer's scores and pattern hides, if it is one that says it."""
        changes = self._of_pattern(layer)
        return changes[0].streaming if len(changes) == 1 else None

    def given(self, values: Mapping[str, Any]) -> "Changes":
        """The same changes, which may read these values too."""

        def with_values(change: Change) -> Change:
            return replace(
                change, function=lambda value, read: change.function(value, {**read, **values})
            )

        return Changes(map(with_values, self.changes))

    def dense_layers(self, n_layers: int) -> list[int]:
        """Layers whose pattern has to be built."""
        return [layer for layer in range(n_layers) if self._of_pattern(layer)]

    def _of_pattern(self, layer: int) -> list[Change]:
        return [c for c in self.changes if c.target in WHOLE_PATTERN and c.is_in(layer)]


def hide(scores: Tensor, hidden: Tensor) -> Tensor:
    """Scores with minus infinity where a key is hidden from a query, so it gets no attention.

    >>> import torch
    >>> hide(torch.zeros(2, 2), torch.tensor([[False, False], [True, False]])).tolist()
    [[0.0, 0.0], [-inf, 0.0]]
    """
    return scores.masked_fill(hidden, -torch.inf)


def hidden_keys(scores: Tensor, unseen: Tensor) -> Tensor:
    """Which keys changed scores `[batch head query key]` hide, of those that a query can see.

    `unseen [query key]` are the others. A query that would attend to nothing is refused.
    """
    hidden = scores.isneginf() & ~unseen  # [batch head query key]
    visible_keys = (~unseen).sum(-1)  # [query]
    sees_nothing = (hidden.sum(-1) == visible_keys).flatten(0, -2).any(0)  # [query]
    if sees_nothing.any():
        raise ScanError(
            "interventions: an intervention hides every key from query "
            f"{int(sees_nothing.nonzero()[0])}; leave each query a key"
        )
    return hidden


def replaced(x: Tensor, where: Index | tuple[Index, ...], value: Tensor | float) -> Tensor:
    """A copy of a tensor with other values in some places.

    >>> import torch
    >>> replaced(torch.ones(3), slice(1), 0).tolist()
    [0.0, 1.0, 1.0]
    """
    # The model goes on to use x, so it stays as it is.
    changed = x.clone()
    changed[where] = value
    return changed
