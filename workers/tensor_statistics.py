"""Statistics of queries, keys and values that somebody holds: no model, no matrix of T²."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import InstanceOf
from torch import Tensor

from headcount.schemas.arguments import checked
from headcount.schemas.errors import MeasureError, ScanError
from headcount.schemas.formulas import Formula
from headcount.schemas.statistics import STATISTICS
from headcount.schemas.values import Count, Factor, Positive
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.tile_sweep import ENTROPY, Question
from headcount.workers.engine.token_pairs import find_matches
from headcount.workers.measurements.undefined import defined_or_nan, where_defined
from headcount.workers.model.attention_facts import AttentionFacts

OF_TENSORS = frozenset({"pattern", "q", "k", "v", "z"})
"""What a statistic may read of them."""

OF_TOKENS = frozenset({"tokens", "copies", "successors"})
"""What it may read besides, if the tokens are given."""


@checked(
    ScanError, mask="attention is causal; a window, a soft cap, slopes and sinks are arguments"
)
def attention_statistics(
    q: InstanceOf[Tensor],
    k: InstanceOf[Tensor],
    v: InstanceOf[Tensor],
    statistics: Literal["standard", "all"] | Sequence[str] = "standard",
    *,
    tokens: InstanceOf[Tensor] | None = None,
    scale: Factor | None = None,
    window: Count | None = None,
    softcap: Positive | None = None,
    slopes: InstanceOf[Tensor] | None = None,
    sinks: InstanceOf[Tensor] | None = None,
) -> dict[str, Tensor]:
    """Statistics of causal attention, `[batch head]` by name, without a pattern being built.

    `A[q,k] = exp S[q,k] / (exp sinks[h] + Σ_{q-window<j≤q} exp S[q,j])`, where
    `S[q,k] = softcap tanh(scale q·k / softcap) + slopes[h] (k - q)`.

    `q` is `[batch head pos d_qk]`, `k` `[batch kv_head pos d_qk]` and `v` `[batch kv_head pos
    d_v]`, after any rotation, of one device and float32 or float64. `kv_head` divides `head`.
    `scale` is 1/√d_qk unless it is given, `window` counts the query's own key, `slopes` (ALiBi's)
    and `sinks` (learned scores of no key) are `[head]`. `tokens` `[batch pos]` are for statistics
    of repeats, such as `induction_score`. "standard" and "all" are those of them that need no more
    than what is given. A value is NaN where the statistic is undefined. Nothing is differentiated.
    """
    _check_shapes(q, k, v, tokens, slopes, sinks)
    readable = OF_TENSORS | (OF_TOKENS if tokens is not None else frozenset[str]())
    chosen = _chosen(statistics, readable)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    facts = AttentionFacts(factor, soft_cap=softcap, window=window, slopes=slopes, sink=sinks)
    with torch.no_grad():
        matches = {} if tokens is None else find_matches(tokens)
        questions: set[Question] = {ENTROPY, *matches}
        number_format = str(q.dtype).removeprefix("torch.")
        pattern = FusedPattern(q, k, v, facts, matches, questions, number_format)
        group = q.shape[1] // k.shape[1]
        by_head = {"q": q, "z": pattern.z, "k": k, "v": v}
        if group > 1:
            by_head |= {name: by_head[name].repeat_interleave(group, 1) for name in ("k", "v")}
        # Statistics read positions before heads.
        values: dict[str, Any] = {name: tensor.transpose(1, 2) for name, tensor in by_head.items()}
        values |= {"pattern": pattern, "tokens": tokens, **matches}
        return {formula.name: _value(formula, values, q) for formula in chosen}


def _chosen(names: str | Sequence[str], readable: frozenset[str]) -> list[Formula]:
    """The statistics of a choice; those that a word stands for are left out if they read more."""
    STATISTICS.check(names if isinstance(names, str) else tuple(names))
    chosen = STATISTICS.select(names)
    lacking = {
        formula: [n for n in (*formula.parameters, *formula.conditions) if n not in readable]
        for formula in chosen
    }
    if isinstance(names, str):
        return [formula for formula in chosen if not lacking[formula]]
    for formula, unknown in lacking.items():
        if unknown:
            needed = "tokens" if {*unknown} <= OF_TOKENS else "headcount.measure, which has a model"
            raise ScanError(f"statistics: {formula.text} reads {', '.join(unknown)}: use {needed}")
    return list(chosen)


def _value(formula: Formula, values: Mapping[str, Any], q: Tensor) -> Tensor:
    """A statistic `[batch head]`, NaN where it is undefined."""
    value = defined_or_nan(formula, values)
    if formula.defined is not None:
        is_defined = where_defined(formula, values, q[:, 0, 0, 0])
        value = value.masked_fill(~is_defined.view(-1, *[1] * (value.dim() - 1)), torch.nan)
    if value.isinf().any():
        raise MeasureError(f"{formula.text}: not a number; expected q, k and v that are finite")
    # What all heads share comes without their axis.
    return value if value.dim() == 2 else value[:, None].expand(-1, q.shape[1])


def _check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Refuse tensors that do not belong to one attention."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or not tensor.numel():
            raise ScanError(f"{name}: expected [batch head pos d], got {list(tensor.shape)}")
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.dtype != q.dtype:
            raise ScanError(
                f"{name}: expected float32 or float64, as q, k and v all are, got {tensor.dtype}"
            )
        if tensor.device != q.device:
            raise ScanError(f"{name}: expected a tensor on {q.device}, as q, got {tensor.device}")
    if tokens is not None and (tokens.dtype.is_floating_point or tokens.dtype == torch.bool):
        raise ScanError(f"tokens: expected integers, got {tokens.dtype}")
    batch, heads, n_ctx, d_qk = q.shape
    if k.shape != (batch, k.shape[1], n_ctx, d_qk) or heads % k.shape[1]:
        raise ScanError(
            f"k: expected [{batch} kv_head {n_ctx} {d_qk}], kv_head a divisor of {heads}, "
            f"got {list(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ScanError(f"v: expected {[*k.shape[:3]]} and d_v, got {list(v.shape)}")
    for name, given, shape in (
        ("tokens", tokens, [batch, n_ctx]),
        ("slopes", slopes, [heads]),
        ("sinks", sinks, [heads]),
    ):
        if given is not None and [*given.shape] != shape:
            raise ScanError(f"{name}: expected the shape {shape}, got {list(given.shape)}")
