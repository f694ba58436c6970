"""What TransformerLens shows of each layer's attention, as an unchanged run confirms it."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from headcount.workers.model.attention_check import LARGEST_DIFFERENCE
from headcount.workers.model.attention_facts import (
    AttentionFacts,
    all_scores,
    pattern_of,
    unseen_keys,
)
from headcount.workers.model.attention_layers import number_of

FACTORS = ("scaling", "inv_norm_factor", "softmax_scale")  # fields that hold factors of q·k
DIVISORS = ("scale_attn", "scale")  # fields of divisors: GPT-J, CodeGen, TransformerLens
UNSCALED = ("GPTNeoSelfAttention",)  # they do not scale, and have no field that says so
CAPS = ("attn_logit_softcapping", "attn_scores_soft_cap")  # fields of caps; 0 or less means none


@dataclass(frozen=True)
class ShownAttention:
    """What the bridge shows of a layer's attention, as an unchanged run confirms it."""

    facts: AttentionFacts
    shows_scores: bool  # whether the bridge shows the scores behind the layer's pattern
    problem: str | None = None  # why q, k and facts do not make the pattern; None if so


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
    scores = shown.get("attn_scores", pattern)
    if not made.shape == scores.shape == pattern.shape:
        shapes = [list(tensor.shape) for tensor in (made, scores, pattern)]
        shows_scores = False
        difference = f"q·k, scores and pattern have the shapes {shapes}, which differ"
    else:
        # Weights that are not numbers agree with everything. Measuring will name their layer.
        allowed = LARGEST_DIFFERENCE
        shows_scores = _largest(pattern_of(scores, facts) - pattern) < allowed
        largest = _largest(pattern_of(made, facts) - pattern)
        # A bias of positions, such as ALiBi's, is the same for both sequences.
        bias = (scores - made).masked_fill(unseen_keys(made.shape[-1], facts, made.device), 0)
        has_bias = _largest(bias[:1] - bias[1:]) < allowed * max(1.0, _largest(made))
        if largest < allowed or (shows_scores and has_bias):
            return ShownAttention(facts, shows_scores)
        difference = f"their softmax differs by {largest:.2g} from the pattern (allowed {allowed})"
    cause = "computes other scores" if shows_scores else "hides the q and k that are multiplied"
    problem = (
        f"the scores of layer {layer} could not be made as {facts.scale:.4g} · q·k: "
        f"{difference}; TransformerLens {cause}"
    )
    return ShownAttention(facts, shows_scores, problem)


def _largest(matrices: Tensor) -> float:
    """The largest size in the lower triangle of the last two axes; NaN counts as none."""
    return matrices.tril().abs().nan_to_num(nan=0.0).max().item()


def _facts_of_fields(attention: nn.Module, d_head: int) -> AttentionFacts:
    heights = [number_of(attention, name) for name in CAPS]
    soft_cap = next((height for height in heights if height is not None and height > 0), None)
    scales = [factor for name in FACTORS if (factor := number_of(attention, name)) is not None]
    scales += [1 / divisor for name in DIVISORS if (divisor := number_of(attention, name))]
    if type(attention).__name__ in UNSCALED:
        scales = [1.0]
    return AttentionFacts([*scales, d_head**-0.5][0], soft_cap)
