"""The fused engine: a model's bare modules, their attention replaced by `FusedPattern`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headcount.schemas.errors import ModelError
from headcount.schemas.files.commit import Method
from headcount.schemas.scans.precision import PRECISIONS
from headcount.schemas.statistics import LAYER_VALUES
from headcount.workers.engine.attention_scores import (
    MASKED,
    all_scores,
    softmax_of,
    unseen_keys,
    weighted_values,
)
from headcount.workers.engine.changes import Changes, hidden_keys
from headcount.workers.engine.dense_pattern import DensePattern, check_unseen
from headcount.workers.engine.engine import Activations, OnFinal, OnLayer, StopPass
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.kernel.sweep_kernel import Sweep
from headcount.workers.engine.number_formats import WeightHalves, linears_in, outside_linears
from headcount.workers.engine.streamed_attention import streamed_attention
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.mlp_pieces import mlps_in_pieces
from headcount.workers.model.model import Model, at_least_float32
from headcount.workers.model.rotations import Rotation

ModuleOutput = Tensor | tuple[Any, ...]
"""What a module returns: a tensor, or a tuple that begins with it."""


class FusedEngine:
    """Runs the bare modules with attention replaced by `FusedPattern`.

    It measures at about the price of a forward pass.
    """

    name: Literal["fused"] = "fused"

    def __init__(
        self, model: Model, precision: str = "float32", sweep: Sweep | None = None
    ) -> None:
        """`sweep` is a GPU's kernel that has proved itself (`kernel_check`); None means tiles."""
        self.model = model
        self.precision = precision
        self.changes = Changes()
        self.questions: set[str] = set()
        """Questions that every sweep answers on its way; patterns add what they are asked."""
        # The facts of the layers were held against the model's own attention when it was loaded.
        problem = model.attention_problem
        if problem is not None:
            advice = "use engine = 'dense'" if model.has_bridge else model.bridge_problem
            raise ModelError(f"{model.info.name}: {problem}; {advice}")
        self.formats = PRECISIONS[precision]
        self.sweep: Sweep | None = sweep
        self._halves = WeightHalves(model.bare.parameters())

    @property
    def attention(self) -> Literal["tiles", "kernel"]:
        """What computes the patterns, except in layers where a change needs them built."""
        return "tiles" if self.sweep is None else "kernel"

    def method(self, intervention: str, depth: int) -> Method:
        """How it measures under its changes."""
        return Method(
            intervention=intervention,
            engine=self.name,
            precision=self.precision,
            attention=self.attention,
            built_layers=self.changes.dense_layers(depth),
        )

    def run(
        self,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        read_late: Container[str] = LAYER_VALUES,
        on_final: OnFinal | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        """One forward pass over tokens `[batch pos]` that shows some layers, by default all.

        It ends with the last of these layers. If there is `on_final`, it goes through all layers
        and ends before the unembedding.
        """
        shown_layers = self.model.info.attention_layers_or_all if layers is None else layers
        fused_pass = _FusedPass(self, tokens, matches, on_layer, read_late, on_final, shown_layers)
        device = tokens.device.type
        # A GPU wants large products, and a narrow format would convert the weights for each piece.
        is_divided = device == "cpu" and self.formats.linears in ("float32", "float64")
        try:
            with (
                fused_pass.hooked(),
                mlps_in_pieces(self.model.mlps if is_divided else ()),
                linears_in(self.formats.linears, device, self._halves),
            ):
                self.model.run_bare(tokens, fused_pass.attend)
        except StopPass:
            pass

    def changed(self, changes: Changes) -> FusedEngine:
        """The same engine with changes of activations."""
        engine = copy.copy(self)  # It shares `questions`: what one learns, the other knows.
        engine.changes = changes
        return engine


class _OfEveryHead(Mapping[str, Any]):
    """Activations in which keys and values are repeated where query heads share them, and queries
    are rotated back.

    That is done when they are asked for, and the copy lives no longer than its reader wants.
    """

    def __init__(
        self,
        activations: Mapping[str, Any],
        n_heads: int,
        rotated_back: Callable[[Tensor], Tensor],
    ) -> None:
        self.activations = activations
        self.n_heads = n_heads
        self.rotated_back = rotated_back

    def __contains__(self, name: object) -> bool:
        return ("q" if name == "unrotated_q" else name) in self.activations

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  (a tensor, a pattern or pairs)
        if name == "unrotated_q":
            return self.rotated_back(self.activations["q"])
        activation = self.activations[name]
        if name not in ("k", "v"):
            return activation
        group = self.n_heads // activation.shape[2]
        return activation if group == 1 else activation.repeat_interleave(group, 2)

    def __iter__(self) -> Iterator[str]:
        return iter(self.activations)

    def __len__(self) -> int:
        return len(self.activations)


class _FusedPass:
    """One forward pass through the bare modules: where it is, and what it knows of the layer."""

    def __init__(
        self,
        engine: FusedEngine,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        read_late: Container[str],
        on_final: OnFinal | None,
        shown_layers: Collection[int],
    ) -> None:
        self.engine = engine
        self.model = engine.model
        self.changes = engine.changes
        self.tokens = tokens
        self.matches = matches
        self.on_layer = on_layer
        self.read_late = read_late
        self.on_final = on_final
        self.shown_layers = shown_layers
        # If no layer is shown, the pass is for its end alone.
        self.last_layer = max(shown_layers, default=-1)
        self.dense_layers = self.changes.dense_layers(len(self.model.blocks))
        self.layer = 0
        self.n_heads = 0
        """Query heads of the layer, known when its attention asks."""
        self.has_attended = False
        """Whether the attention of the layer has asked this pass."""
        self.rotation: Rotation | None = None
        """How the layer rotated its queries; None if it did not."""
        self.activations: dict[str, Tensor | FusedPattern | DensePattern] = {}

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within it, the model's modules tell this pass where it is and take changed tensors."""
        hooks: list[RemovableHandle] = []
        for layer, block in enumerate(self.model.blocks):
            begin_layer = partial(self._begin_layer, layer)
            hooks.append(block.register_forward_pre_hook(begin_layer, with_kwargs=True))
            hooks.append(block.register_forward_hook(partial(self._end_layer, layer)))
        # Only the bridge may know the modules of an activation, so they are not asked for in vain.
        for name in filter(self.changes.touch, ("embed", "pos_embed", "attn_out", "mlp_out")):
            for layer, module in enumerate(self.model.modules(name)):
                if self.changes.touch(name, layer):
                    change_output = partial(self._change_output, name)
                    hooks.append(module.register_forward_hook(change_output))
        if self.on_final is not None:
            hooks += [
                module.register_forward_pre_hook(self._end_pass)
                for module in self.model.modules("unembed")
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

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
        """The attention of a layer, as `attention_facts.Attend` says it.

        The model's attention calls this in the place of its own softmax. It remembers the layer's
        activations and shows them.
        """
        with outside_linears():
            return self._attend(q, k, v, facts)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        dtype = v.dtype  # What is measured is float32 at least; the model gets its own format back.
        self.n_heads = q.shape[1]
        self.rotation = facts.rotation
        # All three before one is remembered: a change of one cannot read the others.
        q = self._changed_projection("q", at_least_float32(q))
        k = self._changed_projection("k", at_least_float32(k))
        v = self._changed_projection("v", at_least_float32(v))
        self.activations["q"] = q.transpose(1, 2)  # [batch pos head d_head], as statistics read it
        self.activations["k"] = k.transpose(1, 2)
        self.activations["v"] = v.transpose(1, 2)
        z = self._attention(q, k, v, facts)
        changed_z = self.change("z", z)
        self.activations["z"] = changed_z
        self.has_attended = True
        self._show_layer()
        # If nobody reads what comes after the attention of the last layer, the pass is done.
        if (
            self.layer == self.last_layer
            and "resid_post" not in self.read_late
            and self.on_final is None
        ):
            raise StopPass
        self._forget_what_nobody_reads()
        return changed_z.to(dtype)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        """z `[batch pos head d_head]` of a layer, whose pattern is remembered if there is one."""
        is_questioned = self.layer in self.shown_layers or "pattern" in self.changes.reads
        formats = self.engine.formats.scores
        sweep = self.engine.sweep
        streaming = self.changes.streaming(self.layer)
        if streaming is not None and not is_questioned:
            return streamed_attention(
                q, k, v, facts, streaming, self.layer, formats, sweep
            ).transpose(1, 2)
        if self.layer in self.dense_layers:
            pattern = self._built_pattern(q, k, facts)
            z = weighted_values(pattern.pattern, v)  # [batch head pos d_v]
        else:
            # In a layer that nobody looks at, the sweep is asked for z alone.
            questions = self.engine.questions if is_questioned else set[str]()
            pattern = FusedPattern(q, k, v, facts, self.matches, questions, formats, sweep)
            z = pattern.z
        self.activations["pattern"] = pattern
        return z.transpose(1, 2)

    def _built_pattern(self, q: Tensor, k: Tensor, facts: AttentionFacts) -> DensePattern:
        """The pattern of a layer whose scores or pattern are changed."""
        unseen = unseen_keys(q.shape[2], facts, q.device)  # [query key]
        scores = all_scores(q, k, facts).masked_fill_(unseen, MASKED)  # [batch head query key]
        hidden = None
        if self.changes.touch("attn_scores", self.layer):
            changed_scores = self.change("attn_scores", scores)
            hidden = hidden_keys(changed_scores, unseen)
            # A change may have given scores to keys that a query does not see.
            scores = changed_scores.masked_fill(unseen, MASKED)
        made = softmax_of(scores, facts)  # [batch head query key]
        pattern = self.change("pattern", made)
        if pattern is not made:
            check_unseen(pattern, unseen, facts, self.layer)
        return DensePattern(pattern, scores, q, k, facts, hidden)

    def _changed_projection(self, name: str, projection: Tensor) -> Tensor:
        """Queries, keys or values `[batch head pos d_head]` as changes leave them.

        Changes see the axes `[batch pos head d_head]`.
        """
        by_position = projection.transpose(1, 2)
        changed = self.change(name, by_position)
        return projection if changed is by_position else changed.transpose(1, 2)

    def change(self, name: str, value: Tensor) -> Tensor:
        """An activation of the layer as changes leave it; the same tensor if nothing changes it."""
        if not self.changes.touch(name, self.layer):
            return value
        activations = _OfEveryHead(self.activations, self.n_heads, self._rotated_back)
        readable_values: dict[str, Any] = {
            read: activations[read] for read in self.changes.reads if read in activations
        }
        readable_values["tokens"] = self.tokens
        return self.changes.apply(name, self.layer, value, readable_values)

    def _change_output(
        self, name: str, _module: nn.Module, _args: tuple[Any, ...], output: ModuleOutput
    ) -> ModuleOutput:
        if isinstance(output, tuple):
            return (self.change(name, output[0]), *output[1:])
        return self.change(name, output)

    def _show_layer(self) -> None:
        """Hand over what is known of the layer, if somebody wants to know."""
        if self.layer in self.shown_layers:
            activations = {**self.activations, **self.matches}
            shown = _OfEveryHead(activations, self.n_heads, self._rotated_back)
            with outside_linears():
                self.on_layer(self.layer, cast(Activations, shown))

    def _rotated_back(self, q: Tensor) -> Tensor:
        """The layer's queries as they were before their rotation."""
        if not self.model.can_undo_rotation(self.layer):
            raise ModelError(
                f"{self.model.info.name}: the queries of layer {self.layer} before their rotation "
                "are not known, because its module rotates them in a way of its own; leave out "
                "the profiles query_mean and query_second_moment"
            )
        return q if self.rotation is None else self.rotation.undo(q)

    def _forget_what_nobody_reads(self) -> None:
        """Free the layer's tensors that neither formulas nor changes read after the attention,
        before the MLP takes its memory.
        """
        self.activations = {
            name: activation
            for name, activation in self.activations.items()
            if name in self.read_late
            # Queries before their rotation are made of these when they are asked for.
            or (name == "q" and "unrotated_q" in self.read_late)
            or name in self.changes.reads
        }

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
        if layer == self.last_layer and self.on_final is None:
            raise StopPass
        if changed is resid_post:
            return None
        return (changed, *output[1:]) if has_more else changed

    def _end_pass(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hand over the stream before the unembedding."""
        if self.on_final is not None:
            self.on_final(at_least_float32(args[0]))
            raise StopPass
