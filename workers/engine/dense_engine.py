"""The dense engine: TransformerLens's hooks, and every pattern read whole."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from schemas.commits import Method
from schemas.errors import ModelError
from schemas.statistics import LAYER_VALUES
from workers.engine.dense_pattern import MASKED, DensePattern
from workers.engine.edits import EMBEDDINGS, WHOLE_PATTERN, Edits, hidden_keys
from workers.engine.engine import Activations, Done, OnFinal, OnLayer
from workers.engine.token_pairs import TokenPairs
from workers.model.attention_layers import causal_softmax
from workers.model.model import Hook, Model, at_least_float32

Tensors = dict[str, Tensor]
"""What hooks have shown of a layer, as edits leave it; `unedited …` and `hidden` say what an edit
changed.
"""


class DenseEngine:
    """Runs the bridge with hooks and reads the whole pattern: the reference, and the way to edit
    activations.
    """

    name: Literal["dense"] = "dense"
    attention: Literal["matrix"] = "matrix"

    def __init__(self, model: Model, edits: Edits | None = None) -> None:
        self.model, self.edits = model, edits or Edits()
        self._checked: set[tuple[int, int]] = set()
        """Layers and lengths whose pattern has been held against its scores."""

    def edited(self, edits: Edits) -> DenseEngine:
        """The same engine with edits of activations."""
        return DenseEngine(self.model, edits)

    def method(self, intervention: str, depth: int) -> Method:
        """How it measures: every pattern is a matrix, so none is built for an edit alone."""
        return Method(
            intervention=intervention,
            engine=self.name,
            precision="float64" if self.model.dtype == torch.float64 else "float32",
            attention=self.attention,
            built_layers=[],
        )

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
        model, info = self.model, self.model.info
        shown_layers = range(info.n_layers) if layers is None else layers
        last = max(shown_layers)
        seen: Tensors = {}

        def known(layer: int) -> Activations:
            """What statistics and edits are shown of a layer: the pattern by question, shared keys
            and values repeated.
            """
            tensors = dict(seen)
            for name in {"k", "v"} & seen.keys():
                tensors[name] = seen[name].repeat_interleave(info.n_heads // seen[name].shape[2], 2)
            shown = {name: x for name, x in tensors.items() if name in LAYER_VALUES}
            if {"pattern", "attn_scores"} <= seen.keys():
                return cast(Activations, {**shown, "pattern": self._pattern(layer, tensors)})
            if "pattern" in self.edits.reads and {"q", "k"} <= seen.keys():
                # Some bridges show pattern and scores when z is gone; the layer's end tells whether
                # q and k make them.
                early = DensePattern.of(*_factors(tensors), model.scale(layer))
                if "pattern" in seen:
                    early.pattern = seen["pattern"]
                return cast(Activations, {**shown, "pattern": early})
            return cast(Activations, shown)

        def change(name: str, layer: int | None, value: Tensor, hook: object) -> Tensor | None:
            if not self.edits.touch(name, layer):
                return None
            edited = self.edits.apply(
                name, layer, value, {**({} if layer is None else known(layer)), "tokens": tokens}
            )
            return None if edited is value else edited

        def note(name: str, layer: int, value: Tensor, hook: object) -> Tensor | None:
            edited = change(name, layer, value, hook)
            seen[name] = at_least_float32(value if edited is None else edited)
            if name in WHOLE_PATTERN:
                seen[f"unedited {name}"] = at_least_float32(value)
            if name == "attn_scores" and edited is not None:
                seen["hidden"] = hidden_keys(edited)
            return edited

        def rotated(name: str, value: Tensor, hook: object) -> None:
            seen[name] = at_least_float32(value)

        def end_layer(layer: int, value: Tensor, hook: object) -> Tensor | None:
            edited = note("resid_post", layer, value, hook)
            if layer in shown_layers:
                on_layer(layer, cast(Activations, {**known(layer), **matches}))
            seen.clear()
            model.forget_pattern(layer)
            if layer == last and on_final is None:
                raise Done
            return edited

        def predict(value: Tensor, hook: object) -> None:
            if on_final is not None:
                on_final(at_least_float32(value))
            raise Done

        hooks: list[tuple[str, Hook]] = [
            (model.hook_name(name), partial(change, name, None))
            for name in EMBEDDINGS
            if self.edits.touch(name)
        ]
        for layer in range(info.n_layers):
            hooks.append((model.hook_name("resid_post", layer), partial(end_layer, layer)))
            if layer not in shown_layers and not self.edits.touch_layer(layer):
                continue  # Nobody reads what it shows.
            for name in ("attn_out", "mlp_out"):
                if self.edits.touch(name, layer):
                    hooks.append((model.hook_name(name, layer), partial(change, name, layer)))
            hooks.append((model.hook_name("resid_pre", layer), partial(note, "resid_pre", layer)))
            for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
                hooks.append((model.hook_name(name, layer), partial(note, name, layer)))
            for name in ("q", "k"):
                if model.has_hook(place := model.hook_name(f"rot_{name}", layer)):
                    hooks.append((place, partial(rotated, name)))
        if on_final is not None:
            hooks.append((model.hook_name("unembed_in"), predict))
        try:
            model.run_with_hooks(tokens, hooks)
        except UserWarning as warning:
            raise ModelError(
                f"{info.name}: {', '.join(e.target for e in self.edits.edits)} cannot be edited "
                f"in this architecture ({warning})"
            ) from None
        except Done:
            pass

    def _pattern(self, layer: int, tensors: Tensors) -> DensePattern:
        """A layer's pattern, with the scores behind it: as the bridge shows them, or else
        scale·q·k.
        """
        model = self.model
        scale = model.scale(layer)
        q, k = _factors(tensors)
        if model.shows_scores(layer):
            scores = tensors["attn_scores"]
        elif self.edits.touch("attn_scores", layer):
            raise ModelError(
                f"{model.info.name}: the bridge does not show the scores behind the pattern of "
                f"layer {layer}, so they cannot be edited"
            )
        else:
            scores = q @ k.mT * scale
        if (layer, scores.shape[-1]) not in self._checked:
            self._check(layer, scores, tensors)
            self._checked.add((layer, scores.shape[-1]))
        return DensePattern(tensors["pattern"], scores, q, k, scale, tensors.get("hidden"))

    def _check(self, layer: int, scores: Tensor, tensors: Tensors) -> None:
        """Refuse a pattern that its scores do not make: the layer looks back less far, or an edit
        of the scores has no effect.
        """
        name = self.model.info.name
        shown = tensors["unedited pattern"]
        problem = self.model.weight_problem if shown.isnan().any() else None
        beyond = f"{name}: layer {layer} looks back less far than n_ctx; lower n_ctx"
        if problem is not None:
            beyond = f"{name}: layer {layer} has no attention pattern: {problem}"
        if self.model.shows_scores(layer):
            if (tensors["unedited attn_scores"].tril() <= MASKED).any():
                raise ModelError(beyond)
            if not _makes(scores, shown):
                raise ModelError(
                    f"{name}: the bridge does not show the scores behind the pattern of "
                    f"layer {layer}"
                )
        elif not _makes(scores, shown):
            raise ModelError(beyond)


def _factors(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Queries and keys `[batch head pos d_head]`."""
    return tensors["q"].transpose(1, 2), tensors["k"].transpose(1, 2)


def _makes(scores: Tensor, pattern: Tensor) -> bool:
    """Whether a pattern is the causal softmax of scores; broken weights are left to measuring."""
    implied = causal_softmax(scores)
    return torch.allclose(implied.tril(), pattern.tril(), atol=1e-4, equal_nan=True)
