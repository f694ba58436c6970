"""The front door: `headcount`, a census of attention heads."""

from __future__ import annotations

import sys

import typer

import jobs.check_commands
import jobs.cluster_commands
import jobs.run_model
import jobs.scan_commands
import queries.query_commands
import queries.text_commands
import reproduce.reproduce_commands
from schemas.errors import HeadcountError

app = typer.Typer(
    help="A census of attention heads: scan a model over a corpus, ask SQL about every head.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt."""

PACKAGES = ("schemas", "workers", "jobs", "queries", "reproduce", "models")
"""Our own packages: one that cannot be imported is a mistake here, not a missing library."""

jobs.scan_commands.mount(app)
jobs.check_commands.mount(app)
jobs.cluster_commands.mount(app)
queries.query_commands.mount(app, jobs.run_model.RunModel)
queries.text_commands.mount(app, jobs.run_model.RunModel)
reproduce.reproduce_commands.mount(app)


def main() -> None:
    """Run the command line; errors we know are lines, not stack traces."""
    try:
        app()
    except HeadcountError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if not library or library in PACKAGES:
            raise
        print(
            f"error: {library} is not installed; it comes with the extra 'scan', which measuring "
            "needs. In headcount's folder: pip install -e '.[scan]'",
            file=sys.stderr,
        )
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as left:
        if isinstance(left, SystemExit) and left.code != INTERRUPTED:
            raise
        print("stopped; a scan goes on where it stopped with the same command", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
