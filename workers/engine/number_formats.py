"""How products are computed in each number format, on devices that have it and on those that can
only imitate it: they round the factors and multiply in float32, with the same drift and no gain.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOAT16X2 = "float16x2"  # activations in float16, each weight as the sum of two float16 numbers
TF32_DROPPED_BITS = 13  # bits of a float32's mantissa that TF32 does not have
LEAST_FREE = 0.5  # share of a GPU's memory that stays free of split weights, for batches


def rounded(x: Tensor, number_format: str) -> Tensor:
    """x as a factor in a format, held in float32 or float64; x itself if nothing is rounded."""
    if number_format in HALVES:
        return x.to(HALVES[number_format]).float()
    if number_format == "tf32":
        # To the nearest number of TF32, and to the even one of two that are equally near. The bits
        # of a float's magnitude count upwards with it, so rounding is integer arithmetic: add a
        # little less than half of the last bit that stays, and one more if that bit is set. Then
        # cut.
        bits = x.float().view(torch.int32)
        last_bit = bits >> TF32_DROPPED_BITS & 1
        below_half = (1 << TF32_DROPPED_BITS - 1) - 1
        bits = bits + (below_half + last_bit)
        return (bits >> TF32_DROPPED_BITS << TF32_DROPPED_BITS).view(torch.float32)
    return x.double() if number_format == "float64" else x.float()


class WeightHalves:
    """Weights as two float16 numbers each, split once, not in every product, if memory allows."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = {parameter.data_ptr(): parameter for parameter in parameters}
        self._halves: dict[tuple[int, tuple[int, ...]], tuple[int, Tensor]] = {}
        """The version of a parameter when it was split, and `[high | low]`.

        By its place and the strides of the weight: a layer may read it transposed.
        """

    def of(self, weight: Tensor) -> Tensor:
        """`[high | low]` of a weight `[out in]`: float16 `[out 2·in]`."""
        parameter = self._parameters.get(weight.data_ptr())
        # A part of a parameter begins where the parameter begins, so the size is asked for too.
        if parameter is None or parameter.numel() != weight.numel():
            return _two_halves(weight)
        # PyTorch counts the writes to a tensor and its views: a change makes the halves stale.
        key = (weight.data_ptr(), weight.stride())
        version, halves = self._halves.get(key, (-1, weight))
        if version != parameter._version:
            self._halves.pop(key, None)  # Before the new ones take memory.
            halves = _two_halves(weight)
            has_room = True
            if weight.is_cuda:
                free, total = torch.cuda.mem_get_info(weight.device)
                has_room = free >= LEAST_FREE * total
            if has_room:
                self._halves[key] = (parameter._version, halves)
        return halves


class LinearProducts(TorchFunctionMode):
    """While it is on, linear layers multiply in another way than PyTorch would by itself.

    It changes the call and not the module: a second set of weights, cast to the format, would not
    see changes of the first.
    """

    def __init__(self, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        """`linear(x, weight, bias)` is called instead of `x @ weight.T + bias`."""
        super().__init__()
        self.linear = linear

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if not kwargs and func is F.linear:
            x, weight = args[:2]
            return self.linear(x, weight, args[2] if len(args) > 2 else None)
        if not kwargs and func is torch.addmm:  # Hugging Face's Conv1D, with the bias first.
            bias, x, weight = args
            return self.linear(x, weight.T, bias)
        return func(*args, **(kwargs or {}))


def linears_in(
    number_format: str, device: str, halves: WeightHalves | None = None
) -> AbstractContextManager[object]:
    """Within it, linear layers multiply factors in a format; `""` leaves them to PyTorch."""
    # Whether the device multiplies in that format at speed.
    is_native = device == "cuda"
    if device == "cpu" and number_format == "bfloat16":
        is_native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if number_format == FLOAT16X2:
        split = _two_halves if halves is None else halves.of
        return LinearProducts(partial(_split_product, split=split, is_native=is_native))
    if number_format == "tf32" and is_native:
        return _tf32_products()
    if number_format in (*HALVES, "tf32"):
        product = partial(_rounded_product, number_format=number_format, is_native=is_native)
        return LinearProducts(product)
    # PyTorch's own float32 product on a CPU is MKL's. On AMD's CPUs oneDNN's is 1.2 to 1.4 times as
    # fast. The operator is private, so a version of PyTorch may lack it.
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    )
    if number_format == "float32" and device == "cpu" and has_onednn:
        return LinearProducts(
            lambda x, weight, bias: (
                _OneDnnProduct.apply(x, weight, bias)
                if x.requires_grad
                else _onednn_product(x, weight, bias)
            )
        )
    return nullcontext()


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnProduct(torch.autograd.Function):
    """oneDNN's product with a weight that is frozen; PyTorch knows no gradient of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401
        ctx.weight = weight
        return _onednn_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _onednn_product(dy, ctx.weight.T, None), None, None


def outside_linears() -> AbstractContextManager[None]:
    """Within it, no call passes `LinearProducts`, which took a third of a small batch's time."""
    return torch._C.DisableTorchFunction()


def _rounded_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, number_format: str, is_native: bool
) -> Tensor:
    if not is_native:
        return F.linear(rounded(x, number_format), rounded(weight, number_format), bias)
    dtype = HALVES[number_format]
    if x.device.type == "cpu":  # It rounds its results to 16 bits too.
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return _summed_in_float32(x.to(dtype), weight.to(dtype), bias)


def _split_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    split: Callable[[Tensor], Tensor],  # makes `[high | low]` of a weight
    is_native: bool,
) -> Tensor:
    if not is_native:
        # In float32, which holds the sum of both halves exactly.
        high, low = split(weight).float().chunk(2, dim=-1)
        return F.linear(rounded(x, "float16"), high + low, bias)
    # x·(high + low) = [x | x]·[high | low]: one product that is twice as deep.
    once_for_each_axis = (1,) * (x.dim() - 1)
    return _summed_in_float32(x.half().repeat(*once_for_each_axis, 2), split(weight), bias)


def _summed_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.flatten(0, -2)  # [row in]: `mm` takes two axes
    product = torch.mm(rows, weight.T, out_dtype=torch.float32).view(*x.shape[:-1], -1)
    return product if bias is None else product.add_(bias)


def _two_halves(weight: Tensor) -> Tensor:
    """`[high | low]` of float32 numbers in float16: 21 bits if neither is subnormal."""
    high = weight.half()
    return torch.cat([high, (weight - high).half()], dim=-1)


@contextmanager
def _tf32_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    # A setting of the process, so it is put back.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
