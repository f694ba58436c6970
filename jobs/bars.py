"""Bars on a terminal, and elsewhere a line every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from headcount.schemas.repeating import repeated

Show = Callable[[str, float | None], None]  # words and a share, None if unknown

QUIET_SECONDS = 10.0  # seconds between two lines if the console is not a terminal

LONGEST_SILENCE = 20.0  # seconds after which the last words are printed again

SAME_WORK = 2.0  # seconds between two bars of one command, at most


@contextmanager
def bar(
    console: Console, title: str, before_lines: str = "", longest_silence: float = LONGEST_SILENCE
) -> Iterator[Show]:
    """A bar with words beside it, and the time; if the console is not a terminal, a line every few
    seconds, at least one every `longest_silence`. Of bars within one another, the innermost has
    the lines.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    lines = _Lines(console, before_lines)
    bars = rich.progress.Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    )
    with bars, nullcontext() if console.is_terminal else lines.kept_coming(longest_silence):
        task = bars.add_task(title, total=None, state="", visible=False)

        def show(words: str, share: float | None) -> None:
            # As long as nobody knows how much there is, the bar pulses.
            total = None if share is None else 1.0
            bars.update(task, completed=share, total=total, state=words, visible=True)
            lines.tell(words)

        yield show


class _Lines:
    """The lines of a bar where the console is not a terminal."""

    of_bars: ClassVar[list["_Lines"]] = []  # that are shown, from the outermost to the innermost
    last_line: ClassVar[float] = 0.0  # when a line was printed, or the first of several bars began
    last_end: ClassVar[float] = 0.0  # when a bar ended

    def __init__(self, console: Console, before: str) -> None:
        self.console, self.before = console, before
        self.words = ""

    def tell(self, words: str) -> None:
        """Print words if the last line was some time ago."""
        self.words = words
        if time.monotonic() - _Lines.last_line >= QUIET_SECONDS:
            self._print()

    def _print(self) -> None:
        if self.words and self.of_bars and self.of_bars[-1] is self:
            self.console.print(f"{self.before}{self.words}", highlight=False, soft_wrap=True)
            _Lines.last_line = time.monotonic()

    @contextmanager
    def kept_coming(self, longest_silence: float) -> Iterator[None]:
        """Within it, the last words are repeated if nothing is told for so many seconds."""

        def end_silence() -> None:
            if time.monotonic() - _Lines.last_line >= longest_silence:
                self._print()

        # A short scan prints no line but its summary. Short bars one after another are not silent
        # for as long as all of them last.
        if not self.of_bars and time.monotonic() - _Lines.last_end > SAME_WORK:
            _Lines.last_line = time.monotonic()
        self.of_bars.append(self)
        try:
            with repeated(end_silence, 1.0):
                yield
        finally:
            self.of_bars.remove(self)
            _Lines.last_end = time.monotonic()


@contextmanager
def waiting(console: Console, words: str) -> Iterator[None]:
    """Show what is done, where nobody knows how long it takes."""
    with bar(console, "") as show:
        show(words, None)
        yield
