"""What a user types, as one query in SQL: a named query with parameters, SQL, or a file."""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from headcount.queries.open.named_queries import NamedQuery
from headcount.schemas.errors import QueryError


def read_typed(typed: str | None, file: Path | None) -> str | None:
    """The query as it was typed, or from a file or stdin. None if nothing was asked."""
    if file is not None and typed is not None:
        raise QueryError(f"expected one query, got {typed!r} and --file {file}")
    if typed == "-" or (file is not None and str(file) == "-"):
        return sys.stdin.read()
    if typed is not None and typed.startswith("@"):
        file = Path(typed.removeprefix("@"))
    elif typed is not None and re.fullmatch(r"[^\s;]+\.sql", typed.strip()):
        file = Path(typed.strip())
    if file is None:
        return typed
    try:
        # Editors on Windows may write a byte order mark, which DuckDB does not read.
        sql = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise QueryError(f"{file}: expected SQL in UTF-8") from None
    except OSError as error:
        raise QueryError(f"{file}: cannot be read ({error.strerror})") from None
    if not sql.strip():
        raise QueryError(f"{file}: is empty; expected one SQL statement")
    return sql


def with_parameters(
    typed: str,
    words: Sequence[str],
    queries: Mapping[str, NamedQuery],
    options: Sequence[str] = (),
) -> str:
    """A query in SQL with parameters from `words`; an option of the command may be meant."""
    query = queries.get(typed.strip())
    if query is None:
        if words:
            raise QueryError(_unexpected(words[0], typed, options))
        return typed
    values = parameter_values(words)
    names = [parameter.name for parameter in query.parameters]
    for name in values:
        if name not in names and difflib.get_close_matches(f"--{name}", options, n=1, cutoff=0.8):
            raise QueryError(_unexpected(f"--{name}", typed, options))
    return query.call(values)


def parameter_values(words: Sequence[str]) -> dict[str, str]:
    """The values of parameters by name.

    >>> parameter_values(["--threshold", "0.2", "--at-least=-1"])
    {'threshold': '0.2', 'at_least': '-1'}
    """
    values: dict[str, str] = {}
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        option, has_value, value = word.partition("=")
        if not option.startswith("--") or option == "--":
            raise QueryError(f"expected --PARAMETER VALUE, got {word!r}")
        name = option.removeprefix("--").replace("-", "_")
        if name in values:
            raise QueryError(f"{option}: is given twice")
        if not has_value:
            if not remaining:
                raise QueryError(f"{option}: expected a value after it")
            # Whatever it begins with: a number may be below zero.
            value = remaining.pop(0)
        values[name] = value
    return values


def _unexpected(word: str, typed: str, options: Sequence[str]) -> str:
    if typed.startswith("--"):
        return f"expected a query before {typed}: QUERY --PARAMETER VALUE"
    if not word.startswith("-"):
        return f"expected one query, got also {word!r}; SQL with spaces stands in quotes"
    nearest = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.5)
    hint = f": did you mean {nearest[0]}?" if nearest else "; only named queries take parameters"
    return f"unknown option {word}{hint}"
