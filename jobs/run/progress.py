"""How far a scan is, in tokens."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from headcount.jobs import phases
from headcount.jobs.bars import Show, bar
from headcount.jobs.console import duration
from headcount.schemas.errors import counted
from headcount.schemas.files.commit import Commit, Failure


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
        self,
        tokens: int,
        done: int,
        show: Show,
        all_runs: "WholeProgress | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens = tokens  # of the whole run
        self.done = self.done_before = done  # that are committed
        self.in_hand: dict[int, int] = {}  # tokens that are measured and not committed, by shard
        self.failures: list[Failure] = []
        self.compute_seconds = self.idle_seconds = 0.0
        self.began: float | None = None  # when the first shard was begun, by the monotonic clock
        self.has_committed = False
        self._show, self._all_runs, self._clock = show, all_runs, clock

    def measured(self, shard: int, tokens: int) -> None:
        """So many tokens of a shard are measured by now; 0 when it is begun."""
        self.began = self.began or self._clock()
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
                begun = self._clock() - outcome.seconds
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
            speed = (measured - self.done_before) / (self._clock() - self.began)
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
        measured, seconds = self.done - self.done_before, self._clock() - self.began
        # Replicas work side by side, so these are sums over all of them.
        busy = self.compute_seconds / (self.compute_seconds + self.idle_seconds)
        speed = f"{measured / seconds:,.0f} tokens/s"
        return f"{measured:,} tokens in {duration(seconds)}, {speed}, replicas busy {busy:.0%}"


class WholeProgress:
    """How far several runs are that one command measures, one after the other."""

    def __init__(self, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = tokens  # tokens that the command has to measure, over all runs
        self.measured = 0
        self._clock = clock
        self.began = clock()

    def add(self, tokens: int) -> None:
        """Count tokens that were measured now."""
        self.measured += tokens

    def line(self) -> str:
        """Share done and time left, in words. Loading and planning between runs count as well."""
        if not self.measured:
            return ""
        tokens_left = max(0, self.tokens - self.measured)
        seconds_left = tokens_left * (self._clock() - self.began) / self.measured
        share = min(1.0, self.measured / self.tokens) if self.tokens else 1.0
        return f"all scans: {share:.0%}, {duration(seconds_left)} left"
