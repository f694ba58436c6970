"""What values fields and options may have: types that say their range, and the words in which a
wrong value is refused.

A type here is an alias of a plain one. Code fingerprints see the plain one, because what is refused
changes no number (`schemas.fingerprints`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, cast, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

LARGEST_INTEGER = 2**63 - 1
"""The largest integer of TOML, and of a column of 64 bits."""

LARGEST_INT32 = 2**31 - 1
"""The largest number of a column of 32 bits, such as `n_tokens`."""

LARGEST_FACTOR = 1_000_000.0
"""What is multiplied by more leaves the range of small number formats, whatever it is."""

Count = Annotated[int, Field(ge=1, le=LARGEST_INT32)]
Index = Annotated[int, Field(ge=0, le=LARGEST_INT32)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Factor = Annotated[float, Field(ge=-LARGEST_FACTOR, le=LARGEST_FACTOR)]

OPTIONS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_min_length=1)
"""How options are checked: no conversions, finite numbers, no empty strings."""

EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "int_type": "an integer",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "an array",
    "literal_error": "{expected}",
    "model_type": "a table",
    "string_too_short": "a string that is not empty",
    "string_type": "a string",
    "tuple_type": "an array",
}
"""What was expected, in TOML's words, by the type of a problem that pydantic finds."""


def problem_of(annotation: Any, value: object) -> str | None:
    """What a value of an option should have been; none if it is right.

    >>> problem_of(Count, 0), problem_of(Factor, "x"), problem_of(Factor, 1)
    ('1 or more', 'a number', None)
    """
    adapter = TypeAdapter(annotation, config=OPTIONS)
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return expected(error.errors())
    return None


def by_key(error: ValidationError) -> dict[str, list[Any]]:
    """The problems of each dotted key; a value that fits no member of a union is one key with
    several problems.
    """
    problems: dict[str, list[Any]] = {}
    for problem in error.errors():
        first, *rest = problem["loc"]
        # The rest holds names of union members besides places in the scan.
        places = [first, *(part for part in rest if isinstance(part, int) or part == "family")]
        problems.setdefault(".".join(map(str, places)), []).append(problem)
    return {
        key: p
        for key, p in problems.items()
        if not any(other.startswith(f"{key}.") for other in problems)
    }


def wrong_value(key: str, problems: list[Any]) -> str:
    """One line for a value that is wrong: what every member of a union expects, and what arrived."""
    return f"{key}: expected {expected(problems)}, got {in_toml(problems[0]['input'])}"


def expected(problems: list[Any]) -> str:
    """What would have been right, in TOML's words; the members of a union one after the other."""
    return " or ".join(dict.fromkeys(map(_expected, problems)))


def _expected(problem: Any) -> str:
    words = EXPECTED.get(problem["type"])
    if words is not None:
        return words.format(**problem.get("ctx", {}))
    # A message of our own says "expected …" itself.
    return problem["msg"].removeprefix("expected ")


def in_toml(value: object) -> str:
    """A value as a TOML file writes it.

    >>> in_toml(True), in_toml([1, "a", float("inf")]), in_toml({"low": -3})
    ('true', "[1, 'a', inf]", '{low = -3}')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_toml, cast('list[object]', value)))}]"
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return f"{{{', '.join(f'{key} = {in_toml(item)}' for key, item in items)}}}"
    return repr(value)


def range_of(annotation: Any) -> str:
    """The range of a type in words; empty where it has none, or one that nobody comes near.

    >>> [range_of(a) for a in (Count, Index | None, Annotated[float, Field(gt=0, lt=1)], int)]
    ['1 or more', '0 or more', 'above 0 and below 1', '']
    """
    limits = _limits(annotation)
    if abs(limits.get("le", 0)) in (LARGEST_INT32, LARGEST_INTEGER):
        del limits["le"]
    if set(limits) == {"ge", "le"}:
        return f"{_number(limits['ge'])} to {_number(limits['le'])}"
    words = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return " and ".join(
        text.format(_number(limits[name])) for name, text in words.items() if name in limits
    )


def _limits(annotation: Any) -> dict[str, float]:
    """The limits of a type, or of the members of a union, by pydantic's names."""
    limits: dict[str, float] = {}
    for part in get_args(annotation):
        for limit in part.metadata if isinstance(part, FieldInfo) else ():
            limits |= {
                name: getattr(limit, name)
                for name in ("ge", "gt", "le", "lt")
                if hasattr(limit, name)
            }
        if not isinstance(part, FieldInfo):
            limits |= _limits(part)
    return limits


def _number(value: float) -> str:
    """A number in the shortest form, its thousands apart."""
    return f"{int(value):,}" if math.isfinite(value) and value == int(value) else str(value)
