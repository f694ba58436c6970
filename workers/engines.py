"""Two ways to run a model and see every layer's activations: fused (bare modules) and dense (TransformerLens's hooks).

Both call `on_layer(layer, activations)` once per layer, in order, with the names of `schemas.statistics.ACTIVATIONS`,
all in float32. Nothing outlives its layer, so memory is that of one layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from schemas.errors import ModelError
from workers.loading import LoadedModel
from workers.pattern import MASKED, DensePattern, FusedPattern, TokenPairs

Activations = dict[str, Any]
OnLayer = Callable[[int, Activations], None]
Edits = Mapping[str, Callable[[Tensor], Tensor | None]]

IMPLEMENTATION = "headcount"
"""The name under which Hugging Face models find our attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention arguments that change the pattern in ways the fused engine does not know."""


class _Forward:
    """What is known of one fused forward pass while it runs."""

    def __init__(self, matches: Mapping[str, TokenPairs], asked: set[str], on_layer: OnLayer) -> None:
        self.matches, self.asked, self.on_layer = matches, asked, on_layer
        self.activations: Activations = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention over `[batch head pos d_head]`; returns z `[batch pos head d_head]` and notes what was seen."""
        groups = q.shape[1] // k.shape[1]
        dtype = v.dtype
        q, k, v = q.float(), k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
        pattern = FusedPattern(q, k, v, scale, self.matches, self.asked)
        z = pattern.z.transpose(1, 2)
        self.activations |= {
            "pattern": pattern, "q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "z": z,
        }  # fmt: skip
        return z.to(dtype)


_forward: ContextVar[_Forward | None] = ContextVar("forward", default=None)


class _Done(Exception):
    """Raised after the last layer: what follows (final norm, unembedding) is not needed."""


class FusedEngine:
    """Runs the bare modules with attention replaced by `FusedPattern`; measures at about the price of a forward pass."""

    name = "fused"

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.asked: set[str] = set()
        if model.info.layout == "huggingface":
            _use_our_attention(model.bare)
        else:
            for block in model.bridge.blocks:
                block.attn.original_component.__class__ = _native_attention()
        for layer, block in enumerate(model.blocks):
            block.register_forward_pre_hook(self._before, with_kwargs=True)
            block.register_forward_hook(partial(self._after, layer))
        self._check_against_bridge()

    def run(self, tokens: Tensor, matches: Mapping[str, TokenPairs], on_layer: OnLayer) -> None:
        """One forward pass over tokens `[batch pos]`."""
        token = _forward.set(_Forward(matches, self.asked, on_layer))
        try:
            self.model.bare(tokens, **({"use_cache": False} if self.model.info.layout == "huggingface" else {}))
        except _Done:
            pass
        finally:
            _forward.reset(token)

    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if forward := _forward.get():
            forward.activations = {"resid_pre": (args[0] if args else kwargs["hidden_states"]).float()}

    def _after(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if forward := _forward.get():
            if "pattern" not in forward.activations:
                raise ModelError(
                    f"{self.model.info.name}: layer {layer} has no attention that can be seen; use engine = 'dense'"
                )
            forward.activations["resid_post"] = (output[0] if isinstance(output, tuple) else output).float()
            forward.on_layer(layer, {**forward.activations, **forward.matches})
            forward.activations = {}
            if layer == len(self.model.blocks) - 1:
                raise _Done

    def _check_against_bridge(self) -> None:
        """Refuse a model whose attention is not the plain causal softmax: the bridge must see the same activations."""
        info = self.model.info
        tokens = torch.randint(info.d_vocab, (1, min(info.n_ctx, 16)), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(next(self.model.bare.parameters()).device)
        fused: list[Activations] = []
        dense: list[Activations] = []
        with torch.inference_mode():
            self.run(tokens, {}, lambda _, seen: fused.append(seen))
            DenseEngine(self.model).run(tokens, {}, lambda _, seen: dense.append(seen))
        if not len(fused) == len(dense) == info.n_layers:
            raise ModelError(f"{info.name}: {info.n_layers} layers expected, {len(fused)} seen; use engine = 'dense'")
        for name in ("q", "k", "resid_post"):
            # Lengths, because not every bridge shows q and k after their rotation, which keeps lengths.
            a, b = (seen[-1][name].norm(dim=-1) for seen in (fused, dense))
            # Weights that are not numbers agree with nothing; measuring will name the layer.
            if (error := ((a - b).norm() / b.norm()).item()) >= 1e-3:
                raise ModelError(
                    f"{info.name}: the fused engine does not reproduce this model (the length of {name} in the last layer "
                    f"differs by {error:.2g}, expected < 1e-3): its attention has something the engine lacks; use engine = 'dense'"
                )


class DenseEngine:
    """Runs the bridge with hooks and reads the whole pattern: the reference, and the way to edit activations."""

    name = "dense"

    def __init__(self, model: LoadedModel, edits: Edits | None = None) -> None:
        """`edits` maps an activation's TransformerLens name to a function that returns an edited one."""
        self.model, self.edits = model, edits or {}
        self._shown: dict[tuple[int, int], bool] = {}

    def run(self, tokens: Tensor, matches: Mapping[str, TokenPairs], on_layer: OnLayer) -> None:
        """One forward pass over tokens `[batch pos]`."""
        info, bridge = self.model.info, self.model.bridge
        seen: Activations = {}

        def note(name: str, layer: int, value: Tensor, hook: object) -> Tensor | None:
            edit = self.edits.get(name)
            edited = None if edit is None else edit(value)
            seen[name] = (value if edited is None else edited).float()
            if name == "pattern":
                seen["unedited"] = value.float()
            return edited

        def rotated(name: str, value: Tensor, hook: object) -> None:
            seen[name] = value.float()

        def finish(layer: int, value: Tensor, hook: object) -> Tensor | None:
            edited = note("resid_post", layer, value, hook)
            groups = info.n_heads // seen["k"].shape[2]
            seen["k"], seen["v"] = (seen[name].repeat_interleave(groups, 2) for name in "kv")
            seen["pattern"] = DensePattern(seen["pattern"], self._scores(layer, seen))
            on_layer(layer, {**seen, **matches})
            seen.clear()
            # The bridge would keep every layer's pattern alive until the next pass.
            bridge.blocks[layer].attn._pattern = None
            if layer == info.n_layers - 1:
                raise _Done
            return edited

        hooks: list[tuple[str, Callable[..., Any]]] = []
        for layer in range(info.n_layers):
            attn = f"blocks.{layer}.attn"
            hooks.append((f"blocks.{layer}.hook_resid_pre", partial(note, "resid_pre", layer)))
            for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
                hooks.append((f"{attn}.hook_{name}", partial(note, name, layer)))
            for name in ("q", "k"):
                if f"{attn}.hook_rot_{name}" in bridge.hook_dict:
                    hooks.append((f"{attn}.hook_rot_{name}", partial(rotated, name)))
            hooks.append((f"blocks.{layer}.hook_resid_post", partial(finish, layer)))
        try:
            with warnings.catch_warnings():
                # The bridge only warns where an architecture gives it no way to apply an edit.
                warnings.filterwarnings("error", message=".*edit is discarded")
                bridge.run_with_hooks(tokens, return_type=None, fwd_hooks=hooks)
        except UserWarning as warning:
            raise ModelError(
                f"{info.name}: {', '.join(self.edits)} cannot be edited in this architecture ({warning})"
            ) from None
        except _Done:
            pass

    def _scores(self, layer: int, seen: Activations) -> Tensor:
        """The scores behind a layer's pattern: as the bridge shows them, or else scale·q·k."""
        q, k = (seen[name].transpose(1, 2) for name in "qk")
        known = (layer, q.shape[2])
        if known not in self._shown:
            self._shown[known] = self._shows_scores(layer, q, k, seen)
        return seen["attn_scores"] if self._shown[known] else q @ k.mT * q.shape[-1] ** -0.5

    def _shows_scores(self, layer: int, q: Tensor, k: Tensor, seen: Activations) -> bool:
        """Whether the bridge shows the scores, or q and k make them: held once against the layer's pattern."""
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        # An edit of scores that the bridge does not show would be measured and have no effect.
        for shown in (True,) if "attn_scores" in self.edits else (True, False):
            scores = seen["attn_scores"] if shown else q @ k.mT * q.shape[-1] ** -0.5
            implied = scores.masked_fill(future, MASKED).softmax(-1)
            if torch.allclose(implied.tril(), seen["unedited"].tril(), atol=1e-4, equal_nan=True):
                if (scores.masked_fill(future, 0) <= MASKED).any():
                    raise ModelError(
                        f"{self.model.info.name}: layer {layer} looks back less far than n_ctx; lower n_ctx"
                    )
                return shown
        raise ModelError(
            f"{self.model.info.name}: the bridge does not show the scores behind the pattern of layer {layer}"
        )


def _use_our_attention(model: nn.Module) -> None:
    from transformers import AttentionInterface

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        forward = _forward.get()
        if forward is None:
            raise RuntimeError("this attention runs only inside FusedEngine.run")
        window = kwargs.get("sliding_window")
        if window is not None and window < query.shape[2]:
            raise ModelError(f"the model looks back {window} tokens, less than n_ctx = {query.shape[2]}; lower n_ctx")
        for name in UNSUPPORTED:
            if kwargs.get(name) is not None:
                _refuse(name)
        if attention_mask is not None:
            _refuse("an attention mask")
        return forward.attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None

    AttentionInterface.register(IMPLEMENTATION, attend)
    model.set_attn_implementation(IMPLEMENTATION)  # pyright: ignore[reportCallIssue]


def _refuse(what: str) -> NoReturn:
    raise ModelError(f"the model's attention uses {what}, which the fused engine does not know; use engine = 'dense'")


def _native_attention() -> type[nn.Module]:
    """TransformerLens's own attention, except that a fused forward pass computes it with `FusedPattern`."""
    from transformer_lens.model_bridge.sources.native import NativeAttention

    class SeenAttention(NativeAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            forward = _forward.get()
            if forward is None:
                return super().forward(hidden_states, *args, **kwargs)
            if self.rotary is not None or self.attn_scores_soft_cap > 0 or not self.causal:
                _refuse("rotary positions, capped scores or no causal mask")
            shape = (*hidden_states.shape[:2], -1, self.d_head)
            q, k, v = (linear(hidden_states).view(shape).transpose(1, 2) for linear in (self.q, self.k, self.v))
            z = forward.attend(q, k, v, 1 / self.scale)
            return self.o(z.flatten(2)), None

    return SeenAttention
