"""MLPs that take a long input in pieces, so that what lies between their layers stays small.

An MLP acts on each position alone, and between its layers it holds several times the stream's
numbers. Whole, these were the largest tensors of a pass over a long sequence. In pieces they stay
in the caches of a CPU, which is faster too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ROWS_OF_PIECE = 1024
"""Positions of a piece: fewer make products slower, more do not fit the caches."""


@contextmanager
def mlps_in_pieces(mlps: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, those of the modules that surely act on each position alone work in pieces."""
    # Layers may share a module.
    distinct = {id(mlp): mlp for mlp in mlps if "forward" not in vars(mlp)}
    divided = [mlp for mlp in distinct.values() if _is_positionwise(mlp)]
    for mlp in divided:
        # An attribute of the instance, so that hooks of the module still see the whole output.
        mlp.forward = partial(_forward_in_pieces, mlp.forward)
    try:
        yield
    finally:
        for mlp in divided:
            del mlp.forward


def _is_positionwise(mlp: nn.Module) -> bool:
    """Whether all its weights belong to linear layers. A mixture of experts is left as it is."""
    # Imported here, because a model is loaded by then, and with it the library.
    from transformers.pytorch_utils import Conv1D

    owners = [module for module in mlp.modules() if module._parameters or module._buffers]
    return bool(owners) and all(isinstance(owner, nn.Linear | Conv1D) for owner in owners)


def _forward_in_pieces(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as the module has it)
    """The output for `[batch pos d_model]`, computed for some rows at a time."""
    stream = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(stream, Tensor) or stream.dim() != 3:
        return forward(*args, **kwargs)
    rows = stream.flatten(0, 1)
    if len(rows) <= ROWS_OF_PIECE:
        return forward(stream)
    output = torch.empty_like(rows)
    for piece, part_of_output in zip(
        rows.split(ROWS_OF_PIECE), output.split(ROWS_OF_PIECE), strict=True
    ):
        part_of_output.copy_(forward(piece[None])[0])
    return output.view_as(stream)
