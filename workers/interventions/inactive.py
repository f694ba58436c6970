"""Heads that are found inactive on an input, and their control: each sequence has heads of its own
taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from schemas.statistics.head_results import head_output_norm_last
from schemas.statistics.norms import head_output_norm, sink_value_norm, value_norm
from schemas.statistics.shape import entropy
from schemas.statistics.sink import sink_alpha
from schemas.values import BelowOne, Positive, Seed
from workers.interventions.intervention_registry import intervention

Score = Literal[
    "sink_alpha", "entropy", "head_output_norm", "head_output_norm_last", "sink_value_norm", "value_norm"
]  # fmt: skip
"""Statistics by which a head may be found inactive."""

Scale = Literal["raw", "layer_mean"]
"""Whether a score is taken as it is, or in parts of its layer's mean."""


def _never(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why no head can be inactive, whatever the sequence."""
    threshold, raw = options["threshold"], options["scale"] == "raw"
    if options["score"] != "sink_alpha":
        return None if threshold > 0 else f"threshold: expected more than 0, got {threshold:g}"
    if threshold < 0 or (raw and threshold >= 1):
        expected = "0 or more and below 1" if raw else "0 or more"
        return f"threshold: expected {expected}, got {threshold:g}"
    return None


@intervention(refuse=_never)
def zero_inactive_heads(
    z: Tensor, pattern: Any, v: Tensor, *, score: Score, threshold: float, scale: Scale = "raw"
) -> Tensor:
    """Heads whose score on a sequence is below a threshold (`sink_alpha`: above) move nothing
    (Sandoval-Segura et al. 2025). With `layer_mean` a score is divided by the mean of the layer's
    heads, `head_output_norm_last` by their mean `head_output_norm`.
    """
    return _without(z, _inactive(z, pattern, v, score, threshold, scale))


@intervention(refuse=_never)
def zero_random_heads(
    z: Tensor,
    pattern: Any,
    v: Tensor,
    tokens: Tensor,
    layer: int,
    *,
    score: Score,
    threshold: float,
    scale: Scale = "raw",
    draw: Seed = 0,
) -> Tensor:
    """The control of zero_inactive_heads: in every layer of a sequence as many heads as would be
    inactive there, drawn from all by a hash of the tokens, the layer and the draw.
    """
    count = _inactive(z, pattern, v, score, threshold, scale).sum(-1, keepdim=True)
    return _without(z, _random_order(tokens, z.shape[2], layer, draw) < count)


@intervention
def zero_entropy_sinks(pattern: Tensor, *, row: Positive, column: BelowOne) -> Tensor:
    """Heads whose mean row entropy is below `row` and largest column entropy above `column` attend
    to nothing (Guo et al. 2024). Row q ≥ 1 counts in parts of ln(q+1), column k, divided by its
    sum, in parts of ln(T-k).
    """
    return pattern * ~_entropy_sinks(pattern, row, column)[..., None, None]


@intervention
def entropy_sinks_to_first(pattern: Tensor, *, row: Positive, column: BelowOne) -> Tensor:
    """The same heads attend to the first token alone (Guo et al. 2024)."""
    first = torch.zeros_like(pattern)
    first[..., 0] = 1
    return torch.where(_entropy_sinks(pattern, row, column)[..., None, None], first, pattern)


def _inactive(
    z: Tensor, pattern: Any, v: Tensor, score: Score, threshold: float, scale: Scale
) -> Tensor:
    """Which heads are inactive: `[batch head]`."""
    values = _score(z, pattern, v, score)
    if scale == "layer_mean":
        # The mean that the source divides the last token's output by is of all tokens.
        values = values / (
            head_output_norm(z) if score == "head_output_norm_last" else values
        ).mean(-1, keepdim=True)
    return values > threshold if score == "sink_alpha" else values < threshold


def _score(z: Tensor, pattern: Any, v: Tensor, score: Score) -> Tensor:
    match score:
        case "sink_alpha":
            return sink_alpha(pattern)
        case "entropy":
            return entropy(pattern)
        case "head_output_norm":
            return head_output_norm(z)
        case "head_output_norm_last":
            return head_output_norm_last(z)
        case "sink_value_norm":
            return sink_value_norm(v)
        case "value_norm":
            return value_norm(v)


def _without(z: Tensor, heads: Tensor) -> Tensor:
    return z.masked_fill(heads[:, None, :, None], 0)


def _random_order(tokens: Tensor, n_heads: int, layer: int, draw: int) -> Tensor:
    """Places of the heads in an order `[batch head]` that depends on a sequence's tokens, the layer
    and the draw alone.
    """
    rng = np.random.default_rng([draw, layer])
    factors = torch.from_numpy(rng.integers(-(2**63), 2**63, size=(tokens.shape[1], n_heads))).to(
        tokens.device
    )
    # A sum of products with random factors modulo 2^64 is a hash.
    return ((tokens + 1)[..., None] * factors).sum(1).argsort(-1).argsort(-1)


def _entropy_sinks(pattern: Tensor, row: float, column: float) -> Tensor:
    """Which heads are sinks by both entropies, each a share of what a uniform row or column would
    have: `[batch head]`.
    """
    # A row has as many entries as the column that is as far from the other end.
    entries = torch.arange(1, pattern.shape[-1] + 1, device=pattern.device, dtype=pattern.dtype)
    uniform = entries.log()
    rows = -torch.xlogy(pattern, pattern).sum(-1)
    mean_row = (rows[..., 1:] / uniform[1:]).mean(-1)
    shares = pattern / pattern.sum(-2, keepdim=True).clamp_min(torch.finfo(pattern.dtype).tiny)
    # The last column has one entry, so its entropy is 0.
    columns = -torch.xlogy(shares, shares).sum(-2) / uniform.flip(0).clamp_min(1e-9)
    return (mean_row < row) & (columns.amax(-1) > column)
