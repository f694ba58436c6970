"""The fused engine: a model's bare modules, their attention replaced by `FusedPattern`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from schemas.errors import ModelError
from schemas.precision import PRECISIONS
from schemas.statistics import ACTIVATIONS
from workers.dense import Activations, DenseEngine, Done, OnLayer, wide
from workers.formats import linears_in
from workers.loading import LoadedModel
from workers.pairs import TokenPairs
from workers.pattern import FusedPattern

IMPLEMENTATION = "headcount"
"""The name under which Hugging Face models find our attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention arguments that change the pattern in ways the fused engine does not know."""


class _Forward:
    """What is known of one fused forward pass while it runs."""

    def __init__(
        self,
        matches: Mapping[str, TokenPairs],
        asked: set[str],
        factors: str,
        on_layer: OnLayer,
        keep: Container[str],
        last: int,
    ) -> None:
        self.matches, self.asked, self.factors, self.on_layer, self.keep = matches, asked, factors, on_layer, keep
        self.layer, self.last = 0, last
        self.attended = False
        self.activations: Activations = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention over `[batch head pos d_head]`; returns z `[batch pos head d_head]` and notes what was seen."""
        groups = q.shape[1] // k.shape[1]
        dtype = v.dtype
        q, k, v = wide(q), wide(k), wide(v)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        pattern = FusedPattern(q, k, v, scale, self.matches, self.asked, self.factors)
        z = pattern.z.transpose(1, 2)
        self.activations |= {
            "pattern": pattern, "q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2), "z": z,
        }  # fmt: skip
        self.attended = True
        self.show()
        if self.layer == self.last and "resid_post" not in self.keep:
            raise Done  # Nobody reads what comes after.
        self.activations = {name: a for name, a in self.activations.items() if name in self.keep}
        return z.to(dtype)

    def show(self) -> None:
        """Hand over what is known of the layer."""
        self.on_layer(self.layer, {**self.activations, **self.matches})


_forward: ContextVar[_Forward | None] = ContextVar("forward", default=None)


class FusedEngine:
    """Runs the bare modules with attention replaced by `FusedPattern`; measures at about the price of a forward pass."""

    name = "fused"

    def __init__(self, model: LoadedModel, precision: str = "float32") -> None:
        self.model = model
        # The check is about the model's attention, so it runs in the format of the bridge.
        self.precision = PRECISIONS["float64" if precision == "float64" else "float32"]
        self.asked: set[str] = set()
        if model.info.layout == "huggingface":
            _use_our_attention(model.bare)
        else:
            for block in model.bridge.blocks:
                block.attn.original_component.__class__ = _native_attention()
        for layer, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(self._before, layer), with_kwargs=True)
            block.register_forward_hook(partial(self._after, layer))
        self._check_against_bridge()
        self.precision = PRECISIONS[precision]

    def run(
        self, tokens: Tensor, matches: Mapping[str, TokenPairs], on_layer: OnLayer, keep: Container[str] = ACTIVATIONS
    ) -> None:
        """One forward pass over tokens `[batch pos]`."""
        token = _forward.set(
            _Forward(matches, self.asked, self.precision.scores, on_layer, keep, len(self.model.blocks) - 1)
        )
        try:
            with linears_in(self.precision.linears, tokens.device.type):
                self.model.bare(tokens, **({"use_cache": False} if self.model.info.layout == "huggingface" else {}))
        except Done:
            pass
        finally:
            _forward.reset(token)

    def _before(self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if forward := _forward.get():
            forward.layer, forward.attended = layer, False
            forward.activations = {"resid_pre": wide(args[0] if args else kwargs["hidden_states"])}

    def _after(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
        if forward := _forward.get():
            if not forward.attended:
                raise ModelError(
                    f"{self.model.info.name}: layer {layer} has no attention that can be seen; use engine = 'dense'"
                )
            forward.activations["resid_post"] = wide(output[0] if isinstance(output, tuple) else output)
            forward.show()
            forward.activations = {}
            if layer == len(self.model.blocks) - 1:
                raise Done

    def _check_against_bridge(self) -> None:
        """Refuse a model whose attention is not the plain causal softmax: the bridge must see the same activations."""
        info = self.model.info
        tokens = torch.randint(info.d_vocab, (1, min(info.n_ctx, 16)), generator=torch.Generator().manual_seed(0))
        tokens = tokens.to(next(self.model.bare.parameters()).device)
        fused: list[Activations] = []
        dense: list[Activations] = []
        with torch.inference_mode():
            self.run(tokens, {}, lambda _, seen: fused.append(seen) if "resid_post" in seen else None)
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
