"""Follow a page to the letter: save its files, run its commands, compare what they print.

`python -m tests.pages.page_commands docs/guide/tutorial.md README.md` writes today's output into
the pages.

What a page holds, in the order of reading:

* a file to save: a line that ends in "`NAME`:", then a fenced block;
* commands, fenced as `bash`, and Python, fenced as `python`, which keeps its names from block to
  block. A comment may hide a block that only prepares something;
* what they print on stdout: a block fenced as `text` that comes next. Without one, anything goes;
* `<!-- not run: needs … -->` before a block that cannot run here;
* `<!-- after: PAGE.md -->`: the page continues in the folder of another one.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.toys.commands import ended

FILE_TO_SAVE = re.compile(r"`([\w.-]+)`:\n\n```\w+\n(?P<content>.*?)```\n", re.DOTALL)

BLOCK = re.compile(
    # An excuse is one line, and covers the block below it alone.
    r"(?P<excuse>^<!-- not run: [^\n]+ -->\n)?"
    r"^```(?P<language>bash|python)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)

AFTER = re.compile(r"<!-- after: (\S+)")

OF_THE_SHELL = re.compile(r"[$|<>&]|^(?!headcount )")
"""What a command has that only a shell understands."""

NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")


@dataclass(frozen=True)
class FileToSave:
    name: str
    content: str


@dataclass(frozen=True)
class CommandBlock:
    language: str
    code: str
    output: str | None
    output_start: int
    """Where the output begins in the page."""

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands of the block: a quotation may go over several lines."""
        commands: list[str] = []
        command = ""
        for line in self.code.splitlines():
            command += line
            try:
                words = shlex.split(command, comments=True)
            except ValueError:
                # A quotation is still open.
                command += "\n"
                continue
            if words:
                commands.append(command)
            command = ""
        return tuple(commands)


def steps_of(page: str) -> list[FileToSave | CommandBlock]:
    steps: dict[int, FileToSave | CommandBlock] = {}
    for match in FILE_TO_SAVE.finditer(page):
        steps[match.start()] = FileToSave(match[1], match["content"])
    files = [match for match in FILE_TO_SAVE.finditer(page) if match[1].endswith(".py")]
    saved = [range(*match.span()) for match in files]
    for match in BLOCK.finditer(page):
        # Python to save is not run.
        if not match["excuse"] and not any(match.start() in span for span in saved):
            output_start = match.start("output")
            block = CommandBlock(match["language"], match["code"], match["output"], output_start)
            steps[match.start()] = block
    return [steps[start] for start in sorted(steps)]


def follow_page(
    page: Path, folder: Path, begun: Path | None = None
) -> Iterator[tuple[FileToSave | CommandBlock, str]]:
    """Do all that a page says in a folder: each step, and what it prints on stdout.

    `begun` is a folder in which the page was followed that comes before this one, if any does.
    """
    text = page.read_text(encoding="utf-8")
    if before := AFTER.search(text):
        if begun:
            shutil.copytree(begun, folder, dirs_exist_ok=True)
        else:
            list(follow_page(page.parent / before[1], folder))
    names: dict[str, object] = {}
    for step in steps_of(text):
        yield step, follow(step, folder, names)


def follow(step: FileToSave | CommandBlock, folder: Path, names: dict[str, object]) -> str:
    """Do one step of a page in a folder; what it prints on stdout.

    `names` are those of the page's Python so far, as a notebook keeps them.
    """
    if isinstance(step, FileToSave):
        (folder / step.name).write_text(step.content, encoding="utf-8")
        return ""
    with contextlib.chdir(folder):
        if step.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(step.code, names)
            return printed.getvalue()
        # In quotations and remarks a shell sees nothing of its own.
        shown = [re.sub(r"\"[^\"]*\"|'[^']*'| #.*", "", command) for command in step.commands]
        if not any(map(OF_THE_SHELL.search, shown)):
            return "".join(map(run_headcount, step.commands))
        environment = os.environ | {"PATH": f"{HEADCOUNT.parent}:{os.environ['PATH']}"}
        shell = ["bash", "-e", "-c", step.code]
        streams = {"stdout": subprocess.PIPE, "text": True, "check": True}
        return subprocess.run(shell, env=environment, **streams).stdout


def run_headcount(command: str) -> str:
    """Run a command of headcount here, which saves loading the libraries again."""
    arguments = shlex.split(command, comments=True)[1:]
    if arguments[0] == "explore":
        return run_until_it_serves(arguments)
    end = ended(*arguments)
    assert end.code == 0, f"{command}\n{end.output}"
    return end.stdout


HEADCOUNT = Path(sys.executable).parent / "headcount"


def run_until_it_serves(arguments: list[str]) -> str:
    """Run a command that serves a page until somebody stops it."""
    with subprocess.Popen([HEADCOUNT, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert "http://127.0.0.1:" in printed, printed
    return printed


def same_output(expected: str, printed: str) -> bool:
    """Whether two outputs are the same, but for one unit in the last digit of a decimal number.

    Libraries of other machines add in another order, and the last digit shows it. `…` is anything.
    """
    words, printed_words = (
        [word for line in text.splitlines() for word in [*line.split(), "\n"]]
        for text in (expected, printed)
    )
    return len(words) == len(printed_words) and all(map(_same_word, words, printed_words))


def _same_word(expected: str, printed: str) -> bool:
    if re.fullmatch(re.escape(expected).replace("…", ".*"), printed):
        return True
    expected_number = NUMBER.fullmatch(expected)
    printed_number = NUMBER.fullmatch(printed)
    if expected_number is None or printed_number is None or expected_number[1] is None:
        return False
    # One unit and a half, because differences of decimal numbers are not exact in floats.
    last_digit = 10.0 ** -len(expected_number[1])
    return abs(float(expected) - float(printed)) < 1.5 * last_digit


def with_outputs_of_today(page: Path, folder: Path) -> str:
    """The page with what its commands print now, where that is not what it says."""
    text = page.read_text(encoding="utf-8")
    # From the last one on: what is above it begins where it did.
    for step, printed in reversed(list(follow_page(page, folder))):
        if isinstance(step, FileToSave) or step.output is None or same_output(step.output, printed):
            continue
        # Tables pad their last column with spaces, which an editor would take away.
        output = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        end = step.output_start + len(step.output)
        text = text[: step.output_start] + output + text[end:]
    return text


if __name__ == "__main__":
    # As the installed command does before torch is loaded: threads that wait take no core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for page_path in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as scratch:
            renewed = with_outputs_of_today(page_path, Path(scratch))
        page_path.write_text(renewed, encoding="utf-8")
