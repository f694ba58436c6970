"""The fused engine: a model's bare modules, their attention replaced by `FusedPattern`."""

from __future__ import annotations

import copy
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from schemas.commits import Method
from schemas.errors import ModelError
from schemas.precision import PRECISIONS
from schemas.statistics import LAYER_VALUES
from workers.engine.dense_engine import DenseEngine
from workers.engine.dense_pattern import MASKED, DensePattern
from workers.engine.edits import Edits, hidden_keys
from workers.engine.engine import Activations, Done, OnFinal, OnLayer
from workers.engine.fused_pattern import FusedPattern
from workers.engine.number_formats import linears_in
from workers.engine.sweep_kernel import Sweep
from workers.engine.token_pairs import TokenPairs
from workers.model.model import Model, at_least_float32

Output = Tensor | tuple[Any, ...]
"""What a module puts out: a tensor, or one and what belongs to it."""


class _Forward:
    """What is known of one fused forward pass while it runs."""

    def __init__(
        self,
        engine: FusedEngine,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        keep: Container[str],
        on_final: OnFinal | None,
        layers: Collection[int] | None,
    ) -> None:
        self.engine, self.model, self.edits = engine, engine.model, engine.edits
        self.tokens, self.matches = tokens, matches
        self.on_layer, self.keep, self.on_final = on_layer, keep, on_final
        self.shown_layers = range(len(self.model.blocks)) if layers is None else layers
        self.layer, self.last = 0, max(self.shown_layers)
        self.dense_layers = self.edits.dense_layers(len(self.model.blocks))
        self.attended = False
        self.activations: dict[str, Tensor | FusedPattern | DensePattern] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention over `[batch head pos d_head]`; returns z `[batch pos head d_head]` and notes
        what was seen.
        """
        groups = q.shape[1] // k.shape[1]
        dtype = v.dtype
        q, k, v = (self._edited(name, at_least_float32(x)) for name, x in (("q", q), ("k", k), ("v", v)))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        self.activations["q"] = q.transpose(1, 2)
        self.activations["k"] = k.transpose(1, 2)
        self.activations["v"] = v.transpose(1, 2)
        if self.layer in self.dense_layers:
            pattern = self._built(q, k, scale)
            z = (pattern.pattern @ v).transpose(1, 2)
        else:
            engine = self.engine
            questioned = self.layer in self.shown_layers or "pattern" in self.edits.reads
            asked = engine.asked if questioned else set[str]()
            pattern = FusedPattern(
                q, k, v, scale, self.matches, asked, engine.formats.scores, engine.sweep
            )
            z = pattern.z.transpose(1, 2)
        self.activations["pattern"] = pattern
        self.activations["z"] = z = self.edit("z", z)
        self.attended = True
        self.show()
        if self.layer == self.last and "resid_post" not in self.keep and self.on_final is None:
            raise Done  # Nobody reads what comes after.
        read = self.edits.reads
        self.activations = {
            name: value
            for name, value in self.activations.items()
            if name in self.keep or name in read
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
        """Hand over what is known of the layer, if somebody wants to know."""
        if self.layer in self.shown_layers:
            self.on_layer(self.layer, cast(Activations, {**self.activations, **self.matches}))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within it, the model's modules tell this pass where it is, and take what edits return."""
        hooks: list[RemovableHandle] = []
        for layer, block in enumerate(self.model.blocks):
            before = partial(self._before, layer)
            hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(block.register_forward_hook(partial(self._after, layer)))
        for name in ("embed", "pos_embed", "attn_out", "mlp_out"):
            for layer, module in enumerate(self.model.modules(name)):
                if self.edits.touch(name, layer):
                    edited = partial(self._edit_output, name, layer)
                    hooks.append(module.register_forward_hook(edited))
        if self.on_final is not None:
            for module in self.model.modules("unembed"):
                hooks.append(module.register_forward_pre_hook(self._before_unembedding))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _edit_output(
        self, name: str, layer: int, _module: nn.Module, _args: tuple[Any, ...], output: Output
    ) -> Output:
        if isinstance(output, tuple):
            return (self.edit(name, output[0]), *output[1:])
        return self.edit(name, output)

    def _before(
        self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.layer, self.attended = layer, False
        before: Tensor = args[0] if args else kwargs["hidden_states"]
        stream = self.edit("resid_pre", before)
        self.activations = {"resid_pre": at_least_float32(stream)}
        if stream is before:
            return None
        return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})

    def _after(
        self, layer: int, _module: nn.Module, _args: tuple[Any, ...], output: Output
    ) -> Output | None:
        if not self.attended:
            raise ModelError(
                f"{self.model.info.name}: layer {layer} has no attention that can be seen; "
                "use engine = 'dense'"
            )
        after = output[0] if isinstance(output, tuple) else output
        stream = self.edit("resid_post", after)
        self.activations["resid_post"] = at_least_float32(stream)
        self.show()
        self.activations = {}
        if layer == self.last and self.on_final is None:
            raise Done
        if stream is after:
            return None
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    def _before_unembedding(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.on_final is not None:
            self.on_final(at_least_float32(args[0]))
            raise Done


class FusedEngine:
    """Runs the bare modules with attention replaced by `FusedPattern`; measures at about the price
    of a forward pass.
    """

    name: Literal["fused"] = "fused"

    def __init__(
        self, model: Model, precision: str = "float32", sweep: Sweep | None = None
    ) -> None:
        """`sweep` is a GPU's kernel that has proved itself (`kernel_check`); None means tiles."""
        self.model, self.precision, self.edits = model, precision, Edits()
        self.asked: set[str] = set()
        """Questions that every sweep answers on its way."""
        # The check is about the model's attention, so it runs in the format of the bridge.
        self.formats = PRECISIONS["float64" if precision == "float64" else "float32"]
        self.sweep: Sweep | None = None
        self._check_against_bridge()
        self.formats = PRECISIONS[precision]
        self.sweep = sweep

    @property
    def attention(self) -> Literal["tiles", "kernel"]:
        """What computes the patterns, except in layers where an edit needs them built."""
        return "tiles" if self.sweep is None else "kernel"

    def method(self, intervention: str, depth: int) -> Method:
        """How it measures under its edits."""
        return Method(
            intervention=intervention,
            engine=self.name,
            precision=self.precision,
            attention=self.attention,
            built_layers=self.edits.dense_layers(depth),
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
        forward = _Forward(self, tokens, matches, on_layer, keep, on_final, layers)
        try:
            with forward.hooked(), linears_in(self.formats.linears, tokens.device.type):
                self.model.run_bare(tokens, forward.attend)
        except Done:
            pass

    def edited(self, edits: Edits) -> FusedEngine:
        """The same engine with edits of activations."""
        other = copy.copy(self)
        other.edits = edits
        return other

    def _check_against_bridge(self) -> None:
        """Refuse a model whose attention is not the plain causal softmax: the bridge must see the
        same activations.
        """
        info = self.model.info
        tokens = torch.randint(
            info.d_vocab, (1, min(info.n_ctx, 16)), generator=torch.Generator().manual_seed(0)
        )
        tokens = tokens.to(self.model.device)
        fused: list[Activations] = []
        dense: list[Activations] = []
        with torch.inference_mode():
            self.run(
                tokens, {}, lambda _, seen: fused.append(seen) if "resid_post" in seen else None
            )
            DenseEngine(self.model).run(tokens, {}, lambda _, seen: dense.append(seen))
        if not len(fused) == len(dense) == info.n_layers:
            raise ModelError(
                f"{info.name}: {info.n_layers} layers expected, {len(fused)} seen; "
                "use engine = 'dense'"
            )
        for name in ("q", "k", "resid_post"):
            # Lengths, because not every bridge shows q and k after their rotation, which keeps
            # lengths.
            a, b = (seen[-1][name].norm(dim=-1) for seen in (fused, dense))
            # Weights that are not numbers agree with nothing; measuring will name the layer.
            if (error := ((a - b).norm() / b.norm()).item()) >= 1e-3:
                raise ModelError(
                    f"{info.name}: the fused engine does not reproduce this model (the length of "
                    f"{name} in the last layer differs by {error:.2g}, expected < 1e-3): its "
                    "attention has something the engine lacks; use engine = 'dense'"
                )
