"""The attention of a model's bare modules: computed by whoever runs them, and what scales its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from schemas.errors import ModelError

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Attention as a function of q, k, v `[batch head pos d_head]` and of the scale of q·k; returns z
`[batch pos head d_head]`.
"""

IMPLEMENTATION = "headcount"
"""The name under which Hugging Face models find our attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention arguments that change the pattern in ways the fused engine does not know."""

_attend: ContextVar[Attend | None] = ContextVar("attend", default=None)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within it, bare modules compute their attention with `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def take_over_attention(model: nn.Module) -> None:
    """Have a Hugging Face model ask `attending` for its attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _hugging_face_attention)
    model.set_attn_implementation(IMPLEMENTATION)  # pyright: ignore[reportCallIssue]


def _hugging_face_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What Hugging Face's modules call in the place of their own attention."""
    attend = _attend.get()
    if attend is None:
        raise RuntimeError("this attention runs only inside Model.run_bare")
    window = kwargs.get("sliding_window")
    if window is not None and window < query.shape[2]:
        raise ModelError(
            f"the model looks back {window} tokens, less than n_ctx = {query.shape[2]}; lower n_ctx"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            _refuse(name)
    if attention_mask is not None:
        _refuse("an attention mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, scale), None


def _refuse(what: str) -> NoReturn:
    raise ModelError(
        f"the model's attention uses {what}, which the fused engine does not know; "
        "use engine = 'dense'"
    )


def native_attention() -> type[nn.Module]:
    """TransformerLens's own attention, except that it asks `attending` where it is on."""
    from transformer_lens.model_bridge.sources.native import NativeAttention

    class AskingAttention(NativeAttention):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
            attend = _attend.get()
            if attend is None:
                return super().forward(hidden_states, *args, **kwargs)
            if self.rotary is not None or self.attn_scores_soft_cap > 0 or not self.causal:
                _refuse("rotary positions, capped scores or no causal mask")
            shape = (*hidden_states.shape[:2], -1, self.d_head)
            q, k, v = (
                linear(hidden_states).view(shape).transpose(1, 2)
                for linear in (self.q, self.k, self.v)
            )
            z = attend(q, k, v, 1 / self.scale)
            return self.o(z.flatten(2)), None

    return AskingAttention


# The scale of scores

FACTORS = ("scaling", "inv_norm_factor", "softmax_scale")
"""Fields of attention modules that hold what q·k is multiplied by."""

DIVISORS = ("scale_attn", "scale")
"""Fields that hold what it is divided by: in GPT-J and CodeGen, and in TransformerLens's own."""

UNSCALED = ("GPTNeoSelfAttention",)
"""Attention modules that do not scale, and say so nowhere."""

CAPS = ("attn_logit_softcapping", "attn_scores_soft_cap")
"""Fields that hold the height at which scores are capped; a height below 0 means none."""


def scale_of(attention: nn.Module, d_head: int) -> float:
    """What a module multiplies q·k by, from its fields; 1/√d_head if it has none of them."""
    if type(attention).__name__ in UNSCALED:
        return 1.0
    for name in FACTORS:
        if (factor := _number(attention, name)) is not None:
            return factor
    for name in DIVISORS:
        if (divisor := _number(attention, name)) is not None:
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
    """Whether `shown` are the scores behind an unedited pattern, and what is wrong with those that
    q·k and the scale made, if they are not; all are `[batch head query key]`, of two sequences.

    Weights that are not numbers agree with everything; measuring will name their layer.
    """
    if not made.shape == shown.shape == pattern.shape:
        shapes = [list(x.shape) for x in (made, shown, pattern)]
        return False, f"q·k, scores and pattern have the shapes {shapes}, which differ"
    shows = _differ(causal_softmax(shown), pattern) < TOLERANCE
    if (off := _differ(causal_softmax(made), pattern)) < TOLERANCE:
        return shows, None
    rest = (shown - made).tril()
    if shows:
        # A bias of positions, as ALiBi's, is the same for all sequences.
        size = max(1.0, made.tril().abs().nan_to_num().max().item())
        if _differ(rest[:1], rest[1:]) < TOLERANCE * size:
            return True, None
        # A rotation leaves the product of a query and a key at the same position as it was.
        diagonal = rest.diagonal(dim1=-2, dim2=-1)
        if rotations_hidden and _differ(diagonal, torch.zeros_like(diagonal)) < TOLERANCE * size:
            return True, None
    return shows, f"their softmax differs by {off:.2g} from the pattern (allowed {TOLERANCE:g})"


TOLERANCE = 1e-4
"""Largest difference of a probability between the pattern of a model and that of q·k."""


def causal_softmax(scores: Tensor) -> Tensor:
    """The pattern that scores make when no query sees the future."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)


def _differ(a: Tensor, b: Tensor) -> float:
    return (a - b).tril().abs().nan_to_num(nan=0.0).max().item()


def _number(module: nn.Module, name: str) -> float | None:
    value = vars(module).get(name)
    return float(value) if isinstance(value, int | float) else None
