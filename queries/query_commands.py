"""The subcommands `query` and `report`."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from schemas.errors import QueryError

if TYPE_CHECKING:
    from queries.asking import RunDatabase


Code = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help="Read the shards that this code measured (shards.code), where two mean different "
        "things.",
    ),
]


def query(
    runs: Annotated[
        str,
        typer.Argument(
            metavar="RUNS", help="A run directory, or a directory of runs; a path or a URL."
        ),
    ],
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION", help="Name of a view, or SQL; without it, the views are listed."
        ),
    ] = None,
    format: Annotated[
        Literal["table", "csv", "json", "parquet"], typer.Option(help="How to write the answer.")
    ] = "table",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; parquet needs one.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Rows at most; a table shows 40 by default.")
    ] = None,
    code: Code = None,
) -> None:
    """Ask the committed rows of runs a question in SQL, or by the name of a view."""
    from queries.answers import rows_to_read, run_query, write, write_parquet
    from queries.asking import open_runs
    from queries.connection import view_descriptions

    if format == "parquet" and output is None:
        raise QueryError("--format parquet writes a file; say which one with -o FILE")
    database = open_runs(runs, code=code, tell=tell_user)
    warn_of_damage(database)
    if question is None:
        for name, description in view_descriptions(database.connection).items():
            first_sentence = description.partition(". ")[0].rstrip(".")
            typer.echo(f"{name:<24} {first_sentence}.")
        return
    answer = run_query(database.connection, question, rows_to_read(format, limit))
    if format == "parquet" and output is not None:
        write_parquet(answer, output)
        return
    try:
        target = (
            output.open("w", encoding="utf-8", newline="") if output else nullcontext(sys.stdout)
        )
    except OSError as error:
        raise QueryError(f"{output}: cannot be written ({error.strerror})") from None
    with target as out:
        write(answer, format, out, limit)


def report(
    runs: Annotated[
        str,
        typer.Argument(
            metavar="RUNS", help="A run directory, or a directory of runs; a path or a URL."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write.")] = Path(
        "report.html"
    ),
    code: Code = None,
) -> None:
    """Write one HTML file with heatmaps, rankings and norms of every run; it opens from disk,
    without a network.
    """
    from queries.asking import open_runs
    from queries.report import write_report

    database = open_runs(runs, code=code, tell=tell_user)
    warn_of_damage(database)
    write_report(database, output)
    typer.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


def warn_of_damage(database: RunDatabase) -> None:
    """Say on stderr which runs have damaged files: their shards are in no answer."""
    for line in database.damage():
        tell_user(f"warning: {line}")


def tell_user(line: str) -> None:
    """A line on stderr, beside whatever goes to stdout."""
    typer.echo(line, err=True)


def mount(app: typer.Typer) -> None:
    """Add the subcommands to the front door."""
    app.command()(query)
    app.command()(report)
