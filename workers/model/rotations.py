"""How a layer rotates its queries by their positions, so that they can be rotated back.

A model's file in transformers has a function that rotates queries and keys. It is wrapped, so that
each call notes its angles. Nothing else changes, and nothing is computed until somebody asks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PREFIX = "apply_rotary"
"""How the names of these functions begin."""

KNOWN_ARGUMENTS = ("q", "k", "cos", "sin")
"""The first arguments of a rotation that can be undone."""

LARGEST_ERROR = 1e-4
"""Largest difference, relative to the queries, between those that were given to a rotation and
those that are rotated back. A layer that does more than rotate them has a larger one.
"""

IS_NOTED = "headcount_notes_it"
"""The attribute of functions that are wrapped."""

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""`rotate(q, k, cos, sin, unsqueeze_dim)`, which returns both rotated."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of a layer's queries."""

    rotate: Rotate | None
    """None if the function has other arguments than `KNOWN_ARGUMENTS`."""
    cos: Tensor
    """`[batch pos angle]`."""
    sin: Tensor
    width: int
    """How many of a query's components are rotated: the first ones."""
    given: Tensor | None = None
    """The queries before it, in the layout of the model; kept only for a check."""

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
        part = q[..., : self.width]
        turned, _ = self.rotate(part, part, self.cos, sin, unsqueeze_dim=2)
        turned = (turned / divisor).to(q.dtype)
        if self.width == q.shape[-1]:
            return turned
        return torch.cat([turned, q[..., self.width :]], dim=-1)

    def without_queries(self) -> Rotation:
        """The same without its copy of the queries."""
        return replace(self, given=None)

    def checked(self, q: Tensor) -> Rotation:
        """The same without its copy of the queries; one that cannot be undone if it fails.

        `q [batch head pos d_head]` is what the layer multiplies.
        """
        if self.rotate is None or self.given is None:
            return self
        given = self.given if self.given.shape[1] == q.shape[1] else self.given.transpose(1, 2)
        back = self.undo(q.transpose(1, 2)).transpose(1, 2)[..., : self.width]
        is_undone = (
            given.shape == back.shape
            and ((back - given).norm() <= LARGEST_ERROR * given.norm()).item()
        )
        return replace(self, given=None, rotate=self.rotate if is_undone else None)


def note_rotations(model: nn.Module, note: Callable[[Rotation], None]) -> None:
    """Wrap the functions that rotate queries in the files of a model's modules.

    Each call gives what it does to `note` first.
    """
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, function in list(_rotating_functions(file)):
            setattr(file, name, _noted(function, note))


def _rotating_functions(file: ModuleType) -> Iterator[tuple[str, Rotate]]:
    """The functions of a file that rotate and are not wrapped yet."""
    for name, function in vars(file).items():
        is_wrapped = hasattr(function, IS_NOTED)
        if name.startswith(PREFIX) and inspect.isfunction(function) and not is_wrapped:
            yield name, function


def _noted(function: Rotate, note: Callable[[Rotation], None]) -> Rotate:
    """The function, which tells `note` what it does."""
    parameters = tuple(inspect.signature(function).parameters)
    is_known = parameters[:4] == KNOWN_ARGUMENTS and "unsqueeze_dim" in parameters

    @functools.wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as the library has it)
        if is_known:
            known = inspect.signature(function).bind(*args, **kwargs).arguments
            q, cos, sin = known["q"], known["cos"], known["sin"]
            has_positions = cos.dim() == 3
            note(Rotation(function if has_positions else None, cos, sin, q.shape[-1], q))
        else:
            note(Rotation(None, args[0], args[0], 0))
        return function(*args, **kwargs)

    setattr(rotate, IS_NOTED, True)
    return rotate
