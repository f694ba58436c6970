"""How a plug-in is read: a file that a scan names, an installed package, or a function."""

import os
import re
from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import cast

from headcount.schemas.errors import ScanError, unknown
from headcount.schemas.files.input_files import ROOTS, read_input
from headcount.schemas.fingerprints import fingerprint
from headcount.schemas.places import Place, names, place
from headcount.schemas.plugins import Plugin, PluginQuery, activate, line_of, waiting_of
from headcount.schemas.reasons import reason
from headcount.schemas.registry import in_words
from headcount.schemas.values import shortened
from headcount.schemas.view_names import names_of_views

GROUP = "headcount.plugins"  # entry points of installed packages


def read_plugins(requested: object) -> tuple[Plugin, ...]:
    """The plug-ins that a scan names: files, installed packages, functions, or read ones."""
    if not isinstance(requested, list | tuple):
        raise ScanError(
            f"plugins: expected a list of files, got {shortened(repr(requested), 60)}; write "
            'plugins = ["my_heads.py"]'
        )
    plugins = tuple(map(_read, cast("list[object]", requested)))
    for number, plugin in enumerate(plugins):
        if plugin.name in [other.name for other in plugins[:number]]:
            raise ScanError(f"plugins: expected each name once, got {plugin.name} twice")
    queries_of(plugins)
    return plugins


def read_and_activate(requested: object) -> tuple[Plugin, ...]:
    """The plug-ins that a scan names, which are active from now on."""
    plugins = read_plugins(requested)
    activate(plugins)
    # No run keeps functions, so none asks for their fingerprints.
    _check_fingerprints([plugin for plugin in plugins if not plugin.functions])
    return plugins


def _check_fingerprints(plugins: Iterable[Plugin]) -> None:
    """Refuse what has no fingerprint, such as a function that reads a lock."""
    for _, entry in (each for plugin in plugins for each in plugin.registrations):
        try:
            fingerprint(*entry.code)
        except Exception as error:
            activate(())
            raise ScanError(f"{line_of(entry.function)}: {in_words(error)}") from None


def queries_of(plugins: Iterable[Plugin]) -> dict[str, PluginQuery]:
    """The named queries of some plug-ins, by name; a name that means two things is refused."""
    queries: dict[str, PluginQuery] = {}
    for query in (query for plugin in plugins for query in plugin.queries):
        if query.name in names_of_views():
            raise ScanError(
                f"plugins: {query.name}.sql: {query.name!r} is a view of headcount's own; call it "
                "otherwise"
            )
        # Plug-ins of one folder have the same files beside them.
        if queries.setdefault(query.name, query) != query:
            raise ScanError(
                f"plugins: {query.name}.sql lies beside two plug-ins and says two things; call one "
                "of them otherwise"
            )
    return queries


def _read(requested: object) -> Plugin:
    match requested:
        case Plugin():
            return requested
        case FunctionType():
            if not waiting_of(requested):
                raise ScanError(
                    f"plugins: {requested.__name__} has no decorator, such as @statistic(SOURCE)"
                )
            name = requested.__name__
            return Plugin(requested.__code__.co_filename, name, b"", (requested,))
        case str() | Path():
            name = str(requested)
            if not name.endswith(".py"):
                file = _installed(name)
                return Plugin(name, file.name, file.read_bytes(), queries=_queries_beside(file))
            if os.environ.get(ROOTS):
                raise ScanError(
                    f"plugins: {name}: {ROOTS} is set, so scans may come from others, and only "
                    "installed plug-ins run"
                )
            try:
                file = place(name)
                content = read_input(file)
                return Plugin(name, file.name, content, queries=_queries_beside(file))
            except OSError as error:
                raise ScanError(
                    f"plugins: {name}: cannot be read ({reason(error)}); expected a Python file"
                ) from None
        case _:
            raise ScanError(
                f"plugins: expected a file, got {shortened(repr(requested), 60)}; write "
                'plugins = ["my_heads.py"]'
            )


def _queries_beside(file: Place) -> tuple[PluginQuery, ...]:
    """The `.sql` files in the folder of a plug-in that begin with what they are for.

    Others are somebody's notes, and stay where they are.
    """
    # DuckDB knows a name whatever its case.
    queries = (
        PluginQuery(name[:-4].lower(), read_input(file.parent / name))
        for name in sorted(names(file.parent))
        if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*\.sql", name)
    )
    return tuple(query for query in queries if query.content.startswith(b"--"))


def _installed(name: str) -> Path:
    """The file of an installed plug-in; its package says which module that is."""
    modules = {point.name: point.module for point in entry_points(group=GROUP)}
    if name not in modules:
        raise ScanError(
            f"plugins: {unknown('installed plug-in', name, modules)}; a file's name ends in .py"
        )
    try:
        spec = find_spec(modules[name])
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise ScanError(f"plugins: {name}: its package has no module {modules[name]}")
    return Path(spec.origin)
