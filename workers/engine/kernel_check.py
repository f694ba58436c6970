"""First contact with a GPU: the kernel is compared with the tiles before it measures anything.

Both get the same q, k and v, in the kernel's format, and the tiles multiply them in float32. So
only the rounding of products may differ.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schemas.errors import ModelError
from schemas.precision import PRECISIONS
from workers.engine import sweep_kernel
from workers.engine.fused_pattern import FusedPattern
from workers.engine.number_formats import HALVES, rounded
from workers.engine.sweep_kernel import PairLabels, Sweep
from workers.engine.token_pairs import TokenPairs, find_matches
from workers.model.attention_facts import AttentionFacts
from workers.model.model_info import ModelInfo

log = logging.getLogger(__name__)

ALLOWED = {"float32": 2e-5, "tf32": 5e-3, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest difference of an answer from the tiles, in proportion where an answer is above 1.

A split float32 product comes within 1e-6, and sums of a thousand terms add to that. One tf32
product comes within 1e-3. Halves round A before it meets v: to 5e-4 in float16, to 4e-3 in
bfloat16, each with room for a few terms.
"""

MOST_TOKENS = 1024
"""Tokens of the compared sequences, at most: every later tile is computed in the same way."""

KV_HEAD_FIELDS = (
    "num_key_value_heads", "num_global_key_value_heads", "num_kv_heads", "n_head_kv",
)  # fmt: skip
"""Fields of config.json that say how many heads of keys the query heads share."""


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
    """The largest from the tiles; infinite if an answer is not finite, or if there is none."""

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


@dataclass(frozen=True)
class Drawn:
    """Random factors of attention and random tokens, the same for the kernel and the tiles."""

    q: Tensor
    """`[batch head pos d_head]`; k and v have `kv_heads` of these heads."""
    k: Tensor
    v: Tensor
    tokens: Tensor
    """`[batch pos]`, few different ones, so that many pairs match."""

    @property
    def facts(self) -> AttentionFacts:
        """A scale of 1/√d_head, and nothing else."""
        return AttentionFacts(self.q.shape[3] ** -0.5)


def compare(sweep: Sweep, shape: Shape, factors: str, device: torch.device) -> Comparison:
    """Ask a kernel every question and then none, and compare its answers with those of the tiles.

    The questions change how a kernel is compiled, so both extremes are tried.
    """
    drawn = _drawn(shape, factors, device)
    matches = find_matches(drawn.tokens)
    every_question = {"entropy", *matches}
    try:
        difference = max(
            _difference(sweep, drawn, factors, matches, questions)
            for questions in (every_question, set[str]())
        )
    except torch.AcceleratorError:
        raise  # The device has failed for good; only a new process mends that.
    except Exception as error:  # Compilers raise all kinds of errors; all mean "use the tiles".
        lines = str(error).strip().splitlines() or [""]
        return Comparison(shape, factors, f"{type(error).__name__}: {lines[0]}", math.inf)
    return Comparison(shape, factors, "", difference)


def proven_sweep(info: ModelInfo, n_ctx: int, precision: str, device: str) -> Sweep | None:
    """The kernel, if the device can run it and it agrees with the tiles; None means tiles.

    It is tried with the model's heads, grouped as they share keys, in the scan's precision: how
    many heads share keys is a constant of the compiled kernel.
    """
    factors = PRECISIONS[precision].scores
    torch_device = torch.device(device)
    if factors == "float64" or not sweep_kernel.available(torch_device):
        return None
    for kv_heads in sorted(kv_heads_of(info)):
        shape = Shape(info.n_heads, kv_heads, min(n_ctx, MOST_TOKENS), info.d_head)
        comparison = compare(sweep_kernel.sweep, shape, factors, torch_device)
        if not comparison.agrees:
            log.warning(
                "the GPU kernel is not used: with %s in %s it %s; tiles measure instead, which is "
                "slower",
                shape,
                factors,
                comparison.problem,
            )
            return None
    return sweep_kernel.sweep


def kv_heads_of(info: ModelInfo) -> set[int]:
    """Every number of heads of keys that a model's config.json names: layers may differ in it."""
    config = json.loads((Path(info.path) / "config.json").read_text(encoding="utf-8"))
    named = {count for count in _named_kv_heads(config) if count > 0 and info.n_heads % count == 0}
    return named or {info.n_heads}


def _named_kv_heads(config: Mapping[str, Any]) -> Iterator[int]:
    """The numbers under the names of `KV_HEAD_FIELDS`, also in the parts of a config."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _named_kv_heads(value)
        elif name == "multi_query" and value is True:
            yield 1
        elif name in KV_HEAD_FIELDS and isinstance(value, int):
            yield value


def _drawn(shape: Shape, factors: str, device: torch.device) -> Drawn:
    """q, k and v as a projection leaves them, rounded to the format, and tokens."""
    generator = torch.Generator().manual_seed(shape.n_ctx)
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    # A model projects to q, k and v at once, so these are slices with large strides.
    projected = torch.randn(2, shape.n_ctx, sum(heads), shape.d_head, generator=generator)
    tokens = torch.randint(7, (2, shape.n_ctx), generator=generator).to(device)
    q, k, v = projected.to(device).transpose(1, 2).split(heads, 1)
    if factors in HALVES:
        # Rounded before, so that what differs is the rounding of products alone.
        q, k, v = rounded(q, factors), rounded(k, factors), rounded(v, factors)
    return Drawn(q, k, v, tokens)


def _difference(
    sweep: Sweep,
    drawn: Drawn,
    factors: str,
    matches: dict[str, TokenPairs],
    questions: set[str],
) -> float:
    """The largest difference between a kernel's answers to some questions and the tiles'."""
    requested_pairs = [pairs for name, pairs in matches.items() if name in questions]
    dtype = HALVES.get(factors, torch.float32)
    swept = sweep(
        drawn.q.to(dtype),
        drawn.k.to(dtype),
        drawn.v.to(dtype),
        drawn.facts,
        [PairLabels(pairs.query_label, pairs.key_label, pairs.lag) for pairs in requested_pairs],
        entropy="entropy" in questions,
        number_format=factors,
    )
    tiles = FusedPattern(drawn.q, drawn.k, drawn.v, drawn.facts, matches, set(questions))
    answers = [(swept.z, tiles.z), (swept.lse, tiles.lse), (swept.distance, tiles.distance())]
    if swept.entropy is not None:
        answers.append((swept.entropy, tiles.entropy()))
    tile_masses = [tiles.mass(pairs) for pairs in requested_pairs]
    answers += zip(swept.masses, tile_masses, strict=True)
    expected_count = 3 + len(questions)
    if len(answers) != expected_count:
        raise ModelError(f"the kernel gave {len(answers)} answers, expected {expected_count}")
    return max(_largest_difference(*pair) for pair in answers)


def _largest_difference(answer: Tensor, reference: Tensor) -> float:
    """In proportion where the reference is above 1; infinite if the answer is not finite."""
    if answer.shape != reference.shape:
        raise ModelError(f"an answer is {list(answer.shape)}, expected {list(reference.shape)}")
    difference = (answer - reference).abs() / reference.abs().clamp(min=1)
    return difference.nan_to_num(nan=math.inf).max().item()


D_HEADS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
QUERY_HEADS_PER_KEY = (1, 2, 4)
LENGTHS = (1, 37, 257, 1024)


def every_shape() -> list[Shape]:
    """What `headcount doctor` compares.

    Every size of heads, and for two of them grouped queries and sequences that fill no tile.
    """
    shapes = [Shape(4, 4, 257, d_head) for d_head in D_HEADS]
    shapes += [
        Shape(4, 4 // query_heads, n_ctx, d_head)
        for d_head in (64, 128)
        for query_heads in QUERY_HEADS_PER_KEY
        for n_ctx in LENGTHS
    ]
    return list(dict.fromkeys(shapes))  # Some shapes are in both lists.
