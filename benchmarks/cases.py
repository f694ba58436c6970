"""What is compared: which way runs on which shape, at full size and at a small size for trying the
benchmark.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.ways import make_gpt2_small, make_llama
from headcount.schemas.scans.scan import FASTEST_ACCEPTABLE

CASES = {
    "cpu": ("speed", "grouped", "effects", "training", "tensors", "batch", "n_ctx"),
    "cuda": ("gpu", "n_ctx"),
}
"""What is run on each device: ratios, ratios of a model of today's kind, what gradients cost, what
watching a training costs, statistics of tensors beside attention alone, curves against the batch
and against the length, best batches of a GPU.
"""

SHOWN = "bfloat16_linears"
"""A precision that a CPU is shown in whether or not its drift is acceptable."""

BYTES_PER_NUMBER = 4
"""`run_with_cache` always runs in float32."""

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
    llama: dict[str, int]
    """About GPT-2 small's size, with grouped heads, RMSNorm and SwiGLU as newer models have."""
    rotary: dict[str, int]
    """A small model without learned positions, so its weights do not grow with `n_ctx`."""
    grouped: dict[str, int]
    """A model as those of today: wide, rotary, its query heads sharing keys."""
    trained: dict[str, int]
    """A small GPT-2 that is trained, and watched."""
    main: Shape
    """Where headcount is compared with every other way."""
    short: Shape
    """About as many tokens, in more and shorter sequences."""
    batches: tuple[int, ...]
    cached: tuple[int, ...]
    """Batches of run_with_cache, as far as they fit into the memory there is."""
    lengths: tuple[int, ...]
    grouped_lengths: tuple[int, ...]
    """Of one sequence through the grouped model."""
    trained_on: Shape
    """A step's batch, and as many tokens as are measured."""
    tensors: tuple[tuple[str, Shape], ...]
    """Whose heads random tensors have, and their batch and n_ctx."""
    product_rows: int
    """Rows of the square matrices whose product shows what the machine can do."""
    first_batch: int
    """Where the search for a GPU's best batch begins."""
    backend: str
    """What torch.compile compiles with."""

    def of_models(self) -> dict[str, dict[str, int]]:
        """The sizes of each model, by its name."""
        return {
            "gpt2": self.gpt2,
            "llama": self.llama,
            "rotary": self.rotary,
            "grouped": self.grouped,
            "trained": self.trained,
        }

    def make_models(self, directory: Path) -> dict[str, Path]:
        """The models' directories, by name."""
        return {
            "gpt2": make_gpt2_small(directory / "gpt2", **self.gpt2),
            "llama": make_llama(directory / "llama", **self.llama),
            "rotary": make_llama(directory / "rotary", **self.rotary),
            "grouped": make_llama(directory / "grouped", **self.grouped),
            "trained": make_gpt2_small(directory / "trained", **self.trained),
        }

    def heads(self, model: str) -> int:
        """How many heads a model has in all its layers."""
        sizes = self.of_models()[model]
        if model == "gpt2":
            return sizes["n_layer"] * sizes["n_head"]
        return sizes["num_hidden_layers"] * sizes["num_attention_heads"]


# The timings that are published.
FULL = Sizes(
    gpt2={"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257},
    llama={
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
        "hidden_size": 768, "intermediate_size": 2048, "max_position_embeddings": 1024,
        "vocab_size": 32000,
    },
    rotary={
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "hidden_size": 512, "intermediate_size": 1408, "max_position_embeddings": 8192,
        "vocab_size": 32000,
    },
    grouped={
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
        "hidden_size": 1024, "intermediate_size": 2816, "max_position_embeddings": 8192,
        "vocab_size": 32000,
    },
    trained={"n_layer": 6, "n_head": 6, "n_embd": 384, "n_positions": 256, "vocab_size": 1024},
    grouped_lengths=(1024, 2048, 8192), product_rows=4096,
    tensors=(
        ("gpt2", (1, 512)), ("gpt2", (1, 1024)), ("gpt2", (1, 2048)), ("llama", (1, 1024)),
        ("grouped", (1, 2048)),
    ),
    trained_on=(8, 256), main=(4, 1024), short=(32, 128), batches=(1, 2, 4, 8), cached=(1, 2, 4),
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192), first_batch=16, backend="inductor",
)  # fmt: skip

# Seconds instead of minutes: what a test runs. Its ratios mean nothing.
QUICK = Sizes(
    gpt2={"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 101},
    llama={
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64,
        "vocab_size": 101,
    },
    rotary={
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024,
        "vocab_size": 1009,
    },
    grouped={
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
        "vocab_size": 101,
    },
    trained={"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 101},
    grouped_lengths=(128,), product_rows=128,
    tensors=(("gpt2", (1, 64)), ("llama", (1, 64))),
    trained_on=(2, 64), main=(2, 64), short=(4, 32), batches=(2,), cached=(2,),
    lengths=(256, 1024), first_batch=1, backend="eager",
)  # fmt: skip


def cpu_precisions() -> list[str]:
    """The precisions in which GPT-2 is timed on a CPU."""
    # A dict drops repeated names and keeps their order.
    return list(dict.fromkeys(["float32", FASTEST_ACCEPTABLE["cpu"], SHOWN]))


def cells(case: str, sizes: Sizes) -> list[Cell]:
    """What a case runs on this machine; the best batches of a GPU are found later."""
    cells_of_case = {
        "speed": _speed_cells,
        "grouped": _grouped_cells,
        "effects": _effect_cells,
        "training": _training_cells,
        "tensors": _tensor_cells,
        "batch": _batch_cells,
        "n_ctx": _length_cells,
        "gpu": lambda sizes: [],
    }
    return [cell for cell in cells_of_case[case](sizes) if _can_run(cell, sizes)]


def _speed_cells(sizes: Sizes) -> list[Cell]:
    """Every way on GPT-2, and the plain ways on a Llama."""
    gpt2_ways = [(way, precision) for precision in cpu_precisions() for way in ("bare", "fused")]
    gpt2_ways += [("compiled", "float32"), ("run_with_cache", "float32")]
    of_gpt2 = [Cell("gpt2", way, precision, *sizes.main) for way, precision in gpt2_ways]
    of_gpt2 += [Cell("gpt2", way, "float32", *sizes.short) for way in ("bare", "fused")]
    of_gpt2.append(product_cell(sizes))
    # Without torch.compile: it would take most of a minute more, and says little that is new.
    llama_ways = ("bare", "fused", "run_with_cache")
    return of_gpt2 + [Cell("llama", way, "float32", *sizes.main) for way in llama_ways]


def product_cell(sizes: Sizes) -> Cell:
    """The matrix product beside which the speed of models is a share of the peak."""
    return Cell("gpt2", "product", "float32", 1, sizes.product_rows)


def _grouped_cells(sizes: Sizes) -> list[Cell]:
    """One sequence through the grouped model, beside both kinds of bare pass."""
    ways = ("bare", "bare_same_products", "fused")
    shapes = [(n_ctx, way) for n_ctx in sizes.grouped_lengths for way in ways]
    return [Cell("grouped", way, "float32", 1, n_ctx) for n_ctx, way in shapes]


def _effect_cells(sizes: Sizes) -> list[Cell]:
    """Passes forward and backward through GPT-2, beside a forward pass that knows its loss."""
    ways = ("bare_loss", "gradients", "direct_effects", "all_effects")
    return [Cell("gpt2", way, "float32", *sizes.main) for way in ways]


def _training_cells(sizes: Sizes) -> list[Cell]:
    """A step of a training, and what a callback does at some of them."""
    ways = ("training_step", "watching")
    return [Cell("trained", way, "float32", *sizes.trained_on) for way in ways]


def _tensor_cells(sizes: Sizes) -> list[Cell]:
    """Attention alone, and all that its q, k and v suffice for."""
    ways = ("attention", "attention_statistics")
    return [Cell(model, way, "float32", *shape) for model, shape in sizes.tensors for way in ways]


def _batch_cells(sizes: Sizes) -> list[Cell]:
    """Curves of GPT-2 against the batch."""
    n_ctx = sizes.main[1]
    shapes = [(batch, way) for batch in sizes.batches for way in ("bare", "fused")]
    shapes += [(batch, "run_with_cache") for batch in sizes.cached]
    return [Cell("gpt2", way, "float32", batch, n_ctx) for batch, way in shapes]


def _length_cells(sizes: Sizes) -> list[Cell]:
    """Curves of one sequence against its length."""
    shapes = [(n_ctx, way) for n_ctx in sizes.lengths for way in ("bare", "fused")]
    return [Cell("rotary", way, "float32", 1, n_ctx) for n_ctx, way in shapes]


def is_weighed(cell: Cell, sizes: Sizes) -> bool:
    """Whether the memory of a cell is measured, because a row or a plot needs it."""
    is_needed = (cell.batch, cell.n_ctx) != sizes.short and cell.precision != SHOWN
    # A compiled pass would be weighed together with its compiler.
    ways = ("bare", "fused", "run_with_cache", "bare_loss", "all_effects")
    return is_needed and cell.way in ways


def _can_run(cell: Cell, sizes: Sizes) -> bool:
    """Whether this machine has what a way needs."""
    if cell.way == "compiled":
        # On a CPU inductor writes C++.
        return sizes.backend == "eager" or shutil.which(os.environ.get("CXX", "g++")) is not None
    if cell.way == "run_with_cache":
        # Patterns and scores of all layers, and as much again for what is computed from them.
        matrices = 4 * sizes.heads(cell.model) * cell.batch
        needed_bytes = BYTES_PER_NUMBER * matrices * cell.n_ctx**2
        return needed_bytes < psutil.virtual_memory().available
    return True
