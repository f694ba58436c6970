"""Effects of heads on the loss, from their definitions: the slope of the loss L along a change of
z is a central difference, and no gradient is computed.

Each definition gives a value for every head of a layer of one sequence. What is not defined is NaN.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.reference.forward import ActivationChange, Run, log_probabilities, token_losses
from tests.reference.reference_changes import quantised, run_changed
from tests.reference.weights import Array, Norm, Weights

Definition = Callable[[Run, int], list[float]]

STEP = 2e-5
"""The largest change of a coordinate: the errors of rounding and of curvature are about as large.
"""


# What z could be instead


def averaged(run: Run, layer: int) -> Array:
    """The mean of z up to each query."""
    z = run.layers[layer].z_before_change
    return z.cumsum(1) / np.arange(1, len(run.tokens) + 1)[:, None]


def windowed(run: Run, layer: int, sink: int, recent: int) -> Array | None:
    """A without its distant keys, and the rest larger by as much; None where no key is distant.

    A learned sink keeps its share. A row that has nothing left is 0.
    """
    block, seen, T = run.weights.layers[layer], run.layers[layer], len(run.tokens)
    if sink + recent >= T or (block.window is not None and block.window <= recent):
        return None
    q, k = np.arange(T)[:, None], np.arange(T)
    kept = seen.pattern * ((k < sink) | (q - k < recent))
    gate = 0 if block.sink is None else 1 - seen.pattern.sum(-1, keepdims=True)
    mass = kept.sum(-1, keepdims=True) + gate
    return kept / np.where(mass == 0, 1, mass) @ seen.v


def with_quantised_values(run: Run, layer: int, bits: int) -> Array:
    seen = run.layers[layer]
    return seen.pattern @ quantised(seen.v, bits)


def with_quantised_keys(run: Run, layer: int, bits: int) -> Array:
    """The attention once more, with the intervention's changes of scores and pattern."""
    change = ActivationChange("k_rotated", lambda k, place: quantised(k, bits), layer)
    return run.again(change, layers=layer + 1).layers[layer].z_before_change


ALTERNATIVES: dict[str, Callable[..., Array | None]] = {
    "window": windowed,
    "mean": averaged,
    "quantised_values": with_quantised_values,
    "quantised_keys": with_quantised_keys,
}


def changed_together(weights: Weights, alternative: str) -> list[range]:
    """The heads whose z changes at once: those that share keys and values that are quantised."""
    size = weights.n_heads // len(weights.layers[0].W_K) if "quantised" in alternative else 1
    return [range(first, first + size) for first in range(0, weights.n_heads, size)]


# Slopes of the loss


def loss(run: Run) -> float:
    """L: the mean loss of the tokens after the first."""
    return sum(token_losses(run)[1:]) / (len(run.tokens) - 1)


def slope(run: Run, layer: int, direction: Array, target: str = "z_before_change") -> float:
    """d/dε L(z + ε direction) at 0."""
    size = np.abs(direction).max()
    if size == 0:
        return 0.0

    def loss_at(epsilon: float) -> float:
        moved = ActivationChange(target, lambda x, place: x + epsilon * direction, layer)
        return loss(run.again(moved))

    epsilon = STEP / size
    return (loss_at(epsilon) - loss_at(-epsilon)) / (2 * epsilon)


def only(heads: Sequence[int], x: Array) -> Array:
    """Zero but for some heads."""
    chosen = np.zeros_like(x)
    chosen[heads] = x[heads]
    return chosen


def gradient(run: Run, layer: int, target: str, shape: tuple[int, ...]) -> Array:
    """∂L/∂x of every coordinate of an activation, one after the other."""
    slopes = np.zeros(shape)
    for place in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[place] = 1
        slopes[place] = slope(run, layer, unit, target)
    return slopes


def effect_of(alternative: str, *options: int) -> Definition:
    """The slope of L towards another z."""

    def define(run: Run, layer: int) -> list[float]:
        other = ALTERNATIVES[alternative](run, layer, *options)
        if other is None:
            return [math.nan] * run.weights.n_heads
        difference = other - run.layers[layer].z_before_change
        effects: list[float] = []
        for heads in changed_together(run.weights, alternative):
            effects += [slope(run, layer, only(heads, difference))] * len(heads)
        return effects

    return define


def effect_zero_magnitude(run: Run, layer: int) -> list[float]:
    z = run.layers[layer].z_before_change
    return [abs(slope(run, layer, only([head], -z))) for head in range(run.weights.n_heads)]


def gradient_norm(run: Run, layer: int) -> list[float]:
    shape = run.layers[layer].z.shape
    slopes = gradient(run, layer, "z_before_change", shape)
    return np.sqrt((slopes**2).sum((1, 2))).tolist()


def gradient_sink_share(run: Run, layer: int) -> list[float]:
    W_V = run.weights.layers[layer].W_V
    shape = (len(W_V), len(run.tokens), W_V.shape[-1])
    lengths = np.sqrt((gradient(run, layer, "v", shape) ** 2).sum(-1))
    sums = lengths.sum(-1)
    shares = np.where(sums > 0, lengths[:, 0] / np.where(sums > 0, sums, 1), np.nan)
    return run.weights.shared(shares).tolist()


# What heads write straight to the logits


def linear_part(norm: Norm, at: Array, x: Array) -> Array:
    """What becomes of parts x of a vector in a norm that is as large as `at` makes it."""
    if norm.subtracts_mean:
        at, x = (vector - vector.mean(-1, keepdims=True) for vector in (at, x))
    return x / np.sqrt((at * at).mean(-1, keepdims=True) + norm.eps) * norm.weight


def stream_of(run: Run, layer: int, z: Array) -> Array:
    """What each head adds to the stream for a z `[head pos d_head]`: `[head pos d_model]`."""
    block = run.weights.layers[layer]
    if block.norm_after_attention is None:
        return z @ block.W_O
    attention = (run.layers[layer].z @ block.W_O).sum(0) + (0 if block.b_O is None else block.b_O)
    return linear_part(block.norm_after_attention, attention, z @ block.W_O)


def logits_of(run: Run, x: Array) -> Array:
    """The logits `[… pos d_vocab]` of parts of the last stream, without biases."""
    return linear_part(run.weights.final_norm, run.layers[-1].resid_post, x) @ run.weights.W_U


def targets(run: Run) -> Array:
    """onehot(y) of every query but the last `[pos d_vocab]`."""
    return np.eye(run.logits.shape[-1])[run.tokens[1:]]


def gain_slopes(run: Run) -> Array:
    """By how much -loss grows with each logit before the cap."""
    logits, cap = run.logits[:-1], run.weights.final_soft_cap
    slopes = targets(run) - np.exp(log_probabilities(logits))
    return slopes if cap is None else slopes * (1 - (logits / cap) ** 2)


def centred_slopes(run: Run) -> Array:
    """By how much the logit of the target, less the mean of all logits, grows with each logit."""
    return targets(run) - 1 / run.logits.shape[-1]


def mean_product(logits: Array, slopes: Array) -> Array:
    """The mean over the queries that have a target, of `[… pos d_vocab]`."""
    return (logits[..., :-1, :] * slopes).sum(-1).mean(-1)


def written_by(run: Run, layer: int, direction: Array) -> Array:
    """What each head adds to the stream for a direction of z before an intervention changes z."""
    seen = run.layers[layer]
    if not seen.attn_out.any():  # The intervention writes nothing of it.
        return np.zeros((len(direction), *seen.resid_pre.shape))

    def z_at(epsilon: float) -> Array:
        moved = ActivationChange("z_before_change", lambda z, place: z + epsilon * direction, layer)
        return run.again(moved, layers=layer + 1).layers[layer].z

    # Changes of z are linear in z.
    return stream_of(run, layer, (z_at(1) - z_at(-1)) / 2)


def direct_effect(run: Run, layer: int) -> list[float]:
    written = written_by(run, layer, run.layers[layer].z_before_change)
    return mean_product(logits_of(run, written), gain_slopes(run)).tolist()


def direct_logit(run: Run, layer: int) -> list[float]:
    written = written_by(run, layer, run.layers[layer].z_before_change)
    return mean_product(logits_of(run, written), centred_slopes(run)).tolist()


def direct_effect_of(alternative: str, *options: int) -> Definition:
    """By how much L grows through the logits alone where another z is written."""

    def define(run: Run, layer: int) -> list[float]:
        other = ALTERNATIVES[alternative](run, layer, *options)
        if other is None:
            return [math.nan] * run.weights.n_heads
        written = written_by(run, layer, other - run.layers[layer].z_before_change)
        effects = -mean_product(logits_of(run, written), gain_slopes(run))
        groups = changed_together(run.weights, alternative)
        return [float(effects[heads].sum()) for heads in groups for _ in heads]

    return define


def direct_logit_of_parts(run: Run, layer: int) -> list[float]:
    """Of the logit of the target less the mean of all: embeddings, heads, what else the attention
    writes, MLP, biases at the end.

    What an intervention does to the stream after the MLP counts as the MLP's.
    """
    weights, seen = run.weights, run.layers[layer]
    if len(run.tokens) == 1:
        return [math.nan] * 5
    heads = stream_of(run, layer, seen.z).sum(0)
    mlp = seen.resid_post - seen.resid_pre - seen.attn_out
    biases = np.zeros_like(run.logits)
    if layer == len(weights.layers) - 1:
        final = weights.final_norm.bias
        biases += weights.b_U + (0 if final is None else final @ weights.W_U)
    embeddings = seen.resid_pre if layer == 0 else np.zeros_like(heads)
    parts = [logits_of(run, x) for x in (embeddings, heads, seen.attn_out - heads, mlp)]
    return [float(mean_product(part, centred_slopes(run))) for part in [*parts, biases]]


# All of it


def with_options(window: tuple[int, int], bits: int) -> dict[str, Definition]:
    """The effects of each alternative, by column."""
    options = {"window": window, "quantised_values": (bits,), "quantised_keys": (bits,)}
    return {
        "_".join(map(str, (kind, alternative, *of_column))): define(alternative, *of_column)
        for kind, define in (("effect", effect_of), ("direct_effect", direct_effect_of))
        for alternative, of_column in options.items()
    }


EFFECT_DEFINITIONS: dict[str, Definition] = {
    "effect_mean": effect_of("mean"),
    "effect_zero_magnitude": effect_zero_magnitude,
    "gradient_norm": gradient_norm,
    "gradient_sink_share": gradient_sink_share,
    "direct_effect": direct_effect,
    "direct_effect_mean": direct_effect_of("mean"),
    "direct_logit": direct_logit,
    **with_options(window=(4, 64), bits=4),
}
"""Of every effect, by column, with its options by default."""

EFFECT_VARIANTS = with_options(window=(1, 3), bits=2)
"""Effects with other options, which mean something in short sequences, by column."""


def recompute_effects(
    weights: Weights,
    tokens: Array,
    columns: Sequence[str],
    intervention: str = "none",
    partner: Array | None = None,
) -> dict[str, Array]:
    """Columns `[sequence layer head]` on tokens `[sequence pos]`."""
    definitions = {**EFFECT_DEFINITIONS, **EFFECT_VARIANTS}
    partners = tokens if partner is None else partner
    pairs = zip(tokens.tolist(), partners.tolist(), strict=True)
    runs = [run_changed(weights, row, intervention, other) for row, other in pairs]
    n_layers, undefined = len(weights.layers), [math.nan] * weights.n_heads
    return {
        name: np.array(
            [
                [
                    definitions[name](run, layer) if len(run.tokens) > 1 else undefined
                    for layer in range(n_layers)
                ]
                for run in runs
            ]
        )
        for name in columns
    }
