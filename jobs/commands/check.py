"""The subcommand `check`: read every file of runs, and name those that are not as committed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headcount.jobs.console import say
from headcount.schemas.errors import counted

if TYPE_CHECKING:
    from headcount.schemas.files.run_directory import RunDirectory

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def check(
    runs: Annotated[
        str,
        typer.Argument(
            metavar="RUNS",
            help="A run directory, or a directory that holds runs; a path, or an address in a "
            "store.",
        ),
    ],
) -> None:
    """Compare every file of runs with its commit.

    Files that are not as committed are named. Nothing is changed.
    """
    from headcount.schemas.errors import RunError
    from headcount.schemas.files.places import absolute
    from headcount.schemas.files.run_directory import find_runs

    console = Console(highlight=False)
    all_whole = True
    for run in find_runs(absolute(runs)):
        try:
            all_whole &= _check(run, console)
        except RunError as error:
            # One run that cannot be read does not keep the others from being checked.
            say(console, f"{run.run_id}: {error}")
            all_whole = False
    if not all_whole:
        sys.exit(1)


def _check(run: RunDirectory, console: Console) -> bool:
    """Print what is wrong with a run; returns whether all of its files are as committed."""
    from headcount.jobs.upkeep.checking import check_run

    checked = check_run(run)
    for damage in checked.damaged:
        say(console, f"{run.run_id}: {damage}")
    if checked.unreferenced:
        # Not an error: a killed process left them, and no reader sees them.
        say(
            console,
            f"{run.run_id}: {counted(checked.unreferenced, 'file')} that no commit refers to; "
            f"headcount compact {run.path} deletes what it may",
        )
    size = f"{counted(checked.files, 'file')}, {checked.bytes / 1e6:,.1f} MB"
    if not checked.damaged:
        say(console, f"{run.run_id}: {counted(checked.shards, 'shard')}, {size}, as committed")
        return True
    # Rows are measured again, but roll-ups only repeat rows: two commands mend two damages.
    damaged_rollups = sum(damage.is_of_rollup for damage in checked.damaged)
    if damaged_rollups:
        say(
            console,
            f"{run.run_id}: {counted(damaged_rollups, 'roll-up')} damaged, in {size}; "
            f"headcount compact {run.path} writes them again from their rows",
        )
    damaged_shards = {
        shard for damage in checked.damaged if not damage.is_of_rollup for shard in damage.shards
    }
    if damaged_shards:
        say(
            console,
            f"{run.run_id}: {counted(len(damaged_shards), 'shard')} of {checked.shards:,} damaged, "
            f"in {size}; headcount resume {run.path} --verify measures them anew",
        )
    return False
