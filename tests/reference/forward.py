"""One sequence through a model, one step a line, with what interventions change on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.reference.weights import Array, Weights


@dataclass
class Seen:
    """One layer of one sequence, as edited; vectors are `[head pos d_head]`, matrices `[head query key]`.

    Keys and values that query heads share are repeated.
    """

    resid_pre: Array
    q: Array
    """As an edit leaves them, before any rotation."""
    k: Array
    v: Array
    q_rotated: Array
    k_rotated: Array
    scores: Array
    """-∞ where the key lies in the future or an edit hides it."""
    pattern: Array
    z: Array
    resid_post: Array


@dataclass
class Run:
    """One sequence, all layers."""

    weights: Weights
    """As they are under the intervention."""
    tokens: list[int]
    layers: list[Seen]
    logits: Array
    """`[pos d_vocab]`."""
    values_before_edit: dict[tuple[int, int], Array] = field(default_factory=dict)
    """What edit i was given in a layer: of a partner's run, what a patch writes."""


@dataclass
class Place:
    """Where an edit is made, and what it may read."""

    tokens: list[int]
    layer: int
    known: Mapping[str, Array]
    """What the layer has made before, by its name in `Seen`."""
    partner: Array | None
    """The same value in the run on the partner sequence."""


@dataclass(frozen=True)
class ActivationEdit:
    """A change of one activation in one layer, or in all where `layer` is None."""

    target: str
    function: Callable[[Array, Place], Array]
    layer: int | None = None
    patches: bool = False
    """Whether it writes what the partner sequence has, and so does nothing in the partner's run."""


EMBEDDINGS = -1
"""The layer of edits that come before the first one."""


def forward(
    weights: Weights,
    tokens: Sequence[int],
    edits: Sequence[ActivationEdit] = (),
    partner: Run | None = None,
    layers: int | None = None,
) -> Run:
    """Run one sequence; `layers` may stop it early.

    Without a partner, edits that patch do nothing: that is how the partner itself is run.
    """
    run = Run(weights, list(tokens), [], np.zeros(0))

    def edited(target: str, layer: int, value: Array, known: Mapping[str, Array]) -> Array:
        for i, edit in enumerate(edits):
            if edit.target != target or edit.layer not in (None, layer):
                continue
            run.values_before_edit[i, layer] = value
            if edit.patches and partner is None:
                continue
            from_partner = (
                partner.values_before_edit[i, layer] if edit.patches and partner else None
            )
            value = edit.function(value.copy(), Place(run.tokens, layer, known, from_partner))
        return value

    n_ctx = len(run.tokens)
    stream = edited("embed", EMBEDDINGS, weights.W_E[run.tokens], {})
    if weights.W_pos is not None:
        stream = stream + edited("pos_embed", EMBEDDINGS, weights.W_pos[:n_ctx], {})
    if weights.norm_of_embeddings:
        stream = weights.norm_of_embeddings(stream)
    future = np.triu(np.ones((n_ctx, n_ctx), dtype=bool), 1)
    for number, layer in enumerate(weights.layers[:layers]):
        known: dict[str, Array] = {}
        resid_pre = edited("resid_pre", number, stream, known)
        known["resid_pre"] = resid_pre
        x = layer.norm_before_attention(resid_pre)
        q = projected(x, layer.W_Q, layer.b_Q)
        k = projected(x, layer.W_K, layer.b_K)
        v = projected(x, layer.W_V, layer.b_V)
        q = layer.q_norm(q) if layer.q_norm else q
        k = layer.k_norm(k) if layer.k_norm else k
        q = edited("q", number, q, known)
        k = weights.shared(edited("k", number, k, known))
        v = weights.shared(edited("v", number, v, known))
        known |= {"q": q, "k": k, "v": v}
        q_rotated = rotated(q, weights.rotated, weights.rotary_base)
        k_rotated = rotated(k, weights.rotated, weights.rotary_base)
        scores = q_rotated @ k_rotated.transpose(0, 2, 1) * layer.scale
        if layer.key_slopes is not None:
            scores = scores + layer.key_slopes[:, None, None] * np.arange(n_ctx)
        scores = edited("attn_scores", number, scores, known)
        scores = np.where(future, -np.inf, scores)
        pattern = edited("pattern", number, softmax(scores), known)
        known["pattern"] = pattern
        z = edited("z", number, pattern @ v, known)
        attn_out = np.einsum("hqe,hed->qd", z, layer.W_O)
        if layer.b_O is not None:
            attn_out = attn_out + layer.b_O
        if layer.norm_after_attention:
            attn_out = layer.norm_after_attention(attn_out)
        attn_out = edited("attn_out", number, attn_out, known)
        resid_mid = resid_pre + attn_out
        if layer.mlp is not None and layer.norm_before_mlp is not None:
            mlp_input = resid_pre if weights.parallel else resid_mid
            mlp_out = layer.mlp(layer.norm_before_mlp(mlp_input))
            if layer.norm_after_mlp:
                mlp_out = layer.norm_after_mlp(mlp_out)
            stream = resid_mid + edited("mlp_out", number, mlp_out, known)
        else:
            stream = resid_mid
        stream = edited("resid_post", number, stream, known)
        run.layers.append(
            Seen(resid_pre, q, k, v, q_rotated, k_rotated, scores, pattern, z, stream)
        )
    if layers is None:
        run.logits = weights.final_norm(stream) @ weights.W_U + weights.b_U
    return run


def projected(x: Array, W: Array, b: Array | None) -> Array:
    """`[pos d_model]` becomes `[head pos d_head]`."""
    product = np.einsum("pd,hde->hpe", x, W)
    return product if b is None else product + b[:, None]


def rotated(x: Array, width: int, base: float) -> Array:
    """Turn coordinates i and i + width/2 of position p by the angle p / base^(2i/width)."""
    half = width // 2
    turned = x.copy()
    for i in range(half):
        angles = np.arange(x.shape[1]) / base ** (2 * i / width)
        cosine, sine = np.cos(angles), np.sin(angles)
        turned[..., i] = x[..., i] * cosine - x[..., i + half] * sine
        turned[..., i + half] = x[..., i + half] * cosine + x[..., i] * sine
    return turned


def softmax(scores: Array) -> Array:
    """Over the last axis."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
