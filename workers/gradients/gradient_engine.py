"""A pass forward and backward: what a head does for the loss, to first order.

The bare modules run with the same attention as in the fused engine. Weights are frozen, so only
activations have gradients. Logits are made a chunk of rows at a time, forward and backward, and
attention a tile at a time.

The direct part needs no backward pass through layers: what the last norm hands back, its scale
frozen, goes through each layer's output projection alone.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from headcount.schemas.formula_kinds import DIRECT_GRADIENTS
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.engine.engine import PassRequest, StopPass
from headcount.workers.engine.fused_engine import FusedEngine, FusedPass
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.number_formats import linears_in
from headcount.workers.engine.prediction_inputs import row_chunks
from headcount.workers.engine.tile_sweep import Question
from headcount.workers.gradients.attention_gradient import FusedAttention
from headcount.workers.gradients.stream_writes import LayerWrites, StreamWrites
from headcount.workers.model.attention_facts import AttentionFacts, weighted_values
from headcount.workers.model.bare_modules import first_of


class GradientEngine(FusedEngine):
    """Runs the bare modules forward and backward, if gradients are asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (as `FusedEngine`)
        super().__init__(*args, **kwargs)
        self.writes = StreamWrites(self.model)

    def run_pass(self, request: PassRequest) -> None:
        """The pass of `run`; layers are shown once more behind it, with their gradients."""
        if not request.gradients:
            super().run_pass(request)
            return
        gradient_pass = _GradientPass(self, request)
        with linears_in(self.formats.linears, request.tokens.device.type):
            try:
                hooked = gradient_pass.hooked()
                with torch.enable_grad(), hooked, suppress(StopPass):
                    self.model.run_bare(request.tokens, gradient_pass.attend)
                gradient_pass.finish()
            finally:
                # Some patterns know the pass. The garbage collector is too late for what it holds.
                gradient_pass.tapes.clear()
                gradient_pass.activations.clear()


@dataclass
class _Tape:
    """What is kept of a layer until its gradients are known."""

    activations: dict[str, Any]
    v: Tensor  # `[batch kv_head pos d_head]`
    z: Tensor  # `[batch head pos d_head]`, before any change of z
    written_z: Tensor | None = None  # `[batch pos head d_head]`, after it
    attn_out: Tensor | None = None
    normed_attn_out: Tensor | None = None  # what a norm behind the attention makes of it
    other: Tensor | None = None  # what the rest of the layer adds to the stream
    stream: Tensor | None = None  # before the layer


class _GradientPass(FusedPass):
    """One pass forward and backward."""

    def __init__(self, engine: GradientEngine, request: PassRequest) -> None:
        self.keep_final = request.on_final
        # Not a method, which would hold the pass, and the pass the graph of all layers.
        self.finals: list[Tensor] = []  # the stream after the last norm
        super().__init__(engine, replace(request, on_final=self.finals.append))
        self.writes = engine.writes
        self.wanted = request.gradients
        self.tapes: dict[int, _Tape] = {}
        self.last_streams: list[Tensor] = []  # the same before it, last of all

    # Forward

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within it, modules tell this pass what they write to the stream, and where it is."""
        with super().hooked(), ExitStack() as hooks:
            if not self.wanted.isdisjoint(DIRECT_GRADIENTS):
                if self.writes.last_norm is not None:
                    keep = self._keep_last_stream
                    hooks.enter_context(self.writes.last_norm.register_forward_pre_hook(keep))
                for layer in self.request.shown_layers:
                    writes = self.writes.layers.get(layer)
                    for name, module in () if writes is None else writes.modules():
                        keep = partial(self._keep, layer, name)
                        hooks.enter_context(module.register_forward_hook(keep))
            yield

    def _keep(self, layer: int, name: str, _module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
        if layer in self.tapes:
            setattr(self.tapes[layer], name, first_of(output))

    def _keep_last_stream(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.last_streams.append(args[0])

    @property
    def last_stream(self) -> Tensor:
        return self.final if self.writes.last_norm is None else self.last_streams[-1]

    @property
    def final(self) -> Tensor:
        return self.finals[0]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        """z `[batch pos head d_head]`, which knows where it comes from."""
        layer = self.layer
        is_shown = layer in self.request.shown_layers
        if is_shown:
            # Nothing before the first layer that is shown needs a gradient.
            q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        # A change that reads the pattern may ask what has no gradient in a fused one.
        if layer in self.dense_layers or "pattern" in self.changes.reads:
            pattern = self._built_pattern(q, k, facts)
            pattern.with_other_keys = partial(self._with_other_keys, layer, q.detach(), facts)
            z = weighted_values(pattern.pattern, v)
        else:
            questions = self.engine.questions if is_shown else set[Question]()
            factors = (q.detach(), k.detach(), v.detach())
            how = (self.engine.formats.scores, self.engine.sweep)
            pattern = FusedPattern(*factors, facts, self.request.matches, questions, *how)
            z = FusedAttention.apply(q, k, v, pattern)
        self.activations["pattern"] = pattern
        if is_shown:
            by_position = {
                name: x.detach().transpose(1, 2) for name, x in (("q", q), ("k", k), ("v", v))
            }
            kept = {**by_position, "pattern": pattern}
            stream = cast(Tensor, self.activations["resid_pre"])
            self.tapes[layer] = _Tape(kept, v, z, stream=stream)
        return z.transpose(1, 2)

    def _with_other_keys(
        self, layer: int, q: Tensor, facts: AttentionFacts, k: Tensor
    ) -> DensePattern:
        """The pattern of a layer that other keys make, with all changes."""
        self.layer = layer
        self.activations = dict(self.tapes[layer].activations)
        return self._built_pattern(q, k, facts)

    def _show_layer(self) -> None:
        tape = self.tapes.get(self.layer)
        if tape is not None and "z" in self.activations:
            tape.written_z = cast(Tensor, self.activations["z"])
        with torch.no_grad():
            super()._show_layer()

    # Backward

    def finish(self) -> None:
        """Go back from the loss, and show every layer once more with its gradients."""
        if self.keep_final is not None:
            self.keep_final(self.final.detach())
        loss_by_stream = self._loss_by_stream()
        shown: dict[int, dict[str, Any]] = {layer: {} for layer in self.tapes}
        if not self.wanted.isdisjoint(DIRECT_GRADIENTS):
            self._add_direct(shown, loss_by_stream)
        if not self.wanted.isdisjoint(("dz", "dv")):
            tapes = self.tapes.values()
            ends = [tape.z for tape in tapes] + [tape.v for tape in tapes]
            # None where a change has cut the way to the loss.
            gradients = torch.autograd.grad(
                self.final, ends, loss_by_stream, materialize_grads=True
            )
            for i, layer in enumerate(shown):
                shown[layer]["dz"] = gradients[i].transpose(1, 2)
                shown[layer]["dv"] = gradients[len(shown) + i].transpose(1, 2)
        # Without what knows the graph, which the last layer would hold until it is shown.
        self.tapes = {
            layer: _Tape(tape.activations, tape.v.detach(), tape.z.detach())
            for layer, tape in self.tapes.items()
        }
        self.finals.clear()
        self.last_streams.clear()
        for layer, gradients_of_layer in shown.items():
            tape = self.tapes[layer]
            self.layer = layer
            z = tape.z.transpose(1, 2)
            self.activations = {**tape.activations, "z": z, **gradients_of_layer}
            self._show_layer()
            del self.tapes[layer]

    def _loss_by_stream(self) -> Tensor:
        """∂L by the stream after the last norm `[batch pos d_model]`, with L the mean loss of a
        sequence; the last query has no next token.
        """
        stream, tokens = self.final.detach(), self.request.tokens
        share = 1 / max(1, tokens.shape[1] - 1)
        gradient = torch.zeros_like(stream)
        rows = (row_chunks(self.model, x.flatten(0, 1)) for x in (stream[:, :-1], tokens[:, 1:]))
        of_rows: list[Tensor] = []
        for row, token in zip(*rows, strict=True):
            leaf = row.requires_grad_()
            with torch.enable_grad():
                unembedded = self.model.unembed(leaf)  # [row d_vocab]
            with torch.no_grad():
                logits, slope = self.model.changed_logits(unembedded.detach())
                by_logit = logits.softmax(-1)
                # p - onehot(y), then through what changes the logits.
                by_logit[torch.arange(len(token), device=token.device), token] -= 1
                by_logit.mul_(slope * share)
            of_rows += torch.autograd.grad(unembedded, leaf, by_logit)
        if of_rows:  # A sequence of one token has no next token.
            gradient[:, :-1] = torch.cat(of_rows).view_as(gradient[:, :-1])
        return gradient

    def _logit_by_stream(self) -> tuple[Tensor, Tensor]:
        """∂C by the stream after the last norm `[batch pos d_model]`, and C `[batch]`: the mean
        logit of the next tokens of a sequence, each less the mean over the vocabulary.
        """
        stream, tokens = self.final.detach(), self.request.tokens
        unembedding: Any = self.model.modules("unembed")[0]
        scale = self.model.logit_scale / max(1, tokens.shape[1] - 1)
        weight, bias = unembedding.weight, getattr(unembedding, "bias", None)  # [d_vocab d_model]
        direction = torch.zeros_like(stream)
        direction[:, :-1] = (weight[tokens[:, 1:]] - weight.mean(0)) * scale
        centred = _products(direction, stream)
        if bias is not None:
            centred = centred + ((bias[tokens[:, 1:]] - bias.mean()) * scale).sum(1)
        return direction, centred

    def _add_direct(self, shown: dict[int, dict[str, Any]], loss_by_stream: Tensor) -> None:
        """Add what goes straight from z to the last norm to what is known of each layer."""
        names = [name for name in DIRECT_GRADIENTS if name in self.wanted]
        if not self.writes.is_known:
            for layer in shown:
                shown[layer] |= dict.fromkeys(names)
            return
        by_stream: dict[str, Tensor] = {}
        behind = loss_by_stream.new_zeros(len(loss_by_stream))
        if "direct_dz" in names:
            by_stream["direct_dz"] = self._before_last_norm(loss_by_stream)
        if not {"logit_dz", "logit_parts"}.isdisjoint(names):
            logit_by_stream, centred = self._logit_by_stream()
            by_stream["logit_dz"] = self._before_last_norm(logit_by_stream)
            behind = centred - _products(by_stream["logit_dz"], self.last_stream.detach())
        for layer, tape in self.tapes.items():
            writes = self.writes.layers.get(layer)
            if writes is None or self.model.changes_z(layer):
                shown[layer] |= dict.fromkeys(names)
                continue
            for name, gradient in by_stream.items():
                by_z, by_written_z = self._through_attention(writes, tape, gradient)
                shown[layer][name] = by_z.transpose(1, 2)
                if name == "logit_dz" and "logit_parts" in names:
                    parts = self._parts(layer, writes, tape, gradient, by_written_z)
                    is_last = layer == len(self.model.blocks) - 1
                    parts.append(behind if is_last else torch.zeros_like(behind))
                    shown[layer]["logit_parts"] = torch.stack(parts, dim=1)

    def _before_last_norm(self, gradient: Tensor) -> Tensor:
        """A gradient by what the unembedding reads, as one by the stream of the last layer."""
        norm = self.writes.last_norm
        if norm is None:
            return gradient
        return through_frozen_norm(norm, self.last_stream, self.final, gradient)

    def _through_attention(
        self, writes: LayerWrites, tape: _Tape, by_stream: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A gradient by the stream as it arrives at z, before and after a change of z."""
        assert tape.written_z is not None
        ends = (tape.z, tape.written_z)
        attn_out = tape.attn_out
        if attn_out is None or not attn_out.requires_grad:
            # An intervention writes something else in its place.
            return torch.zeros_like(ends[0]), torch.zeros_like(ends[1])
        by_attn_out = by_stream * writes.factor
        if writes.norm is not None:
            assert tape.normed_attn_out is not None
            by_attn_out = through_frozen_norm(
                writes.norm, attn_out, tape.normed_attn_out, by_attn_out
            )
        by_z, by_written_z = torch.autograd.grad(
            attn_out, ends, by_attn_out, retain_graph=True, materialize_grads=True
        )
        return by_z, by_written_z

    def _parts(
        self, layer: int, writes: LayerWrites, tape: _Tape, by_stream: Tensor, by_z: Tensor
    ) -> list[Tensor]:
        """What the embeddings, all heads, the rest of the attention and of the layer add."""
        attention = tape.attn_out if writes.norm is None else tape.normed_attn_out
        assert attention is not None
        assert tape.stream is not None
        assert tape.written_z is not None
        nothing = by_stream.new_zeros(len(by_stream))
        heads = (by_z * tape.written_z.detach()).sum((1, 2, 3))
        whole = writes.factor * _products(by_stream, attention.detach())
        other = nothing
        if tape.other is not None:
            other = writes.factor * _products(
                by_stream, tape.other.detach().reshape(by_stream.shape)
            )
        embeddings = _products(by_stream, tape.stream.detach()) if layer == 0 else nothing
        return [embeddings, heads, whole - heads, other]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Σ ⟨a, b⟩ over positions, of `[batch pos d_model]`: `[batch]`."""
    # Some modules have one axis for sequences and positions.
    return (a * b.reshape(a.shape)).sum((1, 2))


def through_frozen_norm(norm: nn.Module, x: Tensor, y: Tensor, by_y: Tensor) -> Tensor:
    """∂/∂x from ∂/∂y `[… d_model]`, where y = norm(x) and the scale of the norm stands still.

    With the scale s, the gain γ and P = I - 11ᵀ/D (P = I where the norm keeps the mean), it is
    y = γ P x/s + β, and the answer is P(γ ∂/∂y)/s. The whole gradient is that less its part along
    P x, which is known: ⟨P x, P(γ ∂/∂y)/s⟩ = ⟨y - β, ∂/∂y⟩. So the norm is asked, and no weight of
    it is read.
    """
    (whole,) = torch.autograd.grad(y, x, by_y, retain_graph=True)
    with torch.no_grad():
        zeros, ones = torch.zeros_like(x[..., :1, :]), torch.ones_like(x[..., :1, :])
        bias = norm(zeros)
        subtracts_mean = torch.allclose(norm(ones), bias, atol=1e-4)
        centred = x - x.mean(-1, keepdim=True) if subtracts_mean else x
        missing = ((y - bias) * by_y).sum(-1, keepdim=True) - (centred * whole).sum(
            -1, keepdim=True
        )
        length = centred.square().sum(-1, keepdim=True)
        return whole + centred * (missing / length.clamp(min=torch.finfo(length.dtype).tiny))
