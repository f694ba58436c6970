"""Keys and values as a cache stores them: rounded to a number format, and read back."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from headcount.schemas.scans.cache_formats import CACHE_FORMATS
from headcount.schemas.scans.head_groups import groups_of
from headcount.schemas.statistics.effects import quantised
from headcount.schemas.values import Index
from headcount.workers.interventions.intervention_registry import intervention
from headcount.workers.interventions.streaming import GroupCount, Groups, problem_of_groups
from headcount.workers.model.model import at_least_float32

FormatName = Literal[
    "fp8", "q8_0", "q4_0", "affine8", "affine4", "affine2", "mlx8", "mlx4", "mlx2"
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
    "affine4": partial(quantised, bits=4),
    "affine2": partial(quantised, bits=2),
    "mlx8": partial(_mlx, bits=8),
    "mlx4": partial(_mlx, bits=4),
    "mlx2": partial(_mlx, bits=2),
}
"""What a format makes of blocks of numbers, along the last axis."""


def stored(x: Tensor, number_format: FormatName, rotated: int) -> Tensor:
    """x `[… d_head]` as it is read back, block by block. A head narrower than a block is one.

    A format of llama.cpp first rotates each `rotated` numbers, if a head is made of these.
    """
    if not CACHE_FORMATS[number_format].rotates or x.shape[-1] % rotated:
        return _in_blocks(x, number_format)
    wide = at_least_float32(x).unflatten(-1, (-1, rotated))
    rotation = hadamard(rotated, wide)
    return (_in_blocks(wide @ rotation, number_format) @ rotation).flatten(-2).to(x.dtype)


def _in_blocks(x: Tensor, number_format: FormatName) -> Tensor:
    block = CACHE_FORMATS[number_format].block
    width = x.shape[-1]
    if block is None or width <= block or width % block:
        return STORE[number_format](x)
    return STORE[number_format](x.unflatten(-1, (-1, block))).flatten(-2)


def hadamard(size: int, like: Tensor) -> Tensor:
    """The rotation `[size size]` of ±1/√size that is its own inverse; `size` is a power of two.

    >>> hadamard(4, torch.ones(1)).tolist()[3]
    [0.5, -0.5, -0.5, 0.5]
    """
    rotation = like.new_ones(1, 1)
    while len(rotation) < size:
        rotation = torch.kron(like.new_tensor([[1, 1], [1, -1]]), rotation)
    return rotation / math.sqrt(size)


def _refused(options: Mapping[str, Any], n_ctx: int) -> str | None:
    whole = options["whole"]
    if whole >= n_ctx:
        return f"whole: expected less than n_ctx = {n_ctx}, so that anything is stored, got {whole}"
    return problem_of_groups(options)


@intervention(refuse=_refused)
def store_keys(
    rot_k: Tensor,
    layer: int,
    *,
    number_format: FormatName,
    whole: Index,
    groups: GroupCount,
    chosen: Groups,
) -> Tensor:
    """The keys of the chosen groups of heads are rounded as a cache of that number format stores
    them, after any rotation; those of the first `whole` positions are not. `groups` and `chosen`
    are as in stream_groups.
    """
    width = rot_k.shape[-1]
    # The largest power of two that divides the width.
    rotated = max(LEAST_ROTATED, width & -width)
    return _rounded(rot_k, layer, number_format, rotated, whole, groups, chosen)


@intervention(refuse=_refused)
def store_values(
    v: Tensor,
    layer: int,
    *,
    number_format: FormatName,
    whole: Index,
    groups: GroupCount,
    chosen: Groups,
) -> Tensor:
    """What store_keys does to keys, for values."""
    return _rounded(v, layer, number_format, LEAST_ROTATED, whole, groups, chosen)


def _rounded(
    x: Tensor,
    layer: int,
    number_format: FormatName,
    rotated: int,
    whole: int,
    groups: int,
    chosen: str,
) -> Tensor:
    n_heads = x.shape[2]
    members = {group for of_layer, group in groups_of(groups, chosen) if of_layer == layer}
    heads = [head for head in range(n_heads) if head * groups // n_heads in members]
    if not heads:
        return x
    changed = x.clone()
    changed[:, whole:, heads] = stored(x[:, whole:, heads], number_format, rotated)
    return changed
