"""Progress of a scan in tokens: a bar on a terminal, elsewhere a line every few seconds."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from headcount.jobs.console import duration
from headcount.jobs.upkeep import phases
from headcount.schemas.errors import counted
from headcount.schemas.files.commit import Commit, Failure

Show = Callable[[str, float | None], None]  # words and a share, None if unknown

QUIET_SECONDS = 10.0  # seconds between two lines if the console is not a terminal


def show_progress(
    outcomes: Iterable[Commit | Failure],
    tokens: int,
    done: int,
    console: Console,
    all_runs: "WholeProgress | None" = None,
) -> list[Failure]:
    """Show progress, of one run and of `all_runs`, until the outcomes end; returns the failures."""
    done_before = done
    failures: list[Failure] = []
    began: float | None = None
    compute_seconds = idle_seconds = 0.0
    with bar(console, "tokens") as show:
        show("", done / tokens)
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                # The clock starts when the first committed shard was begun, so that loading a model
                # does not make the scan look slow. The host's clock may be wrong, so the shard's
                # own duration is taken.
                began = began or time.monotonic() - outcome.seconds
                done += outcome.tokens
                compute_seconds += outcome.compute_seconds
                idle_seconds += outcome.idle_seconds
                if all_runs is not None:
                    all_runs.add(outcome.tokens)
            speed = None
            parts = [f"{done:,} of {tokens:,} tokens"]
            if began is not None:
                # Tokens of earlier commands say nothing about the speed of this one.
                speed = (done - done_before) / (time.monotonic() - began)
                parts += [f"{speed:,.0f} tokens/s", f"{duration((tokens - done) / speed)} left"]
            if failures:
                parts.append(f"{counted(len(failures), 'shard')} failed")
            if all_runs is not None and (line := all_runs.line()):
                parts.append(line)
            show(", ".join(parts), done / tokens)
            phases.note("measuring", tokens_per_second=speed)
    # Without a commit there is no speed to tell.
    if began is not None:
        measured, seconds = done - done_before, time.monotonic() - began
        # Replicas work side by side, so these are sums over all of them.
        busy = compute_seconds / (compute_seconds + idle_seconds)
        summary = f"{measured:,} tokens in {duration(seconds)}, {measured / seconds:,.0f} tokens/s"
        console.print(f"{summary}, replicas busy {busy:.0%}", highlight=False)
    return failures


@contextmanager
def bar(console: Console, title: str, before_lines: str = "") -> Iterator[Show]:
    """A bar with words beside it; if the console is not a terminal, a line every few seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    on_terminal = console.is_terminal
    # A short scan prints no line but its summary.
    next_line = time.monotonic() + QUIET_SECONDS
    with Progress(*columns, console=console, disable=not on_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None, state="", visible=False)

        def show(words: str, share: float | None) -> None:
            nonlocal next_line
            # As long as nobody knows how much there is, the bar pulses.
            total = None if share is None else 1.0
            bar.update(task, completed=share, total=total, state=words, visible=True)
            if not on_terminal and time.monotonic() >= next_line:
                console.print(f"{before_lines}{words}", highlight=False, soft_wrap=True)
                next_line = time.monotonic() + QUIET_SECONDS

        yield show


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
