"""Fingerprints of code, which tell whether two numbers under one name mean the same.

Only what Python runs counts. Comments, docstrings and layout do not. Code is read as a syntax tree
and written in one canonical form.
"""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, ModuleType, UnionType
from typing import Annotated, Any, ForwardRef, NamedTuple, TypeVar, cast, get_args, get_origin

from headcount.schemas.packages import MEASURING, PACKAGE
from headcount.schemas.registry import PLUGIN_MODULES

OURS = tuple(f"headcount.{package}." for package in MEASURING)
"""How the names of our modules begin whose code decides numbers."""

WITH_METHODS = ("headcount.workers.", PLUGIN_MODULES)
"""The same of those whose classes do so by their methods."""

LENGTH = 12  # hexadecimal digits of a fingerprint

WRITTEN_WHOLE = ("datetime", "decimal", "fractions", "uuid", "numpy", "torch", "pyarrow")
"""Modules whose objects write themselves whole, unless they write an address in memory."""


def fingerprint(*functions: Callable[..., Any]) -> str:
    """A digest that changes if and only if the code of some functions changes.

    The code of our own functions that they call counts too. The texts of errors do not.
    """
    return digest(_code_of_function(function) for function in functions)


def module_code(content: bytes, with_errors: bool) -> str:
    """The code of a module in canonical form; `with_errors` includes the texts of its errors."""
    tree = ast.parse(content)
    _strip_prose(tree, with_errors)
    return _canonical(tree)


def digest(texts: Iterable[str]) -> str:
    """The fingerprint of some texts, in order."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:LENGTH]


def _strip_prose(tree: ast.AST, with_errors: bool) -> None:
    """Remove docstrings, also those of fields, and the texts of errors unless `with_errors`."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            statements = cast("list[ast.stmt]", body)
            # In place, because the list belongs to the tree.
            statements[:] = [
                statement
                for statement in statements
                if not (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                )
            ]
        # The words of an error may be mended, and no number is another one for it.
        if not with_errors and isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = []
            node.exc.keywords = []


def _canonical(node: object) -> str:
    """A syntax tree as text, without line numbers and without empty fields.

    Newer versions of Python add fields to the tree. They are empty in code that does not use them,
    so the text is the same in every version.
    """
    if isinstance(node, ast.AST):
        fields = [
            f"{name}={_canonical(value)}"
            for name, value in ast.iter_fields(node)
            if value not in (None, [])
        ]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, cast('list[object]', node)))}]"
    return repr(node)


def _code_of_function(
    function: object, owner: type | None = None, callers: frozenset[object] = frozenset()
) -> str:
    """The code of a function, of the constants it uses and of our own functions that it calls.

    `owner` is the class of a method. `callers` are left out, so that recursion ends.
    """
    assert isinstance(function, FunctionType)
    source = _read_function(function)
    values = _values_read(function, source)
    callers = callers | {function}
    helpers = [
        _code_of_function(helper, None, callers)
        for helper in map(_unwrapped, values)
        if _is_ours(helper) and helper not in callers
    ]
    # The tree does not say whose method `x.rows()` is. So of every class that the function names,
    # all methods count that have the name of one of its attributes.
    types = [value if isinstance(value, type) else type(value) for value in values]
    classes = [cls for cls in types if cls.__module__.startswith(WITH_METHODS)]
    for cls in [*classes, *([owner] if owner else [])]:
        helpers += [
            _code_of_function(method, cls, callers)
            for name, value in vars(cls).items()
            if name in source.attributes
            and _is_ours(method := _unwrapped(value))
            and method not in callers
        ]
    # A constant of a module or of a class decides numbers as much as code does.
    for cls in [value for value in [*values, owner] if _is_our_class(value)]:
        values += _constants_of_class(cast("type", cls))
    constants = [constant_text(value, callers) for value in values if not _is_code(value)]
    return "\n".join([source.text, *constants, *helpers])


def _values_read(function: FunctionType, source: "_Source") -> list[object]:
    """What a function reads of its module, of a function around it, and of modules of ours."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    names = sorted(source.names - {function.__name__})
    values += [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [value for value in values if isinstance(value, ModuleType)]:
        if f"{module.__name__}.".startswith(OURS):
            attributes = sorted(source.attributes & vars(module).keys())
            values += [getattr(module, name) for name in attributes]
    return values


def _is_our_class(value: object) -> bool:
    return isinstance(value, type) and value.__module__.startswith(OURS)


def _constants_of_class(cls: type[Any]) -> list[object]:
    """The members of an enumeration; of other classes their own values, such as defaults."""
    if issubclass(cls, Enum):
        return list[object](cls)
    # The others are Python's, as `__doc__` and `_abc_impl`.
    return [v for name, v in vars(cls).items() if not name.startswith(("__", "_abc_"))]


def _is_code(value: object) -> bool:
    """Whether a value is no constant: it counts as code, or belongs to Python or a library."""
    if isinstance(value, partial):
        return False
    # Descriptors are functions, properties and slots.
    is_described = hasattr(type(value), "__get__") or isinstance(value, type | ModuleType)
    is_of_library = callable(value) and not type(value).__module__.startswith(OURS)
    # For example `Literal["a", "b"]`: which options are refused changes no number.
    is_alias = get_origin(value) is not None or isinstance(value, TypeVar | ForwardRef | UnionType)
    return is_described or is_of_library or is_alias


def constant_text(value: object, callers: frozenset[object] = frozenset()) -> str:
    """A constant as text: the same in every process and on every machine, and no other's.

    One that cannot be written so raises `TypeError`. `callers` as in `_code_of_function`: a table
    of functions may be read by one of them.

    >>> constant_text(({"b": 1}, frozenset("ca"), re.compile("x")))
    "tuple({'b': 1}, frozenset('a', 'c'), Pattern('x', 32))"
    """
    text = partial(constant_text, callers=callers)
    if (plain := _text_of_plain(value)) is not None:
        return plain
    kind = type(value).__name__
    match value:
        case Enum():
            return f"{kind}.{value.name}({text(value.value)})"
        case Mapping():
            items = cast("Mapping[object, object]", value).items()
            return f"{{{', '.join(f'{text(key)}: {text(item)}' for key, item in items)}}}"
        case set() | frozenset():
            return _call_text(kind, sorted(map(text, cast("set[object]", value))))
        case tuple() | list():
            return _call_text(kind, map(text, cast("list[object]", value)))
        case partial():
            return _call_text(kind, map(text, [value.func, value.args, value.keywords]))
        case FunctionType() if _is_ours(value) and value not in callers:
            return digest([_code_of_function(value, None, callers)])
        case type() | FunctionType() | BuiltinFunctionType() | ModuleType():
            module = getattr(value, "__module__", "")
            # The digest of a plug-in counts comments, too.
            module = re.sub(rf"^{re.escape(PLUGIN_MODULES)}\w+\.", "", module)
            return f"{module}.{getattr(value, '__qualname__', value.__name__)}"
        case _:
            return _text_of_object(value, text)


def _text_of_plain(value: object) -> str | None:
    """A number, a text, a path or a pattern, as text; None if a constant is something else."""
    match value:
        case Enum():
            return None
        case bool() | None | bytes() | bytearray() | range() | complex():
            return repr(value)
        # As plain numbers and texts: subclasses, such as NumPy's, may write themselves otherwise.
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)
        case str():
            return str.__repr__(value)
        case re.Pattern():
            pattern = cast(re.Pattern[str], value)
            return _call_text("Pattern", [repr(pattern.pattern), repr(pattern.flags)])
        case PurePath():
            # A file of ours lies elsewhere on every machine.
            is_ours = value.is_relative_to(PACKAGE)
            return _call_text("Path", [repr(str(value.relative_to(PACKAGE) if is_ours else value))])
        case _:
            return None


def _text_of_object(value: Any, text: Callable[[object], str]) -> str:  # noqa: ANN401
    """An object of a library, or of a class of ours, as text; `text` writes what is in it."""
    kind = type(value).__name__
    if type(value) is object:
        return kind  # A mark that stands for nothing else.
    if is_dataclass(value):
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        return f"{kind}{text(content)}"
    # A tensor of PyTorch, which is not imported here.
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    if hasattr(array, "tobytes") and hasattr(array, "dtype"):
        # An array of objects holds their addresses.
        is_of_objects = array.dtype.hasobject
        content = text(array.tolist() if is_of_objects else array.tobytes().hex())
        return _call_text(kind, [str(array.dtype), str(tuple(array.shape)), content])
    if type(value).__module__.partition(".")[0] in WRITTEN_WHOLE and "0x" not in repr(value):
        return f"{kind}({value!r})"
    raise TypeError(
        f"a constant of type {kind} has no fingerprint: {value!r}; expected numbers, texts, arrays,"
        " enumerations, dataclasses, or containers of them"
    )


def _call_text(name: str, arguments: Iterable[str]) -> str:
    return f"{name}({', '.join(arguments)})"


class _Source(NamedTuple):
    """The code of one function, and the names in it."""

    text: str
    names: frozenset[str]
    attributes: frozenset[str]  # by name alone: the tree does not say whose they are


@cache
def _read_function(function: FunctionType) -> _Source:
    """A function's own code, without prose, decorators and the ranges of parameters."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    _strip_prose(tree, with_errors=False)
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) if isinstance(node, ast.arg) else None
        if isinstance(node, ast.FunctionDef):
            # Decorators hold facts such as a source, which change no number.
            node.decorator_list = []
            annotation = node.returns
        # An alias that adds a range or a unit to a type, such as `Count`, counts as the plain type:
        # a range decides which options are refused, and changes no number.
        for part in ast.walk(annotation) if annotation is not None else ():
            alias = function.__globals__.get(part.id) if isinstance(part, ast.Name) else None
            if isinstance(part, ast.Name) and get_origin(alias) is Annotated:
                plain = get_args(alias)[0]
                part.id = plain.__forward_arg__ if isinstance(plain, ForwardRef) else plain.__name__
    nodes = list(ast.walk(tree))
    return _Source(
        text=_canonical(tree),
        names=frozenset(node.id for node in nodes if isinstance(node, ast.Name)),
        attributes=frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
    )


def _unwrapped(value: object) -> object:
    """The function behind a cache, a property or a class method."""
    for name in ("__wrapped__", "__func__", "fget", "func"):
        value = getattr(value, name, value)
    return value


def _is_ours(value: object) -> bool:
    # The libraries of a run are recorded by their versions.
    return isinstance(value, FunctionType) and value.__module__.startswith(OURS)
