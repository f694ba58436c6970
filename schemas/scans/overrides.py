"""What `--set KEY=VALUE` changes in the fields of a scan."""

import copy
import json
import tomllib
from collections.abc import Iterable
from typing import Any, cast

from headcount.schemas.errors import ScanError

MOST_DOTS = 100  # in a key: deeper tables could not be written as JSON


def override_fields(fields: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of a scan's fields with each `key=value` put in: a dotted key and a TOML value.

    >>> override_fields({"n_ctx": 8}, ['input.where."meta.year"=2020'])
    {'n_ctx': 8, 'input': {'where': {'meta.year': 2020}}}
    """
    # A deep copy, because an override may reach into a nested table of the caller's.
    changed = copy.deepcopy(fields)
    for override in overrides:
        (*parents, last), text = split_override(override)
        value = _value(override, text)
        table = changed
        for parent in parents:
            # A table that the file leaves out is made on the way.
            child: Any = table.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ScanError(f"--set {override}: {parent} is a value, not a table")
            table = cast("dict[str, Any]", child)
        table[last] = value
    return changed


def field_of(override: str) -> str:
    """The field that an override sets, as a dotted key.

    >>> field_of(" input . files=a.txt"), field_of('"input.files"=a.txt')
    ('input.files', '"input.files"')
    """
    names, _ = split_override(override)
    return ".".join(json.dumps(name) if "." in name else name for name in names)


def split_override(override: str) -> tuple[list[str], str]:
    """The names of the dotted key of an override, as TOML reads them, and the text of its value.

    >>> split_override("input.'a=b.c' = x=y")
    (['input', 'a=b.c'], ' x=y')
    """
    # A name in quotation marks may hold a sign of equality, so the key is the first that is one.
    equals = override.find("=")
    while equals >= 0:
        if names := _names(override[:equals]):
            return names, override[equals + 1 :]
        equals = override.find("=", equals + 1)
    raise ScanError(f"--set {override}: expected key=value, for instance --set n_ctx=128")


def _names(key: str) -> list[str]:
    """The names of a dotted key; none if it is no key of TOML."""
    line = f"{key.strip()} = 0"
    # Of several lines the first could be a header.
    if "\n" in line or line.count(".") > MOST_DOTS:
        return []
    try:
        # A comment has no names.
        table: Any = tomllib.loads(line)
    except ValueError:
        return []
    names: list[str] = []
    while table:
        [(name, table)] = cast("dict[str, Any]", table).items()
        names.append(name)
    return names


def _value(override: str, text: str) -> object:
    """A TOML value, or a string without its quotation marks."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    # A text with a line end could hold further keys. Then it is not one value.
    if list(parsed) == ["value"]:
        return parsed["value"]
    stripped = text.strip()
    # What looks like an array, a table or a string was meant as one, and is not a bare string.
    if stripped[:1] + stripped[-1:] in ("[]", "{}") or stripped[:1] in ("'", '"'):
        raise ScanError(
            f"--set {override}: not a TOML value; strings in it stand in quotation marks, for "
            """instance --set 'statistics=["entropy"]'"""
        )
    return text
