"""The subcommands `query` and `report`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from schemas.errors import QueryError

Ask = Callable[[str], list[tuple[Any, ...]]]
"""Puts SQL to runs; the rows of the answer."""


Code = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help="Read the shards that this code measured (shards.code), where two mean different things.",
    ),
]


def open_runs(runs: str, views: dict[str, str]) -> Ask:
    """What puts SQL to runs in which some more views are made; a mistake in it is one line."""
    from queries.answers import explain
    from queries.connection import connect

    connection = connect(runs)
    for name, sql in views.items():
        try:
            connection.execute(f"CREATE VIEW {name} AS {sql}")
        except Exception as error:
            raise QueryError(f"view {name}: {explain(error)}") from None

    def ask(sql: str) -> list[tuple[Any, ...]]:
        try:
            return connection.execute(sql).fetchall()
        except Exception as error:
            raise explain(error) from None

    return ask


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
        int | None, typer.Option(min=0, help="Rows at most; a table shows 40 unless told.")
    ] = None,
    code: Code = None,
) -> None:
    """Ask the committed rows of runs a question in SQL, or by the name of a view."""
    from queries.answers import TABLE_ROWS, run_query, write, write_parquet
    from queries.connection import connect, view_descriptions

    if format == "parquet" and output is None:
        raise QueryError("--format parquet writes a file; say which one with -o FILE")
    connection = connect(runs, code=code)
    if question is None:
        for name, description in view_descriptions(connection).items():
            typer.echo(f"{name:<24} {description.partition('. ')[0].rstrip('.')}.")
        return
    # One row more than a table shows tells whether there are more.
    rows = (TABLE_ROWS if limit is None else limit) + 1 if format == "table" else limit
    answer = run_query(connection, question, rows)
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
    from queries.report import write_report

    write_report(runs, output, code)
    typer.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


def mount(app: typer.Typer) -> None:
    """Add the subcommands to the front door."""
    app.command()(query)
    app.command()(report)
