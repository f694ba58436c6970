"""Every intervention once more, from what its documentation says."""

import copy
import inspect
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.reference.forward import ActivationChange, Place, Run, forward
from tests.reference.weights import Array, Weights


class NotApplicable(Exception):
    """The model does not have what the intervention changes or reads."""


HIDDEN = -np.inf

WEIGHT_CHANGES: dict[str, Callable[..., None]] = {}
"""Functions of the weights, which they change, and of the untouched weights; options by name."""

ACTIVATION_CHANGES: dict[str, Callable[..., Array]] = {}
"""Functions of the activation, of its place and of the untouched weights; options by name."""

TARGETS: dict[str, str] = {}
"""What each of `ACTIVATION_CHANGES` changes."""

PATCHES = ("patch_head", "patch_head_at")


def of_weights(function: Callable[..., None]) -> Callable[..., None]:
    WEIGHT_CHANGES[function.__name__] = function
    return function


def of(target: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    def register(function: Callable[..., Array]) -> Callable[..., Array]:
        ACTIVATION_CHANGES[function.__name__] = function
        TARGETS[function.__name__] = target
        return function

    return register


def put(value: Array, place: Any, new: Array | float = 0.0) -> Array:
    value[place] = new
    return value


def run_changed(
    weights: Weights,
    tokens: Sequence[int],
    intervention: str,
    partner: Sequence[int],
    labels: Sequence[str] = (),
) -> Run:
    """One sequence under an intervention such as `zero_query_bias+zero_head(1,2)`."""
    changed, activation_changes = parse(weights, intervention)
    partner_run = None
    if any(change.patches for change in activation_changes):
        partner_run = forward(changed, partner, activation_changes, labels=labels)
    run = forward(changed, tokens, activation_changes, partner_run, labels=labels)
    run.untouched = weights
    return run


def parse(weights: Weights, intervention: str) -> tuple[Weights, list[ActivationChange]]:
    """The weights as changed, and the changes of activations."""
    changed = copy.deepcopy(weights)
    activation_changes: list[ActivationChange] = []
    for part in intervention.split("+"):
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", part)
        assert match, part
        name = match[1]
        options = [option_of(text) for text in (match[2] or "").split(",") if text]
        if name in WEIGHT_CHANGES:
            WEIGHT_CHANGES[name](changed, weights, *options)
        elif name in ACTIVATION_CHANGES:
            activation_changes.append(activation_change(name, weights, options))
        else:
            assert name == "none", name
    return changed, activation_changes


def option_of(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def activation_change(name: str, weights: Weights, options: list[Any]) -> ActivationChange:
    function, target = ACTIVATION_CHANGES[name], TARGETS[name]
    if target == "pos_embed" and weights.W_pos is None:
        raise NotApplicable("no positions are embedded")
    if target == "rotary_positions" and not weights.rotary:
        raise NotApplicable("nothing is rotated")
    if target == "mlp_out" and weights.layers[0].mlp is None:
        raise NotApplicable("no MLP")
    call = inspect.signature(function).bind(None, None, weights, *options)
    call.apply_defaults()
    # An intervention with a layer is made there, the others in every layer.
    layer = call.arguments.get("layer")

    def change(value: Array, place: Place) -> Array:
        return function(value, place, weights, *options)

    return ActivationChange(target, change, layer, name in PATCHES)


# Query biases


def query_biases(weights: Weights) -> list[Array]:
    biases = [layer.b_Q for layer in weights.layers if layer.b_Q is not None]
    if not biases:
        raise NotApplicable("no query bias")
    return biases


@of_weights
def zero_query_bias(changed: Weights, untouched: Weights) -> None:
    scale_query_bias(changed, untouched, 0)


@of_weights
def scale_query_bias(changed: Weights, untouched: Weights, alpha: float) -> None:
    for bias in query_biases(changed):
        bias[:] = bias * alpha


@of_weights
def random_query_bias(
    changed: Weights, untouched: Weights, draw: int = 0, alpha: float = 0.0
) -> None:
    """The control of a scaled bias: it moves b as far, (1 - alpha) ‖b‖, in a random direction."""
    for bias in query_biases(changed):
        directions = random_directions(bias.shape, draw)
        for head in range(len(bias)):
            distance = (1 - alpha) * math.sqrt((bias[head] ** 2).sum())
            bias[head] += distance * directions[head]


def random_directions(shape: tuple[int, ...], draw: int) -> Array:
    """Vectors of length 1 along the last axis: torch's normal numbers, seeded with the draw."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(draw)).double().numpy()
    return drawn / np.sqrt((drawn**2).sum(-1, keepdims=True))


# Keys


def massive_coordinates(untouched: Weights, count: int) -> list[int]:
    """The largest coordinates of the first effective position; with 0 those far from the mean."""
    effective = untouched.effective_positions()
    if effective is None:
        raise NotApplicable("no effective positions")
    return largest(effective[0], count or far_from_the_mean(effective[0]))


def largest(x: Array, count: int) -> list[int]:
    return sorted(range(len(x)), key=lambda d: -abs(x[d]))[:count]


def far_from_the_mean(x: Array) -> int:
    """How many coordinates are larger than 3 standard deviations above the mean; at least 3."""
    sizes = abs(x)
    return max(3, int((sizes > sizes.mean() + 3 * sizes.std()).sum()))


@of_weights
def scale_massive_keys(
    changed: Weights, untouched: Weights, alpha: float = 0.0, count: int = 3
) -> None:
    for layer in changed.layers:
        layer.W_K[:, massive_coordinates(untouched, count)] *= alpha


@of_weights
def scale_random_keys(
    changed: Weights, untouched: Weights, draw: int = 0, alpha: float = 0.0, count: int = 3
) -> None:
    """Python's randint, seeded with the draw, layer after layer.

    A massive coordinate is not drawn, and none is drawn twice in a layer.
    """
    massive = massive_coordinates(untouched, count)
    drawn = drawn_coordinates(untouched, massive, draw)
    for layer, coordinates in zip(changed.layers, drawn, strict=True):
        layer.W_K[:, coordinates] *= alpha


def drawn_coordinates(untouched: Weights, massive: list[int], draw: int) -> list[list[int]]:
    d_model = untouched.W_E.shape[1]
    generator = random.Random(draw)
    of_layers: list[list[int]] = []
    for _ in untouched.layers:
        coordinates: set[int] = set()
        while len(coordinates) < min(len(massive), d_model - len(massive)):
            coordinate = generator.randint(0, d_model - 1)
            if coordinate not in massive:
                coordinates.add(coordinate)
        of_layers.append(sorted(coordinates))
    return of_layers


def of_first_token(place: Place, untouched: Weights) -> list[int]:
    x = untouched.W_E[place.tokens[0]]
    return largest(x, far_from_the_mean(x))


@of("key_input")
def scale_first_token_keys(
    value: Array, place: Place, untouched: Weights, alpha: float = 0.0
) -> Array:
    value[:, of_first_token(place, untouched)] *= alpha
    return value


@of("key_input")
def scale_random_token_keys(
    value: Array, place: Place, untouched: Weights, draw: int = 0, alpha: float = 0.0
) -> Array:
    drawn = drawn_coordinates(untouched, of_first_token(place, untouched), draw)
    value[:, drawn[place.layer]] *= alpha
    return value


# Position embeddings


def positions(weights: Weights) -> Array:
    if weights.W_pos is None:
        raise NotApplicable("no position embeddings")
    return weights.W_pos


def blended(W_pos: Array, position: int, alpha: float) -> Array:
    return alpha * W_pos[position] + (1 - alpha) * W_pos[position + 1]


def moved_at_random(W_pos: Array, draw: int, alpha: float) -> Array:
    """The first position, as far away as it would be blended, in a random direction."""
    distance = (1 - alpha) * math.sqrt(((W_pos[1] - W_pos[0]) ** 2).sum())
    return W_pos[0] + distance * random_directions(W_pos[0].shape, draw)


CHANGES_OF_POSITIONS: dict[str, Callable[..., Array]] = {
    "first_position_second": lambda W_pos: put(W_pos, 0, W_pos[1]),
    "blend_first_position": lambda W_pos, alpha: put(W_pos, 0, blended(W_pos, 0, alpha)),
    "random_first_position": lambda W_pos, draw=0, alpha=0.0: put(
        W_pos, 0, moved_at_random(W_pos, draw, alpha)
    ),
    "blend_position": lambda W_pos, position, alpha=0.0: put(
        W_pos, position, blended(W_pos, position, alpha)
    ),
    "scale_first_position": lambda W_pos, alpha: put(W_pos, 0, alpha * W_pos[0]),
    "scale_position": lambda W_pos, position, alpha: put(W_pos, position, alpha * W_pos[position]),
    "swap_first_positions": lambda W_pos: put(W_pos, [0, 1], W_pos[[1, 0]]),
}


def of_positions(move: Callable[..., Array]) -> Callable[..., None]:
    def change(changed: Weights, untouched: Weights, *options: Any) -> None:
        move(positions(changed), *options)

    return change


WEIGHT_CHANGES |= {name: of_positions(change) for name, change in CHANGES_OF_POSITIONS.items()}


# Embeddings, what layers add, values, single heads


CHANGES: dict[str, dict[str, Callable[..., Array]]] = {
    "pos_embed": {"zero_positions": lambda value, place, weights: value * 0},
    "rotary_positions": {
        "first_rotation_second": lambda value, place, weights: put(value, 0, 1),
        "swap_first_rotations": lambda value, place, weights: value[[1, 0, *range(2, len(value))]],
        "zero_rotations": lambda value, place, weights: value * 0,
    },
    "embed": {
        "zero_tokens": lambda value, place, weights: value * 0,
        "zero_first_token": lambda value, place, weights: put(value, 0),
        "zero_token": lambda value, place, weights, position: put(value, position),
    },
    "mlp_out": {
        "zero_mlps": lambda value, place, weights: value * 0,
        "zero_mlp": lambda value, place, weights, layer: value * 0,
        "zero_first_mlp_out": lambda value, place, weights, layer=0: put(value, 0),
    },
    "attn_out": {"zero_attention": lambda value, place, weights, layer: value * 0},
    "k": {"swap_first_key": lambda value, place, weights, position: swapped(value, position)},
    "v": {
        "zero_first_value": lambda value, place, weights: put(value, np.s_[:, 0]),
        "swap_first_value": lambda value, place, weights, position: swapped(value, position),
    },
    "pattern": {
        "head_to_first": lambda value, place, weights, layer, head: to_first(value, [head]),
        "zero_entropy_sinks": lambda value, place, weights, row, column: put(
            value, entropy_sinks(value, row, column)
        ),
        "entropy_sinks_to_first": lambda value, place, weights, row, column: to_first(
            value, entropy_sinks(value, row, column)
        ),
    },
    "resid_post": {
        "set_massive_activation": (
            lambda value, place, weights, layer, dimension, number, position=0: put(
                value, (position, dimension), number
            )
        )
    },
    "z": {
        "zero_inactive_heads": lambda value, place, weights, score, threshold, scale="raw": put(
            value, inactive_heads(value, place, score, threshold, scale)
        ),
        "zero_head": lambda value, place, weights, layer, head: put(value, head),
        "keep_head": lambda value, place, weights, layer, head: put(value * 0, head, value[head]),
        "mean_head": lambda value, place, weights, layer, head: put(
            value, head, np.array([value[head, : q + 1].mean(0) for q in range(value.shape[1])])
        ),
        "quantise_values": lambda value, place, weights, layer, head, bits=4: put(
            value, group_of(weights, head), quantised_values(place, bits)[group_of(weights, head)]
        ),
        "quantise_keys": lambda value, place, weights, layer, head, bits=4: put(
            value, group_of(weights, head), of_quantised_keys(place, bits)[group_of(weights, head)]
        ),
        "patch_head": lambda value, place, weights, layer, head: put(
            value, head, place.partner[head]
        ),
        "patch_head_at": lambda value, place, weights, layer, head, position: put(
            value, (head, position), place.partner[head, position]
        ),
    },
}
for _target, _functions in CHANGES.items():
    ACTIVATION_CHANGES |= _functions
    TARGETS |= dict.fromkeys(_functions, _target)


def quantised(x: Array, bits: int) -> Array:
    """Each row of the last axis in 2^bits steps from its least to its largest coordinate."""
    low = x.min(-1, keepdims=True)
    step = (x.max(-1, keepdims=True) - low) / (2**bits - 1)
    return np.where(step == 0, x, low + step * np.round((x - low) / np.where(step == 0, 1, step)))


def quantised_values(place: Place, bits: int) -> Array:
    return place.known["pattern"] @ quantised(place.known["v"], bits)


def of_quantised_keys(place: Place, bits: int) -> Array:
    assert place.pattern_of is not None
    q, k = place.known["q_rotated"], place.known["k_rotated"]
    return place.pattern_of(q, quantised(k, bits)) @ place.known["v"]


def group_of(weights: Weights, head: int) -> list[int]:
    """The query heads that share keys and values with one."""
    size = weights.n_heads // len(weights.layers[0].W_K)
    return [other for other in range(weights.n_heads) if other // size == head // size]


def swapped(value: Array, position: int) -> Array:
    """What is at the first key changes places with what is at another."""
    return put(value, np.s_[:, [0, position]], value[:, [position, 0]])


def to_first(value: Array, heads: list[int]) -> Array:
    """All attention of some heads is on the first key."""
    return put(put(value, heads), np.s_[heads, :, 0], 1)


# Positions in the first MLP


@of("mlp_out")
def swap_effective_positions(
    value: Array, place: Place, untouched: Weights, layer: int = 0
) -> Array:
    rows = untouched.effective_positions()
    if rows is None:
        raise NotApplicable("no effective positions")
    return with_directions_swapped(value, rows)


@of("mlp_out")
def swap_raw_positions(value: Array, place: Place, untouched: Weights, layer: int = 0) -> Array:
    return with_directions_swapped(value, positions(untouched))


def with_directions_swapped(value: Array, rows: Array) -> Array:
    """With u0, u1 the directions of two rows and a = value[0]·u0, a u0 becomes a u1 at position 0,
    and a u1 becomes a u0 at position 1.
    """
    u0, u1 = (row / math.sqrt((row**2).sum()) for row in rows[:2])
    a = value[0] @ u0
    value[0] += a * (u1 - u0)
    value[1] += a * (u0 - u1)
    return value


# Masks


def hide(scores: Array, hidden: Callable[[int, int], bool]) -> Array:
    """Scores `[head query key]` without those of the pairs that `hidden(query, key)` names."""
    for q in range(scores.shape[1]):
        for k in range(scores.shape[2]):
            if hidden(q, k):
                scores[:, q, k] = HIDDEN
    return scores


@of("attn_scores")
def mask_keys(
    value: Array, place: Place, untouched: Weights, first: int = 0, count: int = 1
) -> Array:
    keys = list(range(len(place.tokens)))[first:][:count]
    return hide(value, lambda q, k: k in keys and not (k == q and set(range(q)) <= set(keys)))


@of("attn_scores")
def mask_random_span(
    value: Array, place: Place, untouched: Weights, count: int = 4, draw: int = 0
) -> Array:
    """Python's choice, seeded with the draw, of the places from `count` on that leave room."""
    places = [k for k in range(count, len(place.tokens)) if k + count <= len(place.tokens)]
    if not places:
        return value
    start = random.Random(draw).choice(places)
    return hide(value, lambda q, k: start <= k < start + count)


@of("attn_scores")
def mask_recent_keys(value: Array, place: Place, untouched: Weights, count: int = 4) -> Array:
    return hide(value, lambda q, k: q - count <= k < q)


@of("attn_scores")
def keep_window(value: Array, place: Place, untouched: Weights, sinks: int, window: int) -> Array:
    return hide(value, lambda q, k: not (q - window < k or k < sinks))


@of("attn_scores")
def keep_heavy_keys(
    value: Array, place: Place, untouched: Weights, heavy: int, recent: int
) -> Array:
    window = untouched.layers[place.layer].window or len(value[0])
    for scores in value:
        received = [0.0] * len(scores)
        kept: list[int] = []
        for q in range(len(scores)):
            kept.append(q)
            earlier = [k for k in kept if k <= q - recent]
            if len(earlier) > heavy:
                least = min(received[k] for k in earlier)
                kept.remove(next(k for k in earlier if received[k] <= least * (1 + 1e-5)))
            seen = [k for k in kept if q - k < window]
            largest = max(scores[q, k] for k in seen)
            weights = {k: math.exp(scores[q, k] - largest) for k in seen}
            for k, weight in weights.items():
                received[k] += weight / sum(weights.values())
            scores[q, [k for k in range(q) if k not in kept]] = HIDDEN
    return value


@of("attn_scores")
def stream_heads(
    value: Array, place: Place, untouched: Weights, sink: int, recent: int, *heads: str
) -> Array:
    return streamed(value, sink, recent, lambda h: f"L{place.layer}H{h}" in heads)


@of("attn_scores")
def stream_other_heads(
    value: Array, place: Place, untouched: Weights, sink: int, recent: int, *heads: str
) -> Array:
    return streamed(value, sink, recent, lambda h: f"L{place.layer}H{h}" not in heads)


@of("attn_scores")
def stream_groups(
    value: Array, place: Place, untouched: Weights, sink: int, recent: int, groups: int, chosen: str
) -> Array:
    return streamed(
        value,
        sink,
        recent,
        lambda head: in_group(head, len(value), place.layer, groups, chosen),
    )


def in_group(head: int, n_heads: int, layer: int, groups: int, chosen: str) -> bool:
    """Whether a head is in one of the groups that a text names."""
    digits, size = (groups + 3) // 4, n_heads // groups
    of_layer = chosen[1:][layer * digits :][:digits] or "0"
    return f"{int(of_layer, 16):0{groups}b}"[::-1][head // size] == "1"


@of("k_rotated")
def store_keys(
    value: Array,
    place: Place,
    untouched: Weights,
    name: str,
    whole: int,
    end: int,
    groups: int,
    chosen: str,
) -> Array:
    for head in range(len(value)):
        if in_group(head, len(value), place.layer, groups, chosen):
            for position in range(whole, end):
                value[head, position] = STORED[name](value[head, position])
    return value


@of("v")
def store_values(
    value: Array,
    place: Place,
    untouched: Weights,
    name: str,
    whole: int,
    end: int,
    groups: int,
    chosen: str,
) -> Array:
    return store_keys(value, place, untouched, name, whole, end, groups, chosen)


def as_fp8(row: Array) -> Array:
    """Three binary digits behind the first; below 2^-6 in steps of 2^-9; 448 at most."""
    exponents = np.floor(np.log2(np.maximum(np.abs(row), 2.0**-6)))
    steps = 2.0 ** (exponents - 3)
    return np.clip(np.round(row / steps) * steps, -448, 448)


def as_q8_0(row: Array) -> Array:
    scale = np.abs(row).max() / 127
    return np.round(row / scale) * float(np.float16(scale))


def as_q4_0(row: Array) -> Array:
    scale = row[np.abs(row).argmax()] / -8
    return (np.clip(np.floor(row / scale + 8.5), 0, 15) - 8) * float(np.float16(scale))


def as_mlx(row: Array, bits: int) -> Array:
    """Whole steps from the end that is farther from 0, which is a whole number of them away."""
    far = row[np.abs(row).argmax()]
    width = row.max() - row.min()
    levels = 2**bits - 1
    steps_to_0 = np.round(abs(far) * levels / width)
    step = -far / steps_to_0
    return far + step * np.clip(np.round((row - far) / step), 0, levels)


def as_rotated(row: Array, bits: int) -> Array:
    """Rounded between rotations of as many numbers as the largest power of two that divides all."""
    size = max(2**power for power in range(9) if len(row) % 2**power == 0)
    turn = np.kron(np.eye(len(row) // size), rotation(size))
    return quantised(row @ turn, bits) @ turn.T


def rotation(size: int) -> Array:
    """±1/√size, negative where row and column have an odd number of bits in common."""
    in_common = [[(row & column).bit_count() for column in range(size)] for row in range(size)]
    return (-1.0) ** np.array(in_common) / np.sqrt(size)


STORED: dict[str, Callable[[Array], Array]] = {
    "fp8": as_fp8,
    "q8_0": as_q8_0,
    "q4_0": as_q4_0,
    "affine8": lambda row: quantised(row, 8),
    "rotated4": lambda row: as_rotated(row, 4),
    "rotated3": lambda row: as_rotated(row, 3),
    "rotated2": lambda row: as_rotated(row, 2),
    "mlx8": lambda row: as_mlx(row, 8),
    "mlx4": lambda row: as_mlx(row, 4),
    "mlx2": lambda row: as_mlx(row, 2),
}
"""Heads of toys are narrower than any block."""


def streamed(value: Array, sink: int, recent: int, streams: Callable[[int], bool]) -> Array:
    for head in range(len(value)):
        if streams(head):
            hide(value[head : head + 1], lambda q, k: sink <= k <= q - recent)
    return value


# Patterns


def entropy_sinks(pattern: Array, row: float, column: float) -> list[int]:
    return [head for head in range(len(pattern)) if is_entropy_sink(pattern[head], row, column)]


def is_entropy_sink(pattern: Array, row: float, column: float) -> bool:
    """Whether rows are sharp and some column is flat.

    The entropy of a row is divided by ln(q+1), that of what a key receives by ln(T-k).
    """
    n_ctx = len(pattern)
    rows = [entropy_of(pattern[q, : q + 1]) / math.log(q + 1) for q in range(1, n_ctx)]
    columns = [0.0]
    for k in range(n_ctx - 1):
        received = pattern[k:, k]
        if received.sum() > 0:
            columns.append(entropy_of(received / received.sum()) / math.log(n_ctx - k))
    return float(np.mean(rows)) < row and max(columns) > column


def entropy_of(probabilities: Array) -> float:
    return -sum(p * math.log(p) for p in probabilities.tolist() if p > 0)


@of("attn_scores")
def mean_query_bias(value: Array, place: Place, untouched: Weights) -> Array:
    """With c[k] = scale b_Q·k[k], the score loses c[k] and gains the mean of c[0] … c[q]."""
    layer = untouched.layers[place.layer]
    if layer.b_Q is None or untouched.rotated:
        raise NotApplicable("no query bias, or one that is rotated")
    for head in range(len(value)):
        c = place.known["k"][head] @ layer.b_Q[head] * layer.scale
        for q in range(len(c)):
            value[head, q] += c[: q + 1].mean() - c
    return value


# The residual stream


@of("resid_post")
def zero_massive_activations(
    value: Array,
    place: Place,
    untouched: Weights,
    layer: int,
    size: float = 100.0,
    ratio: float = 1000.0,
) -> Array:
    """Beyond both bounds; the median is the lower middle one of every sixteenth position's."""
    sizes = sorted(np.abs(value[::16]).ravel().tolist())
    median = sizes[(len(sizes) - 1) // 2]
    for position, dimension in np.ndindex(*value.shape):
        if abs(value[position, dimension]) > max(size, ratio * median):
            value[position, dimension] = 0
    return value


# Heads


@of("pattern")
def ideal_backcopy(value: Array, place: Place, untouched: Weights, layer: int, head: int) -> Array:
    assert place.labels
    for q, label in enumerate(place.labels):
        value[head, q] = 0
        value[head, q, q - 1 if label == "trigger" and q > 0 else 0] = 1
    return value


@of("pattern")
def ideal_induction(value: Array, place: Place, untouched: Weights, layer: int, head: int) -> Array:
    tokens = place.tokens
    for q, token in enumerate(tokens):
        followers = [j + 1 for j in range(q) if tokens[j] == token] or [0]
        value[head, q] = 0
        for k in followers:
            value[head, q, k] = 1 / len(followers)
    return value


@of("z")
def zero_random_heads(
    value: Array,
    place: Place,
    untouched: Weights,
    score: str,
    threshold: float,
    scale: str = "raw",
    draw: int = 0,
) -> Array:
    """Heads in the order of a hash: Σ_i (t[i] + 1) r[i, head] modulo 2^64, signed, where the r are
    numpy's whole numbers of 64 bits, seeded with the draw and the layer.
    """
    count = len(inactive_heads(value, place, score, threshold, scale))
    generator = np.random.default_rng([draw, place.layer])
    factors = generator.integers(-(2**63), 2**63, size=(len(place.tokens), len(value)))
    hashes: list[int] = []
    for head in range(len(value)):
        total = sum((t + 1) * int(factors[i, head]) for i, t in enumerate(place.tokens))
        hashes.append((total + 2**63) % 2**64 - 2**63)
    return put(value, sorted(range(len(value)), key=lambda head: hashes[head])[:count])


def inactive_heads(z: Array, place: Place, score: str, threshold: float, scale: str) -> list[int]:
    pattern, v = place.known["pattern"], place.known["v"]
    lengths_of_z, lengths_of_v = (np.sqrt((x**2).sum(-1)) for x in (z, v))
    scores = {
        "sink_alpha": pattern[:, :, 0].mean(-1),
        "entropy": np.array([np.mean([entropy_of(row) for row in head]) for head in pattern]),
        "head_output_norm": lengths_of_z.mean(-1),
        "head_output_norm_last": lengths_of_z[:, -1],
        "sink_value_norm": lengths_of_v[:, 0],
        "value_norm": lengths_of_v.mean(-1),
    }
    values = scores[score]
    if scale == "layer_mean":
        # The last output is divided by the mean output, as its source does.
        by = "head_output_norm" if score == "head_output_norm_last" else score
        values = values / scores[by].mean()
    inactive = values > threshold if score == "sink_alpha" else values < threshold
    return np.flatnonzero(inactive).tolist()
