"""Follow a page to the letter: save its files, run its commands, compare what they print.

`python -m tests.pages.page_commands docs/tutorial.md README.md` writes today's output into the
pages.

What a page holds:

* a file to save: a line that ends in "`NAME`:", then a fenced block;
* commands: a block fenced as `bash`. Those of headcount run in this process, others in a shell;
* Python: a block fenced as `python`. One fenced as `py` needs what is not here, and is left out;
* what they print on stdout: a block fenced as `text` that comes next. Without one, anything goes.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from headcount import app

FILE_TO_SAVE = re.compile(r"`([\w.-]+)`:\n\n```\w+\n(?P<content>.*?)```\n", re.DOTALL)

COMMAND_BLOCK = re.compile(
    r"```(?P<language>bash|python)\n(?P<commands>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?",
    re.DOTALL,
)

PIPED = re.compile(r"(headcount .*) \| ((?:grep|head|sed) [^|]+)", re.DOTALL)
"""A command of headcount whose output another program cuts."""

NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


@dataclass(frozen=True)
class FileToSave:
    """A file that the page asks the reader to save."""

    name: str
    content: str


@dataclass(frozen=True)
class CommandBlock:
    """Commands of a page, and what it says that they print."""

    commands: tuple[str, ...]
    output: str | None
    output_start: int
    """Where the output begins in the page."""
    is_python: bool = False


def steps_of(page: str) -> list[FileToSave | CommandBlock]:
    """The files and commands of a page, in the order of reading."""
    # By their place in the page: a reader saves a file before the command that reads it.
    steps: dict[int, FileToSave | CommandBlock] = {}
    for match in FILE_TO_SAVE.finditer(page):
        steps[match.start()] = FileToSave(match[1], match["content"])
    for match in COMMAND_BLOCK.finditer(page):
        is_python = match["language"] == "python"
        commands = [match["commands"]] if is_python else whole_commands(match["commands"])
        steps[match.start()] = CommandBlock(
            tuple(commands), match["output"], match.start("output"), is_python
        )
    return [steps[start] for start in sorted(steps)]


def whole_commands(text: str) -> Iterator[str]:
    """The commands of a block: a quotation may go over several lines."""
    command = ""
    for line in text.splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            # A quotation is still open.
            command += "\n"
            continue
        if words:
            yield command
        command = ""


def follow(
    step: FileToSave | CommandBlock, folder: Path, names: dict[str, object] | None = None
) -> str:
    """Do one step of a page in a folder; what it prints on stdout.

    `names` are those of the page's Python so far, as a notebook keeps them.
    """
    if isinstance(step, FileToSave):
        (folder / step.name).write_text(step.content, encoding="utf-8")
        return ""
    with contextlib.chdir(folder):
        if step.is_python:
            return run_python(step.commands[0], {} if names is None else names)
        return "".join(map(run_command, step.commands))


def run_python(code: str, names: dict[str, object]) -> str:
    """Run an example in Python; what it prints on stdout."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def run_command(command: str) -> str:
    """Run a command in the current directory; what it prints on stdout."""
    # A shell would start another process for headcount, so the pipe is made here.
    if piped := PIPED.fullmatch(command):
        return run_in_shell(piped[2], run_headcount(piped[1]))
    if command.startswith("headcount "):
        return run_headcount(command)
    return run_in_shell(command)


def run_headcount(command: str) -> str:
    """Run a command of headcount here, which saves loading the libraries again."""
    arguments = shlex.split(command, comments=True)[1:]
    result = CliRunner().invoke(app, arguments, prog_name="headcount")
    if result.exit_code != 0:
        raise AssertionError(f"{command}\n{result.output}{result.exception!r}")
    return result.stdout


def run_in_shell(command: str, standard_input: str = "") -> str:
    """Run a command of the system."""
    finished = subprocess.run(
        ["sh", "-c", command], input=standard_input, capture_output=True, text=True, check=True
    )
    return finished.stdout


def same_output(expected: str, printed: str) -> bool:
    """Whether two outputs are the same, but for one unit in the last digit of a decimal number.

    Libraries of other machines add in another order, and the last digit shows it.
    """
    expected_lines = expected.splitlines()
    printed_lines = printed.splitlines()
    return len(expected_lines) == len(printed_lines) and all(
        map(_same_line, expected_lines, printed_lines)
    )


def _same_line(expected: str, printed: str) -> bool:
    if expected.rstrip() == printed.rstrip():
        return True
    expected_words = expected.split()
    printed_words = printed.split()
    return len(expected_words) == len(printed_words) and all(
        map(_same_word, expected_words, printed_words)
    )


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    expected_number = NUMBER.fullmatch(expected)
    printed_number = NUMBER.fullmatch(printed)
    if expected_number is None or printed_number is None or expected_number[1] is None:
        return False
    # One unit and a half, because differences of decimal numbers are not exact in floats.
    last_digit = 10.0 ** -len(expected_number[1])
    return abs(float(expected) - float(printed)) < 1.5 * last_digit


def with_outputs_of_today(page: str, folder: Path) -> str:
    """The page with what its commands print now."""
    renewed_page = page
    # An output begins later in the renewed page if those above it have become longer.
    shift = 0
    names: dict[str, object] = {}
    for step in steps_of(page):
        printed = follow(step, folder, names)
        if isinstance(step, FileToSave) or step.output is None:
            continue
        # Tables pad their last column with spaces, which an editor would take away.
        output = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        start = step.output_start + shift
        stop = start + len(step.output)
        renewed_page = renewed_page[:start] + output + renewed_page[stop:]
        shift += len(output) - len(step.output)
    return renewed_page


if __name__ == "__main__":
    for page_path in map(Path, sys.argv[1:]):
        page_text = page_path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as scratch:
            renewed = with_outputs_of_today(page_text, Path(scratch))
        page_path.write_text(renewed, encoding="utf-8")
