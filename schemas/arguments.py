"""What functions for notebooks are called with: a mistake in it is one line of an error."""

import unicodedata
from collections.abc import Callable
from functools import cache, wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeAlias, TypeVar, cast

import numpy as np
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from headcount.schemas.errors import HeadcountError, printable, unknown
from headcount.schemas.values import problem_of, shortened

LONGEST_TEXT = 4_096  # characters of a name or a path, of which file systems take no more

P = ParamSpec("P")
T = TypeVar("T")


def _in_a_line(text: str | Path) -> str | Path:
    """Refuse texts that no file name and no line of an error can hold."""
    letters = str(text)
    if len(letters) > LONGEST_TEXT or any(
        unicodedata.category(letter) in ("Cc", "Cs") for letter in letters
    ):
        raise PydanticCustomError(
            "in_a_line", "expected at most 4,096 characters, none of them a control character"
        )
    return text


Name: TypeAlias = Annotated[str, AfterValidator(_in_a_line)]
Location: TypeAlias = Annotated[str | Path, AfterValidator(_in_a_line)]  # or an address in a store


def checked(
    error: type[HeadcountError], **advice: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Compare what a function is called with to its annotations, and raise `error`; `advice` says
    what to do instead of arguments that the function does not take.
    """

    def checking(function: Callable[P, T]) -> Callable[P, T]:
        @cache
        def called_as() -> Signature:
            # When it is first called: some of its types are defined below it.
            return signature(function, eval_str=True)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            parameters = called_as().parameters
            takes_others = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
            for name in kwargs:
                if name not in parameters and not takes_others:
                    known = parameters.keys() - {"self"}
                    raise error(f"{name}: {advice.get(name) or unknown('argument', name, known)}")
            bound = called_as().bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                annotation = parameters[name].annotation
                if annotation in (object, Signature.empty):
                    continue
                # A number of numpy counts as one of Python; everything else stays as it is.
                plain = cast("Any", value).item() if isinstance(value, np.generic) else value
                if expected := problem_of(annotation, plain):
                    got = shortened(printable(repr(plain)))
                    raise error(f"{name}: expected {expected}, got {got}")
                bound.arguments[name] = plain
            return function(*bound.args, **bound.kwargs)

        return call

    return checking
