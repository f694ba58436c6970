"""The fused engine: a model's bare modules, their attention replaced by `FusedPattern`."""

from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headcount.schemas.errors import ModelError
from headcount.schemas.scans.scan import PRECISIONS
from headcount.workers.engine.changes import Streaming, hidden_keys
from headcount.workers.engine.dense_pattern import DensePattern, check_unseen
from headcount.workers.engine.engine import Activations, Engine, PassRequest, StopPass
from headcount.workers.engine.fused_pattern import FusedPattern, z_within
from headcount.workers.engine.number_formats import WeightHalves, linears_in, outside_linears
from headcount.workers.engine.tile_sweep import Question, Sweep
from headcount.workers.model.attention_facts import (
    MASKED,
    AttentionFacts,
    all_scores,
    facts_of_heads,
    pattern_of,
    unseen_keys,
    weighted_values,
)
from headcount.workers.model.bare_modules import MLP, child_of_each, mlps_in_pieces
from headcount.workers.model.model import Model, at_least_float32
from headcount.workers.model.rotations import Rotation

AT_MODULES = ("embed", "pos_embed", "rotary_positions", "key_input", "attn_out", "mlp_out")
"""Activations that are changed where a module takes them or puts them out."""

ModuleOutput = Tensor | tuple[Any, ...]
"""What a module returns: a tensor, or a tuple that begins with it."""


class FusedEngine(Engine):
    """Runs the bare modules with `FusedPattern`, at about the price of a forward pass."""

    name = "fused"

    def __init__(
        self, model: Model, precision: str = "float32", sweep: Sweep | None = None
    ) -> None:
        """`sweep` is a GPU's kernel that has proved itself (`kernel_check`); None means tiles."""
        super().__init__(model, precision)
        self.questions: set[Question] = set()  # that every sweep answers on its way
        # The facts of the layers were held against the model's own attention when it was loaded.
        problem = model.attention_problem
        if problem is not None:
            advice = model.bridge().problem or "use engine = 'dense'"
            raise ModelError(f"{model.info.name}: {problem}; {advice}")
        self.formats = PRECISIONS[precision]
        self.sweep = sweep
        self.attention = "tiles" if sweep is None else "kernel"
        self._halves = WeightHalves(model.bare.parameters())

    def run_pass(self, request: PassRequest) -> None:
        """The forward pass of `run`, through the bare modules."""
        fused_pass = FusedPass(self, request)
        device = request.tokens.device.type
        # A GPU wants large products, and a narrow format would convert the weights for each piece.
        is_divided = device == "cpu" and self.formats.linears in ("float32", "float64")
        with (
            fused_pass.hooked(),
            mlps_in_pieces(child_of_each(self.model.blocks, MLP) if is_divided else ()),
            linears_in(self.formats.linears, device, self._halves),
        ):
            self.model.run_bare(request.tokens, fused_pass.attend)


class _OfEveryHead(UserDict[str, Any]):
    """Activations in which keys and values are repeated where query heads share them, and queries
    are rotated back, when they are asked for: the copy lives no longer than its reader wants.
    """

    def __init__(self, activations: Mapping[str, Any], of_pass: "FusedPass") -> None:
        super().__init__(activations)
        self.of_pass = of_pass

    def __contains__(self, name: object) -> bool:
        return ("q" if name == "unrotated_q" else name) in self.data

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  (a tensor, a pattern or pairs)
        if name == "unrotated_q":
            return self.of_pass.rotated_back(self.data["q"])
        activation = self.data[name]
        if name not in ("k", "v", "dv") or activation is None:
            return activation
        group = self.of_pass.n_heads // activation.shape[2]
        return activation if group == 1 else activation.repeat_interleave(group, 2)


class FusedPass:
    """One forward pass through the bare modules: where it is, and what it knows of the layer."""

    def __init__(self, engine: FusedEngine, request: PassRequest) -> None:
        self.engine = engine
        self.model = engine.model
        self.changes = engine.changes
        self.request = request
        self.dense_layers = self.changes.dense_layers(len(self.model.blocks))
        self.layer = 0
        self.n_heads = 0  # query heads of the layer, known when its attention asks
        self.has_attended = False  # whether the attention of the layer has asked this pass
        self.rotation: Rotation | None = None  # how the layer rotated its queries, if it did
        self.activations: dict[str, Tensor | FusedPattern | DensePattern] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within it, the model's modules tell this pass where it is and take changed tensors."""
        with ExitStack() as hooks:
            for layer, block in enumerate(self.model.blocks):
                begin_layer = partial(self._begin_layer, layer)
                end_layer = partial(self._end_layer, layer)
                hooks.enter_context(block.register_forward_pre_hook(begin_layer, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(end_layer))
            for handle in self._changes_at_modules():
                hooks.enter_context(handle)
            if self.request.on_final is not None:
                for module in self.model.modules("unembed"):
                    end_pass = lambda _module, args: self.request.end(args[0])  # noqa: E731
                    hooks.enter_context(module.register_forward_pre_hook(end_pass))
            yield

    def _changes_at_modules(self) -> Iterator[RemovableHandle]:
        """Hooks for changes of what modules take or put out."""
        # Only the bridge may know the modules of an activation: they are not asked in vain.
        for name in filter(self.changes.touch, AT_MODULES):
            for layer, module in enumerate(self.model.modules(name)):
                if not self.changes.touch(name, layer):
                    continue
                if name == "key_input":
                    yield module.register_forward_pre_hook(self._change_key_input)
                else:
                    is_angles = name == "rotary_positions"
                    change = self._turn if is_angles else partial(self._change_output, name)
                    yield module.register_forward_hook(change)

    def _begin_layer(
        self, layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note where the pass is; returns the block's arguments if a change changes its input."""
        self.layer = layer
        self.has_attended = False
        # Libraries pass the stream as the first argument or by this name.
        resid_pre: Tensor = self.model.stream(args[0] if args else kwargs["hidden_states"])
        changed = self.change("resid_pre", resid_pre)
        self.activations = {"resid_pre": at_least_float32(changed)}
        if changed is resid_pre:
            return None
        if args:
            return (changed, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": changed}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        """A layer's attention, in the place of the model's own (`attention_facts.Attend`)."""
        dtype = v.dtype  # What is measured is float32 at least; the model gets its own format back.
        self.n_heads = q.shape[1]
        self.rotation = facts.rotation
        with outside_linears():
            # All three before one is remembered: a change of one cannot read the others. Changes
            # and statistics see them as [batch pos head d_head].
            projections = {
                name: self.change(name, at_least_float32(projection).transpose(1, 2))
                for name, projection in (("q", q), ("k", k), ("v", v))
            }
            self.activations |= projections
            projections["k"] = self.change("rot_k", projections["k"])
            self.activations["k"] = projections["k"]
            q, k, v = (projection.transpose(1, 2) for projection in projections.values())
            z = self.change("z", self._attention(q, k, v, facts))
            self.activations["z"] = z
            self.has_attended = True
            self._show_layer()
            # If nobody reads what comes after the attention of the last layer, the pass is done.
            if self.request.ends_with(self.layer) and "resid_post" not in self.request.read_late:
                raise StopPass
            # Before the MLP takes their memory, tensors go that nobody reads after the attention.
            late = self.request.read_late
            self.activations = {
                name: activation
                for name, activation in self.activations.items()
                if name in late
                # Queries before their rotation are made of these when they are asked for.
                or (name == "q" and "unrotated_q" in late)
                or name in self.changes.reads
            }
            return z.to(dtype)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        """z `[batch pos head d_head]` of a layer, whose pattern is remembered if there is one."""
        is_questioned = self.layer in self.request.shown_layers or "pattern" in self.changes.reads
        how = (self.engine.formats.scores, self.engine.sweep)
        streaming = self.changes.streaming(self.layer)
        if streaming is not None and not is_questioned:
            z = streamed_attention(q, k, v, facts, streaming, self.layer, *how)
            return z.transpose(1, 2)
        if self.layer in self.dense_layers:
            pattern = self._built_pattern(q, k, facts)
            z = weighted_values(pattern.pattern, v)  # [batch head pos d_v]
        else:
            # In a layer that nobody looks at, the sweep is asked for z alone.
            questions = self.engine.questions if is_questioned else set[Question]()
            pattern = FusedPattern(q, k, v, facts, self.request.matches, questions, *how)
            z = pattern.z
        self.activations["pattern"] = pattern
        return z.transpose(1, 2)

    def _built_pattern(self, q: Tensor, k: Tensor, facts: AttentionFacts) -> DensePattern:
        unseen = unseen_keys(q.shape[2], facts, q.device)  # [query key]
        scores = all_scores(q, k, facts).masked_fill_(unseen, MASKED)  # [batch head query key]
        hidden = None
        if self.changes.touch("attn_scores", self.layer):
            changed_scores = self.change("attn_scores", scores)
            hidden = hidden_keys(changed_scores, unseen)
            # A change may have given scores to keys that a query does not see.
            scores = changed_scores.masked_fill(unseen, MASKED)
        made = pattern_of(scores, facts)  # [batch head query key]
        pattern = self.change("pattern", made)
        if pattern is not made:
            check_unseen(pattern, facts, self.layer)
        return DensePattern(pattern, scores, q, k, facts, hidden)

    def change(self, name: str, value: Tensor) -> Tensor:
        """An activation of the layer as changes leave it; the same tensor if nothing changes it."""
        if not self.changes.touch(name, self.layer):
            return value
        activations = _OfEveryHead(self.activations, self)
        read = {name: activations[name] for name in self.changes.reads if name in activations}
        return self.changes.apply(name, self.layer, value, read | {"tokens": self.request.tokens})

    def _change_output(
        self, name: str, _module: nn.Module, _args: tuple[Any, ...], output: ModuleOutput
    ) -> ModuleOutput:
        if isinstance(output, tuple):
            return (self.change(name, output[0]), *output[1:])
        return self.change(name, output)

    def _change_key_input(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.change("key_input", args[0]),)

    def _turn(
        self, _module: nn.Module, _args: tuple[Any, ...], output: ModuleOutput
    ) -> ModuleOutput:
        """Give each token the angles of another position: cosines and sines `[… pos angle]`."""
        angles = output if isinstance(output, tuple) else (output,)
        positions = torch.arange(angles[0].shape[-2], device=angles[0].device)
        positions = self.change("rotary_positions", positions)
        turned = tuple(each[..., positions, :] for each in angles)
        return turned if isinstance(output, tuple) else turned[0]

    def _show_layer(self) -> None:
        if self.layer in self.request.shown_layers:
            shown = _OfEveryHead({**self.activations, **self.request.matches}, self)
            with outside_linears():
                self.request.on_layer(self.layer, cast(Activations, shown))

    def rotated_back(self, q: Tensor) -> Tensor:
        """Queries of the layer as they were before their rotation."""
        if not self.model.can_undo_rotation(self.layer):
            raise ModelError(
                f"{self.model.info.name}: the queries of layer {self.layer} before their rotation "
                "are not known, because its module rotates them in a way of its own; leave out "
                "the profiles query_mean and query_second_moment"
            )
        return q if self.rotation is None else self.rotation.undo(q)

    def _end_layer(
        self, layer: int, _module: nn.Module, _args: tuple[Any, ...], output: ModuleOutput
    ) -> ModuleOutput | None:
        """Show the layer with its output; returns the block's output if a change changes it."""
        if not self.has_attended and layer in self.model.info.attention_layers_or_all:
            raise ModelError(
                f"{self.model.info.name}: layer {layer} has no attention that can be seen; "
                "use engine = 'dense'"
            )
        has_more = isinstance(output, tuple | list)
        resid_post = self.model.stream(output[0] if has_more else output)
        changed = self.change("resid_post", resid_post)
        self.activations["resid_post"] = at_least_float32(changed)
        self._show_layer()
        self.activations = {}
        if self.request.ends_with(layer):
            raise StopPass
        if changed is resid_post:
            return None
        return (changed, *output[1:]) if has_more else changed


# Heads that see the first keys and the last ones


def streamed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: AttentionFacts,
    streaming: Streaming,
    layer: int,
    number_format: str = "float32",
    sweep: Sweep | None = None,
) -> Tensor:
    """z `[batch head pos d_v]` of a layer whose heads stream, as `streaming` says it.

    q is `[batch head pos d_qk]`, k and v have one head for each group of query heads that share it.
    It is made of two pieces, a window and the first keys, so no matrix of scores is needed. It
    answers nothing but z: where somebody asks about the pattern, the pattern is built.
    """
    n_heads = q.shape[1]
    z = q.new_empty(*q.shape[:3], v.shape[3])
    for streams in (True, False):
        heads = [head for head in range(n_heads) if (head in streaming.heads[layer]) == streams]
        if not heads:
            continue
        index = torch.tensor(heads, device=q.device)
        # The heads of one group can differ, so each of them gets its own keys and values.
        kv_index = index // (n_heads // k.shape[1])
        some_facts = facts_of_heads(facts, index)
        factors = (q[:, index], k[:, kv_index], v[:, kv_index], some_facts)
        if streams:
            z[:, index] = z_within(*factors, streaming.sink, streaming.recent, number_format, sweep)
        else:
            z[:, index] = FusedPattern(*factors, {}, None, number_format, sweep).z
    return z
