"""One registry and one parser of `name(option)`, for everything that scans and commands name.

An entry is a function. Its name is the name, its docstring says what it means, and its keyword-only
parameters are its options: `*, sink: Index = 4`. The type of an option says which values it may
have (`schemas.values`); an item of the docstring, "* `sink`: meaning.", says what it means.
Whatever a user writes, pages, comments and errors about it are made of these.
"""

import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError, create_model

from headcount.schemas.errors import HeadcountError, ScanError, unknown
from headcount.schemas.values import OPTIONS, by_key, in_toml, range_of, wrong_value

Argument: TypeAlias = int | float | str  # a number, or a name
REQUIRED = inspect.Parameter.empty  # the default of an option that has none
CALL = re.compile(r"(\w+)(?:\(([^()]*)\))?")  # a name, and its arguments if it has some

ITEM = re.compile(r"^\* `(\w+)`: (.+(?:\n  .+)*)\n?", re.MULTILINE)
"""What an item of a docstring says of an option."""

WAITING = "__headcount__"  # name in the module of a plug-in under which its entries wait

PLUGIN_MODULES = "headcount.schemas.plugins."
"""How the names of modules begin that are made of plug-ins; a digest and the file's name follow."""

WHOLE_NUMBER = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
LARGEST_WHOLE = 2**53  # up to here a float holds every whole number exactly


class Call(NamedTuple):
    """A name with the values of options: those in their order, then those by name."""

    name: str
    arguments: tuple[Argument, ...]
    named: Mapping[str, Argument]


def parse_call(text: str) -> Call:
    """Read `name`, `name(1,0.5)` or `name(1,option=0.5)`; anything else raises `ValueError`.

    >>> parse_call("distant_mass( 4, recent = 64 )")
    Call(name='distant_mass', arguments=(4,), named={'recent': 64})
    """
    match = CALL.fullmatch(text)
    arguments: list[Argument] = []
    named: dict[str, Argument] = {}
    for word in match[2].split(",") if match and match[2] else []:
        option, equals, value = (part.strip() for part in word.rpartition("="))
        # An option by name stands behind those without, once.
        if not value or bool(equals) != bool(option) or option in named or (named and not equals):
            match = None
        elif equals:
            named[option] = read_argument(value)
        else:
            arguments.append(read_argument(value))
    if match is None:
        raise ValueError(f"not a name with options: {text!r}")
    return Call(match[1], tuple(arguments), named)


def call_text(name: str, arguments: Iterable[object]) -> str:
    """A name and the values of its options, in the one way that the same choice is written.

    >>> call_text("zero_head", (1, 2)), call_text("none", ())
    ('zero_head(1,2)', 'none')
    """
    inside = ",".join(map(str, arguments))
    return f"{name}({inside})" if inside else name


def read_argument(text: str) -> Argument:
    """A number in its shortest form, or the text itself.

    >>> [read_argument(text) for text in ("1.0", "0.50", "1e-3", "-0.0", "entropy")]
    [1, 0.5, 0.001, 0, 'entropy']
    """
    if WHOLE_NUMBER.fullmatch(text):
        return int(text)
    if not NUMBER.fullmatch(text):
        return text
    number = float(text)
    # 1.0 and 1 are the same choice, so they must have the same text and the same directory.
    return int(number) if number.is_integer() and abs(number) <= LARGEST_WHOLE else number


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter of a function."""

    name: str
    annotation: Any  # its type, with the range of its values
    default: Any
    meaning: str  # what the docstring says of it; empty if it says nothing

    @property
    def flag(self) -> str:
        """The option as a command line writes it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def values(self) -> str:
        """The range of its values, if they are numbers, and its default."""
        default = "none" if self.default is None else self.default
        return ", ".join(filter(None, (range_of(self.annotation), f"default {default}")))


HAS_DOCSTRINGS = sys.flags.optimize < 2
"""Whether this Python keeps docstrings. Without them runs are read, and nothing is measured."""


def check_docstrings() -> None:
    """Refuse a Python without docstrings, which say what everything that is measured means."""
    if not HAS_DOCSTRINGS:
        raise HeadcountError(
            "PYTHONOPTIMIZE=2 (or python -OO) removes the docstrings that say what statistics, "
            "inputs and interventions mean: runs can be read, and nothing can be measured or "
            "described; unset it, or set PYTHONOPTIMIZE=1"
        )


@cache
def prose_of(function: Callable[..., Any]) -> str:
    """The docstring of a function without its items about options.

    >>> def draw_tokens():
    ...     \'\'\'Tokens.
    ...
    ...     * `low`: the first id,
    ...       or 0.
    ...     \'\'\'
    >>> prose_of(draw_tokens)
    'Tokens.'
    """
    if function.__doc__ is None:
        check_docstrings()
    return ITEM.sub("", inspect.cleandoc(function.__doc__ or "")).strip()


def first_paragraph(function: Callable[..., Any]) -> str:
    """The first paragraph of a function's docstring, on one line."""
    return " ".join(prose_of(function).partition("\n\n")[0].split())


@cache
def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """The options of a function by name."""
    items = ITEM.findall(inspect.cleandoc(function.__doc__ or ""))
    meanings = {name: " ".join(text.split()) for name, text in items}
    return {
        p.name: Option(p.name, p.annotation, p.default, meanings.get(p.name, ""))
        for p in inspect.signature(function, eval_str=True).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of what a function reads; cached, because every layer of every batch needs them."""
    names = inspect.signature(function).parameters
    return tuple(name for name in names if name not in options_of(function))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered function, and what follows from its signature and its docstring."""

    function: Callable[..., Any]

    @cached_property
    def name(self) -> str:
        """How scans and commands name it."""
        return self.function.__name__

    @cached_property
    def meaning(self) -> str:
        """What it is, in a sentence."""
        return first_paragraph(self.function)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of what it reads."""
        return parameters_of(self.function)

    @cached_property
    def options(self) -> dict[str, Option]:
        """Its options by name, in their order."""
        return options_of(self.function)

    @property
    def code(self) -> tuple[Callable[..., Any], ...]:
        """The functions that decide its values (`schemas.fingerprints`)."""
        return (self.function,)

    @cached_property
    def options_model(self) -> type[BaseModel]:
        """The options as a model of pydantic, which checks their types and ranges."""
        fields: Any = {
            option.name: (option.annotation, ... if option.default is REQUIRED else option.default)
            for option in self.options.values()
        }
        return create_model("Options", __config__=OPTIONS, **fields)


E = TypeVar("E", bound=Entry)


@dataclass(eq=False, repr=False)
class Registry(dict[str, E]):
    """Entries by name."""

    word: str  # noun for one of them
    error: type[HeadcountError] = field(default=ScanError, kw_only=True)
    """What a wrong name or option raises."""

    def __eq__(self, other: object) -> bool:
        """A registry equals no other, even if the other has the same entries."""
        return self is other

    def add(self, entry: E) -> E:
        """Register an entry; a name that is taken raises `ValueError`.

        A plug-in's entry only waits in its module, until `schemas.plugins` takes it from there.
        """
        if is_of_plugin(entry.function):
            waiting = entry.function.__globals__.setdefault(WAITING, [])
            waiting.append((self, entry))
            return entry
        if entry.name in self:
            raise ValueError(f"{self.word} {entry.name!r} is defined twice")
        self[entry.name] = entry
        return entry

    def named(self, name: str, field: str) -> E:
        """The entry of a name. `field` begins the line of an error."""
        if name not in self:
            raise self.error(f"{field}: {unknown(self.word, name, self)}")
        return self[name]

    def bind(
        self,
        entry: Entry,
        arguments: Sequence[object] = (),
        named: Mapping[str, object] | None = None,
        *,
        field: str,
        subject: str = "",
    ) -> dict[str, Any]:
        """The value of every option: given in the order of options, or by name, or its default.

        `field` begins a line about all options, and `subject` a line about one of them, whose name
        stands for OPTION in it, or for FLAG: `input.OPTION`, `--FLAG`. Every mistake is a line of
        the error.
        """
        options = entry.options
        name = entry.function.__name__
        if len(arguments) > len(options):
            takes = f"at most {', '.join(options)}" if options else "no options"
            raise self.error(f"{field}: {name} takes {takes}, got {in_toml([*arguments])}")
        given = {**dict(zip(options, arguments, strict=False)), **(named or {})}
        if len(given) < len(arguments) + len(named or {}):
            raise self.error(f"{field}: expected each option of {name} once")
        try:
            checked = entry.options_model(**given)
        except ValidationError as error:
            lines: list[str] = []
            for key, problems in by_key(error).items():
                about = subject or f"{field}: OPTION of {name}"
                about = about.replace("OPTION", key).replace("FLAG", key.replace("_", "-"))
                match problems[0]["type"]:
                    case "extra_forbidden":
                        about = about if subject else field
                        lines.append(f"{about}: {unknown(f'option of {name}', key, options)}")
                    case "missing":
                        word = self.word.rpartition(" ")[2]
                        lines.append(f"{about}: missing; the {word} {name} needs it")
                    case _:
                        lines.append(wrong_value(about, problems))
            raise self.error("\n".join(lines)) from None
        return {option: getattr(checked, option) for option in options}


def is_of_plugin(function: Callable[..., Any]) -> bool:
    """Whether a function is written outside of this package."""
    # Code that is run from a text has none.
    module = function.__module__ or ""
    return module.startswith(PLUGIN_MODULES) or not _is_of_ours(module)


def import_files(package: str, path: Iterable[str]) -> None:
    """Import every file of a package, in order, so that a new entry is a file and no other line.

    One that cannot be imported is an error that names its line.
    """
    for module in pkgutil.iter_modules(path):
        try:
            import_module(f"{package}.{module.name}")
        except HeadcountError:
            raise
        except Exception as error:
            # A library that is missing is no mistake in the file.
            is_ours = not isinstance(error, ModuleNotFoundError) or _is_of_ours(error.name)
            if not is_ours:
                raise
            directories = tuple(path)
            raise HeadcountError(
                f"{_line_of(error, directories)}: {in_words(error)}; mend this file or take it "
                f"out of {directories[0]}"
            ) from error


def _is_of_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "headcount"


def _line_of(error: Exception, directories: Sequence[str]) -> str:
    """The file and the line of the last place in some directories that led to an error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    places = [
        f"{frame.filename}, line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.dirname(os.path.abspath(frame.filename)) in directories
    ]
    return places[-1] if places else directories[0]


def in_words(error: BaseException) -> str:
    """What an error says, on one line; its class if it is not one of ours."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
