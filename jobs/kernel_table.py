"""The table of `headcount doctor --device cuda`, which compares the GPU's kernel with the tiles.

Both sweep over the same scores. The tiles are the reference: they run everywhere and are tested
everywhere. The kernel is faster and runs only on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workers.engine import sweep_kernel
from workers.engine.kernel_check import ALLOWED, Comparison, Shape, compare, every_shape
from workers.engine.sweep_kernel import Sweep


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
    shapes: Sequence[Shape] | None = None,
) -> Iterator[Comparison]:
    """Compare the GPU's kernel with the tiles in every shape and format of factors."""
    for shape in every_shape() if shapes is None else shapes:
        for factors in ALLOWED:
            yield compare(sweep, shape, factors, torch.device(device))


def comparison_line(comparison: Comparison) -> str:
    """A row of the table that `headcount doctor --device cuda` prints."""
    # A kernel that does not compile has no difference to show.
    compiled = "no" if comparison.error else "yes"
    difference = "" if comparison.error else f"{comparison.difference:.1e}"
    verdict = "ok" if comparison.agrees else f"FAIL {comparison.error}".rstrip()
    return COMPARISON_ROW.format(
        str(comparison.shape),
        comparison.factors,
        compiled,
        difference,
        f"{comparison.allowed:.1e}",
        verdict,
    )


COMPARISON_ROW = "{:<38} {:<9} {:<9} {:<11} {:<8} {}"
COMPARISON_HEAD = COMPARISON_ROW.format(
    "shape", "precision", "compiled", "difference", "allowed", "verdict"
)
