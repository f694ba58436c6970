"""The subcommand `query`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperCommand

from headcount.queries.ask.typed_queries import read_typed, with_parameters
from headcount.queries.commands.opening import (
    Code,
    RunsArgument,
    open_for_command,
    tell_user,
    waiting,
)
from headcount.queries.open import rooms
from headcount.queries.open.named_queries import QUERIES, NamedQuery, read_queries
from headcount.queries.open.sql_text import text_literal
from headcount.schemas.errors import HeadcountError, QueryError, SqlMistake
from headcount.schemas.packages import entered

if TYPE_CHECKING:
    from headcount.queries.ask.answers import Answer
    from headcount.queries.ask.asking import RunDatabase
    from headcount.queries.ask.formats import Format
    from headcount.workers.run_model import RunModels

commands = typer.Typer(rich_markup_mode=None)


TIMEOUT = 600.0  # seconds after which a query is given up by default
MANY_RUNS = 3  # if more runs are not complete, one line speaks of all of them


class QueryCommand(TyperCommand):
    """A command that also takes the parameters of named queries, and explains them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Read the command line. `--help` beside a named query is about that query."""
        if {"-h", "--help"} & set(args):
            # The first word is a path, which may have the name of a query.
            runs, *words = [word for word in args if not word.startswith("-")] or [""]
            for word in words:
                if query := _query_named(word, runs):
                    typer.echo(query.help_text())
                    raise typer.Exit
        return super().parse_args(ctx, args)


def _query_named(name: str, runs: str) -> NamedQuery | None:
    """A named query of ours, or else one that runs bring."""
    if own := read_queries(QUERIES).get(name):
        return own
    # Whoever asks for help may not have said yet which runs.
    with suppress(HeadcountError):
        return open_for_command(runs).shipped.queries.get(name)
    return None


@commands.command(
    cls=QueryCommand,
    # What the command does not know may be a parameter of the query.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def query(
    context: typer.Context,
    runs: RunsArgument,
    typed: Annotated[
        str | None,
        typer.Argument(
            metavar="QUERY",
            help="Name of a view, with its parameters (--threshold 0.2; NAME --help explains "
            "them), SQL, a file of SQL (NAME.sql or @NAME), or - for stdin. "
            "Default: list the views.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="File that holds the SQL."),
    ] = None,
    requested_format: Annotated[
        Literal["table", "csv", "json", "jsonl", "parquet", "markdown"] | None,
        typer.Option(
            "--format",
            help="How to write the answer. Default: as the name of the file says, or a table.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File to write: .csv, .json, .jsonl, .parquet or .txt."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="At most so many rows. A table shows 40 by default."),
    ] = None,
    vertical: Annotated[
        bool, typer.Option("--vertical", help="Write a table with one column per line.")
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="Write the column tokens as text.")] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Give up after this time. 0 waits for ever."),
    ] = TIMEOUT,
    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Memory that the query may take: 4GB, or 50%."),
    ] = "50%",
    code: Code = None,
) -> None:
    """Query the committed rows of runs, in SQL or by the name of a view."""
    # These import duckdb and pyarrow, which `headcount --help` need not wait for.
    from headcount.queries.ask.formats import format_of, rows_to_read
    from headcount.queries.ask.text_tables import TABLE_ROWS
    from headcount.queries.open.limits import check_memory, held_to_memory

    time_limit = timeout if 0 < timeout < float("inf") else None
    asked = read_typed(typed, file)
    answer_format = format_of(requested_format, output, vertical)
    database = open_for_command(runs, code, check_memory(memory))
    views = database.view_descriptions
    if asked is None:
        # Every view with the first sentence of its description.
        for name, description in views.items():
            typer.echo(f"{name:<24} {description.partition('. ')[0].rstrip('.')}.")
        return
    options = [option for parameter in context.command.params for option in parameter.opts]
    sql = with_parameters(asked, context.args, database.shipped.queries, options)
    # Their models' tokenizers make text of tokens.
    models = entered(rooms.RUN_MODELS)(runs) if text else None
    with held_to_memory(database.cursor()):
        answer = _answer(database, sql, limit, time_limit, models, answer_format, output, vertical)
    rows_asked = rows_to_read(answer_format, limit)
    if rows_asked is not None and asked.strip().lower() in views:
        # The name of a view is a word, which needs no quotation marks.
        view = sql.strip().removeprefix("FROM ").replace('"', "", 2)
        rows_shown = limit if limit is not None else TABLE_ROWS
        is_all_read = answer.rows_read < rows_asked
        _say_which_runs_are_shown(database, answer, rows_shown, is_all_read, view)
    _say_how_much_is_in(database)


def _say_which_runs_are_shown(
    database: RunDatabase, answer: Answer, rows_shown: int, is_all_read: bool, view: str
) -> None:
    """Say on stderr if a limit shows only some runs of a view: most views are ordered by run."""
    shown = [run_id for run_id, row in answer.first_rows.items() if row < rows_shown]
    all_runs = sorted(run.directory.run_id for run in database.runs)
    # A table also reads rows that it only counts. Of rows that nobody has read, any run may be.
    with_rows = [*answer.first_rows] if is_all_read else all_runs
    others = [run_id for run_id in with_rows if run_id not in shown]
    if shown and others:
        whose = f"run {shown[0]}" if len(shown) == 1 else f"{len(shown)} runs"
        more = f"FROM {view} WHERE run_id = {text_literal(others[0])}"
        tell_user(
            f"note: only rows of {whose} are shown, of {len(all_runs)} runs; see also: {more}"
        )


def _answer(
    database: RunDatabase,
    sql: str,
    limit: int | None,
    time_limit: float | None,
    models: RunModels | None,
    answer_format: Format,
    output: Path | None,
    vertical: bool,
) -> Answer:
    from headcount.queries.ask.answers import run_query
    from headcount.queries.ask.formats import rows_to_read

    try:
        with waiting("asking"):
            found = run_query(database, sql, rows_to_read(answer_format, limit), time_limit)
    except SqlMistake as mistake:
        # It is shown where it stands, above the error.
        if mistake.pointer:
            tell_user(mistake.pointer)
        raise
    if models is not None:
        run_ids = [run.directory.run_id for run in database.runs]
        entered(rooms.WRITE_TOKENS_AS_TEXT)(found, models, run_ids)
    if answer_format == "parquet":
        found.facts = entered(rooms.COLUMN_FACTS)(database, sql)
    if output is not None:
        entered(rooms.WRITE_FILE)(found, answer_format, output, limit, vertical)
    else:
        _write_to_stdout(found, answer_format, limit, vertical)
    # No rows may be the answer, or a sign that the scan did not measure what a view needs.
    if not found.rows_read:
        for line in entered(rooms.WHY_EMPTY)(database, sql):
            tell_user(f"note: {line}")
    return found


def _write_to_stdout(
    answer: Answer, answer_format: Format, limit: int | None, vertical: bool
) -> None:
    from headcount.queries.ask.formats import write

    # A CSV file is read by programs, so its characters must not become numbers.
    if answer_format == "csv" and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="strict")
    try:
        write(answer, answer_format, sys.stdout, limit, vertical)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has what it wanted, as `| head` does. What is left goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UnicodeEncodeError as error:
        raise QueryError(
            f"stdout is {error.encoding}, which has no {error.object[error.start]!a}; "
            "-o FILE.csv is UTF-8, and so is stdout with PYTHONIOENCODING=utf-8"
        ) from None


def _say_how_much_is_in(database: RunDatabase) -> None:
    """Say on stderr which runs are not complete: what was asked is about a part of them."""
    shards = [(r.directory.run_id, len(r.done), r.manifest.shards) for r in database.runs]
    unfinished = sorted(run for run in shards if run[1] < run[2])
    lines = [
        f"run {run_id} is not complete: {done:,} of {in_all:,} shards are in"
        for run_id, done, in_all in unfinished
    ]
    if len(unfinished) > MANY_RUNS:
        _, done, in_all = zip(*unfinished, strict=True)
        lines = [
            f"{len(unfinished):,} runs are not complete: {sum(done):,} of their "
            f"{sum(in_all):,} shards are in"
        ]
    for line in lines:
        tell_user(f"note: {line}")
