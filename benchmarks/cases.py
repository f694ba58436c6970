"""What is compared: which way runs on which shape, at full size and at a size for trying the
benchmark.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.ways import make_gpt2_small, make_rotary
from schemas.precision import FASTEST_ACCEPTABLE

CASES = {"cpu": ("speed", "batch", "n_ctx"), "cuda": ("gpu", "n_ctx")}
"""What is run on each device: the ratios, curves against the batch and against the length, the best
batches.
"""

SHOWN = "bfloat16_linears"
"""A precision that a CPU is shown in whether or not its drift is acceptable."""

Shape = tuple[int, int]
"""Batch and n_ctx."""


@dataclass(frozen=True)
class Cell:
    """One way, in one precision, on tokens of one shape: what is timed and weighed."""

    model: str
    way: str
    precision: str
    batch: int
    n_ctx: int


@dataclass(frozen=True)
class Sizes:
    """The models and shapes of a benchmark."""

    gpt2: dict[str, int]
    rotary: dict[str, int]
    main: Shape
    """Where headcount is compared with every other way."""
    short: Shape
    """About as many tokens, in more and shorter sequences."""
    batches: tuple[int, ...]
    cached: tuple[int, ...]
    """Batches of run_with_cache, as far as they fit into the memory there is."""
    lengths: tuple[int, ...]
    first_batch: int
    """Where the search for a GPU's best batch begins."""
    backend: str
    """What torch.compile compiles with."""

    def make_models(self, directory: Path) -> dict[str, Path]:
        """The models' directories, by name."""
        return {
            "gpt2": make_gpt2_small(directory / "gpt2", **self.gpt2),
            "rotary": make_rotary(directory / "rotary", **self.rotary),
        }


FULL = Sizes(
    gpt2={"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
    rotary={
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 512,
        "intermediate_size": 1408, "max_position_embeddings": 8192, "vocab_size": 32000,
    },
    main=(4, 1024), short=(32, 128), batches=(1, 2, 4, 8), cached=(1, 2, 4),
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192), first_batch=16, backend="inductor",
)  # fmt: skip

QUICK = Sizes(
    gpt2={"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 101},
    rotary={
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64,
        "intermediate_size": 96, "max_position_embeddings": 1024, "vocab_size": 1009,
    },
    main=(2, 64), short=(4, 32), batches=(2,), cached=(2,),
    lengths=(256, 1024), first_batch=1, backend="eager",
)  # fmt: skip


def cpu_precisions() -> list[str]:
    """The precisions in which GPT-2 is timed on a CPU."""
    return list(dict.fromkeys(["float32", FASTEST_ACCEPTABLE["cpu"], SHOWN]))


def cells(case: str, sizes: Sizes) -> list[Cell]:
    """What a case runs; a GPU's best batches are found later."""
    ways = ("bare", "fused")
    n_ctx = sizes.main[1]
    if case == "speed":
        found = [
            Cell("gpt2", way, precision, *sizes.main)
            for precision in cpu_precisions()
            for way in ways
        ]
        found += [
            Cell("gpt2", "compiled", "float32", *sizes.main),
            Cell("gpt2", "run_with_cache", "float32", *sizes.main),
        ]
        found += [Cell("gpt2", way, "float32", *sizes.short) for way in ways]
    elif case == "batch":
        found = [
            Cell("gpt2", way, "float32", batch, n_ctx) for batch in sizes.batches for way in ways
        ]
        found += [Cell("gpt2", "run_with_cache", "float32", batch, n_ctx) for batch in sizes.cached]
    elif case == "n_ctx":
        found = [
            Cell("rotary", way, "float32", 1, n_ctx) for n_ctx in sizes.lengths for way in ways
        ]
    else:
        found = []
    return [cell for cell in found if _can_run(cell, sizes)]


def is_weighed(cell: Cell, sizes: Sizes) -> bool:
    """Whether a cell's memory is measured: not a compiler's, and only where a row or a plot has a
    use for it.
    """
    used = (cell.batch, cell.n_ctx) != sizes.short and cell.precision != SHOWN
    return used and cell.way != "compiled"


def _can_run(cell: Cell, sizes: Sizes) -> bool:
    """Whether this machine has what a way needs."""
    if cell.way == "compiled":
        return sizes.backend == "eager" or shutil.which(os.environ.get("CXX", "g++")) is not None
    if cell.way == "run_with_cache":
        # Patterns and scores of all layers, and as much again for what is made of them.
        numbers = sizes.gpt2["n_layer"] * sizes.gpt2["n_head"] * cell.batch * cell.n_ctx**2
        return 4 * 4 * numbers < psutil.virtual_memory().available
    return True
