"""Progress of a scan in tokens: a bar on a terminal, a quiet line per interval elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from schemas.commits import Commit, Failure

if TYPE_CHECKING:
    from workers.inputs.corpus import IndexProgress

QUIET_SECONDS = 10.0


def show_progress(
    outcomes: Iterable[Commit | Failure], tokens: int, done: int, console: Console
) -> list[Failure]:
    """Show progress until the outcomes end; `done` of all `tokens` were measured before. Returns
    the failures.
    """
    state = _State(tokens, done)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("tokens", total=tokens, completed=done, state=state.line())
        quiet_until = time.monotonic() + QUIET_SECONDS
        for outcome in outcomes:
            state.add(outcome)
            bar.update(task, completed=state.done, state=state.line())
            if not console.is_terminal and time.monotonic() >= quiet_until:
                console.print(state.line(), highlight=False)
                quiet_until = time.monotonic() + QUIET_SECONDS
    if state.began is not None:
        console.print(state.summary(), highlight=False)
    return state.failures


@contextmanager
def watch_index(console: Console) -> Iterator[Callable[[IndexProgress], None]]:
    """Show how far the tokenising of a corpus is: a bar on a terminal, a line now and then
    elsewhere.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    quiet_until = time.monotonic() + QUIET_SECONDS
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("tokenising", total=None, state="", visible=False)

        def show(progress: IndexProgress) -> None:
            nonlocal quiet_until
            state = index_line(progress)
            # Without a number of sequences nobody knows how long the rest is: the bar pulses.
            bar.update(
                task,
                completed=progress.sequences,
                total=progress.enough,
                state=state,
                visible=True,
            )
            if not console.is_terminal and time.monotonic() >= quiet_until:
                console.print(f"tokenising: {state}", highlight=False, soft_wrap=True)
                quiet_until = time.monotonic() + QUIET_SECONDS

        yield show


def index_line(progress: IndexProgress) -> str:
    """How far the tokenising of a corpus is."""
    needed = "" if progress.enough is None else f" of {progress.enough:,}"
    parts = [
        f"{progress.documents:,} documents",
        f"{progress.tokens:,} tokens",
        f"{progress.sequences:,}{needed} sequences",
    ]
    if progress.sources > 1:
        parts.append(f"file {progress.source:,} of {progress.sources:,}")
    return ", ".join(parts)


def say(console: Console, line: str) -> None:
    """Print a line as it is: not wrapped, not interpreted."""
    console.print(line, markup=False, soft_wrap=True)


class _State:
    """Tokens done, and how fast."""

    def __init__(self, tokens: int, done: int) -> None:
        self.tokens, self.before, self.done = tokens, done, done
        self.failures: list[Failure] = []
        self.began: float | None = None
        self.computed = self.idle = 0.0

    def add(self, outcome: Commit | Failure) -> None:
        """Count an outcome; the clock starts when the first committed shard was begun."""
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        self.began = self.began or time.monotonic() - outcome.seconds
        self.done += outcome.tokens
        self.computed += outcome.compute_seconds
        self.idle += outcome.idle_seconds

    def summary(self) -> str:
        """What was measured in how much time."""
        measured, seconds = self.done - self.before, time.monotonic() - (self.began or 0)
        busy = self.computed / (self.computed + self.idle)
        return f"{measured:,} tokens in {duration(seconds)}, {measured / seconds:,.0f} tokens/s, replicas busy {busy:.0%}"

    def line(self) -> str:
        """Done, speed, time left, failed shards."""
        parts = [f"{self.done:,} of {self.tokens:,} tokens"]
        if self.began is not None:
            speed = (self.done - self.before) / (time.monotonic() - self.began)
            parts += [
                f"{speed:,.0f} tokens/s",
                f"{duration((self.tokens - self.done) / speed)} left",
            ]
        if self.failures:
            parts.append(f"{len(self.failures)} shards failed")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time in the two units that matter.

    >>> duration(0.25), duration(45), duration(125), duration(7300)
    ('0.2 s', '45 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
