"""The table of `headcount doctor --device cuda`, which compares the GPU's kernel with the tiles.

Both sweep over the same scores. The tiles are the reference: they run everywhere and are tested
everywhere. The kernel is faster and runs only on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from headcount.workers.engine.kernel import sweep_kernel
from headcount.workers.engine.kernel.kernel_check import (
    ALLOWED,
    Comparison,
    FactNames,
    Shape,
    compare,
    every_layer,
    in_words,
)
from headcount.workers.engine.kernel.sweep_kernel import Sweep


def kernel_obstacle() -> str:
    """Why this machine has no kernel to compare; empty if it has one."""
    if not torch.cuda.is_available():
        return "no CUDA device is here, so there is no kernel to compare"
    # A GPU alone is not enough.
    if not sweep_kernel.available(torch.device("cuda")):
        return (
            f"{torch.cuda.get_device_name()}: the kernel needs triton and compute capability 8.0; "
            "tiles measure instead"
        )
    return ""


def compare_kernel(
    device: str = "cuda",
    sweep: Sweep = sweep_kernel.sweep,
    layers: Sequence[tuple[Shape, FactNames]] | None = None,
) -> Iterator[Comparison]:
    """Compare the GPU's kernel with the tiles with every shape, fact and format of factors."""
    for shape, facts in every_layer() if layers is None else layers:
        for factors in ALLOWED:
            yield compare(sweep, shape, factors, torch.device(device), facts)


def comparison_line(comparison: Comparison) -> str:
    """A row of the table that `headcount doctor --device cuda` prints."""
    # A kernel that does not compile has no difference to show.
    compiled = "no" if comparison.error else "yes"
    difference = "" if comparison.error else f"{comparison.difference:.1e}"
    verdict = "ok" if comparison.agrees else f"FAIL {comparison.error}".rstrip()
    return COMPARISON_ROW.format(
        in_words(comparison.shape, comparison.facts),
        comparison.factors,
        compiled,
        difference,
        f"{comparison.allowed:.1e}",
        verdict,
    )


COMPARISON_ROW = "{:<62} {:<9} {:<9} {:<11} {:<8} {}"
COMPARISON_HEAD = COMPARISON_ROW.format(
    "layer", "precision", "compiled", "difference", "allowed", "verdict"
)
