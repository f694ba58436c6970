"""Keys and values as a cache stores them: rounded to a number format, and read back."""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from headcount.schemas.scans.cache_formats import CACHE_FORMATS
from headcount.schemas.scans.head_groups import groups_of
from headcount.schemas.statistics.effects import quantised
from headcount.schemas.values import Count, Index
from headcount.workers.interventions.intervention_registry import intervention
from headcount.workers.interventions.streaming import GroupCount, Groups, problem_of_groups
from headcount.workers.model.model import at_least_float32

FormatName = Literal[
    "fp8", "q8_0", "q4_0", "affine8", "channel4", "channel3", "rotated4", "rotated3", "rotated2",
    "mlx8", "mlx4", "mlx2",
]  # fmt: skip

LARGEST_FP8 = 448.0  # of float8_e4m3fn

LEAST_ROTATED = 64
"""Numbers that llama.cpp rotates together: of values so many, of keys the largest power of two that
makes up a head (`build_input_k_rot` and `build_input_v_rot` in its llama-kv-cache.cpp).
"""


def _fp8(x: Tensor) -> Tensor:
    """Numbers as float8_e4m3fn has them, the largest in the place of larger ones."""
    return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).to(x.dtype)


def _q8_0(x: Tensor) -> Tensor:
    """round(x / d) d, d = max |x| / 127."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    stored_scale = scale.half().to(x.dtype)
    return (x / scale.clamp(min=1e-30)).round() * stored_scale


def _q4_0(x: Tensor) -> Tensor:
    """min(15, ⌊x / d + 8.5⌋) d - 8 d, where -8 d is the number farthest from 0."""
    farthest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = farthest / -8
    stored_scale = scale.half().to(x.dtype)
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return ((x * inverse + 8.5).floor().clamp(0, 15) - 8) * stored_scale


def _mlx(x: Tensor, bits: int) -> Tensor:
    """Levels from the end e that is farther from 0, at a step that has 0 among them: the other end
    may be beyond the last one. round((x - e) / s) s + e, s = e / round(e n / (max - min)), n =
    2^bits - 1.
    """
    steps = 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = ((high - low) / steps).clamp(min=1e-7)
    is_low = low.abs() > high.abs()
    step, end = torch.where(is_low, step, -step), torch.where(is_low, low, high)
    count = (end / step).round()
    step = torch.where(count == 0, step, end / count)
    end = torch.where(count == 0, 0, end)
    return ((x - end) / step).round().clamp(0, steps) * step + end


STORE: dict[FormatName, Callable[[Tensor], Tensor]] = {
    "fp8": _fp8,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "affine8": partial(quantised, bits=8),
    "channel4": partial(quantised, bits=4),
    "channel3": partial(quantised, bits=3),
    "rotated4": partial(quantised, bits=4),
    "rotated3": partial(quantised, bits=3),
    "rotated2": partial(quantised, bits=2),
    "mlx8": partial(_mlx, bits=8),
    "mlx4": partial(_mlx, bits=4),
    "mlx2": partial(_mlx, bits=2),
}
"""What a format makes of blocks of numbers, along the last axis."""


def stored(x: Tensor, number_format: FormatName, rotated: int) -> Tensor:
    """x `[batch pos head d]` as it is read back, block by block, where each `rotated` numbers of a
    head are rotated before.
    """
    if rotated == 1:
        return _in_blocks(x, number_format)
    wide = at_least_float32(x).unflatten(-1, (-1, rotated))
    rotation = hadamard(rotated, wide.dtype, wide.device)
    turned = _in_blocks((wide @ rotation).flatten(-2), number_format).unflatten(-1, (-1, rotated))
    return (turned @ rotation).flatten(-2).to(x.dtype)


def _in_blocks(x: Tensor, number_format: FormatName) -> Tensor:
    of_format, store = CACHE_FORMATS[number_format], STORE[number_format]
    block, width = of_format.block, x.shape[-1]
    if of_format.along == "positions":
        assert block is not None
        complete = x.shape[1] // block * block
        blocks = x[:, :complete].unflatten(1, (-1, block)).movedim(2, -1)
        rounded = store(blocks).movedim(-1, 2).flatten(1, 2)
        return torch.cat([rounded, x[:, complete:]], 1)
    # A head narrower than a block is one.
    if block is None or width <= block or width % block:
        return store(x)
    return store(x.unflatten(-1, (-1, block))).flatten(-2)


def rotated_numbers(number_format: FormatName, width: int, *, of_keys: bool) -> int:
    """How many numbers of a head of this width are rotated together; 1: they are not.

    >>> [rotated_numbers(name, 96, of_keys=True) for name in ("rotated4", "q4_0", "affine8")]
    [32, 1, 1]
    """
    rotates, largest_power = CACHE_FORMATS[number_format].rotates, width & -width
    if rotates is None:
        return 1
    if rotates == "all":
        return largest_power
    size = max(LEAST_ROTATED, largest_power) if of_keys else LEAST_ROTATED
    return 1 if width % size else size


@cache
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The rotation `[size size]` of ±1/√size that is its own inverse; `size` is a power of two.

    >>> hadamard(4, torch.float32, torch.device("cpu")).tolist()[3]
    [0.5, -0.5, -0.5, 0.5]
    """
    signs = torch.tensor([[1, 1], [1, -1]], dtype=dtype, device=device)
    rotation = signs[:1, :1]
    while len(rotation) < size:
        rotation = torch.kron(signs, rotation)
    return rotation / math.sqrt(size)


def _refused(options: Mapping[str, Any], n_ctx: int) -> str | None:
    whole, end = options["whole"], options["end"]
    if not whole < end <= n_ctx:
        return (
            f"whole and end: expected whole < end <= n_ctx = {n_ctx}, so that anything is stored, "
            f"got {whole} and {end}"
        )
    return problem_of_groups(options)


@intervention(refuse=_refused)
def store_keys(
    rot_k: Tensor,
    layer: int,
    *,
    number_format: FormatName,
    whole: Index,
    end: Count,
    groups: GroupCount,
    chosen: Groups,
) -> Tensor:
    """The keys of the chosen groups of heads are rounded as a cache of that number format stores
    them, after any rotation; those of the first `whole` positions and from position `end` on are
    not. `groups` and `chosen` are as in stream_groups.
    """
    rotated = rotated_numbers(number_format, rot_k.shape[-1], of_keys=True)
    return _rounded(rot_k, layer, number_format, rotated, slice(whole, end), groups, chosen)


@intervention(refuse=_refused)
def store_values(
    v: Tensor,
    layer: int,
    *,
    number_format: FormatName,
    whole: Index,
    end: Count,
    groups: GroupCount,
    chosen: Groups,
) -> Tensor:
    """What store_keys does to keys, for values."""
    rotated = rotated_numbers(number_format, v.shape[-1], of_keys=False)
    return _rounded(v, layer, number_format, rotated, slice(whole, end), groups, chosen)


def _rounded(
    x: Tensor,
    layer: int,
    number_format: FormatName,
    rotated: int,
    positions: slice,
    groups: int,
    chosen: str,
) -> Tensor:
    n_heads = x.shape[2]
    members = {group for of_layer, group in groups_of(groups, chosen) if of_layer == layer}
    heads = [head for head in range(n_heads) if head * groups // n_heads in members]
    if not heads:
        return x
    changed = x.clone()
    changed[:, positions, heads] = stored(x[:, positions, heads], number_format, rotated)
    return changed
