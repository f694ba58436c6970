"""How the layers of a model add to the residual stream, found by looking at one pass."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.model.attention_check import CHECK_TOKENS, drawn_tokens
from headcount.workers.model.attention_facts import AttentionFacts
from headcount.workers.model.bare_modules import ATTENTION, child_of, first_of
from headcount.workers.model.model import Model

LARGEST_DIFFERENCE = 1e-4  # of what a layer adds to the stream, relative to it


@dataclass(frozen=True)
class LayerWrites:
    """A layer that does `resid_post = resid_pre + factor · (attention + other)`."""

    attention: nn.Module
    norm: nn.Module | None  # what the attention's output passes before it is added; None if nothing
    other: nn.Module | None  # what puts out the rest; None if there is none
    factor: float

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules, by what their output is."""
        yield "attn_out", self.attention
        if self.norm is not None:
            yield "normed_attn_out", self.norm
        if self.other is not None:
            yield "other", self.other


@dataclass
class _Seen:
    """A module that ran, with the first of its inputs and of its outputs."""

    module: nn.Module
    given: Tensor
    output: Tensor


class StreamWrites:
    """What writes to the stream of a model, layer by layer, and the norm behind the last layer."""

    def __init__(self, model: Model) -> None:
        self.layers: dict[int, LayerWrites] = {}  # of the layers of which it is known
        self.last_norm: nn.Module | None = None  # None if the model has none
        self.is_known = False  # whether the unembedding reads the last layer's stream
        seen, final = _seen_in(model)
        stream: Tensor | None = None
        for layer, block in enumerate(model.blocks):
            whole = next((one for one in seen if one.module is block), None)
            if whole is None or whole.given.shape != whole.output.shape:
                continue
            stream = whole.output
            parts = set(block.modules()) - {block}
            inside = [one for one in seen if one.module in parts]
            writes = _writes_of(child_of(block, ATTENTION), inside, whole)
            if writes is not None:
                self.layers[layer] = writes
        # What makes the tensor that the unembedding reads, and does not only hand it on.
        made = (one for one in seen if final is not None and _is_same(one.output, final))
        last = next((one for one in made if not _is_same(one.given, one.output)), None)
        if last is not None and stream is not None:
            self.last_norm = None if last.module in model.blocks else last.module
            self.is_known = _is_same(last.output if self.last_norm is None else last.given, stream)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.data_ptr() == b.data_ptr()


def _writes_of(
    attention: nn.Module | None, inside: list[_Seen], whole: _Seen
) -> LayerWrites | None:
    added = whole.output - whole.given
    of_attention = next((one for one in inside if one.module is attention), None)
    if attention is None or of_attention is None or of_attention.output.shape != added.shape:
        return None
    # What the attention puts out may pass a norm. What takes it is told by the tensor itself.
    after = [
        one
        for one in inside
        if one.given is of_attention.output
        and one is not of_attention
        and one.output.shape == added.shape
    ]
    # The outermost module of the rest has ended last. Some put out one axis for sequences and
    # positions, so shapes are compared by their size.
    others = [one for one in reversed(inside) if one.output.numel() == added.numel()]
    for written in (of_attention, *after):
        for other in (None, *others):
            total = (
                written.output
                if other is None
                else written.output + other.output.reshape(added.shape)
            )
            factor = float((added * total).sum() / total.square().sum())
            if (added - factor * total).norm() <= LARGEST_DIFFERENCE * added.norm():
                factor = 1.0 if abs(factor - 1) < LARGEST_DIFFERENCE else factor
                norm = None if written is of_attention else written.module
                return LayerWrites(attention, norm, other and other.module, factor)
    return None


def _seen_in(model: Model) -> tuple[list[_Seen], Tensor | None]:
    """The modules that run in a pass over a few tokens, in the order in which they end, and what
    the unembedding reads.
    """
    seen: list[_Seen] = []
    read: list[Tensor] = []

    def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401
        given, output = next(iter((*args, *kwargs.values())), None), first_of(output)
        if isinstance(given, Tensor) and isinstance(output, Tensor):
            seen.append(_Seen(module, given, output))

    def attend(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
        return FusedPattern(q, k, v, facts, {}).z.transpose(1, 2).to(v.dtype)

    tokens = drawn_tokens(model.info, 1, CHECK_TOKENS).to(model.device)
    with torch.no_grad(), ExitStack() as hooks:
        for module in model.modules("unembed"):
            keep = lambda _module, args: read.append(args[0])  # noqa: E731
            hooks.enter_context(module.register_forward_pre_hook(keep))
        for module in model.bare.modules():
            hooks.enter_context(module.register_forward_hook(see, with_kwargs=True))
        model.run_bare(tokens, attend)
    return seen, next(iter(read), None)
