"""Every weight statistic once more, as its formula stands in the documentation."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.reference.definitions import cosine, length
from tests.reference.weights import Array, Norm, Weights

Index = int | tuple[int, int] | None
"""A position or a dimension, or layer and head of an earlier head."""
Rows = dict[tuple[int | None, int | None, Index], float]
"""Values by layer, head and index; None for what has no such place."""


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


def with_fixed_positions(define: Callable[[Weights], Rows]) -> Callable[[Weights], Rows]:
    """No rows where queries and keys are rotated."""
    return lambda weights: {} if weights.rotary else define(weights)


def bias_position_cosine(weights: Weights) -> Rows:
    EPE = weights.effective_positions()
    if EPE is None:
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


def products(w: list[Array], position: int) -> Rows:
    return by_index([float(row @ w[position]) for row in w])


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


def effective_positions(weights: Weights) -> Sequence[Array]:
    EPE = weights.effective_positions()
    return [] if EPE is None else list(EPE)


WEIGHT_DEFINITIONS: dict[str, Callable[[Weights], Rows]] = {
    "query_bias_norm": lambda weights: by_head(
        weights, lambda b_Q, W_K: [length(b_Q)], indexed=False
    ),
    "bias_key_coupling": with_fixed_positions(
        lambda weights: by_head(weights, lambda b_Q, W_K: (W_K @ b_Q).tolist())
    ),
    "bias_position_cosine": with_fixed_positions(bias_position_cosine),
    "query_key_norm": with_fixed_positions(
        lambda weights: of_every_head(weights, lambda QK, OV: size(QK))
    ),
    "value_output_norm": lambda weights: of_every_head(weights, lambda QK, OV: size(OV)),
    "key_composition": with_fixed_positions(
        lambda weights: of_every_pair(
            weights, lambda QK, OV, X: size(QK @ X.T) / size(QK) / size(X)
        )
    ),
    "query_composition": with_fixed_positions(
        lambda weights: of_every_pair(weights, lambda QK, OV, X: size(X @ QK) / size(QK) / size(X))
    ),
    "value_composition": lambda weights: of_every_pair(
        weights, lambda QK, OV, X: size(X @ OV) / size(OV) / size(X)
    ),
    "copying_score": copying_score,
    "centred_position_norm": lambda weights: by_index([length(w) for w in centred(weights)]),
    "position_product_first": lambda weights: products(centred(weights), 0),
    "position_product_second": lambda weights: products(centred(weights), 1),
    "position_component_1": lambda weights: component(weights, 1),
    "position_component_2": lambda weights: component(weights, 2),
    "position_component_3": lambda weights: component(weights, 3),
    "position_norm": lambda weights: by_index(
        [] if weights.W_pos is None else [length(row) for row in weights.W_pos]
    ),
    "effective_position_norm": lambda weights: by_index(
        [length(row) for row in effective_positions(weights)]
    ),
    "first_effective_position": lambda weights: by_index(
        [number for row in effective_positions(weights)[:1] for number in row.tolist()]
    ),
}
