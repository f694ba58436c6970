"""The fused engine: a model's bare modules, their attention replaced by `FusedPattern`."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from schemas.errors import ModelError
from schemas.precision import PRECISIONS
from schemas.statistics import LAYER_VALUES
from workers.engine.dense_engine import Activations, DenseEngine, Done, OnFinal, OnLayer, wide
from workers.engine.dense_pattern import MASKED, DensePattern
from workers.engine.edits import Edits, hidden_keys
from workers.engine.fused_pattern import FusedPattern
from workers.engine.number_formats import linears_in
from workers.engine.token_pairs import TokenPairs
from workers.model.loading import LoadedModel

IMPLEMENTATION = "headcount"
"""The name under which Hugging Face models find our attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention arguments that change the pattern in ways the fused engine does not know."""


class _Forward:
    """What is known of one fused forward pass while it runs."""

    def __init__(
        self,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        asked: set[str],
        factors: str,
        on_layer: OnLayer,
        keep: Container[str],
        last: int,
        edits: Edits,
        on_final: OnFinal | None,
    ) -> None:
        self.tokens, self.matches, self.asked, self.factors = tokens, matches, asked, factors
        self.on_layer, self.keep = on_layer, keep
        self.layer, self.last, self.edits, self.on_final = 0, last, edits, on_final
        self.dense_layers = edits.dense_layers(last + 1)
        self.attended = False
        self.activations: Activations = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention over `[batch head pos d_head]`; returns z `[batch pos head d_head]` and notes
        what was seen.
        """
        groups = q.shape[1] // k.shape[1]
        dtype = v.dtype
        q, k, v = (self._edited(name, wide(x)) for name, x in (("q", q), ("k", k), ("v", v)))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        self.activations |= {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        if self.layer in self.dense_layers:
            pattern = self._built(q, k, scale)
            z = (pattern.pattern @ v).transpose(1, 2)
        else:
            pattern = FusedPattern(q, k, v, scale, self.matches, self.asked, self.factors)
            z = pattern.z.transpose(1, 2)
        self.activations["pattern"] = pattern
        self.activations["z"] = z = self.edit("z", z)
        self.attended = True
        self.show()
        if self.layer == self.last and "resid_post" not in self.keep and self.on_final is None:
            raise Done  # Nobody reads what comes after.
        kept = self.edits.reads
        self.activations = {
            name: a for name, a in self.activations.items() if name in self.keep or name in kept
        }
        return z.to(dtype)

    def _edited(self, name: str, x: Tensor) -> Tensor:
        """Queries, keys or values `[batch head pos d_head]`, as edits leave them, whose axes are
        `[batch pos head d_head]`.
        """
        edited = self.edit(name, y := x.transpose(1, 2))
        return x if edited is y else edited.transpose(1, 2)

    def edit(self, name: str, value: Tensor) -> Tensor:
        """An activation of the layer as edits leave it; itself where nothing edits it."""
        if not self.edits.touch(name, self.layer):
            return value
        return self.edits.apply(
            name, self.layer, value, {**self.activations, "tokens": self.tokens}
        )

    def _built(self, q: Tensor, k: Tensor, scale: float) -> DensePattern:
        """The pattern of a layer whose scores or pattern are edited."""
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT * scale).masked_fill_(future, MASKED)
        hidden = None
        if self.edits.touch("attn_scores", self.layer):
            scores = self.edit("attn_scores", scores)
            hidden = hidden_keys(scores)
            scores = scores.masked_fill(future, MASKED)
        pattern = self.edit("pattern", scores.softmax(-1))
        return DensePattern(pattern, scores, q, k, scale, hidden)

    def show(self) -> None:
        """Hand over what is known of the layer."""
        self.on_layer(self.layer, {**self.activations, **self.matches})


_forward: ContextVar[_Forward | None] = ContextVar("forward", default=None)


class FusedEngine:
    """Runs the bare modules with attention replaced by `FusedPattern`; measures at about the price
    of a forward pass.
    """

    name = "fused"

    def __init__(self, model: LoadedModel, precision: str = "float32") -> None:
        self.model = model
        # The check is about the model's attention, so it runs in the format of the bridge.
        self.precision = PRECISIONS["float64" if precision == "float64" else "float32"]
        self.asked: set[str] = set()
        self.edits = Edits()
        if model.info.layout == "huggingface":
            _use_our_attention(model.bare)
        else:
            for block in model.bridge.blocks:
                block.attn.original_component.__class__ = _native_attention()
        for layer, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(self._before, layer), with_kwargs=True)
            block.register_forward_hook(partial(self._after, layer))
        for name in ("embed", "pos_embed", "attn_out", "mlp_out"):
            for layer, module in enumerate(model.parts[name]):
                module.register_forward_hook(partial(self._edit_output, name, layer))
        for module in model.parts["unembed"]:
            module.register_forward_pre_hook(self._before_unembedding)
        self._check_against_bridge()
        self.precision = PRECISIONS[precision]

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
        last = len(self.model.blocks) - 1
        forward = _Forward(
            tokens,
            matches,
            self.asked,
            self.precision.scores,
            on_layer,
            keep,
            last,
            self.edits,
            on_final,
        )
        token = _forward.set(forward)
        try:
            with linears_in(self.precision.linears, tokens.device.type):
                self.model.bare(
                    tokens,
                    **({"use_cache": False} if self.model.info.layout == "huggingface" else {}),
                )
        except Done:
            pass
        finally:
            _forward.reset(token)

    def edited(self, edits: Edits) -> FusedEngine:
        """The same engine with edits of activations."""
        other = copy.copy(self)
        other.edits = edits
        return other

    def _edit_output(
        self, name: str, layer: int, _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        forward = _forward.get()
        if forward is None or not forward.edits.touch(name, layer):
            return None
        if isinstance(output, tuple):
            return (forward.edit(name, output[0]), *output[1:])
        return forward.edit(name, output)

    def _before(
        self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        forward = _forward.get()
        if forward is None:
            return None
        forward.layer, forward.attended = layer, False
        before = args[0] if args else kwargs["hidden_states"]
        stream = forward.edit("resid_pre", before)
        forward.activations = {"resid_pre": wide(stream)}
        if stream is before:
            return None
        return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})

    def _after(self, layer: int, _module: nn.Module, _args: Any, output: Any) -> Any:
        if forward := _forward.get():
            if not forward.attended:
                raise ModelError(
                    f"{self.model.info.name}: layer {layer} has no attention that can be seen; use engine = 'dense'"
                )
            after = output[0] if isinstance(output, tuple) else output
            stream = forward.edit("resid_post", after)
            forward.activations["resid_post"] = wide(stream)
            forward.show()
            forward.activations = {}
            if layer == forward.last and forward.on_final is None:
                raise Done
            if stream is not after:
                return (stream, *output[1:]) if isinstance(output, tuple) else stream
        return None

    def _before_unembedding(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        forward = _forward.get()
        if forward is not None and forward.on_final is not None:
            forward.on_final(wide(args[0]))
            raise Done

    def _check_against_bridge(self) -> None:
        """Refuse a model whose attention is not the plain causal softmax: the bridge must see the
        same activations.
        """
        info = self.model.info
        tokens = torch.randint(
            info.d_vocab, (1, min(info.n_ctx, 16)), generator=torch.Generator().manual_seed(0)
        )
        tokens = tokens.to(next(self.model.bare.parameters()).device)
        fused: list[Activations] = []
        dense: list[Activations] = []
        with torch.inference_mode():
            self.run(
                tokens, {}, lambda _, seen: fused.append(seen) if "resid_post" in seen else None
            )
            DenseEngine(self.model).run(tokens, {}, lambda _, seen: dense.append(seen))
        if not len(fused) == len(dense) == info.n_layers:
            raise ModelError(
                f"{info.name}: {info.n_layers} layers expected, {len(fused)} seen; use engine = 'dense'"
            )
        for name in ("q", "k", "resid_post"):
            # Lengths, because not every bridge shows q and k after their rotation, which keeps
            # lengths.
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
            raise ModelError(
                f"the model looks back {window} tokens, less than n_ctx = {query.shape[2]}; lower n_ctx"
            )
        for name in UNSUPPORTED:
            if kwargs.get(name) is not None:
                _refuse(name)
        if attention_mask is not None:
            _refuse("an attention mask")
        return forward.attend(
            query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling
        ), None

    AttentionInterface.register(IMPLEMENTATION, attend)
    model.set_attn_implementation(IMPLEMENTATION)  # pyright: ignore[reportCallIssue]


def _refuse(what: str) -> NoReturn:
    raise ModelError(
        f"the model's attention uses {what}, which the fused engine does not know; use engine = 'dense'"
    )


def _native_attention() -> type[nn.Module]:
    """TransformerLens's own attention, except that a fused forward pass computes it with
    `FusedPattern`.
    """
    from transformer_lens.model_bridge.sources.native import NativeAttention

    class SeenAttention(NativeAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            forward = _forward.get()
            if forward is None:
                return super().forward(hidden_states, *args, **kwargs)
            if self.rotary is not None or self.attn_scores_soft_cap > 0 or not self.causal:
                _refuse("rotary positions, capped scores or no causal mask")
            shape = (*hidden_states.shape[:2], -1, self.d_head)
            q, k, v = (
                linear(hidden_states).view(shape).transpose(1, 2)
                for linear in (self.q, self.k, self.v)
            )
            z = forward.attend(q, k, v, 1 / self.scale)
            return self.o(z.flatten(2)), None

    return SeenAttention
