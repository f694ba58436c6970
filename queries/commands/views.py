"""The subcommand `views`."""

from pathlib import Path
from typing import Annotated

import typer

from headcount.queries.commands.opening import Code, RunsArgument, tell_user

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
    from headcount.queries.ask.exported_views import write_views
    from headcount.schemas.process import leave_pandas_out

    leave_pandas_out()
    written, damage = write_views(runs, output, code)
    for line in damage:
        tell_user(f"warning: {line}")
    typer.echo(written)
