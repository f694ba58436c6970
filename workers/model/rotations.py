"""How a layer rotates its queries by their positions, so that they can be rotated back.

The function that rotates, in a model's file in transformers, is wrapped during a pass and notes its
angles. Nothing is computed until somebody asks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

PREFIX = "apply_rotary"  # how the names of these functions begin
HEAD_AXIS = "unsqueeze_dim"  # the argument that says where the axis of heads is

# The first arguments of a function that rotates queries and keys at once; of one that rotates
# either, as in Gemma 4; and all of one that rotates either, with heads behind positions: GPT-J and
# CodeGen.
BOTH = ("q", "k", "cos", "sin")
ONE = ("x", "cos", "sin")
ONE_WITHOUT_AXIS = ("tensor", "sin", "cos")

LARGEST_ERROR = 1e-4
"""Largest difference, relative to the queries, between those that were given to a rotation and
those that are rotated back. A layer that does more than rotate them has a larger one.
"""

IS_NOTED = "headcount_notes_it"  # the attribute of functions that are wrapped
Rotate = Callable[..., tuple[Tensor, Tensor]]  # rotates q and k: `rotate(q, k, cos, sin, axis)`


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of a layer's queries."""

    rotate: Rotate | None  # None if its arguments are not known, or the layer does more
    cos: Tensor  # `[batch pos angle]`
    sin: Tensor
    width: int  # how many of a query's components are rotated: the first ones
    given: Tensor | None = None  # queries before, `[batch head pos width]`, for a check

    def at(self, positions: Tensor) -> Rotation:
        """The rotation that gives each token the angles of another position, `positions [pos]`."""
        return replace(self, cos=self.cos[:, positions], sin=self.sin[:, positions])

    def apply(self, q: Tensor) -> Tensor:
        """Queries or keys `[batch pos head d_head]`, rotated."""
        return self._turned(q, self.sin, 1.0)

    def undo(self, q: Tensor) -> Tensor:
        """Rotated queries `[batch pos head d_head]` as they were before."""
        # A rotation by the opposite angles. Where cos and sin are scaled, as YaRN scales them, both
        # rotations multiply by that factor.
        factor = self.cos.flatten()[0].square() + self.sin.flatten()[0].square()
        return self._turned(q, -self.sin, factor)

    def _turned(self, q: Tensor, sin: Tensor, divisor: Tensor | float) -> Tensor:
        assert self.rotate is not None
        # Some models rotate a part of each head and leave the rest as it is.
        part = q[..., : self.width]
        # The function takes queries and keys at once; here both are the same. Heads are axis 2.
        turned, _ = self.rotate(part, part, self.cos, sin, unsqueeze_dim=2)
        turned = (turned / divisor).to(q.dtype)
        if self.width == q.shape[-1]:
            return turned
        return torch.cat([turned, q[..., self.width :]], dim=-1)

    def checked(self, q: Tensor) -> Rotation:
        """The same without its copy of queries; without `rotate` if `q` is not undone."""
        if self.rotate is None or self.given is None:
            return self
        back = self.undo(q.transpose(1, 2)).transpose(1, 2)[..., : self.width]
        is_undone = self.given.shape == back.shape and (
            (back - self.given).norm() <= LARGEST_ERROR * self.given.norm()
        )
        return replace(self, given=None, rotate=self.rotate if is_undone else None)


@contextmanager
def noted_rotations(model: nn.Module, note: Callable[[Rotation], None]) -> Iterator[None]:
    """Within it, what rotates queries in the files of a model's modules tells `note` first."""
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    # A pass inside another one finds them wrapped already.
    found = [
        (file, name, function)
        for file in files
        for name, function in vars(file).items()
        if name.startswith(PREFIX)
        and inspect.isfunction(function)
        and not hasattr(function, IS_NOTED)
    ]
    for file, name, function in found:
        setattr(file, name, _noted(function, note))
    try:
        yield
    finally:
        for file, name, function in found:
            setattr(file, name, function)


def _noted(function: Callable[..., Any], note: Callable[[Rotation], None]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    # Once for each function, and not in every call.
    rotate = _of_both(function, tuple(signature.parameters))

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as the library has it)
        if rotate is None:
            note(Rotation(None, args[0], args[0], 0))
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = next(iter(bound.arguments.values()))  # Queries come first, or alone.
        width = given.shape[-1]
        cos, sin = bound.arguments["cos"], bound.arguments["sin"]
        if bound.arguments.get(HEAD_AXIS, 2) != 1:
            given = given.transpose(1, 2)
        has_positions = cos.dim() == 3
        note(Rotation(rotate if has_positions else None, cos, sin, width, given))
        return function(*args, **kwargs)

    setattr(noting, IS_NOTED, True)
    return noting


def _of_both(function: Callable[..., Any], parameters: tuple[str, ...]) -> Rotate | None:
    """A rotating function in the form of `Rotate`; None if its arguments are not known."""
    if parameters == ONE_WITHOUT_AXIS:

        def one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
            assert unsqueeze_dim == 2
            return function(x, sin, cos)

    elif parameters[:3] == ONE and HEAD_AXIS in parameters:
        one = function
    else:
        return function if parameters[:4] == BOTH and HEAD_AXIS in parameters else None

    return lambda q, k, cos, sin, unsqueeze_dim: (
        one(q, cos, sin, unsqueeze_dim=unsqueeze_dim),
        one(k, cos, sin, unsqueeze_dim=unsqueeze_dim),
    )
