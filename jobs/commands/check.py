"""The subcommand `check`: read every file of runs, and name those that are not as committed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headcount.jobs.console import say
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.damage import BY_CONTENT, Damage, examined_files
from headcount.schemas.files.places import names, reason
from headcount.schemas.files.run_directory import RunDirectory, check_merged
from headcount.schemas.scans.kinds import TABLES

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
    if checked.without_digest:
        # Without a digest, a flipped bit in a value may go unnoticed.
        say(
            console,
            f"{run.run_id}: {counted(checked.without_digest, 'file')} of older code, committed "
            "without a digest; what shows in them was checked",
        )
    size = f"{counted(checked.files, 'file')}, {checked.bytes / 1e6:,.1f} MB"
    if not checked.damaged:
        say(console, f"{run.run_id}: {counted(checked.shards, 'shard')}, {size}, as committed")
        return True
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


@dataclass(frozen=True)
class Checked:
    """The result of checking one run."""

    shards: int
    """Shards with a commit that counts."""
    files: int
    """Data files that commits refer to."""
    bytes: int
    """Their size, as committed."""
    damaged: list[Damage]
    """In the order of shards."""
    unreferenced: int
    """Files in the data directories that no commit refers to."""
    without_digest: int
    """Files of which the commit records no digest."""


def check_run(run: RunDirectory) -> Checked:
    """Read every committed file of a run, also in a store, and count the other files."""
    manifest = run.manifest()
    ledger = run.ledger(BY_CONTENT)
    # Otherwise rows would be counted twice, which no single file shows.
    check_merged(ledger)
    damaged: list[Damage] = []
    committed_paths: set[str] = set()
    committed_bytes = 0
    without_digest = 0
    try:
        for file, why in examined_files(run.path, manifest, [ledger]):
            committed_paths.add(file.path)
            committed_bytes += file.bytes
            without_digest += not file.digest  # Older code recorded none.
            if why is not None:
                damaged.append(Damage(file.path, file.shards, why))
        unreferenced = sum(path not in committed_paths for path in _paths_in_data_directories(run))
    except OSError as error:
        raise RunError(f"{run.path}: cannot be read ({reason(error)})") from None
    return Checked(
        shards=len(ledger),
        files=len(committed_paths),
        bytes=committed_bytes,
        damaged=sorted(damaged, key=lambda damage: (min(damage.shards), damage.path)),
        unreferenced=unreferenced,
        without_digest=without_digest,
    )


def _paths_in_data_directories(run: RunDirectory) -> Iterator[str]:
    """Every file in the directories of the tables, relative to the run."""
    for table in TABLES:
        for folder in names(run.path / table):
            for name in names(run.path / table / folder):
                yield f"{table}/{folder}/{name}"
