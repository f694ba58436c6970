"""The front door: starts the command line, and ends it in lines and not in stack traces."""

import os

# The built-in half of `signal`. Until `main` begins an interrupt prints a stack trace, or Python
# ignores it inside an import, so nothing is imported before that has to be read from a file.
from _signal import (  # pyright: ignore[reportMissingImports] - it is built in
    SIGINT,
    default_int_handler,
    getsignal,
    signal,
)


def _leave_at_once(number: int, _: object) -> None:
    """End without unwinding: an interrupt during an import would print a stack trace."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command line; every error is a line and not a stack trace."""
    # A program that handles interrupts itself is left alone.
    hears_interrupts = getsignal(SIGINT) is default_int_handler
    # Until everything is imported, nothing is started or written that would have to be ended.
    if hears_interrupts:
        signal(SIGINT, _leave_at_once)
    # OpenMP's threads wait for one another in a loop, and take cores from those they wait for.
    # Beside other programs a scan on all cores was ten times slower than on one. Torch reads the
    # variable when it is loaded; a value of the user's stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from headcount import commands
    from headcount.jobs.endings import ended_in_lines
    from headcount.schemas.process import collect_garbage_rarely

    # Before anything large is imported.
    collect_garbage_rarely()
    app = commands.command_line()
    if hears_interrupts:
        signal(SIGINT, default_int_handler)
    with ended_in_lines():
        app(prog_name="headcount")
