"""Checks that a machine can run scans."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from schemas.errors import HeadcountError
from schemas.scan import parse_scan
from workers.engine import sweep_kernel
from workers.engine.kernel_check import ALLOWED, Comparison, Shape, compare, every_shape
from workers.engine.sweep_kernel import Sweep
from workers.model.model_info import BUNDLED_MODELS, describe, find_model
from workers.process import prepare_process
from workers.replica import Replica

DRIFT = 1e-5
"""Largest difference allowed between the two engines on a probability."""


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    found: str


def examine() -> Iterator[Check]:
    """Look at the interpreter, the libraries, the machine and every bundled model."""
    yield Check("python", True, f"{platform.python_version()} on {platform.platform()}")
    for library in ("torch", "transformer_lens", "ray", "pyarrow", "duckdb", "datasets"):
        try:
            yield Check(library, True, version(library))
        except PackageNotFoundError:
            yield Check(library, False, "not installed; run: pip install -e .")
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Check("device", True, ", ".join(gpus) or f"CPU, {len(os.sched_getaffinity(0))} cores")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check("memory", memory > 4e9, f"{memory / 1e9:.1f} GB; a scan with Ray wants 4 GB")
    free = shutil.disk_usage(Path.cwd()).free
    yield Check("disk", free > 1e9, f"{free / 1e9:.1f} GB free in {Path.cwd()}")
    prepare_process()
    for config in sorted(BUNDLED_MODELS.glob("*/config.json")):
        yield _check_model(config.parent.name)


def kernel_obstacle() -> str:
    """Why there is no kernel to compare on this machine; empty if there is one."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device is here, so there is no kernel to compare"
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
    """Hold the GPU's kernel against the tiles, in every shape and format of factors."""
    import torch

    for shape in every_shape() if shapes is None else shapes:
        for factors in ALLOWED:
            yield compare(sweep, shape, factors, torch.device(device))


def comparison_line(comparison: Comparison) -> str:
    """A row of the table that `headcount doctor --device cuda` prints."""
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


def _check_model(name: str) -> Check:
    """Measure two sequences with both engines."""
    fields = {
        "model": f"bundled:{name}",
        "n_ctx": 32,
        "sequences": 2,
        "input": {"family": "repeated_random"},
    }
    try:
        info = describe(find_model(f"bundled:{name}"))
        tokens = np.random.default_rng(0).integers(info.d_vocab, size=(2, 32)).astype(np.int32)
        fused, dense = (
            Replica(info, parse_scan(fields | {"engine": e}), "cpu").measure(tokens).heads
            for e in ("fused", "dense")
        )
    except HeadcountError as error:
        return Check("model", False, str(error))
    drift = max(
        float(np.abs(fused[c] - dense[c]).max())
        for c in ("sink_mass", "previous_token_score", "induction_score")
    )
    return Check(
        "model",
        drift < DRIFT,
        f"{name}: fused and dense engines differ by {drift:.1g} (allowed {DRIFT:g})",
    )
