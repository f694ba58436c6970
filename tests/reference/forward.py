"""One sequence through a model, one step a line, with what interventions change on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tests.reference.weights import Array, Weights


@dataclass
class LayerActivations:
    """One layer of one sequence, as changes leave it.

    Vectors are `[head pos d_head]`, matrices `[head query key]`. Keys and values that query heads
    share are repeated.
    """

    resid_pre: Array
    q: Array
    """As a change leaves them, before any rotation."""
    k: Array
    v: Array
    q_rotated: Array
    k_rotated: Array
    scores: Array
    """-∞ where the key lies in the future or a change hides it."""
    pattern: Array
    z_before_change: Array
    """pattern · v, before a change of z."""
    z: Array
    attn_out: Array
    """What the attention adds to the stream `[pos d_model]`."""
    resid_post: Array


@dataclass
class Run:
    """One sequence, all layers."""

    weights: Weights
    """As they are under the intervention."""
    tokens: list[int]
    layers: list[LayerActivations]
    logits: Array
    """`[pos d_vocab]`."""
    changes: Sequence[ActivationChange] = ()
    partner: Run | None = None
    labels: Sequence[str] = ()
    values_before_change: dict[tuple[int, int], Array] = field(default_factory=dict)
    """What change i was given in a layer: of a partner's run, what a patch writes."""
    untouched: Weights | None = None
    """The weights without the intervention, if there is one."""

    def again(self, change: ActivationChange, layers: int | None = None) -> Run:
        """The same sequence with one more change, which is made last."""
        changes = [*self.changes, change]
        return forward(self.weights, self.tokens, changes, self.partner, layers, self.labels)

    @cached_property
    def untouched_logits(self) -> Array:
        """Those after the last token without the intervention `[d_vocab]`."""
        return forward(self.untouched or self.weights, self.tokens).logits[-1]

    @cached_property
    def effective_positions(self) -> Array | None:
        """Those of the weights, which nothing changes once they have run."""
        return self.weights.effective_positions()


@dataclass
class Place:
    """Where a change is made, and what it may read."""

    tokens: list[int]
    layer: int
    known: Mapping[str, Array]
    """What the layer has made before, by its name in `LayerActivations`."""
    partner: Array | None
    """The same value in the run on the partner sequence."""
    labels: Sequence[str] = ()
    """The label of every token, "" if it has none; empty if the input has no labels."""
    pattern_of: Callable[[Array, Array], Array] | None = None
    """The layer's pattern of other rotated queries and keys, with all changes."""


@dataclass(frozen=True)
class ActivationChange:
    """A change of one activation in one layer, or in all where `layer` is None."""

    target: str
    function: Callable[[Array, Place], Array]
    layer: int | None = None
    patches: bool = False
    """Whether it writes what the partner sequence has, and so does nothing in the partner's run."""


EMBEDDINGS = -1
"""The layer of changes that come before the first one."""


def forward(
    weights: Weights,
    tokens: Sequence[int],
    changes: Sequence[ActivationChange] = (),
    partner: Run | None = None,
    layers: int | None = None,
    labels: Sequence[str] = (),
) -> Run:
    """Run one sequence; `layers` may stop it early.

    Without a partner, changes that patch do nothing: that is how the partner itself is run.
    """
    forward_pass = _ForwardPass(weights, list(tokens), changes, partner, labels)
    stream = forward_pass.embedded()
    for number in range(len(weights.layers[:layers])):
        stream = forward_pass.after_layer(number, stream)
    if layers is None:
        forward_pass.run.logits = weights.logits(stream)
    return forward_pass.run


class _ForwardPass:
    """One pass over one sequence, and the changes that are made on the way."""

    def __init__(
        self,
        weights: Weights,
        tokens: list[int],
        changes: Sequence[ActivationChange],
        partner: Run | None,
        labels: Sequence[str],
    ) -> None:
        self.weights = weights
        self.changes = changes
        self.partner = partner
        self.labels = labels
        self.run = Run(weights, tokens, [], np.zeros(0), changes, partner, labels)
        self.known: dict[str, Array] = {}
        """What changes may read of the present layer."""

    def changed(self, target: str, layer: int, value: Array) -> Array:
        """An activation as changes leave it."""
        for number, change in enumerate(self.changes):
            if change.target != target or change.layer not in (None, layer):
                continue
            self.run.values_before_change[number, layer] = value
            if change.patches and self.partner is None:
                continue
            from_partner = None
            if change.patches and self.partner is not None:
                from_partner = self.partner.values_before_change[number, layer]

            def pattern_of(q: Array, k: Array) -> Array:
                return self.pattern(layer, q, k)[1]

            place = Place(self.run.tokens, layer, self.known, from_partner, self.labels, pattern_of)
            value = change.function(value.copy(), place)
        return value

    def embedded(self) -> Array:
        """The stream before the first layer `[pos d_model]`."""
        weights, tokens = self.weights, self.run.tokens
        stream = self.changed("embed", EMBEDDINGS, weights.W_E[tokens])
        if weights.W_pos is not None:
            positions = weights.W_pos[: len(tokens)]
            stream = stream + self.changed("pos_embed", EMBEDDINGS, positions)
        if weights.norm_of_embeddings:
            stream = weights.norm_of_embeddings(stream)
        return stream

    def after_layer(self, number: int, stream: Array) -> Array:
        """The stream after a layer; its activations are added to the run."""
        layer = self.weights.layers[number]
        self.known = {}
        resid_pre = self.changed("resid_pre", number, stream)
        self.known["resid_pre"] = resid_pre
        activations = self.attention(number, resid_pre)
        attn_out = np.einsum("hqe,hed->qd", activations.z, layer.W_O)
        if layer.b_O is not None:
            attn_out = attn_out + layer.b_O
        if layer.norm_after_attention:
            attn_out = layer.norm_after_attention(attn_out)
        activations.attn_out = self.changed("attn_out", number, attn_out)
        resid_mid = resid_pre + activations.attn_out
        resid_post = resid_mid + self.mlp_out(number, resid_pre, resid_mid)
        activations.resid_post = self.changed("resid_post", number, resid_post)
        self.run.layers.append(activations)
        return activations.resid_post

    def attention(self, number: int, resid_pre: Array) -> LayerActivations:
        """Everything up to z; `attn_out` and `resid_post` are still to come."""
        weights, layer = self.weights, self.weights.layers[number]
        x = layer.norm_before_attention(resid_pre)
        q = projected(x, layer.W_Q, layer.b_Q)
        k = projected(self.changed("key_input", number, x), layer.W_K, layer.b_K)
        v = projected(x, layer.W_V, layer.b_V)
        q = layer.q_norm(q) if layer.q_norm else q
        k = layer.k_norm(k) if layer.k_norm else k
        # All three are made at once, so a change of one does not see the others.
        q = self.changed("q", number, q)
        k = weights.shared(self.changed("k", number, k))
        v = weights.shared(self.changed("v", number, v))
        self.known |= {"q": q, "k": k, "v": v}
        positions = self.changed("rotary_positions", EMBEDDINGS, np.arange(len(x)))
        q_rotated = rotated(q, weights.rotated, weights.rotary_base, positions)
        k_rotated = rotated(k, weights.rotated, weights.rotary_base, positions)
        k_rotated = self.changed("k_rotated", number, k_rotated)
        # Turned back, so that keys are those that queries meet.
        k = rotated(k_rotated, weights.rotated, weights.rotary_base, -positions)
        scores, pattern = self.pattern(number, q_rotated, k_rotated)
        self.known |= {"q_rotated": q_rotated, "k_rotated": k_rotated, "pattern": pattern}
        z_before_change = self.changed("z_before_change", number, pattern @ v)
        z = self.changed("z", number, z_before_change)
        of_heads = (q, k, v, q_rotated, k_rotated, scores, pattern, z_before_change, z)
        return LayerActivations(resid_pre, *of_heads, resid_pre, resid_pre)

    def pattern(self, number: int, q: Array, k: Array) -> tuple[Array, Array]:
        """Scores and pattern of rotated queries and keys, as changes leave them."""
        layer, n_ctx = self.weights.layers[number], len(self.run.tokens)
        scores = q @ k.transpose(0, 2, 1) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
        position = np.arange(n_ctx)
        if layer.distance_slopes is not None:
            scores = scores + layer.distance_slopes[:, None, None] * (position - position[:, None])
        scores = self.changed("attn_scores", number, scores)
        behind = position[:, None] - position
        window = n_ctx if layer.window is None else layer.window
        scores = np.where((behind < 0) | (behind >= window), -np.inf, scores)
        row = scores
        if layer.sink is not None:
            sink = np.broadcast_to(layer.sink[:, None, None], (len(scores), n_ctx, 1))
            row = np.concatenate([scores, sink], axis=-1)
        return scores, self.changed("pattern", number, softmax(row)[..., :n_ctx])

    def mlp_out(self, number: int, resid_pre: Array, resid_mid: Array) -> Array | float:
        """What the MLP adds to the stream; 0 if the layer does not have one."""
        layer = self.weights.layers[number]
        if layer.mlp is None or layer.norm_before_mlp is None:
            return 0.0
        # In a parallel layer the MLP reads what the attention read.
        mlp_input = resid_pre if self.weights.parallel else resid_mid
        mlp_out = layer.mlp(layer.norm_before_mlp(mlp_input))
        if layer.norm_after_mlp:
            mlp_out = layer.norm_after_mlp(mlp_out)
        return self.changed("mlp_out", number, mlp_out)


def projected(x: Array, W: Array, b: Array | None) -> Array:
    """`[pos d_model]` becomes `[head pos d_head]`."""
    product = np.einsum("pd,hde->hpe", x, W)
    return product if b is None else product + b[:, None]


def rotated(x: Array, width: int, base: float, positions: Array) -> Array:
    """Turn coordinates i and i + width/2 of position p by the angle p / base^(2i/width)."""
    half = width // 2
    turned = x.copy()
    for i in range(half):
        angles = positions / base ** (2 * i / width)
        cosine, sine = np.cos(angles), np.sin(angles)
        turned[..., i] = x[..., i] * cosine - x[..., i + half] * sine
        turned[..., i + half] = x[..., i + half] * cosine + x[..., i] * sine
    return turned


def softmax(scores: Array) -> Array:
    """Over the last axis."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def log_probabilities(logits: Array) -> Array:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def token_losses(run: Run) -> list[float]:
    """-ln p(t[i] | t[<i]), NaN for the first."""
    pairs = zip(run.logits[:-1], run.tokens[1:], strict=True)
    return [math.nan, *(-float(log_probabilities(logits)[token]) for logits, token in pairs)]
