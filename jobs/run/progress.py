"""Progress of a scan in tokens: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from headcount.jobs.console import duration
from headcount.jobs.upkeep import phases
from headcount.schemas.errors import counted
from headcount.schemas.files.commit import Commit, Failure

if TYPE_CHECKING:
    from headcount.jobs.corpus.preparation import CorpusProgress

QUIET_SECONDS = 10.0
"""Seconds between two lines if the console is not a terminal."""


def show_progress(
    outcomes: Iterable[Commit | Failure],
    tokens: int,
    done: int,
    console: Console,
    all_runs: WholeProgress | None = None,
) -> list[Failure]:
    """Show progress until the outcomes end; returns the failures.

    `done` of all `tokens` were measured before. `all_runs` is the progress of several runs, of
    which this is one.
    """
    progress = _Progress(tokens, done, all_runs)
    # A short scan prints no line but its summary.
    next_line = time.monotonic() + QUIET_SECONDS
    with _bar(console) as bar:
        task = bar.add_task("tokens", total=tokens, completed=done, state=progress.line())
        for outcome in outcomes:
            progress.add(outcome)
            bar.update(task, completed=progress.done, state=progress.line())
            if not console.is_terminal and time.monotonic() >= next_line:
                console.print(progress.line(), highlight=False)
                next_line = time.monotonic() + QUIET_SECONDS
    # Without a commit there is no speed to tell.
    if progress.began is not None:
        console.print(progress.summary(), highlight=False)
    return progress.failures


def _bar(console: Console) -> Progress:
    """A bar with the field `state` beside it; nothing if the console is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


@contextmanager
def watch_index(console: Console) -> Iterator[Callable[[CorpusProgress], None]]:
    """Show how far the preparation of a corpus is: a bar on a terminal, lines elsewhere.

    Yields the function that takes each step of it.
    """
    next_line = time.monotonic() + QUIET_SECONDS
    with _bar(console) as bar:
        task = bar.add_task("preparing tokens", total=None, state="", visible=False)

        def show(progress: CorpusProgress) -> None:
            nonlocal next_line
            state = corpus_line(progress)
            phases.note("preparing tokens", state)
            # As long as nobody knows how much there is, the bar pulses.
            total = None if progress.share is None else 1.0
            bar.update(task, completed=progress.share, total=total, state=state, visible=True)
            if not console.is_terminal and time.monotonic() >= next_line:
                console.print(f"preparing tokens: {state}", highlight=False, soft_wrap=True)
                next_line = time.monotonic() + QUIET_SECONDS

        yield show


def corpus_line(progress: CorpusProgress) -> str:
    """How far the preparation of a corpus is, in one line."""
    parts = [counted(progress.documents, "document"), counted(progress.tokens, "token")]
    if progress.bad:
        parts.append(counted(progress.bad, "bad row"))
    if progress.share is not None:
        parts.append(f"{progress.share:.0%}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return ", ".join(parts)


class WholeProgress:
    """How far several runs are that one command measures, one after the other."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        """Tokens that the command has to measure, over all runs."""
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


class _Progress:
    """How many tokens are done, and how fast they were measured."""

    def __init__(self, tokens: int, done: int, all_runs: WholeProgress | None = None) -> None:
        self.tokens = tokens
        self.all_runs = all_runs
        self.done_before = done
        self.done = done
        self.failures: list[Failure] = []
        self.began: float | None = None
        self.compute_seconds = 0.0
        self.idle_seconds = 0.0

    def add(self, outcome: Commit | Failure) -> None:
        """Count an outcome.

        The clock starts when the first committed shard was begun, so that loading a model does not
        make the scan look slow.
        """
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        if self.began is None:
            # The host's clock may be wrong, so the shard's own duration is taken.
            self.began = time.monotonic() - outcome.seconds
        self.done += outcome.tokens
        if self.all_runs is not None:
            self.all_runs.add(outcome.tokens)
        self.compute_seconds += outcome.compute_seconds
        self.idle_seconds += outcome.idle_seconds

    def summary(self) -> str:
        """How many tokens were measured, in how much time; in one line."""
        measured = self.done - self.done_before
        seconds = time.monotonic() - (self.began or 0)
        # Replicas work side by side, so these are sums over all of them.
        busy = self.compute_seconds / (self.compute_seconds + self.idle_seconds)
        return (
            f"{measured:,} tokens in {duration(seconds)}, {measured / seconds:,.0f} tokens/s, "
            f"replicas busy {busy:.0%}"
        )

    def line(self) -> str:
        """Tokens done, speed, time left and failed shards, in one line."""
        parts = [f"{self.done:,} of {self.tokens:,} tokens"]
        if self.began is not None:
            # Tokens of earlier commands say nothing about the speed of this one.
            speed = (self.done - self.done_before) / (time.monotonic() - self.began)
            seconds_left = (self.tokens - self.done) / speed
            parts += [f"{speed:,.0f} tokens/s", f"{duration(seconds_left)} left"]
        if self.failures:
            parts.append(f"{counted(len(self.failures), 'shard')} failed")
        if self.all_runs is not None and self.all_runs.measured:
            parts.append(self.all_runs.line())
        return ", ".join(parts)
