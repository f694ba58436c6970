"""A command line that says what it imports."""

import sys


def main() -> None:
    """Run `headcount …`, and print the top-level name of every module that is imported then."""
    # It says what an interrupt does, so it is imported by the command alone.
    import headcount.command_line

    try:
        headcount.command_line.main()
    finally:
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
