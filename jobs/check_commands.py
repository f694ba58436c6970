"""The subcommand `check`: read every file of runs, and say which are not as committed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jobs.console import say
from schemas.errors import counted

if TYPE_CHECKING:
    from schemas.run_directory import RunDirectory


def mount(app: typer.Typer) -> None:
    """Add the subcommand to the front door."""
    app.command()(check)


def check(
    runs: Annotated[
        str,
        typer.Argument(
            metavar="RUNS", help="A run directory, or one that holds runs; a path or an address."
        ),
    ],
) -> None:
    """Read every file of runs, and say which are not as committed. Nothing is changed."""
    from schemas.errors import RunError
    from schemas.places import absolute
    from schemas.run_directory import find_runs

    console = Console(highlight=False)
    whole = True
    for run in find_runs(absolute(runs)):
        try:
            whole &= _check(run, console)
        except RunError as error:
            say(console, f"{run.run_id}: {error}")
            whole = False
    if not whole:
        sys.exit(1)


def _check(run: RunDirectory, console: Console) -> bool:
    """Say what is wrong with a run; whether nothing is."""
    from jobs.checking import check_run

    found = check_run(run)
    for damage in found.damaged:
        say(console, f"{run.run_id}: {damage}")
    if found.unreferenced:
        say(
            console,
            f"{run.run_id}: {counted(found.unreferenced, 'file')} that no commit refers to; "
            f"headcount compact {run.path} deletes what it may",
        )
    if found.without_digest:
        say(
            console,
            f"{run.run_id}: {counted(found.without_digest, 'file')} of older code, committed "
            "without a digest; what shows in them was checked",
        )
    size = f"{counted(found.files, 'file')}, {found.bytes / 1e6:,.1f} MB"
    if not found.damaged:
        say(console, f"{run.run_id}: {counted(found.shards, 'shard')}, {size}, as committed")
        return True
    shards = len({shard for damage in found.damaged for shard in damage.shards})
    say(
        console,
        f"{run.run_id}: {counted(shards, 'shard')} of {found.shards:,} damaged, in {size}; "
        f"headcount resume {run.path} --verify measures them anew",
    )
    return False
