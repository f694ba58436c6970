"""`headcount …` in this process, from its front door to its exit code."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from typing import TextIO

import pytest

import headcount.command_line
from headcount.jobs import bars, endings
from tests.tools.processes import Ended, kept_endings


def ended(
    *words: object,
    stdin: str = "",
    columns: int | None = None,
    stdout_to: TextIO | None = None,
    stderr_to: TextIO | None = None,
) -> Ended:
    """How a command ends.

    `columns` is how wide its terminal would be. A test may want to see what goes to a terminal.
    """
    stdout, stderr = BytesIO(), BytesIO()
    # What it tells does not go on with what another command told in this process.
    bars._Lines.last_end = 0.0
    with (
        pytest.MonkeyPatch.context() as patch,
        kept_endings(),
        redirect_stdout(stdout_to or TextIOWrapper(stdout, encoding="utf-8", write_through=True)),
        redirect_stderr(stderr_to or TextIOWrapper(stderr, encoding="utf-8", write_through=True)),
    ):
        patch.setattr(sys, "argv", ["headcount", *map(str, words)])
        patch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode()), encoding="utf-8"))
        patch.setattr(sys, "excepthook", sys.excepthook)
        # Each that fails would have this process killed if its end takes long.
        patch.setattr(endings, "_exit_for_sure", sys.exit)
        if columns is not None:
            patch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stop:
            headcount.command_line.main()
        code = stop.value.code
        end = Ended(int(code or 0), stdout.getvalue().decode(), stderr.getvalue().decode())
    assert "Traceback" not in end.output, end.output
    return end


def printed(*words: object, stdin: str = "") -> str:
    """What a command prints that ends well: what it says, and its answer."""
    end = ended(*words, stdin=stdin)
    assert end.code == 0, end.output
    return end.output


def error_of(*words: object) -> str:
    """The error that a command ends with, without what it says before."""
    end = ended(*words)
    assert end.code == 2, end.output
    return end.stderr.partition("error: ")[2].rstrip()
