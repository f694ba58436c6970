"""How products are computed in each number format, on devices that have it and on those that can
only imitate it.

An imitated format rounds the factors as the device would and multiplies in float32: the same drift,
no gain in speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

TWO = "float16x2"
"""Activations in float16, each weight as the sum of two float16 numbers."""

TF32_DROPPED = 13
"""Bits of a float32's mantissa that TF32 does not have."""


def rounded(x: Tensor, factors: str) -> Tensor:
    """x as a factor of a product in the format `factors`, held in float32 (or float64)."""
    if factors in HALVES:
        return x.to(HALVES[factors]).float()
    if factors == "tf32":
        bits = x.float().view(torch.int32)
        half = (1 << TF32_DROPPED - 1) - 1 + (bits >> TF32_DROPPED & 1)  # To nearest, ties to even.
        return (bits + half >> TF32_DROPPED << TF32_DROPPED).view(torch.float32)
    return x.double() if factors == "float64" else x.float()


class Products(TorchFunctionMode):
    """While it is on, linear layers multiply in another way than PyTorch would by itself."""

    def __init__(self, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        """`linear(x, weight, bias)` stands for `x @ weight.T + bias`."""
        super().__init__()
        self.linear = linear

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not kwargs and func is F.linear:
            return self.linear(args[0], args[1], args[2] if len(args) > 2 else None)
        if not kwargs and func is torch.addmm:  # Hugging Face's Conv1D, with the bias first.
            bias, x, weight = args
            return self.linear(x, weight.T, bias)
        return func(*args, **(kwargs or {}))


def linears_in(factors: str, device: str) -> AbstractContextManager[Any]:
    """Within it, linear layers multiply factors of the format `factors`."""
    if factors in HALVES or factors == TWO:
        return Products(partial(_half if _has(factors, device) else _imitated, factors=factors))
    if factors == "tf32":
        return _Tf32() if _has(factors, device) else Products(partial(_imitated, factors=factors))
    if factors == "float32" and device == "cpu" and _has_onednn():
        return Products(_onednn)
    return nullcontext()


def _has(factors: str, device: str) -> bool:
    """Whether the device multiplies in that format at speed."""
    if device == "cuda":
        return True
    return factors == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _half(x: Tensor, weight: Tensor, bias: Tensor | None, factors: str) -> Tensor:
    if x.device.type == "cpu":  # It rounds its results too.
        x, weight = x.to(HALVES[factors]), weight.to(HALVES[factors])
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if factors == TWO:  # One product, twice as deep.
        high, low = _two(weight)
        x, weight = x.half().repeat(*(1 for _ in x.shape[:-1]), 2), torch.cat([high, low], dim=-1)
    else:
        x, weight = x.to(HALVES[factors]), weight.to(HALVES[factors])
    out = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return out if bias is None else out.add_(bias)


def _imitated(x: Tensor, weight: Tensor, bias: Tensor | None, factors: str) -> Tensor:
    if factors == TWO:
        high, low = _two(weight)
        return F.linear(rounded(x, "float16"), high.float() + low.float(), bias)
    return F.linear(rounded(x, factors), rounded(weight, factors), bias)


def _two(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 number as a float16 one and the float16 remainder: 21 bits where neither is
    subnormal.
    """
    high = weight.half()
    return high, (weight - high).half()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _has_onednn() -> bool:
    """Whether PyTorch can be asked for oneDNN's float32 product, 1.2 to 1.4 times as fast as its
    own on AMD's CPUs.
    """
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class _Tf32:
    """TF32 tensor cores for float32 products."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.fp32_precision = self.before
