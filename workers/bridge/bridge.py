"""The `TransformerBridge` beside the bare modules of a model: what it shows, where it hooks in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.bridge.shown_attention import ShownAttention, settle_shown_attention
from headcount.workers.model.attention_check import SeenEnough, drawn_tokens
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.model import Model, tensor_or_none
from headcount.workers.model.rotations import Rotation

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

CHECK_TOKENS = 8  # of the check of what is shown: fewer than any model looks back

OUTSIDE_ATTENTION = ("resid_pre", "resid_post", "attn_out", "mlp_out")
"""Activations of a layer that TransformerLens shows outside its attention."""

Hook = Callable[..., Tensor | None]
"""Sees an activation while the model runs, as `hook(value, hook=TransformerLens's hook point)`.
Returns what takes its place, or None.
"""


class Bridge:
    """What TransformerLens makes of a model, and what it tells of the bare modules.

    Both share most tensors. TransformerLens does not bridge every architecture, so there may be no
    `TransformerBridge` in it, and `problem` says why.
    """

    def __init__(
        self,
        name: str,
        transformer_bridge: TransformerBridge | None,
        modules: dict[str, list[nn.Module]],
        problem: str | None = None,
    ) -> None:
        self.name = name  # of the model
        self.transformer_bridge = transformer_bridge
        self.modules = modules  # bare modules by the activation they put out
        self.problem = problem  # why there is no bridge, or why it cannot run the model
        self._shown: dict[int, ShownAttention] = {}
        self._rotations: dict[int, dict[int, Rotation]] = {}  # by length of sequences that asked

    @property
    def running(self) -> TransformerBridge:
        """The `TransformerBridge`, refused if it cannot run the model."""
        if self.transformer_bridge is None or self.problem is not None:
            raise ModelError(f"{self.name}: {self.problem}")
        return self.transformer_bridge

    # Weights

    @property
    def has_weights(self) -> bool:
        """Whether TransformerLens names the model's weights."""
        return self.transformer_bridge is not None

    def weight(self, name: str) -> Tensor | None:
        """A weight that belongs to no layer, such as `W_U`; None if it is not shown."""
        return tensor_or_none(self.transformer_bridge, name)

    def layer_weight(self, layer: int, name: str) -> Tensor | None:
        """A weight of a layer's attention; None if it is not shown."""
        from transformer_lens.model_bridge.generalized_components.attention import (
            PerLayerGeometryError,
        )

        assert self.transformer_bridge is not None
        block = self.transformer_bridge.blocks[layer]
        try:
            return tensor_or_none(getattr(block, "attn", None), name)
        except (NotImplementedError, PerLayerGeometryError):
            # Latent attention has no such matrix. Heads of a layer may have a width of their own,
            # as in Gemma 4, and the bridge splits by that of the config.
            return None

    def parameters(self) -> Iterator[Tensor]:
        """Every weight that it reads."""
        return iter(()) if self.transformer_bridge is None else self.transformer_bridge.parameters()

    # Activations

    def has(self, activation: str) -> bool:
        """Whether the model has `pos_embed`, `attn_out` or `mlp_out`."""
        assert self.transformer_bridge is not None
        components = self.transformer_bridge.adapter.component_mapping
        assert components is not None
        if activation == "pos_embed":
            return "pos_embed" in components
        # Every layer of a bridge has an `attn_out`.
        return activation == "attn_out" or "mlp" in components["blocks"].submodules

    def first_mlp_out(self, tokens: Tensor) -> Tensor:
        """What the first MLP adds at position 0: `[batch d_model]`."""
        outputs: list[Tensor] = []

        def keep_output(value: Tensor, hook: object) -> None:
            outputs.append(value[:, 0])
            raise SeenEnough

        # Later tokens change nothing at position 0.
        with suppress(SeenEnough):
            self.run_with_hooks(tokens[:, :1], [(self.hook_name("mlp_out", 0), keep_output)])
        return outputs[0]

    # Attention

    def settle(self, model: Model) -> None:
        """Hold what is shown of each layer in a run against the facts of the bare modules."""
        shown: dict[int, dict[str, Tensor]] = {
            layer: {} for layer in model.info.attention_layers_or_all
        }

        def record(activations: dict[str, Tensor], name: str, value: Tensor, hook: object) -> None:
            activations[name] = value.detach().clone()

        def end_pass(value: Tensor, hook: object) -> None:
            raise SeenEnough

        hooks: list[tuple[str, Hook]] = [
            (place, partial(record, activations, name))
            for layer, activations in shown.items()
            for name in ("q", "k", "rot_q", "rot_k", "attn_scores", "pattern")
            if self.has_hook(place := self.hook_name(name, layer))
        ]
        # The unembedding is not run: its weights may be a large part of a mapped file.
        hooks.append((self.hook_name("resid_post", len(model.blocks) - 1), end_pass))
        tokens = drawn_tokens(model.info, 2, CHECK_TOKENS).to(model.device)
        with torch.inference_mode(), suppress(SeenEnough):
            self.run_with_hooks(tokens, hooks)
        for layer, activations in shown.items():
            attention = getattr(self.running.blocks[layer], "attn", None)
            self._shown[layer] = settle_shown_attention(
                layer,
                None if attention is None else attention.original_component,
                model.facts(layer) if model.attention_problem is None else None,
                partial(self.rotated, model, layer),
                activations,
            )

    def shown_facts(self, layer: int) -> AttentionFacts:
        """How a layer makes its pattern of the q and k that are shown; refused if not."""
        problem = self.problem or self._shown[layer].problem
        if problem is not None:
            raise ModelError(f"{self.name}: {problem}")
        return self._shown[layer].facts

    def shows_scores(self, layer: int) -> bool:
        """Whether `attn_scores` are the scores behind a layer's pattern."""
        return self._shown[layer].shows_scores

    def rotated(
        self, model: Model, layer: int, vectors: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        """Queries or keys `[batch pos head d_head]` as a layer rotates them, if it is known; by
        `positions [pos]`, if a change gives the tokens others than their own.
        """
        facts = model.facts(layer)
        is_known = facts is not None and facts.rotation is not None and facts.rotation.rotate
        if not is_known or model.attention_problem is not None:
            return vectors
        n_ctx = vectors.shape[1]
        if n_ctx not in self._rotations:
            self._rotations[n_ctx] = _rotations_of_pass(model, n_ctx)
        rotation = self._rotations[n_ctx][layer]
        return (rotation if positions is None else rotation.at(positions)).apply(vectors)

    def forget_pattern(self, layer: int) -> None:
        """Free the memory of a layer's pattern, which would be kept until the next pass."""
        self.running.blocks[layer].attn._pattern = None

    # Hooks

    def run_with_hooks(self, tokens: Tensor, hooks: Sequence[tuple[str, Hook]]) -> None:
        """One forward pass; `UserWarning` if it cannot apply what a hook returns."""
        # TransformerLens only warns. The rows would be those of the unchanged model.
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*edit is discarded")
            self.running.run_with_hooks(tokens, return_type=None, fwd_hooks=list(hooks))

    @property
    def rotary_hooks(self) -> list[str]:
        """The hooks at which TransformerLens shows the angles of rotations, `[… pos angle]`."""
        # Each layer shows the same angles again.
        return [
            name
            for name in self.running.hook_dict
            if name.endswith((".hook_cos", ".hook_sin")) and not name.startswith("blocks.")
        ]

    def has_hook(self, name: str) -> bool:
        """Whether TransformerLens has a hook of that name; a layer may not show its rotations."""
        return name in self.running.hook_dict

    @staticmethod
    def hook_name(activation: str, layer: int | None = None) -> str:
        """The name of the hook at which TransformerLens shows an activation."""
        if layer is None:
            return "unembed.hook_in" if activation == "unembed_in" else f"hook_{activation}"
        if activation == "key_input":
            return f"blocks.{layer}.attn.k.hook_in"
        component = "" if activation in OUTSIDE_ATTENTION else "attn."
        return f"blocks.{layer}.{component}hook_{activation}"


def _rotations_of_pass(model: Model, n_ctx: int) -> dict[int, Rotation]:
    """How each layer rotates sequences of a length, by layer."""
    layers = model.info.attention_layers_or_all
    of_layers: list[Rotation | None] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        of_layers.append(facts.rotation)
        if len(of_layers) == len(layers):
            raise SeenEnough
        # Angles depend on positions alone, so the attention may be anything.
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    with torch.inference_mode(), suppress(SeenEnough):
        model.run_bare(torch.zeros(1, n_ctx, dtype=torch.long, device=model.device), attend)
    noted = zip(layers, of_layers, strict=True)
    return {layer: rotation for layer, rotation in noted if rotation is not None}


def bridge_of(model: Model) -> Bridge:
    """The bridge of a model that was loaded with one, booted now if it is not there."""
    bridge = model.bridge()
    assert isinstance(bridge, Bridge)
    return bridge
