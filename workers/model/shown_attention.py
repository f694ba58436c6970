"""What TransformerLens shows of each layer's attention, held against an unchanged run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from headcount.workers.model.attention_facts import (
    AttentionFacts,
    all_scores,
    pattern_of,
    unseen_keys,
)
from headcount.workers.model.attention_layers import number_of

TOLERANCE = 1e-4
"""Largest difference allowed between the probabilities of a model's pattern and those of q·k."""

FACTORS = ("scaling", "inv_norm_factor", "softmax_scale")
"""Fields of attention modules that hold what q·k is multiplied by."""

DIVISORS = ("scale_attn", "scale")
"""Fields that hold what q·k is divided by: in GPT-J and CodeGen, and in TransformerLens's own."""

UNSCALED = ("GPTNeoSelfAttention",)
"""Attention modules that do not scale, and have no field that says so."""

CAPS = ("attn_logit_softcapping", "attn_scores_soft_cap")
"""Fields that hold the height at which scores are capped. A height of 0 or less means no cap."""


@dataclass(frozen=True)
class ShownAttention:
    """What the bridge shows of a layer's attention, as an unchanged run confirms it."""

    facts: AttentionFacts
    shows_scores: bool
    """Whether the bridge shows the scores behind the layer's pattern."""
    problem: str | None
    """Why q, k and the facts do not make the layer's pattern; None if they do."""


def settle_shown_attention(
    layer: int,
    attention: nn.Module | None,
    known: AttentionFacts | None,
    rotated: Callable[[Tensor], Tensor],
    shown: dict[str, Tensor],
) -> ShownAttention:
    """What the bridge shows of a layer, from the activations of an unchanged run on two sequences.

    `known` are the facts of the bare modules if something has confirmed them, and `rotated` rotates
    queries or keys as the layer does.
    """
    # What a rotary layer multiplies is the rotated q and k, if the bridge shows them.
    q, k = (shown.get(f"rot_{name}", shown.get(name)) for name in ("q", "k"))
    pattern = shown.get("pattern")
    if attention is None or q is None or k is None or pattern is None:
        problem = f"TransformerLens does not show q, k and pattern of layer {layer}"
        return ShownAttention(AttentionFacts(math.nan), False, problem)
    facts = known or _facts_of_fields(attention, q.shape[-1])
    if "rot_q" not in shown:
        q, k = rotated(q), rotated(k)
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] % k.shape[2]:
        problem = f"TransformerLens does not show q and k of layer {layer} by head"
        return ShownAttention(facts, False, problem)
    made = all_scores(q.float().transpose(1, 2), k.float().transpose(1, 2), facts)
    shown_scores = shown.get("attn_scores", pattern)
    if not made.shape == shown_scores.shape == pattern.shape:
        shapes = [list(tensor.shape) for tensor in (made, shown_scores, pattern)]
        shows_scores = False
        difference = f"q·k, scores and pattern have the shapes {shapes}, which differ"
    else:
        # Weights that are not numbers agree with everything. Measuring will name their layer.
        shows_scores = _difference(pattern_of(shown_scores, facts), pattern) < TOLERANCE
        largest = _difference(pattern_of(made, facts), pattern)
        if largest < TOLERANCE or (shows_scores and _adds_a_bias(made, shown_scores, facts)):
            return ShownAttention(facts, shows_scores, None)
        difference = (
            f"their softmax differs by {largest:.2g} from the pattern (allowed {TOLERANCE:g})"
        )
    cause = "computes other scores" if shows_scores else "hides the q and k that are multiplied"
    problem = (
        f"the scores of layer {layer} could not be made as {facts.scale:.4g} · q·k: "
        f"{difference}; TransformerLens {cause}"
    )
    return ShownAttention(facts, shows_scores, problem)


def _adds_a_bias(made: Tensor, shown: Tensor, facts: AttentionFacts) -> bool:
    """Whether shown scores are the made ones and a bias of positions, such as ALiBi's.

    It is the same for both sequences.
    """
    added = (shown - made).masked_fill(unseen_keys(made.shape[-1], facts, made.device), 0)
    size = made.tril().abs().nan_to_num(nan=0.0).max().item()
    return _difference(added[:1], added[1:]) < TOLERANCE * max(1.0, size)


def _difference(first: Tensor, second: Tensor) -> float:
    """The largest difference in the lower triangle of the last two axes; NaN counts as none."""
    return (first - second).tril().abs().nan_to_num(nan=0.0).max().item()


def _facts_of_fields(attention: nn.Module, d_head: int) -> AttentionFacts:
    """The scale and the cap that a module's fields name; 1/√d_head and no cap if none does."""
    heights = [number_of(attention, name) for name in CAPS]
    soft_cap = next((height for height in heights if height is not None and height > 0), None)
    factors = [number_of(attention, name) for name in FACTORS]
    divisors = [number_of(attention, name) for name in DIVISORS]
    scales = [factor for factor in factors if factor is not None]
    scales += [1 / divisor for divisor in divisors if divisor is not None]
    if type(attention).__name__ in UNSCALED:
        scales = [1.0]
    return AttentionFacts([*scales, d_head**-0.5][0], soft_cap)
