"""Plug-ins: files of one's own with statistics, inputs and interventions, written as ours are.

A file is run once in a process, as a module whose name holds the digest of its bytes. So two
versions of a file are two modules, and fingerprints cover its functions as they do ours. What it
registers is in the registries while a scan is read or measured that names it (`activate`).

SQL beside a file, in `.sql` files that begin with a comment, becomes named queries of the runs.
"""

import hashlib
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from pydantic_core import CoreSchema, core_schema

from headcount.schemas.errors import ScanError
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.formula_kinds import CURVES, PROFILES
from headcount.schemas.kinds import KINDS
from headcount.schemas.registry import PLUGIN_MODULES, WAITING, Entry, Registry, in_words
from headcount.schemas.tables import PARTITION_NAMES, carried_name, uniform_column

NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
"""How columns are called. SQL takes no difference between capitals and small letters."""

COLUMNS = {*PARTITION_NAMES, "label", *(name for table in TABLES.values() for name in table.own)}
"""The columns that runs have besides those of formulas."""

PREFIXES = (uniform_column(""), carried_name(""))  # of the names of columns that are made of others


class PluginQuery(NamedTuple):
    """A `.sql` file beside a plug-in, which runs keep as a named query."""

    name: str
    content: bytes

    @property
    def digest(self) -> str:
        """Of its bytes, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def meaning(self) -> str:
        """What its first line says that its rows are."""
        return self.content.decode(errors="replace").splitlines()[0].removeprefix("--").strip()


class Registration(NamedTuple):
    """What a decorator of a plug-in asks for."""

    registry: Registry[Any]
    entry: Entry


@dataclass(frozen=True)
class Plugin:
    """A file of definitions, or functions that are passed as they are."""

    place: str  # how a user names it
    name: str  # of the file
    content: bytes
    functions: tuple[FunctionType, ...] = ()
    # They change no row, so a plug-in is the same one with others.
    queries: tuple[PluginQuery, ...] = field(default=(), compare=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        """Tell pydantic to take it as it is."""
        text = core_schema.to_string_ser_schema(when_used="always")
        return core_schema.is_instance_schema(cls, serialization=text)

    def __str__(self) -> str:
        """How a user names it."""
        return self.place

    @cached_property
    def digest(self) -> str:
        """Of its bytes, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def file(self) -> str:
        """What Python takes for the name of its file: no other version has it."""
        return f"<{self.place} {self.digest[:12]}>"

    @property
    def registrations(self) -> list[Registration]:
        """What its decorators ask for, in order."""
        if not self.functions:
            return _registrations_of(self)
        return [each for function in self.functions for each in waiting_of(function)]


def line_in_plugin(filename: str, line: int | None) -> str:
    """A line of a plug-in in words, by what Python calls its file; empty if it is none.

    >>> line_in_plugin("<my_heads.py 0123456789ab>", 7), line_in_plugin("batch.py", 7)
    ('my_heads.py, line 7', '')
    """
    match = re.fullmatch(r"<(.+) [0-9a-f]{12}>", filename)
    return f"{match[1]}, line {line}" if match else ""


def line_of(function: Callable[..., Any]) -> str:
    """Where a function begins, its decorators included."""
    code = cast(FunctionType, function).__code__
    line = line_in_plugin(code.co_filename, code.co_firstlineno)
    return line or f"{code.co_filename}, line {code.co_firstlineno}"


def line_of_error(error: BaseException) -> str:
    """The last line of a plug-in that led to an error; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    lines = [line_in_plugin(*each) for each in places]
    return next(filter(None, reversed(lines)), "")


@cache
def _registrations_of(plugin: Plugin) -> list[Registration]:
    """Run the file of a plug-in; whatever is wrong with it is one line."""
    module = module_of(plugin)
    try:
        source = plugin.content.decode()
        # For tracebacks and `inspect.getsource`: there may be no such file on this machine.
        lines = source.splitlines(keepends=True)
        linecache.cache[plugin.file] = (len(source), None, lines, plugin.file)
        vars(module)[WAITING] = []
        exec(compile(source, plugin.file, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        raise ScanError(f"{line_of_error(error) or plugin.place}: {in_words(error)}") from error
    if not vars(module)[WAITING]:
        raise ScanError(
            f"{plugin.place}: defines nothing; decorate a function, as with @statistic(SOURCE)"
        )
    if neighbour := _neighbour(plugin, module):
        raise ScanError(
            f"{plugin.place}: imports {neighbour} from the same folder, which does not travel with "
            "it; write it into this file, or install it on every machine"
        )
    return [Registration(*each) for each in vars(module)[WAITING]]


def _neighbour(plugin: Plugin, module: ModuleType) -> str | None:
    """A module of the same folder that a file imports; none of an installed one."""
    if not plugin.place.endswith(".py"):
        return None
    folder = Path(plugin.place).absolute().parent
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
        top = f"{name}".partition(".")[0]
        file = getattr(sys.modules.get(top), "__file__", None)
        if top != "headcount" and file and folder in (Path(file).parent, Path(file).parent.parent):
            return top
    return None


@cache
def module_of(plugin: Plugin) -> ModuleType:
    """The module that a plug-in becomes; it is empty until the file was run."""
    stem = plugin.name.removesuffix(".py").replace(".", "_")
    module = ModuleType(f"{PLUGIN_MODULES}{plugin.digest[:12]}.{stem}")
    module.__file__ = plugin.file
    # Where Python looks for the module of a class or a function.
    sys.modules[module.__name__] = module
    return module


def waiting_of(function: FunctionType) -> list[Registration]:
    """What the decorators of a function asked for."""
    waiting = function.__globals__.get(WAITING, [])
    return [Registration(*each) for each in waiting if each[1].function is function]


_active: tuple[Plugin, ...] = ()
_added: list[tuple[Registry[Any], str]] = []


def activate(plugins: tuple[Plugin, ...]) -> None:
    """Let the registries of this process hold what these plug-ins register, and no others."""
    global _active
    if plugins == _active:
        return
    for registry, name in _added:
        registry.pop(name, None)
    _added.clear()
    _active = ()
    registrations = [each for plugin in plugins for each in plugin.registrations]
    _check_names(registrations)
    for registry, entry in registrations:
        targets: list[Registry[Any]] = [registry]
        # A profile may be kept of every sequence.
        if registry is PROFILES:
            targets.append(CURVES)
        for target in targets:
            target[entry.name] = entry
            _added.append((target, entry.name))
    _active = plugins


def _check_names(registrations: Iterable[Registration]) -> None:
    """Refuse a name that two plug-ins define, that is one of ours, or that no column may have."""
    lines: dict[tuple[int, str], str] = {}  # of the names that plug-ins have taken
    for registry, entry in registrations:
        name, line = entry.function.__name__, line_of(entry.function)
        what = f"{line}: {registry.word} {name!r}"
        if (other := lines.get((id(registry), name))) is not None:
            raise ScanError(f"{what} is defined before, in {other}; call one of them otherwise")
        ours: Iterable[Entry] = registry.values()
        if name in {*registry, *(each.function.__name__ for each in ours)}:
            raise ScanError(f"{what} is one of headcount's own; call it otherwise")
        if not NAME.fullmatch(name):
            raise ScanError(f"{what}: expected at most 60 of a to z, 0 to 9 and _, a letter first")
        if registry in KINDS and (name in COLUMNS or name.startswith(PREFIXES)):
            raise ScanError(f"{what} is, or begins as, a column of every run; call it otherwise")
        lines[id(registry), name] = line
