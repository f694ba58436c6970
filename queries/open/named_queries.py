"""Named queries: each `.sql` file of a folder, with what it is for and the parameters it takes.

The first comment of a file is its description. It may end in lines of this form:

    -- parameter threshold DOUBLE = 0.3: mean sink_alpha above which a head is a sink.
    -- ranks sink_mass above (n_ctx * $threshold - 1) / (n_ctx - 1)
    -- example: sink_heads --threshold 0.2 --limit 5

In the SQL, `$threshold` stands for the value. A parameter without a default must be given. A column
that has the name of a parameter is written with the name of its table. A query that ranks heads by
a statistic says so, and above or from which mean on it calls them by a name: SQL over `runs`.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from headcount.queries.open.sql_text import quoted_name, text_literal
from headcount.schemas.errors import QueryError
from headcount.schemas.packages import PACKAGE

QUERIES = PACKAGE / "queries" / "sql"  # the folder whose `.sql` files are the named queries

SqlType: TypeAlias = Literal["VARCHAR", "DOUBLE", "BIGINT", "BOOLEAN"]  # of parameters

WORDS_OF_TYPES: Mapping[SqlType, str] = {
    "VARCHAR": "TEXT",
    "DOUBLE": "NUMBER",
    "BIGINT": "WHOLE NUMBER",
    "BOOLEAN": "true|false",
}
"""What a user is told to write."""

PARAMETER = re.compile(r"parameter (\w+) (\w+)(?: = (.+?))?: (.+)")
EXAMPLE = re.compile(r"example: (.+)")
RANKING = re.compile(r"ranks (\w+) (above|from) (.+)")


@dataclass(frozen=True)
class Parameter:
    """A value that a query may set."""

    name: str
    type: SqlType
    default: str | None  # In SQL. None if the value must be given.
    meaning: str

    def literal(self, text: str) -> str:
        """A value that a user typed, as SQL writes it."""
        if self.type == "VARCHAR":
            return text_literal(text)
        try:
            return _number_literal(self.type, text.strip().lower())
        except ValueError:
            raise QueryError(
                f"--{self.name}: expected {WORDS_OF_TYPES[self.type]}, got {text[:200]!r}"
            ) from None


def _number_literal(sql_type: SqlType, text: str) -> str:
    """A number or a truth value in SQL. ValueError if the text is none."""
    if sql_type == "BOOLEAN":
        if text not in ("true", "false"):
            raise ValueError(text)
        return text
    if sql_type == "BIGINT":
        return str(int(text))
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    # In parentheses: the cast would come before a minus.
    return f"({number!r})::DOUBLE"


@dataclass(frozen=True)
class Ranking:
    """By which statistic a query ranks heads, and which mean it holds this against."""

    statistic: str
    is_strict: bool  # whether a mean must lie above it, and is not enough itself
    threshold: str  # in SQL, over `runs`, with the query's own parameter `$threshold`


@dataclass(frozen=True)
class NamedQuery:
    """A query that is asked by its name."""

    name: str
    description: str  # what its rows are, in one line of text
    parameters: tuple[Parameter, ...]
    example: str | None  # what a user may write after `headcount query RUNS`
    sql: str
    ranking: Ranking | None = None

    @property
    def declared(self) -> str:
        """The parameters as a macro declares them."""
        return ", ".join(
            f"{p.name} {p.type}" + ("" if p.default is None else f" := {p.default}")
            for p in self.parameters
        )

    @property
    def sql_by_default(self) -> str:
        """The SQL in which parameters are their defaults."""
        values = {p.name: f"CAST({p.default} AS {p.type})" for p in self.parameters}
        return self._with_parameters_as(lambda name: values[name])

    @property
    def macro_body(self) -> str:
        """The SQL in which parameters are plain names, as in the body of a macro."""
        return self._with_parameters_as(str)

    @property
    def grouped_macro_body(self) -> str:
        """The same with each parameter in a query of its own, as groups of rows need it."""
        return self._with_parameters_as("(SELECT {})".format)

    def _with_parameters_as(self, form: Callable[[str], str]) -> str:
        if not self.parameters:
            return self.sql
        names = "|".join(parameter.name for parameter in self.parameters)
        # To the end of the word: one name may begin with another.
        return re.sub(rf"\$({names})\b", lambda match: form(match[1]), self.sql)

    @property
    def required(self) -> list[Parameter]:
        """The parameters that have no default."""
        return [parameter for parameter in self.parameters if parameter.default is None]

    @property
    def code(self) -> str:
        """The SQL without its comments, in which other queries and tables are looked for."""
        return re.sub(r"--.*", "", self.sql).lower()

    def parameter(self, name: str) -> Parameter:
        """The parameter of a name. It is an error if there is none."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        names = [parameter.name for parameter in self.parameters]
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean --{nearest[0]}? " if nearest else ""
        known = ", ".join(f"--{name}" for name in names) or "none"
        raise QueryError(f"query {self.name!r} has no parameter --{name}: {hint}It takes: {known}")

    def call(self, values: Mapping[str, str]) -> str:
        """The query in SQL, with values as a user typed them."""
        arguments = {name: self.parameter(name).literal(text) for name, text in values.items()}
        missing = [parameter for parameter in self.required if parameter.name not in arguments]
        if missing:
            raise QueryError(self.what_is_missing(missing))
        if not arguments:
            return f"FROM {quoted_name(self.name)}"
        listed = ", ".join(f"{name} := {literal}" for name, literal in arguments.items())
        return f"FROM {quoted_name(self.name)}({listed})"

    def what_is_missing(self, missing: Sequence[Parameter]) -> str:
        """Which parameters must be given, and how, in one line."""
        options = " and ".join(f"--{p.name} {WORDS_OF_TYPES[p.type]}" for p in missing)
        in_sql = ", ".join(f"{p.name} := …" for p in missing)
        example = f", as in: {self.example}" if self.example else ""
        return f"query {self.name!r} needs {options}{example} (in SQL: FROM {self.name}({in_sql}))"

    def help_text(self) -> str:
        """What the query is for, and what it takes, for a terminal."""
        lines = [self.description]
        if self.parameters:
            lines += ["", "Parameters:"]
        for parameter in self.parameters:
            default = parameter.default
            state = "must be given" if default is None else f"default {default}"
            option = f"  --{parameter.name} {WORDS_OF_TYPES[parameter.type]}"
            lines.append(f"{option}  {parameter.meaning} ({state})")
        if self.example:
            lines += ["", f"Example: headcount query RUNS {self.example}"]
        if self.parameters:
            defaults = [p for p in self.parameters if p.default is not None]
            shown = ", ".join(f"{p.name} := {p.default or '…'}" for p in self.required or defaults)
            lines.append(f"In SQL: FROM {self.name}({shown})")
        return "\n".join(lines)


def read_queries(folder: Path) -> dict[str, NamedQuery]:
    """The named queries of a folder, by name."""
    return {
        file.stem: parse_query(file.stem, file.read_text(encoding="utf-8"))
        for file in sorted(folder.rglob("*.sql"), key=attrgetter("stem"))
    }


def parse_query(name: str, sql: str) -> NamedQuery:
    """A named query from the text of its file.

    >>> query = parse_query("sinks", "-- Sinks.\\n-- parameter low DOUBLE = 0.3: least.\\nFROM a")
    >>> query.description, query.parameters[0].default
    ('Sinks.', '0.3')
    >>> query.call({"low": "0.2"})
    'FROM "sinks"(low := (0.2)::DOUBLE)'
    """
    description: list[str] = []
    parameters: list[Parameter] = []
    example: str | None = None
    ranking: Ranking | None = None
    for line in first_comment(sql):
        if match := PARAMETER.fullmatch(line):
            parameter, sql_type, default, meaning = match.groups()
            if sql_type not in get_args(SqlType):
                raise QueryError(
                    f"{name}.sql: parameter {parameter}: expected a type of "
                    f"{', '.join(get_args(SqlType))}, got {sql_type}"
                )
            parameters.append(Parameter(parameter, cast("SqlType", sql_type), default, meaning))
        elif match := EXAMPLE.fullmatch(line):
            example = match[1]
        elif match := RANKING.fullmatch(line):
            ranking = Ranking(match[1], match[2] == "above", match[3])
        else:
            description.append(line)
    text = " ".join(description)
    return NamedQuery(name, text, tuple(parameters), example, sql, ranking)


def first_comment(sql: str) -> list[str]:
    """The lines of the comment that a query starts with.

    A line that is indented more continues the one before it.

    >>> first_comment("-- Heads, ranked.\\n-- Two\\n--   lines.\\nFROM heads -- not this")
    ['Heads, ranked.', 'Two lines.']
    """
    lines: list[str] = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        text = line.removeprefix("--")
        if text.startswith("   ") and lines:
            lines[-1] += f" {text.strip()}"
        else:
            lines.append(text.strip())
    return lines
