"""The dense engine: TransformerLens's hooks, and every pattern read whole."""

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.formula_kinds import LAYER_VALUES
from headcount.workers.bridge.bridge import Hook, bridge_of
from headcount.workers.engine.changes import WHOLE_PATTERN, Changes, hidden_keys
from headcount.workers.engine.dense_pattern import DensePattern, check_unseen
from headcount.workers.engine.engine import Activations, Engine, PassRequest, StopPass
from headcount.workers.model.attention_facts import (
    MASKED,
    AttentionFacts,
    all_scores,
    pattern_of,
    scored,
    unseen_keys,
    weighted_values,
)
from headcount.workers.model.model import Model, at_least_float32

Tensors = dict[str, Tensor]
"""Activations of one layer as changes leave them. Beside them are the pattern and the scores before
changes, under `unchanged …`, and the keys that a change hides, under `hidden`.
"""


class DenseEngine(Engine):
    """Runs the bridge with hooks and reads the whole pattern: the reference."""

    name = "dense"
    attention = "matrix"

    def __init__(self, model: Model, changes: Changes | None = None) -> None:
        super().__init__(model, model.precision, changes)
        self.bridge = bridge_of(model)
        self._checked_patterns: set[tuple[int, int]] = set()  # by layer and length

    def changed(self, changes: Changes) -> "DenseEngine":
        """The same engine with other changes, under which patterns are checked anew."""
        return DenseEngine(self.model, changes)

    def built_layers(self, depth: int) -> list[int]:  # noqa: D102 (every pattern is a matrix)
        return []

    def run_pass(self, request: PassRequest) -> None:
        """The forward pass of `run`, through TransformerLens's hooks."""
        try:
            self.bridge.run_with_hooks(request.tokens, list(_DensePass(self, request).hooks()))
        except UserWarning as warning:  # It has no way to apply what a hook returns.
            targets = ", ".join(change.target for change in self.changes.changes)
            raise ModelError(
                f"{self.model.info.name}: {targets} cannot be changed "
                f"in this architecture ({warning})"
            ) from None

    def pattern_of(self, layer: int, tensors: Tensors) -> DensePattern:
        """A layer's pattern with the scores behind it, from what its hooks have shown."""
        model, name = self.model, self.model.info.name
        facts = self.bridge.shown_facts(layer)
        q, k = (tensors[name].transpose(1, 2) for name in ("q", "k"))
        shows_scores = self.bridge.shows_scores(layer)
        if shows_scores:
            scores = _as_facts_have_them(tensors, q, k, facts)
        elif self.changes.touch("attn_scores", layer):
            raise ModelError(
                f"{name}: the bridge does not show the scores behind the pattern of layer {layer}, "
                "so they cannot be changed"
            )
        else:
            scores = all_scores(q, k, facts)
        n_ctx = scores.shape[-1]
        # A pattern that its scores and facts do not make is refused: the layer's mask is another
        # one, or a change of the scores has no effect. The comparison costs a softmax over T², and
        # its outcome depends on the layer and T alone.
        if (layer, n_ctx) not in self._checked_patterns:
            pattern = tensors["unchanged pattern"]
            # NaN of broken weights counts as equal: measuring names their layer.
            is_made_of_scores = torch.allclose(
                pattern_of(scores, facts).tril(), pattern.tril(), atol=1e-4, equal_nan=True
            )
            is_masked = not is_made_of_scores
            if shows_scores:
                # A mask of the bridge is seen in its scores. One that hides more keys than the
                # facts say was not known when the model was loaded.
                unseen = unseen_keys(n_ctx, facts, scores.device)
                shown = tensors["unchanged attn_scores"].masked_fill(unseen, 0)
                is_masked = bool((shown <= MASKED).any())
            if is_masked:
                if pattern.isnan().any() and (problem := model.weight_problem) is not None:
                    raise ModelError(f"{name}: layer {layer} has no attention pattern: {problem}")
                raise ModelError(
                    f"{name}: layer {layer} looks back less far than n_ctx; lower n_ctx"
                )
            if not is_made_of_scores:
                raise ModelError(
                    f"{name}: the bridge does not show the scores behind the pattern of layer "
                    f"{layer}"
                )
            self._checked_patterns.add((layer, n_ctx))
        return DensePattern(tensors["pattern"], scores, q, k, facts, tensors.get("hidden"))


def _as_facts_have_them(tensors: Tensors, q: Tensor, k: Tensor, facts: AttentionFacts) -> Tensor:
    """The scores that the bridge shows, with ALiBi as `AttentionFacts` has it: slope · (k - q).

    BLOOM adds slope · k, MPT something else: a shift of every query's scores, and the same pattern.
    """
    scores = tensors["attn_scores"]
    if facts.slopes is None:
        return scores
    # A query's bias to its own key is 0.
    own_keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    product = torch.linalg.vecdot(q, own_keys)  # [batch head pos]
    own_score = scored(product, torch.zeros_like(product[0, 0]), facts)
    # [batch head query]
    shown_own_score = tensors["unchanged attn_scores"].diagonal(dim1=-2, dim2=-1)
    return scores - (shown_own_score - own_score)[..., None]


class _DensePass:
    """One forward pass through the bridge: its hooks, and what they have shown of the layer."""

    def __init__(self, engine: DenseEngine, request: PassRequest) -> None:
        self.engine = engine
        self.model = engine.model
        self.bridge = engine.bridge
        self.changes = engine.changes
        self.request = request
        self.attention_layers = self.model.info.attention_layers_or_all
        self.tensors: Tensors = {}
        self.rotary_positions: Tensor | None = None  # of each token, if a change gives others
        self.rotated_layers: set[int] = set()  # that have shown the keys that they multiply

    def hooks(self) -> Iterator[tuple[str, Hook]]:
        """Where this pass hooks in, and with what."""
        for name in ("embed", "pos_embed"):
            if self.changes.touch(name):
                yield self.bridge.hook_name(name), partial(self._change, name, None)
        if self.changes.touch("rotary_positions"):
            hooks = self.bridge.rotary_hooks
            if not hooks:
                raise ModelError(
                    f"{self.model.info.name}: TransformerLens does not show the angles of its "
                    "rotations, so they cannot be changed; use engine = 'fused'"
                )
            yield from ((name, self._turn) for name in hooks)
        for layer in range(self.model.info.n_layers):
            yield self.bridge.hook_name("resid_post", layer), partial(self._end_layer, layer)
            # Hooks cost time, so a layer that nobody reads or changes has only that of its end.
            if layer in self.request.shown_layers or self.changes.touch_layer(layer):
                yield from self._hooks_inside(layer)
        if self.request.on_final is not None:
            yield self.bridge.hook_name("unembed_in"), lambda value, hook: self.request.end(value)

    def _hooks_inside(self, layer: int) -> Iterator[tuple[str, Hook]]:
        for name in ("key_input", "attn_out", "mlp_out"):
            if self.changes.touch(name, layer):
                yield self.bridge.hook_name(name, layer), partial(self._change, name, layer)
        at = self.bridge.hook_name("resid_pre", layer)
        yield at, partial(self._change_and_record, "resid_pre", layer)
        if layer not in self.attention_layers:
            return
        if layer in self.request.shown_layers:
            self.bridge.shown_facts(layer)  # What hides its attention is refused.
        if self.model.changes_z(layer) and self.changes.touch("z", layer):
            raise ModelError(
                f"{self.model.info.name}: TransformerLens shows z of layer {layer} only after the "
                "layer has changed it, so it cannot be changed; use engine = 'fused'"
            )
        for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
            yield self.bridge.hook_name(name, layer), partial(self._change_and_record, name, layer)
        # Not every layer norms or rotates its queries.
        at = self.bridge.hook_name("q_normed", layer)
        if self.bridge.has_hook(at):
            yield at, self._record_normed
        yield from self._hooks_of_rotations(layer)

    def _hooks_of_rotations(self, layer: int) -> Iterator[tuple[str, Hook]]:
        for name in ("q", "k"):
            at = self.bridge.hook_name(f"rot_{name}", layer)
            if self.bridge.has_hook(at):
                yield at, partial(self._record_rotated, name, layer)
            elif name == "k" and self.changes.touch("rot_k", layer):
                if self.model.rotary:
                    raise self._hidden_rotation(layer)
                # Hooks of one place run in order: this is what a change of k has left.
                at = self.bridge.hook_name("k", layer)
                yield at, partial(self._record_rotated, name, layer)

    def _hidden_rotation(self, layer: int) -> ModelError:
        return ModelError(
            f"{self.model.info.name}: TransformerLens does not show the keys of layer {layer} "
            "after their rotation, so they cannot be changed; use engine = 'fused'"
        )

    # TransformerLens calls hooks as `hook(value, hook=place)`. It puts what they return in the
    # place of the activation, and leaves the activation as it is if they return None.

    def _change(self, name: str, layer: int | None, value: Tensor, hook: object) -> Tensor | None:
        if not self.changes.touch(name, layer):
            return None
        readable_values: dict[str, Any] = {} if layer is None else {**self._activations(layer)}
        changed = self.changes.apply(
            name, layer, value, {**readable_values, "tokens": self.request.tokens}
        )
        return None if changed is value else changed

    def _turn(self, angles: Tensor, hook: object) -> Tensor:
        # Each token takes the angles of the position that it is given: [… pos angle].
        own = torch.arange(angles.shape[-2], device=angles.device)
        read = {"tokens": self.request.tokens}
        self.rotary_positions = self.changes.apply("rotary_positions", None, own, read)
        return angles[..., self.rotary_positions, :]

    def _change_and_record(
        self, name: str, layer: int, value: Tensor, hook: object
    ) -> Tensor | None:
        changed = self._change(name, layer, value, hook)
        if name in WHOLE_PATTERN:
            # Whether scores make the pattern is checked on what the model itself made.
            self.tensors[f"unchanged {name}"] = at_least_float32(value)
            if changed is not None:
                facts = self.bridge.shown_facts(layer)
                if name == "pattern":
                    check_unseen(changed, facts, layer)
                else:
                    unseen = unseen_keys(changed.shape[-1], facts, changed.device)  # [query key]
                    self.tensors["hidden"] = hidden_keys(changed, unseen)
                    # A change may have given scores to keys that a query does not see.
                    changed = changed.masked_fill(unseen, MASKED)
        self.tensors[name] = at_least_float32(value if changed is None else changed)
        return changed

    def _record_normed(self, value: Tensor, hook: object) -> None:
        # Queries after their norm: [batch pos head·d_head], or [batch head pos d_head].
        n_heads = self.model.info.n_heads
        by_head = value.unflatten(2, (n_heads, -1)) if value.dim() == 3 else value.transpose(1, 2)
        self.tensors["normed q"] = at_least_float32(by_head)

    def _record_rotated(self, name: str, layer: int, value: Tensor, hook: object) -> Tensor | None:
        # q or k as it is multiplied takes the place of what it was before its rotation.
        if name == "q" and "q" in self.tensors:
            self.tensors["unrotated_q"] = self.tensors.get("normed q", self.tensors["q"])
        changed = None
        if name == "k":
            self.rotated_layers.add(layer)
            changed = self._change("rot_k", layer, value, hook)
        self.tensors[name] = at_least_float32(value if changed is None else changed)
        return changed

    def _end_layer(self, layer: int, value: Tensor, hook: object) -> Tensor | None:
        # A hook that TransformerLens has may never be called.
        if self.changes.touch("rot_k", layer) and layer not in self.rotated_layers:
            raise self._hidden_rotation(layer)
        changed = self._change_and_record("resid_post", layer, value, hook)
        if layer in self.request.shown_layers:
            shown = {**self._activations(layer), **self.request.matches}
            self.request.on_layer(layer, cast(Activations, shown))
        # A matrix of T² for each head: only one layer's fits the memory.
        self.tensors.clear()
        if layer in self.attention_layers:
            self.bridge.forget_pattern(layer)
        if self.request.ends_with(layer):
            raise StopPass
        return changed

    def _activations(self, layer: int) -> Activations:
        """What statistics and changes are shown of a layer so far, with a pattern to ask."""
        tensors = dict(self.tensors)
        if self.model.changes_z(layer) and {"pattern", "v", "z"} <= tensors.keys():
            # The bridge shows what the layer has made of z.
            z = weighted_values(tensors["pattern"], tensors["v"].transpose(1, 2))
            tensors["z"] = z.transpose(1, 2)
        has_rotated = "unrotated_q" in tensors or not self.model.can_undo_rotation(layer)
        if "q" in tensors and not has_rotated:
            # The bridge shows queries and keys before their rotation alone.
            tensors["unrotated_q"] = tensors["q"]
            for name in {"q", "k"} & tensors.keys():
                positions = self.rotary_positions
                tensors[name] = self.bridge.rotated(self.model, layer, tensors[name], positions)
        activations: dict[str, Any] = {
            name: tensor for name, tensor in tensors.items() if name in LAYER_VALUES
        }
        if {"pattern", "attn_scores"} <= tensors.keys():
            activations["pattern"] = self.engine.pattern_of(layer, tensors)
        elif "pattern" in self.changes.reads and {"q", "k"} <= tensors.keys():
            # Some bridges show the pattern and the scores only after z. A change that reads the
            # pattern before gets one of q and k, which is checked at the end of the layer.
            facts = self.bridge.shown_facts(layer)
            q, k = (tensors[name].transpose(1, 2) for name in ("q", "k"))
            early_pattern = DensePattern.of(q, k, facts)
            if "pattern" in tensors:
                early_pattern.pattern = tensors["pattern"]
            activations["pattern"] = early_pattern
        for name in {"k", "v"} & activations.keys():
            # Last, because a pattern knows which query heads share them: [batch pos head d_head].
            group = self.model.info.n_heads // tensors[name].shape[2]
            activations[name] = tensors[name].repeat_interleave(group, 2)
        return cast(Activations, activations)
