"""Changes of heads that are inactive on a sequence, or sinks, and their control. Which heads these
are is decided for each sequence.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headcount.schemas.pattern import Pattern
from headcount.schemas.statistics.head_results import head_output_norm_last
from headcount.schemas.statistics.norms import head_output_norm, sink_value_norm, value_norm
from headcount.schemas.statistics.shape import entropy
from headcount.schemas.statistics.sink import sink_alpha
from headcount.schemas.values import BelowOne, Positive, Seed
from headcount.workers.interventions.heads import to_first
from headcount.workers.interventions.intervention_registry import intervention

Score = Literal[
    "sink_alpha", "entropy", "head_output_norm", "head_output_norm_last", "sink_value_norm",
    "value_norm",
]  # fmt: skip
"""Statistics that may say whether a head is inactive."""

Scale = Literal["raw", "layer_mean"]  # whether a score is divided by its layer's mean


def _never(options: Mapping[str, Any], n_ctx: int) -> str | None:
    """Why no head of any sequence can be inactive by this threshold; None if one can."""
    threshold = options["threshold"]
    raw = options["scale"] == "raw"
    # An inactive head is below the threshold of a norm or an entropy, which is never negative. It
    # is above that of sink_alpha, which is a share of attention.
    if options["score"] != "sink_alpha":
        return None if threshold > 0 else f"threshold: expected more than 0, got {threshold:g}"
    if threshold < 0 or (raw and threshold >= 1):
        expected = "0 or more and below 1" if raw else "0 or more"
        return f"threshold: expected {expected}, got {threshold:g}"
    return None


@intervention(refuse=_never)
def zero_inactive_heads(
    z: Tensor, pattern: Pattern, v: Tensor, *, score: Score, threshold: float, scale: Scale = "raw"
) -> Tensor:
    """Heads whose score on a sequence is below a threshold (`sink_alpha`: above) move nothing
    (Sandoval-Segura et al. 2025). With `layer_mean` a score is divided by its mean over the layer's
    heads; `head_output_norm_last` is divided by their mean `head_output_norm`.
    """
    return _without(z, _inactive(z, pattern, v, score, threshold, scale))


@intervention(refuse=_never)
def zero_random_heads(
    z: Tensor,
    pattern: Pattern,
    v: Tensor,
    tokens: Tensor,
    layer: int,
    *,
    score: Score,
    threshold: float,
    scale: Scale = "raw",
    draw: Seed = 0,
) -> Tensor:
    """The control of zero_inactive_heads: in every layer as many heads move nothing as would be
    inactive there on the sequence, chosen by a hash of its tokens, the layer and the draw.
    """
    count = _inactive(z, pattern, v, score, threshold, scale).sum(-1, keepdim=True)
    rng = np.random.default_rng([draw, layer])
    factors = torch.from_numpy(rng.integers(-(2**63), 2**63, size=(tokens.shape[1], z.shape[2])))
    # A sum of products with random factors, modulo 2^64, is a hash. Integers overflow as intended.
    # Of tokens + 1, or token 0 would say nothing of its place.
    hashes = ((tokens + 1)[..., None] * factors.to(tokens.device)).sum(1)
    # Sorting the order of the hashes turns it into ranks, so this is a random order of the heads.
    return _without(z, hashes.argsort(-1).argsort(-1) < count)


@intervention
def zero_entropy_sinks(pattern: Tensor, *, row: Positive, column: BelowOne) -> Tensor:
    """Heads whose mean row entropy is below `row` and whose largest column entropy is above
    `column` attend to nothing (Guo et al. 2024). The entropy of row q ≥ 1 is divided by ln(q+1),
    that of column k, scaled to sum 1, by ln(T-k).
    """
    return pattern * ~_entropy_sinks(pattern, row, column)[..., None, None]


@intervention
def entropy_sinks_to_first(pattern: Tensor, *, row: Positive, column: BelowOne) -> Tensor:
    """The same heads attend to the first token alone (Guo et al. 2024)."""
    is_sink = _entropy_sinks(pattern, row, column)[..., None, None]
    return torch.where(is_sink, to_first(pattern), pattern)


def _inactive(
    z: Tensor, pattern: Pattern, v: Tensor, score: Score, threshold: float, scale: Scale
) -> Tensor:
    """Which heads are inactive: `[batch head]`."""
    values: Tensor = {
        "sink_alpha": lambda: sink_alpha(pattern),
        "entropy": lambda: entropy(pattern),
        "head_output_norm": lambda: head_output_norm(z),
        "head_output_norm_last": lambda: head_output_norm_last(z),
        "sink_value_norm": lambda: sink_value_norm(v),
        "value_norm": lambda: value_norm(v),
    }[score]()
    if scale == "layer_mean":
        # The source divides the output at the last token by a mean over all tokens.
        averaged = head_output_norm(z) if score == "head_output_norm_last" else values
        values = values / averaged.mean(-1, keepdim=True)
    return values > threshold if score == "sink_alpha" else values < threshold


def _without(z: Tensor, heads: Tensor) -> Tensor:
    """z `[batch pos head d_head]`, 0 for the heads that `heads [batch head]` marks."""
    return z.masked_fill(heads[:, None, :, None], 0)


def _entropy_sinks(pattern: Tensor, row: float, column: float) -> Tensor:
    """Which heads are sinks by both entropies: `[batch head]`.

    Each entropy is divided by that of a uniform row or column of the same length.
    """
    # Under the causal mask row q has q+1 entries and column k has T-k: the same numbers, backwards.
    entries = torch.arange(1, pattern.shape[-1] + 1, device=pattern.device, dtype=pattern.dtype)
    uniform_entropy = entries.log()
    row_entropy = -torch.xlogy(pattern, pattern).sum(-1)  # [batch head query]
    # Row 0 has one entry, so its entropy says nothing.
    mean_row_entropy = (row_entropy[..., 1:] / uniform_entropy[1:]).mean(-1)
    column_sum = pattern.sum(-2, keepdim=True)  # [batch head 1 key]
    shares = pattern / column_sum.clamp_min(torch.finfo(pattern.dtype).tiny)
    column_entropy = -torch.xlogy(shares, shares).sum(-2)  # [batch head key]
    # The last column has one entry and entropy 0, which must not be divided by ln 1 = 0.
    relative_column_entropy = column_entropy / uniform_entropy.flip(0).clamp_min(1e-9)
    return (mean_row_entropy < row) & (relative_column_entropy.amax(-1) > column)
