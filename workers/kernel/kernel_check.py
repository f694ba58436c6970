"""First contact with a GPU: the kernel must agree with the tiles before it measures anything.

Both get the same q, k and v, in the kernel's format, and the tiles compute in float64.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headcount.schemas.errors import ModelError
from headcount.schemas.scans.scan import PRECISIONS
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.number_formats import HALVES, rounded
from headcount.workers.engine.tile_sweep import Sweep
from headcount.workers.engine.token_pairs import TokenPairs, find_matches
from headcount.workers.kernel import sweep_kernel
from headcount.workers.model.attention_facts import AttentionFacts, window_of

if TYPE_CHECKING:
    from headcount.workers.model.model import Model

log = logging.getLogger(__name__)

ALLOWED = {"float32": 2e-5, "tf32": 5e-3, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest difference of an answer from the tiles, in proportion where an answer is above 1.

A split float32 product comes within 1e-6, and sums of a thousand terms add to that. One tf32
product comes within 1e-3. Halves round A before it meets v: to 5e-4 in float16, to 4e-3 in
bfloat16, each with room for a few terms.
"""

MOST_TOKENS = 1024  # of the compared sequences: every later tile is computed in the same way

EVERY_FACT = ("a soft cap", "a window", "ALiBi slopes", "a learned sink")
SOFT_CAP, WINDOW, SLOPES, SINK = EVERY_FACT

FactNames = frozenset[str]  # which facts a layer has besides its scale

PLAIN = FactNames()

DRAWN_FACTS = [
    PLAIN,
    *(FactNames({name}) for name in EVERY_FACT),
    FactNames({SOFT_CAP, WINDOW}),
    FactNames({WINDOW, SINK}),
]
"""What layers of models have: each fact alone, and those that models have together."""


@dataclass(frozen=True)
class Shape:
    """The sizes of q, k and v that a sweep gets."""

    heads: int
    kv_heads: int
    n_ctx: int
    d_head: int
    d_v: int | None = None  # the width of v; None if it is d_head

    def __str__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f"/{self.kv_heads}"
        sizes = f"heads {self.heads}{shared}, n_ctx {self.n_ctx}, d_head {self.d_head}"
        return sizes if self.d_v is None else f"{sizes}, d_v {self.d_v}"


@dataclass(frozen=True)
class Comparison:
    """What came of a kernel on one shape with some facts, in one format of factors."""

    shape: Shape
    facts: FactNames
    factors: str
    error: str  # why it did not compile or run; empty if it did
    difference: float  # the largest from the tiles; infinite if one is not finite

    @property
    def allowed(self) -> float:
        """The largest difference with which the kernel is used."""
        return ALLOWED[self.factors]

    @property
    def agrees(self) -> bool:
        """Whether the kernel may measure."""
        return not self.error and self.difference <= self.allowed


def in_words(shape: Shape, facts: FactNames) -> str:
    """The sizes and the facts of a layer, as a line of the log names it."""
    return ", ".join([str(shape), *sorted(facts, key=EVERY_FACT.index)])


def compare(
    sweep: Sweep, shape: Shape, factors: str, device: torch.device, facts: FactNames = PLAIN
) -> Comparison:
    """Ask a kernel every question, and compare its answers with those of the tiles."""
    generator = torch.Generator().manual_seed(shape.n_ctx)
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    # A model projects to q, k and v at once, so these are slices with large strides.
    width = max(shape.d_head, shape.d_v or 0)
    projected = torch.randn(2, shape.n_ctx, sum(heads), width, generator=generator)
    q, k, v = projected.to(device).transpose(1, 2).split(heads, 1)
    q, k, v = q[..., : shape.d_head], k[..., : shape.d_head], v[..., : shape.d_v or shape.d_head]
    if factors in HALVES:
        # Rounded before, so that what differs is the rounding of products alone.
        q, k, v = (rounded(x, factors) for x in (q, k, v))
    # Few different tokens, so that many pairs match; [batch pos].
    matches = find_matches(torch.randint(7, (2, shape.n_ctx), generator=generator).to(device))
    drawn = _drawn_facts(shape, facts, device)
    # The questions change how a kernel is compiled. So without facts it is also asked none.
    asked = [{"entropy", *matches}, set[str]()] if facts == PLAIN else [{"entropy", *matches}]
    try:
        differences = [_difference(sweep, (q, k, v), drawn, factors, matches, qs) for qs in asked]
    except torch.AcceleratorError:
        raise  # The device has failed for good; only a new process mends that.
    except Exception as error:  # Compilers raise all kinds of errors; all mean "use the tiles".
        lines = str(error).strip().splitlines() or [""]
        return Comparison(shape, facts, factors, f"{type(error).__name__}: {lines[0]}", math.inf)
    return Comparison(shape, facts, factors, "", max(differences))


def proven_sweep(model: Model, n_ctx: int, precision: str, device: str) -> Sweep | None:
    """The kernel, if it runs here and agrees with the tiles for the model's layers; else None."""
    factors = PRECISIONS[precision].scores
    torch_device = torch.device(device)
    if factors == "float64" or not sweep_kernel.available(torch_device):
        return None
    layers = layers_of(model, n_ctx)
    for shape, facts in layers:
        tried = compare(sweep_kernel.sweep, shape, factors, torch_device, facts)
        if not tried.agrees:
            problem = f"differs from the tiles by {tried.difference:.2g} (allowed {tried.allowed})"
            if tried.error:
                problem = f"does not compile or run ({tried.error})"
            log.warning(
                f"the GPU kernel is not used: with {in_words(shape, facts)} in {factors} it "
                f"{problem}; tiles measure instead, which is slower"
            )
            return None
    # Without layers the fused engine cannot run this model, so nothing is proved.
    return sweep_kernel.sweep if layers else None


def layers_of(model: Model, n_ctx: int) -> list[tuple[Shape, FactNames]]:
    """The different layers that the kernel will meet, those with fewer facts first."""
    layers: set[tuple[Shape, FactNames]] = set()
    for layer in model.info.attention_layers_or_all:
        layer_facts, sizes = model.facts(layer), model.sizes(layer)
        if layer_facts is None or sizes is None:
            continue
        d_v = None if sizes.d_v == sizes.d_qk else sizes.d_v
        shape = Shape(sizes.heads, sizes.kv_heads, min(n_ctx, MOST_TOKENS), sizes.d_qk, d_v)
        window = layer_facts.window if window_of(layer_facts, n_ctx) < n_ctx else None
        values = (layer_facts.soft_cap, window, layer_facts.slopes, layer_facts.sink)
        named = zip(EVERY_FACT, values, strict=True)
        facts = FactNames(name for name, value in named if value is not None)
        # `FusedPattern.without` leaves a layer its window alone.
        layers |= {(shape, PLAIN), (shape, facts & {WINDOW}), (shape, facts)}
    return sorted(layers, key=lambda layer: (len(layer[1]), str(layer[0]), sorted(layer[1])))


def _drawn_facts(shape: Shape, facts: FactNames, device: torch.device) -> AttentionFacts:
    generator = torch.Generator().manual_seed(shape.heads)
    # ALiBi's own slopes: 2^(-8 h / heads).
    head = torch.arange(1, shape.heads + 1)
    # About as high as a row's log-sum-exp, so that the sink takes about half of a row.
    sinks = math.log(shape.n_ctx) + torch.randn(shape.heads, generator=generator)
    return AttentionFacts(
        shape.d_head**-0.5,
        soft_cap=1.5 if SOFT_CAP in facts else None,
        # Of no tile's size, and short enough that late queries leave out whole tiles.
        window=max(1, shape.n_ctx // 3) if WINDOW in facts else None,
        slopes=torch.exp2(-8 * head / shape.heads).to(device) if SLOPES in facts else None,
        sink=sinks.to(device) if SINK in facts else None,
    )


def _difference(
    sweep: Sweep,
    factors: tuple[Tensor, Tensor, Tensor],
    facts: AttentionFacts,
    number_format: str,
    matches: dict[str, TokenPairs],
    questions: set[str],
) -> float:
    """The largest of the answers, relative above 1; infinite if one is not finite."""
    pairs = [pairs for name, pairs in matches.items() if name in questions]
    dtype = HALVES.get(number_format, torch.float32)
    in_format = [factor.to(dtype) for factor in factors]
    has_entropy = "entropy" in questions
    swept = sweep(*in_format, facts, pairs, entropy=has_entropy, number_format=number_format)
    tiles = FusedPattern(*factors, facts, matches, set(questions), number_format="float64")
    answers = [(swept.z, tiles.z), (swept.lse, tiles.lse), (swept.distance, tiles.distance())]
    if swept.entropy is not None:
        answers.append((swept.entropy, tiles.entropy()))
    answers += zip(swept.masses, map(tiles.mass, pairs), strict=True)
    # z, lse and distance come unasked. A kernel that forgets one must not pass.
    if len(answers) != 3 + len(questions):
        raise ModelError(f"the kernel gave {len(answers)} answers, expected {3 + len(questions)}")
    differences: list[float] = []
    for answer, reference in answers:
        if answer.shape != reference.shape:
            raise ModelError(f"an answer is {list(answer.shape)}, expected {list(reference.shape)}")
        # Distances may be hundreds of keys, shares are at most 1.
        difference = (answer - reference).abs() / reference.abs().clamp(min=1)
        differences.append(difference.nan_to_num(nan=math.inf).max().item())
    return max(differences)


D_HEADS = (16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256)


def every_layer() -> list[tuple[Shape, FactNames]]:
    """What `headcount doctor` compares: sizes of heads, shared keys, unfilled tiles, all facts."""
    shapes = [Shape(4, 4, 257, d_head) for d_head in D_HEADS]
    shapes += [
        Shape(2 * query_heads, 2, n_ctx, d_head)
        for d_head in (64, 128)
        for query_heads in (1, 2, 3, 4)
        for n_ctx in (1, 37, 257, 1024)
    ]
    shapes += [Shape(4, 2, 257, 64, d_v=80), Shape(4, 4, 257, 192, d_v=128)]
    with_facts = (Shape(6, 2, 257, 64), Shape(4, 2, 1024, 128, d_v=80))
    return [(shape, PLAIN) for shape in shapes] + [
        (shape, facts) for shape in with_facts for facts in DRAWN_FACTS
    ]
