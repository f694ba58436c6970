"""Which heads of a model are measured, and how a scan names them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headcount.schemas.errors import ScanError

NUMBER = "(0|[1-9][0-9]{0,5})"  # without zeros in front, so that a head has one name

NAME = re.compile(f"L{NUMBER}H{NUMBER}")

LABEL = re.compile(r"\s*[Ll](\d{1,6})[Hh](\d{1,6})\s*")

ABSENT = -1  # fills up the heads of a layer that has fewer measured heads than another layer


class ModelSize(Protocol):
    """The facts of a model that decide which heads it has."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def n_heads(self) -> int:
        """Number of heads in a layer."""
        ...

    @property
    def attention_layers_or_all(self) -> tuple[int, ...]:
        """The layers that attend, in ascending order. The others have no rows."""
        ...


class Head(NamedTuple):
    """A head. Its text is the same in scans and in the column `label`.

    >>> str(Head(5, 1))
    'L5H1'
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def labelled(cls, label: str) -> "Head | None":
        """The head with a label as people write it; None if the text is no label.

        >>> Head.labelled("L5H1"), Head.labelled(" l10h0 "), Head.labelled("5.1")
        (Head(layer=5, head=1), Head(layer=10, head=0), None)
        """
        match = LABEL.fullmatch(label)
        return cls(int(match[1]), int(match[2])) if match else None

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        """Tell pydantic to read and write it as its text."""
        text = core_schema.to_string_ser_schema(when_used="always")
        return core_schema.no_info_plain_validator_function(_named, serialization=text)


def _named(given: object) -> Head:
    if isinstance(given, Head):
        return given
    if not isinstance(given, str):
        raise PydanticCustomError("string_type", "expected a string")
    match = NAME.fullmatch(given)
    if match is None:
        raise PydanticCustomError("head", "expected a layer and a head in it, as L5H1")
    return Head(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class MeasuredHeads:
    """The heads that are measured, by layer, in ascending order.

    Their values are arrays `[… layer head …]`: of the i-th measured layer, the j-th measured head.
    `numbers` says which head of the model that is.
    """

    n_heads: int  # number of heads in a layer of the model, measured or not
    by_layer: Mapping[int, tuple[int, ...]]  # the measured heads of each layer that has one

    @classmethod
    def every(cls, n_layers: int, n_heads: int) -> "MeasuredHeads":
        """All heads of a model."""
        return cls(n_heads, dict.fromkeys(range(n_layers), tuple(range(n_heads))))

    @classmethod
    def of(cls, n_heads: int, heads: Iterable[Head]) -> "MeasuredHeads":
        """The given heads of a model."""
        of_layers = groupby(sorted(heads), lambda head: head.layer)
        return cls(n_heads, {layer: tuple(head.head for head in own) for layer, own in of_layers})

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers with a measured head."""
        return tuple(self.by_layer)

    @property
    def heads(self) -> tuple[Head, ...]:
        """All measured heads."""
        return tuple(Head(layer, head) for layer, own in self.by_layer.items() for head in own)

    @cached_property
    def places(self) -> dict[int, int]:
        """The index of each measured layer on the axis `layer`."""
        return {layer: place for place, layer in enumerate(self.layers)}

    @cached_property
    def count(self) -> int:
        """Number of measured heads."""
        return sum(map(len, self.by_layer.values()))

    @cached_property
    def width(self) -> int:
        """Length of the axis `head`: the largest number of measured heads in a layer."""
        return max(map(len, self.by_layer.values()))

    @cached_property
    def numbers(self) -> list[list[int]]:
        """The head at each index of the axes `[layer head]`, filled up with `ABSENT`.

        >>> MeasuredHeads.of(4, [Head(3, 1), Head(0, 2), Head(3, 0)]).numbers
        [[2, -1], [0, 1]]
        """
        # All rows have the same length, so that the axes form one array.
        rows = [list(heads) for heads in self.by_layer.values()]
        return [row + [ABSENT] * (self.width - len(row)) for row in rows]

    def part(self, layer: int) -> tuple[int, ...] | None:
        """The measured heads of a layer; None if these are all of its heads."""
        # With None a caller takes whole arrays, without a selection that would copy them.
        heads = self.by_layer[layer]
        return None if len(heads) == self.n_heads else heads


def find_heads(
    layers: tuple[int, ...] | str, heads: tuple[Head, ...] | str, model: ModelSize
) -> MeasuredHeads:
    """The heads that a scan names; raises `ScanError` if the model lacks one of them."""
    for head in heads if isinstance(heads, tuple) else ():
        if problem := _problem(head, model):
            raise ScanError(f"heads: '{head}': {problem}")
    for layer in layers if isinstance(layers, tuple) else ():
        if problem := _problem(Head(layer, 0), model):
            raise ScanError(f"layers: {problem}")
    if isinstance(heads, tuple):
        return MeasuredHeads.of(model.n_heads, heads)
    chosen = sorted(layers) if isinstance(layers, tuple) else model.attention_layers_or_all
    return MeasuredHeads(model.n_heads, dict.fromkeys(chosen, tuple(range(model.n_heads))))


def _problem(head: Head, model: ModelSize) -> str | None:
    """Why a model does not have a head; None if it has."""
    counts = {"layer": model.n_layers, "head": model.n_heads}
    for (noun, count), number in zip(counts.items(), head, strict=True):
        if number >= count:
            return (
                f"{noun} {number} of {model.name}, which has {count}; expected {noun}s from 0 to "
                f"{count - 1}"
            )
    if head.layer not in (attending := model.attention_layers_or_all):
        return (
            f"layer {head.layer} of {model.name} has no softmax attention; layers "
            f"{', '.join(map(str, attending))} have"
        )
    return None
