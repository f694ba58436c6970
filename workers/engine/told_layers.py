"""How far a forward pass is, while it runs: by the layers that it has gone through.

A batch of a large model takes minutes on a CPU, and nobody should wait for its end to see a sign.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

TELL_SECONDS = 1.0  # between two signs of a pass: short ones give none

BACKWARD = 2  # what a layer costs on the way back, in passes forward


@contextmanager
def told_by_layers(
    blocks: Sequence[nn.Module],
    passes: int,
    with_gradients: bool,
    tell: Callable[[float], None],
) -> Iterator[None]:
    """Within it, `tell` is called now and then with the share of `passes` that is done."""
    total = passes * len(blocks) * (1 + BACKWARD * with_gradients)
    done, last_sign = 0, time.monotonic()

    def count(layers: int) -> None:
        nonlocal done, last_sign
        done += layers
        if time.monotonic() - last_sign >= TELL_SECONDS:
            last_sign = time.monotonic()
            tell(min(1.0, done / total))

    def behind(_block: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401 - of any layer
        count(1)
        stream = output[0] if isinstance(output, tuple) else output
        if isinstance(stream, Tensor) and stream.requires_grad:
            # Its gradient arrives when the backward pass has gone through all later layers.
            stream.register_hook(lambda _: count(BACKWARD))

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(behind))
        yield
