"""One of two models that are compared: run whole, or a layer at a time on a stream of the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headcount.schemas.errors import ModelError
from headcount.workers.engine.engine import StopPass
from headcount.workers.engine.fused_pattern import FusedPattern
from headcount.workers.engine.prediction_inputs import row_chunks
from headcount.workers.model.attention_facts import (
    Attend,
    AttentionFacts,
    all_scores,
    pattern_of,
    weighted_values,
)
from headcount.workers.model.attention_layers import attending
from headcount.workers.model.bare_modules import first_of
from headcount.workers.model.model import Model

NOTHING = torch.empty(0)  # what has not been computed yet

LOSS_POSITIONS = 128  # of a sequence whose loss is taken: vocabularies may be large


def swept(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """Attention as it is measured: z `[batch pos head d_v]`, a tile of scores at a time."""
    return FusedPattern(q, k, v, facts, {}).z.transpose(1, 2)


def built(q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """The same of the whole matrix, which adds up in another order."""
    return weighted_values(pattern_of(all_scores(q, k, facts), facts), v).transpose(1, 2)


def given_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """What a module is given first, as an argument or by the name that libraries use."""
    return args[0] if args else kwargs.get("hidden_states")


def with_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], stream: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module with another stream."""
    return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})


@dataclass
class WholePass:
    """One pass from the tokens to the last norm."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """How each layer was called. Its stream is another one when the layer is run again."""
    first_stream: Tensor = NOTHING  # given to the first layer
    last_outputs: tuple[Any, ...] | None = None  # beside the stream, if layers put out several
    last_stream: Tensor = NOTHING
    normed: Tensor = NOTHING  # `[batch pos d_model]` that the unembedding reads


class Side:
    """A model under a name that messages use."""

    def __init__(self, name: str, model: Model) -> None:
        self.name = name
        self.model = model
        self.bare: Any = model.bare
        if model.attention_problem is not None:
            raise ModelError(
                f"{name}, {model.info.name}: {model.attention_problem}; expected a causal language "
                "model that the fused engine measures, as headcount doctor --model says"
            )
        if not model.modules("unembed"):
            raise ModelError(f"{name}: no unembedding was found, so there are no predictions")

    def run(
        self,
        tokens: Tensor,
        around: Callable[[ExitStack], None] = lambda _: None,
        attend: Attend = swept,
    ) -> WholePass:
        """Run it whole, but for the unembedding; `around` may add hooks of its own."""
        whole = WholePass()
        last = len(self.model.blocks) - 1

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not whole.calls:
                whole.first_stream = given_stream(args, kwargs).clone()
            whole.calls.append(with_stream(args, kwargs, NOTHING))

        def end(layer: int, _module: nn.Module, _args: object, output: object) -> None:
            stream = first_of(output)
            assert isinstance(stream, Tensor)
            if not stream.isfinite().all():
                problem = self.model.weight_problem or "its numbers overflow there"
                raise ModelError(
                    f"{self.name}: layer {layer} puts out NaN or infinity ({problem}), expected "
                    "numbers; nothing can be compared behind it"
                )
            if layer == last:
                whole.last_stream = stream.clone()
                has_more = isinstance(output, tuple | list)
                whole.last_outputs = (*output[1:],) if has_more else None

        def end_pass(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            whole.normed = args[0].clone()
            raise StopPass

        with ExitStack() as hooks:
            for layer, block in enumerate(self.model.blocks):
                hooks.enter_context(block.register_forward_pre_hook(begin, with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(partial(end, layer)))
            (unembedding,) = self.model.modules("unembed")
            hooks.enter_context(unembedding.register_forward_pre_hook(end_pass))
            around(hooks)
            with suppress(StopPass):
                self.model.run_bare(tokens, attend)
        return whole

    def run_layer(self, whole: WholePass, layer: int, stream: Tensor, attend: Attend) -> Tensor:
        """What a layer puts out for a stream, called as it was in a pass of this model."""
        args, kwargs = with_stream(*whole.calls[layer], stream.clone())
        with attending(self.bare, attend, checks_rotations=True):
            # Not the call, because hooks of a pass that goes on may be on the layer.
            output = first_of(self.model.blocks[layer].forward(*args, **kwargs))
        assert isinstance(output, Tensor)
        return output

    def normed_of(self, whole: WholePass, tokens: Tensor, stream: Tensor) -> Tensor:
        """What the unembedding reads if the last layer puts out this stream."""
        blocks = self.model.blocks

        def stand_in(is_last: bool, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            handed_on = stream.clone() if is_last else given_stream(args, kwargs)
            more = whole.last_outputs
            return handed_on if more is None else (handed_on, *more)

        for block in blocks:
            # Of the instance alone. Some modules hand on what is set as an attribute.
            vars(block)["forward"] = partial(stand_in, block is blocks[-1])
        try:
            return self.run(tokens).normed
        finally:
            for block in blocks:
                del vars(block)["forward"]

    def losses(self, normed: Tensor, tokens: Tensor) -> Tensor:
        """Mean loss of each sequence, at positions that are spread evenly over it: `[batch]`."""
        last = tokens.shape[1] - 1
        positions = torch.linspace(0, last - 1, min(last, LOSS_POSITIONS)).round().long()
        rows, nexts = normed[:, positions].flatten(0, 1), tokens[:, positions + 1].flatten()
        chunks = zip(row_chunks(self.model, rows), row_chunks(self.model, nexts), strict=True)
        losses = [
            nn.functional.cross_entropy(
                self.model.logits(chunk).float(), following, reduction="none"
            )
            for chunk, following in chunks
        ]
        return torch.cat(losses).view(len(tokens), -1).mean(1)
