"""The dense engine: TransformerLens's hooks, and every pattern read whole."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelError
from schemas.statistics import LAYER_VALUES
from workers.engine.dense_pattern import MASKED, DensePattern, causal_softmax
from workers.engine.edits import WHOLE_PATTERN, Edits, hidden_keys
from workers.engine.token_pairs import TokenPairs
from workers.model.model import Hook, Model, wide

Activations = dict[str, Any]
OnLayer = Callable[[int, Activations], None]
"""Called as `on_layer(layer, activations)`, layer by layer, with the names of
`schemas.statistics.LAYER_VALUES`.

The dense engine calls it once a layer, the fused one after the attention and again, with
`resid_post`, at the end of the layer. What `keep` does not name is forgotten in between, and
nothing outlives its layer.
"""

OnFinal = Callable[[Tensor], None]
"""Called with the stream after the last norm `[batch pos d_model]`, where somebody wants to know
what is predicted.
"""


class Done(Exception):
    """Raised after the last layer: what follows (final norm, unembedding) is not needed."""


class DenseEngine:
    """Runs the bridge with hooks and reads the whole pattern: the reference, and the way to edit
    activations.
    """

    name = "dense"

    def __init__(self, model: Model, edits: Edits | None = None) -> None:
        self.model, self.edits = model, edits or Edits()
        self._checked: set[tuple[int, int]] = set()
        """Layers, and lengths of sequences, whose scores have been held against their pattern."""

    def edited(self, edits: Edits) -> DenseEngine:
        """The same engine with edits of activations."""
        return DenseEngine(self.model, edits)

    def run(
        self,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        keep: Container[str] = LAYER_VALUES,
        on_final: OnFinal | None = None,
    ) -> None:
        """One forward pass over tokens `[batch pos]`; it ends with the last layer, or before the
        unembedding if `on_final`.
        """
        model, info = self.model, self.model.info
        seen: Activations = {}

        def known(layer: int) -> Activations:
            """What statistics and edits are shown of a layer: the pattern by question, shared keys
            and values repeated.
            """
            shown = dict(seen)
            for name in {"k", "v"} & seen.keys():
                shown[name] = seen[name].repeat_interleave(info.n_heads // seen[name].shape[2], 2)
            if {"pattern", "attn_scores"} <= seen.keys():
                shown["pattern"] = self._pattern(layer, shown)
            elif "pattern" in self.edits.reads and {"q", "k"} <= seen.keys():
                # Some bridges show pattern and scores when z is gone; the layer's end tells whether
                # q and k make them.
                q, k = _factors(shown)
                unedited = DensePattern.of(q, k, model.scale(layer))
                if "pattern" in seen:
                    unedited.pattern = seen["pattern"]
                shown["pattern"] = unedited
            return shown

        def change(name: str, layer: int | None, value: Tensor, hook: object) -> Tensor | None:
            if not self.edits.touch(name, layer):
                return None
            edited = self.edits.apply(
                name, layer, value, {**({} if layer is None else known(layer)), "tokens": tokens}
            )
            return None if edited is value else edited

        def note(name: str, layer: int, value: Tensor, hook: object) -> Tensor | None:
            edited = change(name, layer, value, hook)
            seen[name] = wide(value if edited is None else edited)
            if name in WHOLE_PATTERN:
                seen[f"unedited {name}"] = wide(value)
            if name == "attn_scores" and edited is not None:
                seen["hidden"] = hidden_keys(edited)
            return edited

        def rotated(name: str, value: Tensor, hook: object) -> None:
            seen[name] = wide(value)

        def finish(layer: int, value: Tensor, hook: object) -> Tensor | None:
            edited = note("resid_post", layer, value, hook)
            on_layer(layer, {**known(layer), **matches})
            seen.clear()
            model.forget_pattern(layer)
            if layer == info.n_layers - 1 and on_final is None:
                raise Done
            return edited

        def predict(value: Tensor, hook: object) -> None:
            if on_final is not None:
                on_final(wide(value))
            raise Done

        hooks: list[tuple[str, Hook]] = [
            (model.hook_name(name), partial(change, name, None))
            for name in ("embed", "pos_embed")
            if self.edits.touch(name)
        ]
        for layer in range(info.n_layers):
            for name in ("attn_out", "mlp_out"):
                if self.edits.touch(name, layer):
                    hooks.append((model.hook_name(name, layer), partial(change, name, layer)))
            hooks.append((model.hook_name("resid_pre", layer), partial(note, "resid_pre", layer)))
            for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
                hooks.append((model.hook_name(name, layer), partial(note, name, layer)))
            for name in ("q", "k"):
                if model.has_hook(place := model.hook_name(f"rot_{name}", layer)):
                    hooks.append((place, partial(rotated, name)))
            hooks.append((model.hook_name("resid_post", layer), partial(finish, layer)))
        if on_final is not None:
            hooks.append((model.hook_name("unembed_in"), predict))
        try:
            model.run_with_hooks(tokens, hooks)
        except UserWarning as warning:
            raise ModelError(
                f"{info.name}: {', '.join(e.target for e in self.edits.edits)} cannot be edited in this architecture ({warning})"
            ) from None
        except Done:
            pass

    def _pattern(self, layer: int, seen: Activations) -> DensePattern:
        """A layer's pattern, with the scores behind it: as the bridge shows them, or else
        scale·q·k.
        """
        q, k = _factors(seen)
        scale = self.model.scale(layer)
        shown = self.model.shows_scores(layer)
        scores = seen["attn_scores"] if shown else q @ k.mT * scale
        n_ctx = q.shape[2]
        if (layer, n_ctx) not in self._checked:
            # An edit of scores that the bridge does not show would be measured and have no effect.
            edited_unseen = not shown and self.edits.touch("attn_scores", layer)
            self._check(layer, scores, seen, edited_unseen)
            self._checked.add((layer, n_ctx))
        return DensePattern(seen["pattern"], scores, q, k, scale, seen.get("hidden"))

    def _check(self, layer: int, scores: Tensor, seen: Activations, edited_unseen: bool) -> None:
        """Hold scores against the pattern that they should make, before an edit of the pattern."""
        name, pattern = self.model.info.name, seen["unedited pattern"]
        makes = torch.allclose(
            causal_softmax(scores).tril(), pattern.tril(), atol=1e-4, equal_nan=True
        )
        if edited_unseen or not makes:
            raise ModelError(
                f"{name}: the bridge does not show the scores behind the pattern of layer {layer}"
            )
        unedited = seen["unedited attn_scores"] if self.model.shows_scores(layer) else scores
        if (unedited.tril() <= MASKED).any():
            raise ModelError(f"{name}: layer {layer} looks back less far than n_ctx; lower n_ctx")


def _factors(seen: Activations) -> tuple[Tensor, Tensor]:
    """Queries and keys `[batch head pos d_head]`."""
    return seen["q"].transpose(1, 2), seen["k"].transpose(1, 2)
