"""The subcommand `views`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headcount.queries.commands.query import Code, RunsArgument, tell_user
from headcount.schemas.errors import counted

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def views(
    runs: RunsArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="DuckDB file to write: .duckdb or .db.")
    ] = Path("head.duckdb"),
    code: Code = None,
) -> None:
    """Write a DuckDB file with the views of runs and none of their rows, for dashboards and the
    DuckDB shell. The same command renews it, also while a scan writes.
    """
    from headcount.queries.open.exported_views import write_views

    exported = write_views(runs, output, code)
    for line in exported.damage:
        tell_user(f"warning: {line}")
    typer.echo(
        f"{output}: {counted(exported.views, 'view')} and {exported.macros} queries with "
        f"parameters over {counted(exported.runs, 'run')} ({exported.shards_done:,} of "
        f"{counted(exported.shards, 'shard')} done), {exported.bytes / 1e6:.1f} MB"
    )
