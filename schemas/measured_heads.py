"""Which heads of a model are measured, and how a scan names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from schemas.errors import ScanError

NUMBER = "(0|[1-9][0-9]{0,5})"
NAME = re.compile(f"L{NUMBER}H{NUMBER}")

ABSENT = -1
"""Stands for a head where a layer has fewer measured heads than the layer with most of them."""


class ModelSize(Protocol):
    """What of a model decides which heads it has."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def n_layers(self) -> int:
        """Its layers."""
        ...

    @property
    def n_heads(self) -> int:
        """Heads in a layer."""
        ...


@dataclass(frozen=True, order=True)
class Head:
    """A head, as a scan names it: in the words of the column `label`.

    >>> str(Head(5, 1))
    'L5H1'
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A scan file holds the text."""
        text = core_schema.no_info_after_validator_function(_head, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=text,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), text]),
            serialization=core_schema.to_string_ser_schema(when_used="always"),
        )


def _head(text: str) -> Head:
    match = NAME.fullmatch(text)
    if match is None:
        raise PydanticCustomError("head", "expected a layer and a head in it, as L5H1")
    return Head(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class MeasuredHeads:
    """The heads that are measured, by layer; layers and heads ascend.

    Values of some heads are kept as `[… layer head …]`. Both axes are places among those that are
    measured, and `numbers` says which head of the model a place is.
    """

    n_heads: int
    """Heads in a layer of the model."""
    by_layer: Mapping[int, tuple[int, ...]]

    @classmethod
    def every(cls, n_layers: int, n_heads: int) -> MeasuredHeads:
        """All heads of a model."""
        return cls(n_heads, dict.fromkeys(range(n_layers), tuple(range(n_heads))))

    @classmethod
    def of(cls, n_heads: int, heads: Iterable[Head]) -> MeasuredHeads:
        """Some heads of a model."""
        by_layer: dict[int, tuple[int, ...]] = {}
        for head in sorted(heads):
            by_layer[head.layer] = (*by_layer.get(head.layer, ()), head.head)
        return cls(n_heads, by_layer)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers with a head that is measured."""
        return tuple(self.by_layer)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All of them, by name."""
        return tuple(Head(layer, head) for layer, some in self.by_layer.items() for head in some)

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each layer."""
        return {layer: place for place, layer in enumerate(self.layers)}

    @cached_property
    def count(self) -> int:
        """How many heads are measured."""
        return sum(map(len, self.by_layer.values()))

    @cached_property
    def width(self) -> int:
        """Measured heads of the layer with most of them."""
        return max(map(len, self.by_layer.values()))

    @cached_property
    def numbers(self) -> list[list[int]]:
        """The head at each place, by place of its layer.

        >>> MeasuredHeads.of(4, [Head(3, 1), Head(0, 2), Head(3, 0)]).numbers
        [[2, -1], [0, 1]]
        """
        lines = map(list, self.by_layer.values())
        return [line + [ABSENT] * (self.width - len(line)) for line in lines]

    def part(self, layer: int) -> tuple[int, ...] | None:
        """The measured heads of a layer; none where these are all that it has."""
        heads = self.by_layer[layer]
        return None if len(heads) == self.n_heads else heads


def check_named(layers: tuple[int, ...] | str, heads: tuple[Head, ...] | str) -> None:
    """Refuse what says nothing, says something twice, or says it in two ways."""
    for field, named, what in (("layers", layers, "layer"), ("heads", heads, "head")):
        if isinstance(named, str):
            continue
        if not named or len(set(named)) < len(named):
            shown = ", ".join(map(str, named))
            raise ScanError(
                f'{field}: expected "all", or at least one {what} and each once, got [{shown}]'
            )
    if layers != "all" and heads != "all":
        raise ScanError(
            "heads: these imply their layers, so layers and heads exclude each other; "
            "leave one of them out"
        )


def find_heads(
    layers: tuple[int, ...] | str, heads: tuple[Head, ...] | str, model: ModelSize
) -> MeasuredHeads:
    """The heads that a scan means; what a model does not have is refused."""
    for layer in layers if isinstance(layers, tuple) else ():
        if layer >= model.n_layers:
            raise ScanError(f"layers: {_lacks(model, f'layer {layer}', model.n_layers)}")
    for head in heads if isinstance(heads, tuple) else ():
        if head.layer >= model.n_layers:
            missing = _lacks(model, f"layer {head.layer}", model.n_layers)
            raise ScanError(f"heads: '{head}': {missing}")
        if head.head >= model.n_heads:
            raise ScanError(f"heads: '{head}': {_lacks(model, f'head {head.head}', model.n_heads)}")
    if isinstance(heads, tuple):
        return MeasuredHeads.of(model.n_heads, heads)
    named = range(model.n_layers) if isinstance(layers, str) else layers
    return MeasuredHeads.of(
        model.n_heads, (Head(layer, head) for layer in named for head in range(model.n_heads))
    )


def _lacks(model: ModelSize, what: str, count: int) -> str:
    kind = what.partition(" ")[0]
    return f"{what} of {model.name}, which has {count}; expected {kind}s from 0 to {count - 1}"
