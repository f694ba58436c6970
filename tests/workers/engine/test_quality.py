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


def test_uniform_attention_has_its_published_levels() -> None:
    for n_ctx, all_queries, late in ((40, 0.1070, 0.0340), (256, 0.0239, 0.0054)):
        tokens = torch.zeros(1, n_ctx, dtype=torch.long)
        levels = uniform_levels(tokens, "sink_alpha", "sink_mass_late")
        assert levels == pytest.approx([all_queries, late], abs=5e-5)
    block = torch.arange(25)
    repeated = torch.cat([torch.tensor([BOS]), block, block])[None]
    assert uniform_levels(repeated, "induction_diagonal_strict") == pytest.approx(
        [0.0266], abs=5e-5
    )


def uniform_levels(tokens: Tensor, *names: str) -> list[float]:
    """Statistics of uniform attention."""
    matches = find_matches(tokens)
    activations = {"pattern": uniform_pattern(matches, tokens), "tokens": tokens, **matches}
    return [evaluate(STATISTICS[name].function, activations).item() for name in names]
