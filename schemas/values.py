"""The values that fields and options may have: types with a range, and errors about wrong values.

Each type here is an alias of a plain type. Code fingerprints see the plain type, because what is
refused does not change any number (`schemas.fingerprints`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LARGEST_INTEGER = 2**63 - 1  # the largest integer of TOML, and of a column of 64 bits
LARGEST_INT32 = 2**31 - 1  # the largest number of a column of 32 bits, such as `n_tokens`

LARGEST_FACTOR = 1_000_000.0  # larger ones leave the range of small number formats

Count = Annotated[int, Field(ge=1, le=LARGEST_INT32)]
Index = Annotated[int, Field(ge=0, le=LARGEST_INT32)]
TokenId = Annotated[int, Field(ge=0, le=LARGEST_INT32)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Factor = Annotated[float, Field(ge=-LARGEST_FACTOR, le=LARGEST_FACTOR)]
Share = Annotated[float, Field(ge=0, le=1)]
Zipf = Annotated[float, Field(ge=0, le=10)]
"""Exponent of Zipf's law. 0 is uniform; at 10 nearly all tokens are the most frequent one."""

SubSequence = Annotated[int, Field(ge=2, le=10_000)]
"""Number of tokens in a sub-sequence, which an input family writes out in full."""

Positive = Annotated[float, Field(gt=0)]
BelowOne = Annotated[float, Field(lt=1)]

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
    "is_instance_of": "a {class}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "an array",
    "literal_error": "{expected}",
    "model_type": "a table",
    "none_required": "None",
    "sequence_str": "a list",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "a string that is not empty",
    "string_type": "a string",
    "too_long": "at most {max_length} items",
    "too_short": "{min_length} or more items",
    "tuple_type": "an array",
}
"""What was expected, in TOML's words, by pydantic's type of the problem."""

Problem: TypeAlias = "ErrorDetails"  # a problem that pydantic found in a value


def problem_of(annotation: object, value: object) -> str | None:
    """What an option's value should have been; None if it is right.

    >>> problem_of(Count, 0), problem_of(Factor, "x"), problem_of(Factor, 1)
    ('1 or more', 'a number', None)
    """
    adapter = TypeAdapter[object](cast("Any", annotation), config=OPTIONS)
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return expected(error.errors())
    return None


def by_key(error: ValidationError) -> dict[str, list[Problem]]:
    """The problems of each dotted key; that of a union has one for each member."""
    problems_by_key: dict[str, list[Problem]] = {}
    for problem in error.errors():
        first, *rest = problem["loc"]
        # Besides places in the scan, pydantic puts the names of union members into the rest.
        places = [first, *(part for part in rest if isinstance(part, int) or part == "family")]
        problems_by_key.setdefault(".".join(map(str, places)), []).append(problem)
    # In a union of a word and a list, a wrong item of a list is also "not the word". Only the
    # problem of the item helps.
    return {
        key: problems
        for key, problems in problems_by_key.items()
        if not any(other.startswith(f"{key}.") for other in problems_by_key)
    }


def wrong_value(key: str, problems: list[Problem]) -> str:
    """One line about a wrong value: what was expected, and what arrived."""
    return f"{key}: expected {expected(problems)}, got {shortened(in_toml(problems[0]['input']))}"


def shortened(text: str, longest: int = 200) -> str:
    """A text that fits into a line of an error."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def expected(problems: list[Problem]) -> str:
    """What would have been right, in TOML's words, for example `an integer or 'all'`."""
    alternatives = list(dict.fromkeys(map(_expected, problems)))
    # A comma keeps "0 or more, or 'all'" readable.
    separator = ", or " if any(" or " in words for words in alternatives) else " or "
    return separator.join(alternatives)


def _expected(problem: Problem) -> str:
    template = EXPECTED.get(problem["type"])
    if template is None:
        # The message of one of our own validators begins with "expected".
        return problem["msg"].removeprefix("expected ")
    limits = {
        name: value if isinstance(value, str) else _number(value)
        for name, value in problem.get("ctx", {}).items()
    }
    if limits.get("class") == "Sequence":
        return "a list"
    return template.format(**limits)


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


def range_of(annotation: object) -> str:
    """The range of a type in words; empty if it has none, or only the limit of its bits.

    >>> types = (Count, Index | None, Annotated[float, Field(gt=0, lt=1)], int)
    >>> [range_of(annotation) for annotation in types]
    ['1 or more', '0 or more', 'above 0 and below 1', '']
    """
    limits = _limits(annotation)
    # A reader does not need to know the limits of 32 and 64 bits.
    if abs(limits.get("le", 0)) in (LARGEST_INT32, LARGEST_INTEGER):
        del limits["le"]
    if set(limits) == {"ge", "le"}:
        return f"{_number(limits['ge'])} to {_number(limits['le'])}"
    templates = {"ge": "{} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    return " and ".join(
        template.format(_number(limits[name]))
        for name, template in templates.items()
        if name in limits
    )


def _limits(annotation: object) -> dict[str, float]:
    """The limits of a type, or of the members of a union, by pydantic's names."""
    limits: dict[str, float] = {}
    for part in get_args(annotation):
        if isinstance(part, FieldInfo):
            for limit in part.metadata:
                names = [name for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)]
                limits |= {name: getattr(limit, name) for name in names}
        else:
            limits |= _limits(part)
    return limits


def _number(value: float) -> str:
    """A number in its shortest form, with commas between thousands."""
    return f"{int(value):,}" if math.isfinite(value) and value == int(value) else str(value)
