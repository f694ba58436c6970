"""Whether a weight is another one as a narrower number format holds it."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = {"float16": (torch.float16, 10, 2.0**-24), "bfloat16": (torch.bfloat16, 7, 0.0)}
"""Formats by name: bits of the mantissa, and the distance of the numbers around 0."""

FORMATS = (*FLOATS, "8-bit", "4-bit")  # from the finest to the coarsest

BLOCK = 16  # weights of a row that share a scale in every format of integers
SAMPLED_BLOCKS = 1024
LEVELS = 255  # steps between the smallest and the largest number of a block, at most
OFF_GRID = {15: 0.06, LEVELS: 0.02}  # of a step: what a float makes of an integer times a scale
MOST_STEPS = 0.6  # root mean square of the differences in steps; to the nearest gives 0.29
MOST_TAIL = 1.5  # the same over the median: rounding gives 1.2 to 1.4, a normal distribution 1.5
LEAST_LEFT, FEW_ROWS = 0.8, 0.02
"""What a scale of its row leaves of a difference, at least, but in this share of the rows."""


def rounding_between(ours: Tensor, theirs: Tensor) -> str | None:
    """The finest format whose rounding explains what lies between two weights; None if none does.

    One of them must hold numbers of that format, and none of them may be further from the other
    than rounding carries it.
    """
    if ours.shape != theirs.shape:
        return None
    for name, (dtype, mantissa, least) in FLOATS.items():
        _, exponent = torch.frexp(torch.maximum(ours.abs(), theirs.abs()))
        step = torch.ldexp(torch.ones_like(ours), exponent - 1 - mantissa).clamp(min=least)
        # A little more than a half, because the other may have been rounded to a finer format.
        is_near = ((ours - theirs).abs() <= MOST_STEPS * step).all()
        if is_near and any(x.to(dtype).to(x.dtype).equal(x) for x in (ours, theirs)):
            return name
    return _integer_rounding(ours, theirs) if ours.dim() >= 2 else None


def _integer_rounding(ours: Tensor, theirs: Tensor) -> str | None:
    a, b = ours.flatten(0, -2), theirs.flatten(0, -2)  # [row column]
    slopes = (a * b).sum(1, keepdim=True) / a.square().sum(1, keepdim=True).clamp(min=1e-30)
    is_scaled = (b - slopes * a).norm(dim=1) < LEAST_LEFT * (b - a).norm(dim=1)
    if a.shape[1] % BLOCK or is_scaled.float().mean() > FEW_ROWS:
        return None
    blocks = torch.stack([a, b]).unflatten(2, (-1, BLOCK)).flatten(1, 2)  # [side block column]
    blocks = blocks[:, (blocks[0] != blocks[1]).any(1)]
    generator = torch.Generator().manual_seed(0)
    sample = torch.randperm(blocks.shape[1], generator=generator)[:SAMPLED_BLOCKS]
    blocks = blocks[:, sample]
    (levels, coarsest), (finer, _) = sorted(
        ((_levels(side), side) for side in blocks), key=lambda pair: pair[0]
    )
    if levels > LEVELS:
        return None
    steps = ((coarsest.amax(1) - coarsest.amin(1)) / levels).clamp(min=1e-12)  # [block]
    distances = ((blocks[0] - blocks[1]) / steps[:, None]).abs()
    size = float(distances.square().mean().sqrt())
    # A model on a grid may have been changed by less than a step, which is no rounding. What was
    # changed lies on no grid.
    is_even = finer <= LEVELS or size <= MOST_TAIL * float(distances.median())
    if size > MOST_STEPS or not is_even:
        return None
    return "4-bit" if levels <= 15 else "8-bit"


def _levels(blocks: Tensor) -> int:
    """How many steps the blocks `[block column]` have between their extremes, by nearly all of
    them; more than `LEVELS` if they lie on no grid.
    """
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    shares = (blocks - low) / (high - low).clamp(min=1e-12)  # from 0 to 1
    needed = torch.full((len(blocks),), LEVELS + 1)
    for levels in range(LEVELS, 0, -1):
        places = shares * levels
        allowed = OFF_GRID[15 if levels <= 15 else LEVELS]
        needed[((places - places.round()).abs() <= allowed).all(1)] = levels
    return int(needed.float().quantile(0.95).item())
