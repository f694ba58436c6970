"""The subcommand `explore`."""

import os
import sys
from typing import Annotated

import typer

from headcount.queries.commands.opening import (
    Code,
    RunsArgument,
    tell_user,
    waiting,
    warn_of_damage,
)

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def explore(
    runs: RunsArgument,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page. 0 takes a free one.")
    ] = 0,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen at. Any other than 127.0.0.1 can be reached by others.",
        ),
    ] = "127.0.0.1",
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address and start no browser.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Give up a query after this time."),
    ] = 20.0,
    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Memory that queries may take: 4GB, or 50%."),
    ] = "50%",
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where the model of the runs lies, if it has moved."),
    ] = None,
    code: Code = None,
) -> None:
    """Open a page on which every head of the runs can be looked at, over any number of rows."""
    # A tokenizer is read where it lies on this machine, and never fetched.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # These import duckdb and pyarrow, which `headcount --help` need not wait for.
    with waiting("starting"):
        from headcount.queries.explore.many_files import cost_of_many_files
        from headcount.queries.explore.query_engine import Engine
        from headcount.queries.explore.server import LOCAL_NAMES, serve
        from headcount.queries.open.limits import check_memory
        from headcount.schemas.process import leave_pandas_out

    leave_pandas_out()
    memory = check_memory(memory)
    if (cost := cost_of_many_files(runs)) is not None:
        tell_user(cost)
    with waiting("reading the runs"):
        engine = Engine(runs, code=code, model=model, memory=memory, deadline=timeout)
        warn_of_damage(engine.runs.database)
    if host not in LOCAL_NAMES:
        tell_user(
            f"warning: whoever reaches {host} and has the address below can read these runs; "
            "nothing on the way is encrypted"
        )
    # Without a window, a browser would write into the terminal.
    has_window = sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )

    def print_address(address: str) -> None:
        # At once: a program may be waiting for the line.
        typer.echo(address)
        sys.stdout.flush()
        tell_user("Ctrl-C ends the explorer. Whoever has this address can read the runs.")

    serve(engine, host, port, print_address, open_browser=has_window and not no_open)
