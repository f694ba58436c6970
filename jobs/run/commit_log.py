"""What a driver does with each outcome of a shard: it keeps the commit log small, and stops a run
in which one cause fails every shard.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from headcount.schemas.errors import RunError
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.commits import COMMITS_PER_SEGMENT, Segments, gather
from headcount.schemas.files.run_directory import RunDirectory, differing_keys

MOST_FAILURES = 20  # stop after so many in a row: their cause is not in the shards

MOST_UNWRITTEN = 3  # the same if they were measured, and the disk or the store did not take them


class CommitLog:
    """The commit log of a run that is measured now.

    A segment is written in the background, because a store may take seconds for it. The next one
    waits for it: so there is one at a time, and an error of a segment is raised and not lost.
    """

    def __init__(
        self,
        run: RunDirectory,
        tell: Callable[[str], None],
        stop_at_failure: bool = False,
        per_segment: int = COMMITS_PER_SEGMENT,
    ) -> None:
        self.run, self.tell, self.stop_at_failure = run, tell, stop_at_failure
        self.per_segment = per_segment  # commits that are gathered into one file
        self._first = run.any_commit()  # which says what the run was begun with
        self._lines_told: set[str] = set()
        # By whether it was written: sets, because a shard that fails three times is one shard.
        self._failed_in_a_row: dict[bool, set[int]] = {True: set(), False: set()}
        self._ungathered: list[Commit] = []
        self._segments: Segments = {}
        self._background = ThreadPoolExecutor(1)
        self._gathering: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._background.shutdown()
        if self._gathering is not None and error is None:
            self._gathering.result()

    def note(self, outcome: Commit | Failure) -> None:
        """Take in what became of an attempt at a shard.

        Raises `RunError` if attempts at many shards in a row failed in one way: then the cause is
        not in the shards, and the others need not be tried.
        """
        if isinstance(outcome, Failure):
            self._check_failure(outcome)
            return
        self._failed_in_a_row = {True: set(), False: set()}
        self._tell_difference(outcome)
        self._ungathered.append(outcome)
        # The last few commits stay in files of their own, until there are enough of them.
        if len(self._ungathered) == self.per_segment:
            if self._gathering is not None:
                self._gathering.result()
            self._gathering = self._background.submit(
                gather, self.run.commits_directory, self._ungathered, self._segments
            )
            self._ungathered = []

    def _tell_difference(self, commit: Commit) -> None:
        """Say each device and each set of libraries once that differ from the first commit's."""
        self._first = self._first or commit
        versions, now = (
            {entry.library: entry.version for entry in each.versions}
            for each in (self._first, commit)
        )
        differences = differing_keys(versions, now)
        if commit.device != self._first.device:
            differences.insert(0, f"{commit.device}, begun on {self._first.device}")
        line = f"{self.run.run_id}: measured on {commit.host} with {', '.join(differences)}"
        if differences and line not in self._lines_told:
            self.tell(line)
            self._lines_told.add(line)

    def _check_failure(self, failure: Failure) -> None:
        """Raise `RunError` if other shards need not be tried after a failure."""
        run_id = self.run.run_id
        failed_in_a_row = self._failed_in_a_row[failure.of_writing]
        failed_in_a_row.add(failure.shard)
        advice = "; mend the cause and run the same command again"
        most, what = MOST_FAILURES, "measured"
        if failure.of_writing:
            # An error of writing says itself what to do.
            most, what, advice = MOST_UNWRITTEN, "written", ""
        if len(failed_in_a_row) >= most:
            raise RunError(
                f"{run_id}: stopped, because {most} shards in a row could not be {what}, the last "
                f"with: {failure.error}{advice}"
            )
        if self.stop_at_failure and failure.is_last:
            raise RunError(f"{run_id}: shard {failure.shard} failed: {failure.error}{advice}")
