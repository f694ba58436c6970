"""Interventions as a scan names them: `NAME`, `NAME(1,0.5)`, `A+B`.

A text is parsed once, when the scan is read. Only `workers.interventions` knows which names exist,
what they change and which arguments they take.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headcount.schemas.errors import ScanError
from headcount.schemas.registry import Argument, call_text, parse_call

EXPECTED = "expected NAME, NAME(1,0.5) or A+B"


@dataclass(frozen=True)
class InterventionPart:
    """One change and its arguments."""

    name: str
    arguments: tuple[Argument, ...] = ()

    def __str__(self) -> str:
        """The change in its canonical form: the same change always has the same text.

        >>> str(InterventionPart("zero_head", (1, 2))), str(InterventionPart("none"))
        ('zero_head(1,2)', 'none')
        """
        return call_text(self.name, self.arguments)


@dataclass(frozen=True)
class Intervention:
    """One change of the model, or several that are applied in order."""

    parts: tuple[InterventionPart, ...]

    def __str__(self) -> str:
        """The canonical text: the value of column `intervention`, and of its directory."""
        return "+".join(map(str, self.parts))

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Tell pydantic to read and write an intervention as its text."""
        text = core_schema.no_info_after_validator_function(_validated, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=text,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), text]),
            serialization=core_schema.to_string_ser_schema(when_used="always"),
        )


def parse_intervention(text: str) -> Intervention:
    """The intervention that a text names; whether its changes exist is not checked here.

    >>> parse_intervention("zero_head(1, 2)").parts
    (InterventionPart(name='zero_head', arguments=(1, 2)),)
    >>> str(parse_intervention("scale_query_bias(0.50)+blend_first_position(1.0)"))
    'scale_query_bias(0.5)+blend_first_position(1)'
    >>> parse_intervention("a+")
    Traceback (most recent call last):
    headcount.schemas.errors.ScanError: interventions: expected NAME, NAME(1,0.5) or A+B, got 'a+'
    """
    try:
        return _parsed(text)
    except ValueError as error:
        raise ScanError(f"interventions: {error}, got {text!r}") from None


def _validated(text: str) -> Intervention:
    try:
        return _parsed(text)
    except ValueError as error:
        raise PydanticCustomError("intervention", str(error)) from None  # pyright: ignore[reportArgumentType]


def _parsed(text: str) -> Intervention:
    # Split at plus signs outside of parentheses. One inside belongs to a number, as in
    # scale_query_bias(1e+3).
    texts = re.split(r"\+(?![^()]*\))", text)
    return Intervention(tuple(_part(part_text) for part_text in texts))


def _part(text: str) -> InterventionPart:
    try:
        call = parse_call(text)
    except ValueError:
        raise ValueError(EXPECTED) from None
    # Which options there are, and so their order, is not known here.
    if call.named:
        raise ValueError(EXPECTED)
    return InterventionPart(call.name, call.arguments)


NONE = parse_intervention("none")
"""The untouched model."""
