"""The subcommand `report`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from headcount.queries.commands.opening import Code, RunsArgument, open_for_command, waiting

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def report(
    runs: RunsArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="HTML file to write.")] = Path(
        "report.html"
    ),
    code: Code = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text/--no-text",
            help="Show the sequences of a head as text. It needs the tokenizer of the run.",
        ),
    ] = True,
) -> None:
    """Write one HTML file with heatmaps of every statistic and a card of every head. It opens
    from disk, without a network.
    """
    with waiting("starting"):
        from headcount.queries.report.report import write_report
        from headcount.workers.run_model import RunModels

    # A tokenizer that is not on this machine is not fetched: tokens are numbers then.
    os.environ["HF_HUB_OFFLINE"] = "1"
    database = open_for_command(runs, code)
    with waiting("writing the report"):
        write_report(database, output, RunModels(runs) if text else None)
    typer.echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
