"""Every weight statistic once more, as its formula stands in the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.reference.definitions import cosine, length
from tests.reference.weights import Array, Norm, Weights

Index = int | tuple[int, int] | None
"""A position or a dimension, or layer and head of an earlier head."""
Rows = dict[tuple[int | None, int | None, Index], float]
"""Values by layer, head and index; None for what has no such place."""

WEIGHT_DEFINITIONS: dict[str, Callable[[Weights], Rows]] = {}


def weight_statistic(function: Callable[[Weights], Rows]) -> Callable[[Weights], Rows]:
    WEIGHT_DEFINITIONS[function.__name__] = function
    return function


def by_head(
    weights: Weights, define: Callable[[Array, Array], Sequence[float]], indexed: bool = True
) -> Rows:
    """Values of b_Q and W_K of every head; none where the model has no query bias."""
    rows: Rows = {}
    for layer, block in enumerate(weights.layers):
        if block.b_Q is None:
            continue
        W_K = weights.shared(block.W_K)
        for head in range(weights.n_heads):
            for index, value in enumerate(define(block.b_Q[head], W_K[head])):
                rows[layer, head, index if indexed else None] = value
    return rows


def by_index(values: Sequence[float]) -> Rows:
    """Values that belong to no layer."""
    return {(None, None, index): float(value) for index, value in enumerate(values)}


# Biases


@weight_statistic
def query_bias_norm(weights: Weights) -> Rows:
    return by_head(weights, lambda b_Q, W_K: [length(b_Q)], indexed=False)


@weight_statistic
def bias_key_coupling(weights: Weights) -> Rows:
    return {} if weights.rotary else by_head(weights, lambda b_Q, W_K: (W_K @ b_Q).tolist())


@weight_statistic
def bias_position_cosine(weights: Weights) -> Rows:
    EPE = weights.effective_positions()
    if EPE is None or weights.rotary:
        return {}
    return by_head(weights, lambda b_Q, W_K: [cosine(b_Q, row @ W_K) for row in EPE])


# Composition


def read_through(norm: Norm, W: Array) -> Array:
    """N W, the norm's linear part written out as a matrix."""
    D = len(W)
    N = np.diag(norm.weight)
    return (np.eye(D) - np.ones((D, D)) / D) @ N @ W if norm.subtracts_mean else N @ W


def size(M: Array) -> float:
    """Frobenius norm."""
    return math.sqrt(float((M * M).sum()))


def matrices(weights: Weights, layer: int) -> list[tuple[Array, Array]]:
    """W_QK and W_OV of every head of a layer, `[d_model d_model]`."""
    block = weights.layers[layer]
    norm = block.norm_before_attention
    Q, K, V = block.W_Q, weights.shared(block.W_K), weights.shared(block.W_V)
    return [
        (
            read_through(norm, Q[head]) @ read_through(norm, K[head]).T,
            read_through(norm, V[head]) @ block.W_O[head],
        )
        for head in range(weights.n_heads)
    ]


def of_every_head(weights: Weights, define: Callable[[Array, Array], float]) -> Rows:
    return {
        (layer, head, None): define(QK, OV)
        for layer in range(len(weights.layers))
        for head, (QK, OV) in enumerate(matrices(weights, layer))
    }


def of_every_pair(weights: Weights, define: Callable[[Array, Array, Array], float]) -> Rows:
    """Values of a head's W_QK and W_OV and an earlier head's W_OV."""
    by_layer = [matrices(weights, layer) for layer in range(len(weights.layers))]
    return {
        (layer, head, (earlier, earlier_head)): define(QK, OV, X)
        for layer, heads in enumerate(by_layer)
        for head, (QK, OV) in enumerate(heads)
        for earlier in range(layer)
        for earlier_head, (_, X) in enumerate(by_layer[earlier])
    }


@weight_statistic
def query_key_norm(weights: Weights) -> Rows:
    return {} if weights.rotary else of_every_head(weights, lambda QK, OV: size(QK))


@weight_statistic
def value_output_norm(weights: Weights) -> Rows:
    return of_every_head(weights, lambda QK, OV: size(OV))


@weight_statistic
def key_composition(weights: Weights) -> Rows:
    if weights.rotary:
        return {}
    return of_every_pair(weights, lambda QK, OV, X: size(QK @ X.T) / size(QK) / size(X))


@weight_statistic
def query_composition(weights: Weights) -> Rows:
    if weights.rotary:
        return {}
    return of_every_pair(weights, lambda QK, OV, X: size(X @ QK) / size(QK) / size(X))


@weight_statistic
def value_composition(weights: Weights) -> Rows:
    return of_every_pair(weights, lambda QK, OV, X: size(X @ OV) / size(OV) / size(X))


# Copying


@weight_statistic
def copying_score(weights: Weights) -> Rows:
    W_U = read_through(weights.final_norm, weights.W_U)

    def score(QK: Array, OV: Array) -> float:
        eigenvalues = np.linalg.eigvals(weights.W_E @ OV @ W_U)
        return float(eigenvalues.real.sum() / np.abs(eigenvalues).sum())

    return of_every_head(weights, score)


# Geometry


def centred(weights: Weights) -> list[Array]:
    """w[j]: the embedding of each position less the mean of its coordinates."""
    return [] if weights.W_pos is None else [row - row.mean() for row in weights.W_pos]


@weight_statistic
def centred_position_norm(weights: Weights) -> Rows:
    return by_index([length(row) for row in centred(weights)])


@weight_statistic
def position_product_first(weights: Weights) -> Rows:
    w = centred(weights)
    return by_index([float(row @ w[0]) for row in w])


@weight_statistic
def position_product_second(weights: Weights) -> Rows:
    w = centred(weights)
    return by_index([float(row @ w[1]) for row in w])


def component(weights: Weights, number: int) -> Rows:
    """Coordinates along a principal component of all positions of the model.

    It is an eigenvector of their covariance; number 1 has the largest eigenvalue.
    """
    w = np.array(centred(weights))
    if not len(w):
        return {}
    w = w - w.mean(0)
    _, eigenvectors = np.linalg.eigh(w.T @ w)
    coordinates = w @ eigenvectors[:, -number]
    largest = coordinates[np.abs(coordinates).argmax()]
    return by_index((coordinates * math.copysign(1, largest)).tolist())


@weight_statistic
def position_component_1(weights: Weights) -> Rows:
    return component(weights, 1)


@weight_statistic
def position_component_2(weights: Weights) -> Rows:
    return component(weights, 2)


@weight_statistic
def position_component_3(weights: Weights) -> Rows:
    return component(weights, 3)


# Position vectors


@weight_statistic
def position_norm(weights: Weights) -> Rows:
    return by_index([] if weights.W_pos is None else [length(row) for row in weights.W_pos])


@weight_statistic
def effective_position_norm(weights: Weights) -> Rows:
    EPE = weights.effective_positions()
    return by_index([] if EPE is None else [length(row) for row in EPE])


@weight_statistic
def first_effective_position(weights: Weights) -> Rows:
    EPE = weights.effective_positions()
    return by_index([] if EPE is None else EPE[0].tolist())
