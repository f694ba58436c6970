"""Fingerprints of code, which tell whether two numbers under one name mean the same.

Only what Python runs counts. Comments, docstrings and layout do not. Code is read as a syntax tree
and written in one canonical form.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Annotated, Any, ForwardRef, NamedTuple, cast, get_args, get_origin

from headcount.schemas.packages import MEASURING

OURS = tuple(f"headcount.{package}." for package in MEASURING)
"""How the names of our modules begin whose code decides numbers."""

LENGTH = 12  # hexadecimal digits of a fingerprint


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
    names = sorted(source.names - {function.__name__})
    global_values = [function.__globals__.get(name) for name in names]
    callers = callers | {function}
    helpers = [
        _code_of_function(helper, None, callers)
        for helper in map(_unwrapped, global_values)
        if _is_ours(helper) and helper not in callers
    ]
    # The tree does not say whose method `x.rows()` is. So of every class that the function names,
    # all methods count that have the name of one of its attributes.
    classes = [
        value
        for value in global_values
        if isinstance(value, type) and value.__module__.startswith("headcount.workers.")
    ]
    for cls in [*classes, *([owner] if owner else [])]:
        helpers += [
            _code_of_function(method, cls, callers)
            for name, value in vars(cls).items()
            if name in source.attributes
            and _is_ours(method := _unwrapped(value))
            and method not in callers
        ]
    # A constant of a module decides numbers as much as code does.
    constants = [repr(value) for value in global_values if isinstance(value, int | float | str)]
    closed_over = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return "\n".join([source.text, *closed_over, *constants, *helpers])


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
