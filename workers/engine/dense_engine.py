"""The dense engine: TransformerLens's hooks, and every pattern read whole."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.files.commit import Method
from headcount.schemas.statistics import LAYER_VALUES
from headcount.workers.engine.attention_scores import (
    MASKED,
    all_scores,
    scored,
    softmax_of,
    unseen_keys,
    weighted_values,
)
from headcount.workers.engine.changes import EMBEDDINGS, WHOLE_PATTERN, Changes, hidden_keys
from headcount.workers.engine.dense_pattern import DensePattern, check_unseen
from headcount.workers.engine.engine import Activations, OnFinal, OnLayer, StopPass
from headcount.workers.engine.token_pairs import TokenPairs
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.model import Hook, Model, at_least_float32

Tensors = dict[str, Tensor]
"""Activations of one layer as changes leave them. Beside them are the pattern and the scores before
changes, under `unchanged …`, and the keys that a change hides, under `hidden`.
"""


class DenseEngine:
    """Runs the bridge with hooks and reads the whole pattern.

    It is the reference, and the way to change what only TransformerLens shows.
    """

    name: Literal["dense"] = "dense"
    attention: Literal["matrix"] = "matrix"

    def __init__(self, model: Model, changes: Changes | None = None) -> None:
        self.model = model
        self.changes = changes or Changes()
        self._checked_patterns: set[tuple[int, int]] = set()
        """Layers and lengths whose pattern has been held against its scores."""

    def changed(self, changes: Changes) -> DenseEngine:
        """The same engine with changes of activations."""
        return DenseEngine(self.model, changes)

    def method(self, intervention: str, depth: int) -> Method:
        """How it measures: every pattern is a matrix, so none is built for a change alone."""
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
        read_late: Container[str] = LAYER_VALUES,
        on_final: OnFinal | None = None,
        layers: Collection[int] | None = None,
    ) -> None:
        """One forward pass over tokens `[batch pos]` that shows some layers, by default all.

        It ends with the last of these layers. If there is `on_final`, it goes through all layers
        and ends before the unembedding.
        """
        shown_layers = self.model.info.attention_layers_or_all if layers is None else layers
        dense_pass = _DensePass(self, tokens, matches, on_layer, on_final, shown_layers)
        try:
            self.model.run_with_hooks(tokens, list(dense_pass.hooks()))
        except UserWarning as warning:
            # TransformerLens warns where it has no way to apply what a hook returns, and
            # `run_with_hooks` makes the warning an error.
            targets = ", ".join(change.target for change in self.changes.changes)
            raise ModelError(
                f"{self.model.info.name}: {targets} cannot be changed "
                f"in this architecture ({warning})"
            ) from None
        except StopPass:
            pass

    def pattern_of(self, layer: int, tensors: Tensors) -> DensePattern:
        """A layer's pattern with the scores behind it, from what its hooks have shown."""
        model = self.model
        facts = model.shown_facts(layer)
        q, k = _queries_and_keys(tensors)
        if model.shows_scores(layer):
            scores = _as_facts_have_them(tensors, facts)
        elif self.changes.touch("attn_scores", layer):
            raise ModelError(
                f"{model.info.name}: the bridge does not show the scores behind the pattern of "
                f"layer {layer}, so they cannot be changed"
            )
        else:
            scores = all_scores(q, k, facts)
        # The comparison costs a softmax over T², and its outcome depends on the layer and T alone.
        n_ctx = scores.shape[-1]
        if (layer, n_ctx) not in self._checked_patterns:
            self._check_pattern(layer, scores, facts, tensors)
            self._checked_patterns.add((layer, n_ctx))
        return DensePattern(tensors["pattern"], scores, q, k, facts, tensors.get("hidden"))

    def _check_pattern(
        self, layer: int, scores: Tensor, facts: AttentionFacts, tensors: Tensors
    ) -> None:
        """Refuse a pattern that its scores and facts do not make.

        Either the layer's mask is another one, or a change of the scores has no effect.
        """
        name = self.model.info.name
        pattern = tensors["unchanged pattern"]
        other_mask = f"{name}: layer {layer} looks back less far than n_ctx; lower n_ctx"
        if pattern.isnan().any() and (problem := self.model.weight_problem) is not None:
            other_mask = f"{name}: layer {layer} has no attention pattern: {problem}"
        unseen = unseen_keys(scores.shape[-1], facts, scores.device)
        implied = softmax_of(scores.masked_fill(unseen, MASKED), facts)
        # NaN of broken weights counts as equal: measuring names their layer.
        is_made_of_scores = torch.allclose(
            implied.tril(), pattern.tril(), atol=1e-4, equal_nan=True
        )
        if not self.model.shows_scores(layer):
            if not is_made_of_scores:
                raise ModelError(other_mask)
            return
        # A mask of the bridge is seen in its scores. One that hides more keys than the facts say
        # was not known when the model was loaded.
        if (tensors["unchanged attn_scores"].masked_fill(unseen, 0) <= MASKED).any():
            raise ModelError(other_mask)
        if not is_made_of_scores:
            raise ModelError(
                f"{name}: the bridge does not show the scores behind the pattern of layer {layer}"
            )


def _as_facts_have_them(tensors: Tensors, facts: AttentionFacts) -> Tensor:
    """The scores that the bridge shows, with ALiBi as `AttentionFacts` has it: slope · (k - q).

    BLOOM adds slope · k, and MPT something else again. Every query's scores are shifted, which
    makes the same pattern.
    """
    scores = tensors["attn_scores"]
    if facts.slopes is None:
        return scores
    q, k = _queries_and_keys(tensors)
    queries_per_key = q.shape[1] // k.shape[1]
    # A query's bias to its own key is 0.
    product = torch.linalg.vecdot(q, k.repeat_interleave(queries_per_key, 1))  # [batch head pos]
    own_score = scored(product, torch.zeros_like(product[0, 0]), facts)
    # [batch head query]
    shown_own_score = tensors["unchanged attn_scores"].diagonal(dim1=-2, dim2=-1)
    return scores - (shown_own_score - own_score)[..., None]


class _DensePass:
    """One forward pass through the bridge: its hooks, and what they have shown of the layer."""

    def __init__(
        self,
        engine: DenseEngine,
        tokens: Tensor,
        matches: Mapping[str, TokenPairs],
        on_layer: OnLayer,
        on_final: OnFinal | None,
        shown_layers: Collection[int],
    ) -> None:
        self.engine = engine
        self.model = engine.model
        self.changes = engine.changes
        self.tokens = tokens
        self.matches = matches
        self.on_layer = on_layer
        self.on_final = on_final
        self.shown_layers = shown_layers
        # If no layer is shown, the pass is for its end alone.
        self.last_layer = max(shown_layers, default=-1)
        self.attention_layers = self.model.info.attention_layers_or_all
        self.tensors: Tensors = {}

    def hooks(self) -> Iterator[tuple[str, Hook]]:
        """Where this pass hooks in, and with what."""
        for name in EMBEDDINGS:
            if self.changes.touch(name):
                yield self.model.hook_name(name), partial(self._change, name, None)
        for layer in range(self.model.info.n_layers):
            yield self.model.hook_name("resid_post", layer), partial(self._end_layer, layer)
            # Hooks cost time, so a layer that nobody reads or changes has only that of its end.
            if layer in self.shown_layers or self.changes.touch_layer(layer):
                yield from self._hooks_inside(layer)
        if self.on_final is not None:
            yield self.model.hook_name("unembed_in"), self._end_pass

    def _hooks_inside(self, layer: int) -> Iterator[tuple[str, Hook]]:
        """The hooks of a layer that is shown or changed, all but that of its end."""
        for name in ("attn_out", "mlp_out"):
            if self.changes.touch(name, layer):
                yield self.model.hook_name(name, layer), partial(self._change, name, layer)
        at = self.model.hook_name("resid_pre", layer)
        yield at, partial(self._change_and_record, "resid_pre", layer)
        if layer not in self.attention_layers:
            return
        if layer in self.shown_layers:
            self.model.shown_facts(layer)  # What hides its attention is refused.
        if self.model.changes_z(layer) and self.changes.touch("z", layer):
            raise ModelError(
                f"{self.model.info.name}: TransformerLens shows z of layer {layer} only after the "
                "layer has changed it, so it cannot be changed; use engine = 'fused'"
            )
        for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
            yield self.model.hook_name(name, layer), partial(self._change_and_record, name, layer)
        # Not every layer norms or rotates its queries.
        at = self.model.hook_name("q_normed", layer)
        if self.model.has_hook(at):
            yield at, self._record_normed
        for name in ("q", "k"):
            at = self.model.hook_name(f"rot_{name}", layer)
            if self.model.has_hook(at):
                yield at, partial(self._record_rotated, name)

    # TransformerLens calls hooks as `hook(value, hook=place)`. It puts what they return in the
    # place of the activation, and leaves the activation as it is if they return None.

    def _change(self, name: str, layer: int | None, value: Tensor, hook: object) -> Tensor | None:
        """The activation as changes leave it; None if they leave it as it is."""
        if not self.changes.touch(name, layer):
            return None
        readable_values: dict[str, Any] = {} if layer is None else {**self._activations(layer)}
        changed = self.changes.apply(name, layer, value, {**readable_values, "tokens": self.tokens})
        return None if changed is value else changed

    def _change_and_record(
        self, name: str, layer: int, value: Tensor, hook: object
    ) -> Tensor | None:
        """Change an activation, and remember what came of it."""
        changed = self._change(name, layer, value, hook)
        if name in WHOLE_PATTERN:
            # Whether scores make the pattern is checked on what the model itself made.
            self.tensors[f"unchanged {name}"] = at_least_float32(value)
            if changed is not None:
                facts = self.model.shown_facts(layer)
                unseen = unseen_keys(changed.shape[-1], facts, changed.device)  # [query key]
                if name == "pattern":
                    check_unseen(changed, unseen, facts, layer)
                else:
                    self.tensors["hidden"] = hidden_keys(changed, unseen)
                    # A change may have given scores to keys that a query does not see.
                    changed = changed.masked_fill(unseen, MASKED)
        self.tensors[name] = at_least_float32(value if changed is None else changed)
        return changed

    def _record_normed(self, value: Tensor, hook: object) -> None:
        """Remember queries after their norm: `[batch pos head·d_head]`, or `[batch head pos
        d_head]`.
        """
        n_heads = self.model.info.n_heads
        by_head = value.unflatten(2, (n_heads, -1)) if value.dim() == 3 else value.transpose(1, 2)
        self.tensors["normed q"] = at_least_float32(by_head)

    def _record_rotated(self, name: str, value: Tensor, hook: object) -> None:
        """Remember q or k as it is multiplied, in the place of what it was before its rotation."""
        if name == "q" and "q" in self.tensors:
            self.tensors["unrotated_q"] = self.tensors.get("normed q", self.tensors["q"])
        self.tensors[name] = at_least_float32(value)

    def _end_layer(self, layer: int, value: Tensor, hook: object) -> Tensor | None:
        """Hand over what is known of the layer, and forget it."""
        changed = self._change_and_record("resid_post", layer, value, hook)
        if layer in self.shown_layers:
            self.on_layer(layer, cast(Activations, {**self._activations(layer), **self.matches}))
        # A matrix of T² for each head: only one layer's fits the memory.
        self.tensors.clear()
        if layer in self.attention_layers:
            self.model.forget_pattern(layer)
        if layer == self.last_layer and self.on_final is None:
            raise StopPass
        return changed

    def _end_pass(self, value: Tensor, hook: object) -> None:
        """Hand over the stream before the unembedding."""
        if self.on_final is not None:
            self.on_final(at_least_float32(value))
        raise StopPass

    def _activations(self, layer: int) -> Activations:
        """What statistics and changes are shown of a layer so far: keys and values repeated, and a
        pattern that answers questions.
        """
        tensors = dict(self.tensors)
        if self.model.changes_z(layer) and {"pattern", "v", "z"} <= tensors.keys():
            # The bridge shows what the layer has made of z.
            z = weighted_values(tensors["pattern"], tensors["v"].transpose(1, 2))
            tensors["z"] = z.transpose(1, 2)
        n_heads = self.model.info.n_heads
        for name in {"k", "v"} & tensors.keys():
            kv_heads = tensors[name].shape[2]
            # [batch pos head d_head]
            tensors[name] = tensors[name].repeat_interleave(n_heads // kv_heads, 2)
        has_rotated = "unrotated_q" in tensors or not self.model.can_undo_rotation(layer)
        if "q" in tensors and not has_rotated:
            # The bridge shows queries and keys before their rotation alone.
            tensors["unrotated_q"] = tensors["q"]
            for name in {"q", "k"} & tensors.keys():
                tensors[name] = self.model.rotated(layer, tensors[name])
        activations: dict[str, Any] = {
            name: tensor for name, tensor in tensors.items() if name in LAYER_VALUES
        }
        if {"pattern", "attn_scores"} <= tensors.keys():
            activations["pattern"] = self.engine.pattern_of(layer, tensors)
        elif "pattern" in self.changes.reads and {"q", "k"} <= tensors.keys():
            # Some bridges show the pattern and the scores only after z. A change that reads the
            # pattern before gets one of q and k. Whether these make the layer's pattern is checked
            # at the end of the layer.
            facts = self.model.shown_facts(layer)
            early_pattern = DensePattern.of(*_queries_and_keys(tensors), facts)
            if "pattern" in tensors:
                early_pattern.pattern = tensors["pattern"]
            activations["pattern"] = early_pattern
        return cast(Activations, activations)


def _queries_and_keys(tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Queries and keys `[batch head pos d_head]`."""
    return tensors["q"].transpose(1, 2), tensors["k"].transpose(1, 2)
