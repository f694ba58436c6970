"""Interventions as a scan names them: `NAME`, `NAME(1,0.5)`, `A+B`.

A text is parsed once, when the scan is read. Only `workers.interventions` knows which names exist,
what they change and which arguments they take.
"""

import re
from dataclasses import dataclass

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from headcount.schemas.errors import ScanError
from headcount.schemas.registry import Argument, call_text, parse_call


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
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        """Tell pydantic to read and write it as its text."""
        text = core_schema.to_string_ser_schema(when_used="always")
        return core_schema.no_info_plain_validator_function(_parsed, serialization=text)


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


def _parsed(given: object) -> Intervention:
    if isinstance(given, Intervention):
        return given
    if not isinstance(given, str):
        raise PydanticCustomError("string_type", "expected a string")
    # Split at plus signs outside of parentheses. One inside belongs to a number, as in
    # scale_query_bias(1e+3).
    try:
        calls = [parse_call(part) for part in re.split(r"\+(?![^()]*\))", given)]
    except ValueError:
        calls = []
    # Which options there are, and so their order, is not known here.
    if not calls or any(call.named for call in calls):
        raise PydanticCustomError("intervention", "expected NAME, NAME(1,0.5) or A+B")
    return Intervention(tuple(InterventionPart(call.name, call.arguments) for call in calls))


NONE = parse_intervention("none")  # the untouched model
