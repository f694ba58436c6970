"""First contact with a GPU: the kernel is held against the tiles before it measures anything.

Both get the same q, k and v, in the kernel's format; the tiles multiply them in float32. What may
differ is therefore the rounding of products alone.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.errors import ModelError
from schemas.precision import PRECISIONS
from workers.engine import sweep_kernel
from workers.engine.fused_pattern import FusedPattern
from workers.engine.number_formats import HALVES, rounded
from workers.engine.sweep_kernel import Sweep
from workers.engine.token_pairs import TokenPairs, find_matches
from workers.model.model_info import ModelInfo

log = logging.getLogger(__name__)

ALLOWED = {"float32": 2e-5, "tf32": 5e-3, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest difference of an answer from the tiles, in proportion where an answer is above 1.

A split float32 product comes within 1e-6, and sums of a thousand terms add to that. One tf32
product comes within 1e-3. Halves round A before it meets v: to 5e-4 in float16, to 4e-3 in
bfloat16, each with room for a few terms.
"""

MOST_TOKENS = 1024
"""A replica compares sequences of its scan's length, or of this one: later tiles are all alike."""


@dataclass(frozen=True)
class Shape:
    """The sizes of q and k that a sweep gets."""

    heads: int
    kv_heads: int
    n_ctx: int
    d_head: int

    def __str__(self) -> str:
        heads = str(self.heads)
        if self.kv_heads != self.heads:
            heads += f"/{self.kv_heads}"
        return f"heads {heads}, n_ctx {self.n_ctx}, d_head {self.d_head}"


@dataclass(frozen=True)
class Comparison:
    """What came of a kernel on one shape, in one format of factors."""

    shape: Shape
    factors: str
    error: str
    """Why it did not compile or run; empty if it did."""
    difference: float
    """The largest from the tiles; infinite where an answer is not finite, or there is none."""

    @property
    def allowed(self) -> float:
        """The largest difference with which the kernel is used."""
        return ALLOWED[self.factors]

    @property
    def agrees(self) -> bool:
        """Whether the kernel may measure."""
        return not self.error and self.difference <= self.allowed

    @property
    def problem(self) -> str:
        """Why it may not."""
        if self.error:
            return f"does not compile or run ({self.error})"
        return f"differs from the tiles by {self.difference:.2g} (allowed {self.allowed:g})"


def compare(sweep: Sweep, shape: Shape, factors: str, device: torch.device) -> Comparison:
    """Ask a kernel everything and then next to nothing, and hold its answers against the tiles'."""
    q, k, v, tokens = _drawn(shape, factors, device)
    matches = find_matches(tokens)
    try:
        largest = max(
            _difference(sweep, (q, k, v), factors, matches, asked)
            for asked in ({"entropy", *matches}, set[str]())
        )
    except torch.AcceleratorError:
        raise  # The device has failed for good; only a new process mends that.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Comparison(shape, factors, f"{type(error).__name__}: {lines[0]}", math.inf)
    return Comparison(shape, factors, "", largest)


def proven_sweep(info: ModelInfo, n_ctx: int, precision: str, device: str) -> Sweep | None:
    """The kernel, if the device can run it and it agrees with the tiles on a model's shapes and
    precision; None means tiles.
    """
    factors = PRECISIONS[precision].scores
    place = torch.device(device)
    if factors == "float64" or not sweep_kernel.available(place):
        return None
    # The engine repeats keys and values before it asks.
    shape = Shape(info.n_heads, info.n_heads, min(n_ctx, MOST_TOKENS), info.d_head)
    comparison = compare(sweep_kernel.sweep, shape, factors, place)
    if comparison.agrees:
        return sweep_kernel.sweep
    log.warning(
        "the GPU kernel is not used: with %s in %s it %s; tiles measure instead, which is slower",
        shape,
        factors,
        comparison.problem,
    )
    return None


def _drawn(
    shape: Shape, factors: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v `[batch head pos d_head]` as a projection leaves them, rounded to the format, and
    tokens of which many come again.
    """
    generator = torch.Generator().manual_seed(shape.n_ctx)
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    projected = torch.randn(2, shape.n_ctx, sum(heads), shape.d_head, generator=generator)
    tokens = torch.randint(7, (2, shape.n_ctx), generator=generator).to(device)
    q, k, v = projected.to(device).transpose(1, 2).split(heads, 1)
    if factors in HALVES:
        q, k, v = (rounded(x, factors) for x in (q, k, v))
    return q, k, v, tokens


def _difference(
    sweep: Sweep,
    qkv: tuple[Tensor, Tensor, Tensor],
    factors: str,
    matches: dict[str, TokenPairs],
    asked: set[str],
) -> float:
    """The largest difference between a kernel's answers to some questions and the tiles'."""
    q, k, v = qkv
    groups = q.shape[1] // k.shape[1]
    every = (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
    tiles = FusedPattern(*every, q.shape[3] ** -0.5, matches, set(asked))
    labels = [(p.query_label, p.key_label, p.lag) for p in matches.values() if p.name in asked]
    dtype = HALVES.get(factors, torch.float32)
    swept = sweep(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        q.shape[3] ** -0.5,
        labels,
        entropy="entropy" in asked,
        scores=factors,
    )
    pairs = [(swept.z, tiles.z), (swept.lse, tiles.lse), (swept.distance, tiles.distance())]
    if swept.entropy is not None:
        pairs.append((swept.entropy, tiles.entropy()))
    masses = [tiles.mass(p) for p in matches.values() if p.name in asked]
    pairs += zip(swept.masses, masses, strict=True)
    if len(pairs) != 3 + len(asked):
        raise ModelError(f"the kernel gave {len(pairs)} answers, expected {3 + len(asked)}")
    return max(_farthest(*pair) for pair in pairs)


def _farthest(answer: Tensor, reference: Tensor) -> float:
    if answer.shape != reference.shape:
        raise ModelError(f"an answer is {list(answer.shape)}, expected {list(reference.shape)}")
    difference = (answer - reference).abs() / reference.abs().clamp(min=1)
    return difference.nan_to_num(nan=math.inf).max().item()


D_HEADS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
GROUPS = (1, 2, 4)
LENGTHS = (1, 37, 257, 1024)


def every_shape() -> list[Shape]:
    """What `headcount doctor` compares: every size of heads, and for two of them GQA groups and
    sequences that fill no tile.
    """
    shapes = [Shape(4, 4, 257, d_head) for d_head in D_HEADS]
    shapes += [
        Shape(4, 4 // group, n_ctx, d_head)
        for d_head in (64, 128)
        for group in GROUPS
        for n_ctx in LENGTHS
    ]
    return list(dict.fromkeys(shapes))
