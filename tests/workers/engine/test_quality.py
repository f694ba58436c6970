"""Published levels of uniform attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headcount.schemas.formulas import evaluate
from headcount.schemas.statistics import STATISTICS
from headcount.workers.engine.fused_pattern import uniform_pattern
from headcount.workers.engine.token_pairs import find_matches

BOS = 256


@pytest.mark.parametrize(
    ("n_ctx", "all_queries", "late"),
    [
        (40, 0.1070, 0.0340),
        (64, 0.0741, 0.0214),
        (128, 0.0424, 0.0108),
        (256, 0.0239, 0.0054),
        (512, 0.0133, 0.0027),
        (1024, 0.0073, 0.0014),
    ],
)
def test_uniform_attention_has_its_published_levels(
    n_ctx: int, all_queries: float, late: float
) -> None:
    levels = uniform_levels(torch.zeros(1, n_ctx, dtype=torch.long), "sink_alpha", "sink_mass_late")
    assert levels == pytest.approx([all_queries, late], abs=5e-5)


def test_uniform_attention_has_its_published_induction_score() -> None:
    block = torch.arange(25)
    levels = uniform_levels(
        torch.cat([torch.tensor([BOS]), block, block])[None], "induction_diagonal_strict"
    )
    assert levels == pytest.approx([0.0266], abs=5e-5)


def uniform_levels(tokens: Tensor, *names: str) -> list[float]:
    """Statistics of uniform attention."""
    matches = find_matches(tokens)
    activations = {"pattern": uniform_pattern(matches, tokens), "tokens": tokens, **matches}
    return [evaluate(STATISTICS[name].compute, activations).item() for name in names]
