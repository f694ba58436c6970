"""Which statistics a window leaves without a value, without running a model."""

from __future__ import annotations

from typing import Any

import torch

from headcount.schemas.statistics import KIND, Statistic
from headcount.workers.engine.dense_pattern import DensePattern
from headcount.workers.measurements.layer_formulas import where_defined
from headcount.workers.measurements.undefined import defined_or_nan
from headcount.workers.model.attention_facts import AttentionFacts

LARGEST_TRIAL_WINDOW = 128
"""A longer window leaves no other statistics without a value than this one."""


def undefined_behind(window: int) -> list[str]:
    """The statistics of attention that have no value because of a window, in long sequences.

    They are evaluated on random queries and keys, with the window and without it.
    """
    window = min(window, LARGEST_TRIAL_WINDOW)
    n_ctx = 4 * LARGEST_TRIAL_WINDOW
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, n_ctx, 4, generator=generator)
    without_window, with_window = (
        {
            "pattern": DensePattern.of(q, k, AttentionFacts(1.0, window=size)),
            "q": q.transpose(1, 2),
            "k": k.transpose(1, 2),
        }
        for size in (None, window)
    )
    return [
        statistic.name
        for statistic in KIND.select("all")
        if {*statistic.parameters, *statistic.conditions} <= with_window.keys()
        and _has_value(statistic, without_window)
        and not _has_value(statistic, with_window)
    ]


def _has_value(statistic: Statistic, activations: dict[str, Any]) -> bool:
    value = defined_or_nan(statistic, activations)
    is_defined = where_defined(statistic, activations, value)
    return bool((value.isfinite() & is_defined).all())
