"""Every weight statistic once more, as its formula stands in the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.reference.definitions import cosine, length
from tests.reference.weights import Array, Weights

Rows = dict[tuple[int | None, int | None, int | None], float]
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
