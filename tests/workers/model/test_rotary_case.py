"""The Llama of the speed table: the ways that are compared measure the same numbers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import FULL, QUICK, cells
from benchmarks.targets import targets
from benchmarks.ways import STATISTICS, WAYS, draw_tokens, make_llama


def test_headcount_and_run_with_cache_measure_the_same_statistics(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama", **QUICK.llama)
    tokens = draw_tokens(path, 2, 48)
    with torch.inference_mode():
        measurements: Any = WAYS["fused"](path, "cpu", "float32")(tokens)
        cached: Any = WAYS["run_with_cache"](path, "cpu", "float32")(tokens)
    assert len(cached) == QUICK.llama["num_hidden_layers"] * len(STATISTICS)
    for number, cached_values in enumerate(cached):
        layer, place = divmod(number, len(STATISTICS))
        name = STATISTICS[place].name
        fused_values = torch.from_numpy(measurements.heads[name][:, layer])
        # A statistic that the heads of a layer share comes without their axis.
        by_head = cached_values if cached_values.dim() == 2 else cached_values[:, None]
        expected = by_head.expand_as(fused_values)
        torch.testing.assert_close(fused_values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_the_model_shares_key_heads_as_newer_models_do(sizes: Any) -> None:
    assert sizes.llama["num_attention_heads"] % sizes.llama["num_key_value_heads"] == 0
    assert sizes.llama["num_attention_heads"] > sizes.llama["num_key_value_heads"]


def test_the_table_has_its_own_rows_for_speed_and_memory() -> None:
    rows = [(row.row, row.baseline) for row in targets(FULL) if row.row.startswith("Llama")]
    place = "Llama, CPU, 4 × 1024, float32"
    assert rows == [
        (f"{place}: speed", "bare"),
        (f"{place}: peak memory", "bare"),
        (f"{place}: speed", "run_with_cache"),
        (f"{place}: peak memory", "run_with_cache"),
    ]
    ways = {cell.way for cell in cells("speed", QUICK) if cell.model == "llama"}
    assert ways == {"bare", "fused", "run_with_cache"}
