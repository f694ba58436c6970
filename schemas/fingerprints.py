"""Fingerprints of code, which tell whether two numbers under one name mean the same.

What counts is what Python runs: comments, docstrings and layout do not. Code is read as a syntax
tree and written in one canonical form, in which a newer Python's empty fields leave no trace.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, cast, get_args, get_origin

LENGTH = 12
"""Hexadecimal digits of a fingerprint."""


def fingerprint(*functions: Callable[..., Any]) -> str:
    """Changes if and only if the functions' code changes, that of the helpers of ours they call
    included. What errors say does not count.
    """
    return digest(_code_of_function(function) for function in functions)


def module_code(file: Path, with_errors: bool) -> str:
    """The code of a module in canonical form; `with_errors` keeps what its errors say."""
    tree = ast.parse(file.read_bytes())
    _strip_prose(tree, with_errors)
    return _canonical(tree)


def digest(parts: Iterable[str]) -> str:
    """The fingerprint of some texts, in order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:LENGTH]


def _strip_prose(tree: ast.AST, with_errors: bool) -> None:
    """Remove docstrings, those of fields included, and what errors say unless `with_errors`."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            statements = cast("list[ast.stmt]", body)
            statements[:] = [statement for statement in statements if not _is_prose(statement)]
        if not with_errors and isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []


def _is_prose(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _canonical(node: Any) -> str:
    """A syntax tree as text, without its places in the file and without empty fields."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node))
        written = [
            f"{name}={_canonical(value)}" for name, value in fields if value not in (None, [])
        ]
        return f"{type(node).__name__}({','.join(written)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, cast('list[Any]', node)))}]"
    return repr(node)


def _code_of_function(
    function: Any, owner: type | None = None, above: frozenset[Any] = frozenset()
) -> str:
    """The code of a function and of what it calls of ours.

    `owner` is its class, `above` are its callers.
    """
    assert isinstance(function, FunctionType)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    _strip_prose(tree, with_errors=False)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        if isinstance(node, ast.arg) and node.annotation is not None:
            _forget_ranges(node.annotation, function.__globals__)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named = [function.__globals__.get(name) for name in sorted(names - {function.__name__})]
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    above = above | {function}
    helpers = [
        _code_of_function(helper, None, above)
        for helper in map(_plain, named)
        if _is_ours(helper) and helper not in above
    ]
    classes = [
        kind for kind in named if isinstance(kind, type) and kind.__module__.startswith("workers.")
    ]
    for kind in [*classes, owner]:
        methods = (_plain(m) for name, m in vars(kind).items() if name in used) if kind else ()
        helpers += [
            _code_of_function(method, kind, above)
            for method in methods
            if _is_ours(method) and method not in above
        ]
    constants = [repr(value) for value in named if isinstance(value, int | float | str)]
    closed_over = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    return "\n".join([_canonical(tree), *closed_over, *constants, *helpers])


def _forget_ranges(annotation: ast.expr, known: dict[str, Any]) -> None:
    """Write the plain type in the place of an alias that adds a range to it: what is refused changes
    no number.
    """
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and get_origin(known.get(node.id)) is Annotated:
            node.id = get_args(known[node.id])[0].__name__


def _plain(value: Any) -> Any:
    """The function behind a cache, a property or a class method."""
    for name in ("__wrapped__", "__func__", "fget", "func"):
        value = getattr(value, name, value)
    return value


def _is_ours(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__.startswith(("schemas.", "workers."))
