"""The subcommand `diff`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headcount.jobs.console import say

commands = typer.Typer(rich_markup_mode=None)


@commands.command()
def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A model: a directory, a GGUF file, a Hub id or bundled:NAME; or the directory of "
            "a run, which stands for its model and has the input.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What should be the same model.")],
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="A kind of difference that ends with exit code 0: rounding, a format such as "
            "float16 or 4-bit, or a cause such as tokenizer; may be given several times. Default: "
            "rounding.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it for programs.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="HTML file to write, with both sides: each is measured on the same sequences, in "
            "a run beside the file, unless it is such a run.",
        ),
    ] = None,
) -> None:
    """Say whether two models are the same, and where they begin to differ.

    Each layer of B gets the input of A's, and each step in it what A's step was given, so every
    fault shows by itself. Exit code 1 says that they differ.
    """
    from headcount.workers.process import prepare_process

    prepare_process()
    from headcount.exports.diff.difference import ROUNDING, Difference, check_kinds
    from headcount.exports.diff.report import write_difference
    from headcount.queries.report.html_page import check_writable

    allowed = allow or [ROUNDING]
    check_kinds(allowed)
    if report is not None:
        check_writable(report)
    console = Console(highlight=False, stderr=True)
    difference = Difference(a, b, console)
    try:
        if report is not None:
            write_difference(difference, report, console)
    finally:
        # What was found is said, also if a side cannot be scanned.
        if as_json:
            print(difference.json())
        else:
            for word, text in difference.lines():
                say(Console(highlight=False), f"{word:<11}{text}")
    if report is not None:
        typer.echo(f"{report}: {report.stat().st_size / 1e6:.1f} MB", err=True)
    sys.exit(difference.exit_code(allowed))
