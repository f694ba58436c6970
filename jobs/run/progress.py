"""Progress of a scan in tokens: a bar on a terminal, elsewhere a line every few seconds."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from headcount.jobs.console import duration
from headcount.jobs.upkeep import phases
from headcount.schemas.errors import counted
from headcount.schemas.files.commit import Commit, Failure

Show = Callable[[str, float | None], None]  # words and a share, None if unknown

QUIET_SECONDS = 10.0  # seconds between two lines if the console is not a terminal

LONGEST_SILENCE = 20.0  # seconds after which the last words are printed again


@contextmanager
def shown_progress(
    console: Console,
    tokens: int,
    done: int,
    words: str,
    all_runs: "WholeProgress | None" = None,
) -> Iterator["Progress"]:
    """Show how far a run is, of `tokens` of which some are done; `words` until it measures."""
    with bar(console, "tokens") as show:
        show(words, done / tokens)
        progress = Progress(tokens, done, show, all_runs)
        yield progress
    if (summary := progress.summary()) is not None:
        console.print(summary, highlight=False)


class Progress:
    """How far a run is, in tokens: those that are committed, and those of shards in hand.

    A batch is the unit. What a shard that fails has measured is taken back.
    """

    def __init__(
        self, tokens: int, done: int, show: Show, all_runs: "WholeProgress | None" = None
    ) -> None:
        self.tokens = tokens  # of the whole run
        self.done = self.done_before = done  # that are committed
        self.in_hand: dict[int, int] = {}  # tokens that are measured and not committed, by shard
        self.failures: list[Failure] = []
        self.compute_seconds = self.idle_seconds = 0.0
        self.began: float | None = None  # when the first shard was begun, by the monotonic clock
        self.has_committed = False
        self._show, self._all_runs = show, all_runs

    def measured(self, shard: int, tokens: int) -> None:
        """So many tokens of a shard are measured by now; 0 when it is begun."""
        self.began = self.began or time.monotonic()
        self.in_hand[shard] = tokens
        self._tell()

    def note(self, outcome: Commit | Failure) -> None:
        """A shard is committed, or an attempt at it has failed."""
        self.in_hand.pop(outcome.shard, None)
        if isinstance(outcome, Failure):
            # A shard that is tried again has not failed yet.
            if outcome.is_last:
                self.failures.append(outcome)
        else:
            # The clock starts when the first committed shard was begun, so that loading a model
            # does not make the scan look slow. The host's clock may be wrong, so the shard's
            # own duration is taken.
            if not self.has_committed:
                begun = time.monotonic() - outcome.seconds
                self.began = min(begun, self.began or begun)
            self.has_committed = True
            self.done += outcome.tokens
            self.compute_seconds += outcome.compute_seconds
            self.idle_seconds += outcome.idle_seconds
            if self._all_runs is not None:
                self._all_runs.add(outcome.tokens)
        self._tell()

    def _tell(self) -> None:
        in_hand = sum(self.in_hand.values())
        measured = self.done + in_hand
        parts = [f"{measured:,} of {self.tokens:,} tokens"]
        speed = None
        # Tokens of earlier commands say nothing about the speed of this one.
        if self.began is not None and measured > self.done_before:
            speed = (measured - self.done_before) / (time.monotonic() - self.began)
            left = duration((self.tokens - measured) / speed)
            parts += [f"{speed:,.0f} tokens/s", f"{left} left"]
        if self.failures:
            parts.append(f"{counted(len(self.failures), 'shard')} failed")
        if self._all_runs is not None and (line := self._all_runs.line()):
            parts.append(line)
        self._show(", ".join(parts), measured / self.tokens)
        phases.note("measuring", tokens_per_second=speed, tokens_in_hand=in_hand)

    def summary(self) -> str | None:
        """What was committed, how fast, and how busy replicas were; none without a commit."""
        if not self.has_committed or self.began is None:
            return None
        measured, seconds = self.done - self.done_before, time.monotonic() - self.began
        # Replicas work side by side, so these are sums over all of them.
        busy = self.compute_seconds / (self.compute_seconds + self.idle_seconds)
        speed = f"{measured / seconds:,.0f} tokens/s"
        return f"{measured:,} tokens in {duration(seconds)}, {speed}, replicas busy {busy:.0%}"


@contextmanager
def bar(console: Console, title: str, before_lines: str = "") -> Iterator[Show]:
    """A bar with words beside it, and the time; if the console is not a terminal, a line every few
    seconds. Of bars within one another, the innermost has the lines.
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
    with bars, nullcontext() if console.is_terminal else lines.kept_coming():
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

    def __init__(self, console: Console, before: str) -> None:
        self.console, self.before = console, before
        self.words = ""
        # A short scan prints no line but its summary.
        self.last_line = time.monotonic()

    def tell(self, words: str) -> None:
        """Print words if the last line was some time ago."""
        self.words = words
        if time.monotonic() - self.last_line >= QUIET_SECONDS:
            self._print()

    def _print(self) -> None:
        if self.words and self.of_bars and self.of_bars[-1] is self:
            self.console.print(f"{self.before}{self.words}", highlight=False, soft_wrap=True)
            self.last_line = time.monotonic()

    @contextmanager
    def kept_coming(self) -> Iterator[None]:
        """Within it, the last words are repeated if nothing is told for long."""
        has_ended = threading.Event()

        def repeat() -> None:
            while not has_ended.wait(1.0):
                if time.monotonic() - self.last_line >= LONGEST_SILENCE:
                    self._print()

        thread = threading.Thread(target=repeat, daemon=True)
        self.of_bars.append(self)
        thread.start()
        try:
            yield
        finally:
            self.of_bars.remove(self)
            has_ended.set()
            thread.join()


@contextmanager
def waiting(console: Console, words: str) -> Iterator[None]:
    """Show what is done, where nobody knows how long it takes."""
    with bar(console, "") as show:
        show(words, None)
        yield


class WholeProgress:
    """How far several runs are that one command measures, one after the other."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # tokens that the command has to measure, over all runs
        self.measured = 0
        self.began = time.monotonic()

    def add(self, tokens: int) -> None:
        """Count tokens that were measured now."""
        self.measured += tokens

    def line(self) -> str:
        """Share done and time left, in words. Loading and planning between runs count as well."""
        if not self.measured:
            return ""
        tokens_left = max(0, self.tokens - self.measured)
        seconds_left = tokens_left * (time.monotonic() - self.began) / self.measured
        share = min(1.0, self.measured / self.tokens) if self.tokens else 1.0
        return f"all scans: {share:.0%}, {duration(seconds_left)} left"
