"""The attention of a model's bare modules: who computes it, and what scales its scores.

A Hugging Face model looks its attention up by name, so ours is registered under a name. A legacy
model's attention module gets another class. Both then call the function that `attending` has set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from schemas.errors import ModelError
from workers.model.attention_facts import Attend, AttentionFacts

IMPLEMENTATION = "headcount"
"""The name under which Hugging Face models look our attention up."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention arguments that change the pattern in ways the fused engine does not know."""

_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)
"""The attention of the model that runs now. A context variable keeps threads apart."""


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within this context, bare modules compute their attention with `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def take_over_attention(model: nn.Module) -> None:
    """Make a Hugging Face model use the attention that `attending` sets."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _hugging_face_attention)
    model.set_attn_implementation(IMPLEMENTATION)  # pyright: ignore[reportCallIssue]


def _hugging_face_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    """What Hugging Face's modules call instead of their own attention.

    An argument that would change the pattern is refused, because the fused engine does not know it.
    """
    attend = _attend.get()
    if attend is None:
        raise RuntimeError("this attention runs only inside Model.run_bare")
    n_ctx = query.shape[2]
    window = arguments.get("sliding_window")
    if isinstance(window, int) and window < n_ctx:
        raise ModelError(
            f"the model looks back {window} tokens, less than n_ctx = {n_ctx}; lower n_ctx"
        )
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            _refuse(name)
    # transformers makes no causal mask for an attention that it does not know. A mask that arrives
    # hides something else.
    if attention_mask is not None:
        _refuse("an attention mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, AttentionFacts(scale)), None


def _refuse(feature: str) -> NoReturn:
    raise ModelError(
        f"the model's attention uses {feature}, which the fused engine does not know; "
        "use engine = 'dense'"
    )


def native_attention() -> type[nn.Module]:
    """TransformerLens's own attention class, which uses what `attending` sets, if anything."""
    from transformer_lens.model_bridge.sources.native import NativeAttention

    class AskingAttention(NativeAttention):
        def forward(
            self,
            hidden_states: Tensor,
            *args: Any,  # noqa: ANN401
            **kwargs: Any,  # noqa: ANN401
        ) -> tuple[Tensor, Tensor | None]:
            """The output of the attention, and the pattern if TransformerLens computes it."""
            attend = _attend.get()
            if attend is None:
                # The bridge shares these modules, and runs them without `attending`.
                return super().forward(hidden_states, *args, **kwargs)
            if self.rotary is not None or self.attn_scores_soft_cap > 0 or not self.causal:
                _refuse("rotary positions, capped scores or no causal mask")
            shape = (*hidden_states.shape[:2], -1, self.d_head)
            q, k, v = (
                linear(hidden_states).view(shape).transpose(1, 2)
                for linear in (self.q, self.k, self.v)
            )
            z = attend(q, k, v, AttentionFacts(1 / self.scale))
            return self.o(z.flatten(2)), None

    return AskingAttention


# The scale of scores

FACTORS = ("scaling", "inv_norm_factor", "softmax_scale")
"""Fields of attention modules that hold what q·k is multiplied by."""

DIVISORS = ("scale_attn", "scale")
"""Fields that hold what q·k is divided by: in GPT-J and CodeGen, and in TransformerLens's own."""

UNSCALED = ("GPTNeoSelfAttention",)
"""Attention modules that do not scale, and have no field that says so."""

CAPS = ("attn_logit_softcapping", "attn_scores_soft_cap")
"""Fields that hold the height at which scores are capped. A height of 0 or less means no cap."""

TOLERANCE = 1e-4
"""Largest difference allowed between the probabilities of a model's pattern and those of q·k."""


def scale_of(attention: nn.Module, d_head: int) -> float:
    """What a module multiplies q·k by, from its fields; 1/√d_head if it has none of them."""
    if type(attention).__name__ in UNSCALED:
        return 1.0
    for name in FACTORS:
        factor = _number(attention, name)
        if factor is not None:
            return factor
    for name in DIVISORS:
        divisor = _number(attention, name)
        if divisor is not None:
            return 1 / divisor
    return d_head**-0.5


def scores_from(attention: nn.Module, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The scores `[batch head query key]` that a module should make of q and k
    `[batch pos head d_head]`, before any bias and mask.
    """
    products = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale
    for name in CAPS:
        cap = _number(attention, name)
        if cap is not None and cap > 0:
            return cap * torch.tanh(products / cap)
    return products


def score_problem(
    made: Tensor, shown: Tensor, pattern: Tensor, *, rotations_hidden: bool
) -> tuple[bool, str | None]:
    """Check the scores of an unedited run against its pattern.

    `made` are the scores from q·k and the scale, `shown` those that the bridge shows. All are
    `[batch head query key]`, of two sequences. Returns whether the shown ones are the scores behind
    the pattern, and what is wrong with the made ones, None if they are right.

    Weights that are not numbers agree with everything. Measuring will name their layer.
    """
    if not made.shape == shown.shape == pattern.shape:
        shapes = [list(tensor.shape) for tensor in (made, shown, pattern)]
        return False, f"q·k, scores and pattern have the shapes {shapes}, which differ"
    shows_scores = _largest_difference(causal_softmax(shown), pattern) < TOLERANCE
    pattern_difference = _largest_difference(causal_softmax(made), pattern)
    if pattern_difference < TOLERANCE:
        return shows_scores, None
    # The made scores may still be right if the model adds something that q and k do not hold.
    added = (shown - made).tril()
    score_tolerance = TOLERANCE * max(1.0, _largest_size(made.tril()))
    if shows_scores:
        # A bias of positions, such as ALiBi's, is the same for both sequences.
        if _largest_difference(added[:1], added[1:]) < score_tolerance:
            return True, None
        # A rotation keeps the product of a query and a key at the same position.
        added_at_same_position = added.diagonal(dim1=-2, dim2=-1)
        if rotations_hidden and _largest_size(added_at_same_position) < score_tolerance:
            return True, None
    return shows_scores, (
        f"their softmax differs by {pattern_difference:.2g} from the pattern (allowed "
        f"{TOLERANCE:g})"
    )


def causal_softmax(scores: Tensor) -> Tensor:
    """The pattern that scores make when no query sees the future."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def _largest_difference(first: Tensor, second: Tensor) -> float:
    """The largest difference in the lower triangle of the last two axes; NaN counts as none."""
    return _largest_size((first - second).tril())


def _largest_size(values: Tensor) -> float:
    """The largest absolute value; NaN counts as 0."""
    return values.abs().nan_to_num(nan=0.0).max().item()


def _number(module: nn.Module, name: str) -> float | None:
    """A field of a module that is a plain number; None if it has no such field."""
    value = vars(module).get(name)
    return float(value) if isinstance(value, int | float) else None
