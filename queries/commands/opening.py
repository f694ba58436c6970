"""Opening runs for a command, and telling its user what goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headcount.schemas.repeating import repeated

if TYPE_CHECKING:
    from headcount.queries.ask.asking import RunDatabase

LONGEST_SILENCE = 20.0  # seconds between two lines in a log about what takes long

RunsArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUNS", help="A run directory, or a directory of runs; a path or a URL."
    ),
]

Code = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help="Read only the shards that this code measured (shards.code). Needed if two codes "
        "define a statistic differently.",
    ),
]


@contextmanager
def waiting(words: str, seconds: float = LONGEST_SILENCE) -> Iterator[None]:
    """Say what is done, where nobody knows how long it takes: on a terminal as long as it is done,
    in a log whenever so many seconds have passed.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(words):
            yield
        return
    began = time.monotonic()

    def say() -> None:
        tell_user(f"{words}, for {time.monotonic() - began:.0f} s")

    with repeated(say, seconds):
        yield


def open_for_command(runs: str, code: str | None = None, memory: str | None = None) -> RunDatabase:
    """The runs of a command. What is damaged is said."""
    with waiting("reading the runs"):
        # These import duckdb and pyarrow, which `headcount --help` need not wait for.
        from headcount.queries.ask.asking import open_runs
        from headcount.queries.open.limits import MEMORY
        from headcount.schemas.process import leave_pandas_out

        leave_pandas_out()
        database = open_runs(runs, code=code, memory=memory or MEMORY, tell=tell_user)
        warn_of_damage(database)
    return database


def warn_of_damage(database: RunDatabase) -> None:
    """Say on stderr which runs have damaged files: their shards are in no answer."""
    for line in database.damage():
        tell_user(f"warning: {line}")


def tell_user(line: str) -> None:
    """Print a line on stderr, so that an answer on stdout stays as it is."""
    typer.echo(line, err=True)
