"""The dense engine: TransformerLens's hooks, and every pattern read whole."""

from __future__ import annotations

import warnings
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
from workers.model.loading import LoadedModel

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


def wide(x: Tensor) -> Tensor:
    """What is measured is float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


class Done(Exception):
    """Raised after the last layer: what follows (final norm, unembedding) is not needed."""


class DenseEngine:
    """Runs the bridge with hooks and reads the whole pattern: the reference, and the way to edit
    activations.
    """

    name = "dense"

    def __init__(self, model: LoadedModel, edits: Edits | None = None) -> None:
        self.model, self.edits = model, edits or Edits()
        self._scales: dict[tuple[int, int], float | None] = {}
        self._shown_scales: dict[tuple[int, int], float] = {}

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
        info, bridge = self.model.info, self.model.bridge
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
                unedited = DensePattern.of(q, k, _usual_scale(shown))
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
            # The bridge would keep every layer's pattern alive until the next pass.
            bridge.blocks[layer].attn._pattern = None
            if layer == info.n_layers - 1 and on_final is None:
                raise Done
            return edited

        def predict(value: Tensor, hook: object) -> None:
            if on_final is not None:
                on_final(wide(value))
            raise Done

        hooks: list[tuple[str, Callable[..., Any]]] = [
            (f"hook_{name}", partial(change, name, None))
            for name in ("embed", "pos_embed")
            if self.edits.touch(name)
        ]
        for layer in range(info.n_layers):
            attn = f"blocks.{layer}.attn"
            for name in ("attn_out", "mlp_out"):
                if self.edits.touch(name, layer):
                    hooks.append((f"blocks.{layer}.hook_{name}", partial(change, name, layer)))
            hooks.append((f"blocks.{layer}.hook_resid_pre", partial(note, "resid_pre", layer)))
            for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
                hooks.append((f"{attn}.hook_{name}", partial(note, name, layer)))
            for name in ("q", "k"):
                if f"{attn}.hook_rot_{name}" in bridge.hook_dict:
                    hooks.append((f"{attn}.hook_rot_{name}", partial(rotated, name)))
            hooks.append((f"blocks.{layer}.hook_resid_post", partial(finish, layer)))
        if on_final is not None:
            hooks.append(("unembed.hook_in", predict))
        try:
            with warnings.catch_warnings():
                # The bridge only warns where an architecture gives it no way to apply an edit.
                warnings.filterwarnings("error", message=".*edit is discarded")
                bridge.run_with_hooks(tokens, return_type=None, fwd_hooks=hooks)
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
        known = (layer, seen["q"].shape[1])
        if known not in self._scales:
            self._scales[known] = self._find_scale(layer, seen)
        q, k = _factors(seen)
        scores = _scores_of(seen, self._scales[known])
        scale = self._scale(layer, seen)
        return DensePattern(seen["pattern"], scores, q, k, scale, seen.get("hidden"))

    def _scale(self, layer: int, seen: Activations) -> float:
        """What q·k is multiplied by, from scores that no edit has touched."""
        known = (layer, seen["q"].shape[1])
        if (scale := self._scales[known]) is not None:
            return scale
        if known not in self._shown_scales:
            # Rotations leave the product of a query and the key of its own position as it is.
            q, k = _factors(seen)
            products = (q * k).sum(-1)
            shown = seen["unedited attn_scores"].diagonal(dim1=-2, dim2=-1)
            self._shown_scales[known] = float((shown * products).sum() / products.square().sum())
        return self._shown_scales[known]

    def _find_scale(self, layer: int, seen: Activations) -> float | None:
        """None where the bridge shows the scores, else the scale of q·k that makes them: held once
        against the layer's pattern.
        """
        scales: list[float | None] = [None]
        # An edit of scores that the bridge does not show would be measured and have no effect.
        if not self.edits.touch("attn_scores", layer):
            scales.append(_usual_scale(seen))
            # GPT-Neo does not scale. An edit that reads the pattern was shown the usual scale.
            if "pattern" not in self.edits.reads:
                scales.append(1.0)
        for scale in scales:
            scores = _scores_of(seen, scale)
            implied = causal_softmax(scores)
            shown = seen["unedited pattern"]
            if torch.allclose(implied.tril(), shown.tril(), atol=1e-4, equal_nan=True):
                unedited = seen["unedited attn_scores"] if scale is None else scores
                if (unedited.tril() <= MASKED).any():
                    raise ModelError(
                        f"{self.model.info.name}: layer {layer} looks back less far than n_ctx; lower n_ctx"
                    )
                return scale
        raise ModelError(
            f"{self.model.info.name}: the bridge does not show the scores behind the pattern of layer {layer}"
        )


def _scores_of(seen: Activations, scale: float | None) -> Tensor:
    """The scores as the bridge shows them, or those that queries and keys make."""
    return seen["attn_scores"] if scale is None else _made(seen, scale)


def _made(seen: Activations, scale: float) -> Tensor:
    """The scores that queries and keys make."""
    q, k = _factors(seen)
    return q @ k.mT * scale


def _factors(seen: Activations) -> tuple[Tensor, Tensor]:
    """Queries and keys `[batch head pos d_head]`."""
    return seen["q"].transpose(1, 2), seen["k"].transpose(1, 2)


def _usual_scale(seen: Activations) -> float:
    return seen["q"].shape[-1] ** -0.5
