"""The front door: the command `headcount`, a census of attention heads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Annotated

ROOT = os.path.dirname(os.path.abspath(__file__))
"""Where our rooms lie."""


def _find_own_rooms() -> None:
    """Import our rooms from here before anywhere else.

    Their names are common: a user may have a `jobs.py` or a `models.py` of his own.
    """
    # `python -m headcount` puts the working directory first, where even a `torch.py` may lie.
    if __name__ == "__main__" and not sys.flags.safe_path:
        sys.path[0] = ROOT
    elif sys.path[:1] != [ROOT]:
        sys.path.insert(0, ROOT)


def _leave_at_once(number: int, _: FrameType | None) -> None:
    """End without unwinding: an interrupt during an import would print a stack trace."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


_find_own_rooms()
# Until the imports below have ended, an interrupt ends the process at once: nothing is started
# or written yet. A program that imports this module and handles interrupts itself is left alone.
_hears_interrupts = (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _hears_interrupts:
    signal.signal(signal.SIGINT, _leave_at_once)

import typer  # noqa: E402

import jobs.check_commands  # noqa: E402
import jobs.cluster_commands  # noqa: E402
import jobs.corpus_commands  # noqa: E402
import jobs.run_model  # noqa: E402
import jobs.scan_commands  # noqa: E402
import queries.explore_commands  # noqa: E402
import queries.query_commands  # noqa: E402
import queries.text_commands  # noqa: E402
import queries.views_commands  # noqa: E402
import reproduce.reproduce_commands  # noqa: E402
import reproduce.texts_commands  # noqa: E402
from jobs.endings import ended_in_lines  # noqa: E402

if _hears_interrupts:
    signal.signal(signal.SIGINT, signal.default_int_handler)

app = typer.Typer(
    help="A census of attention heads: scan a model over a corpus, ask SQL about every head.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of `headcount --help`.
jobs.scan_commands.mount(app)
jobs.corpus_commands.mount(app)
jobs.check_commands.mount(app)
jobs.cluster_commands.mount(app)
# Questions import no models, so the front door hands them the class that opens one.
queries.query_commands.mount(app, jobs.run_model.RunModel)
queries.explore_commands.mount(app, jobs.run_model.RunModel)
queries.text_commands.mount(app, jobs.run_model.RunModel)
queries.views_commands.mount(app)
reproduce.reproduce_commands.mount(app)
reproduce.texts_commands.mount(app)


def _print_version(is_wanted: bool) -> None:
    """Print the release and the fingerprint of the code, and end the command."""
    if not is_wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    from workers.provenance.code_fingerprint import code_fingerprint

    try:
        release = version("headcount")
    except PackageNotFoundError:
        release = "not installed"
    print(f"headcount {release}, code {code_fingerprint()}")
    raise typer.Exit


@app.callback()
def front_door(
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the release and the fingerprint of the measuring code.",
        ),
    ] = False,
) -> None:
    """Options that come before any command."""


def main() -> None:
    """Run the command line; every error is a line and not a stack trace."""
    # OpenMP's threads wait for one another in a loop, and take cores from those they wait for.
    # Beside other programs a scan on all cores was ten times slower than on one. Torch reads the
    # variable when it is loaded; a value of the user's stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ended_in_lines():
        app(prog_name="headcount")


if __name__ == "__main__":
    main()
