"""The Llama of the speed table: the ways that are compared measure the same numbers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import QUICK
from benchmarks.ways import STANDARD, WAYS, draw_tokens, make_llama


def test_headcount_and_run_with_cache_measure_the_same_statistics(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "llama", **QUICK.llama)
    tokens = draw_tokens(path, 2, 48)
    with torch.inference_mode():
        measurements: Any = WAYS["fused"](path, "cpu", "float32")(tokens)
        cached: Any = WAYS["run_with_cache"](path, "cpu", "float32")(tokens)
    assert len(cached) == QUICK.llama["num_hidden_layers"] * len(STANDARD)
    for number, cached_values in enumerate(cached):
        layer, place = divmod(number, len(STANDARD))
        name = STANDARD[place].name
        fused_values = torch.from_numpy(measurements.heads[name][:, layer])
        # A statistic that the heads of a layer share comes without their axis.
        by_head = cached_values if cached_values.dim() == 2 else cached_values[:, None]
        expected = by_head.expand_as(fused_values)
        torch.testing.assert_close(fused_values, expected, rtol=1e-4, atol=1e-5)
