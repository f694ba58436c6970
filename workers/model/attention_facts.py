"""What a pattern is given of its layer: how scores are made, and which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headcount.workers.model.rotations import Rotation


@dataclass(frozen=True, eq=False)
class AttentionFacts:
    """How one layer turns q·k into a pattern.

    `S[q, k] = cap(scale q·k) + slopes[h] (k - q)` for the visible keys `q - window < k <= q`, where
    `cap(s) = soft_cap tanh(s / soft_cap)`. The pattern is the softmax of `S` over the visible keys
    and, if there is a sink, one more entry `sink[h]` that has no value.
    """

    scale: float
    """The factor of q·k: 1/√d_head in most models."""
    soft_cap: float | None = None
    """The height at which scores are capped; None if they are not."""
    window: int | None = None
    """How many keys a query sees, its own among them; None if it sees all before it."""
    slopes: Tensor | None = None
    """ALiBi's slope of each head, `[head]`; None if positions add nothing to scores."""
    sink: Tensor | None = None
    """The score of each head's learned sink, `[head]`; None if there is none."""
    rotation: Rotation | None = None
    """How the layer rotated its queries before; None if it did not, or nobody noted it."""


class AttentionSizes(NamedTuple):
    """The sizes of the q, k and v that one layer attends with."""

    heads: int
    kv_heads: int
    """Heads of k and v; each is shared by `heads // kv_heads` heads of q."""
    d_qk: int
    d_v: int


Attend = Callable[[Tensor, Tensor, Tensor, AttentionFacts], Tensor]
"""Computes attention from q `[batch head pos d_qk]`, k `[batch kv_head pos d_qk]`,
v `[batch kv_head pos d_v]` and the layer's facts. Returns z `[batch pos head d_v]`.
"""
