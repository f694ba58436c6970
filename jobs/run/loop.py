"""Bring a run to its end: find what is missing, have it measured, keep the commit log small.

There is one such loop. `scan`, `resume` and `reproduce` use it, with Ray and without. Whoever
measures shards is handed in (`jobs.run.measuring`), and tells what became of each: a commit or a
failure.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.console import Console

from headcount.jobs.console import say
from headcount.jobs.endings import finishing_work_in_hand
from headcount.jobs.lock import locked
from headcount.jobs.plan.begun_with import check_code_of_run
from headcount.jobs.plan.run_plan import RunPlan, check_unextended, extend
from headcount.jobs.run.commit_log import CommitLog
from headcount.jobs.run.progress import WholeProgress, shown_progress
from headcount.jobs.upkeep.cleaning import clean
from headcount.jobs.upkeep.removal import removed_if_it_never_began
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.commits import (
    delete,
    gather_loose,
    gathered_shards,
    taken_back,
    write_segment,
)
from headcount.schemas.files.content_check import BY_CONTENT, files_damaged_by_content
from headcount.schemas.files.damage import BY_SIZE
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.reasons import reason

Outcomes = Generator[Commit | Failure, None, None]

Begin = Callable[[], None]  # called once a replica is there, before it measures
Measured = Callable[[int, int], None]  # told a shard, and how many of its tokens are measured

Measure = Callable[[np.ndarray, Begin, Measured], Outcomes]
"""Measures, writes and commits shards; yields each commit and each failed attempt."""

FAILURES_SHOWN = 10  # Failures that are said one by one at the end. A full disk may cause hundreds.


def bring_to_end(
    plan: RunPlan,
    measure: Measure,
    console: Console,
    first_words: str,
    *,
    verify: bool = False,
    stop_at_failure: bool = False,
    allow_other_code: bool = False,
    all_runs: WholeProgress | None = None,
) -> list[Failure]:
    """Measure every shard that is not done; returns the failures.

    `first_words` say what is done until the first shard is begun. For the options, see
    `jobs.run.measuring.run_to_end`.
    """
    tell = partial(say, console)
    run, previous = plan.run, plan.previous_manifest
    with removed_if_it_never_began(run) if previous is None else nullcontext(), locked(run):
        check_unextended(plan)
        missing, untrue = shards_left(plan, verify)
        # A run may miss shards beyond what this command asks for.
        requested = missing[missing * plan.scan.sequences_per_shard < plan.requested_sequences]
        # A run that is complete is not refused: after an update, the same command still says that
        # nothing is missing.
        is_longer = previous is not None and plan.manifest.sequences > previous.sequences
        if (len(requested) or is_longer) and not allow_other_code:
            check_code_of_run(run, previous, plan.code)
        begin = partial(begin_measuring, plan, untrue)
        shards = plan.manifest.shards
        for note in plan.notes:
            tell(f"{run.run_id}: {note}")
        tell(
            f"{run.run_id}: {counted(plan.tokens, 'token')}, {counted(shards, 'shard')}, "
            f"{shards - len(missing):,} of them done"
        )
        failures: list[Failure] = []
        if len(requested):
            tokens_done = plan.tokens - tokens_of(plan, requested)
            with (
                shown_progress(
                    console, plan.tokens, tokens_done, first_words, all_runs
                ) as progress,
                # An error keeps a generator alive. Closed here, replicas end while there is still a
                # Ray.
                closing(measure(requested, begin, progress.measured)) as outcomes,
                finishing_work_in_hand(),
                CommitLog(run, tell, stop_at_failure) as commit_log,
            ):
                # Each is a shard that was measured, written and committed, or that failed.
                for outcome in outcomes:
                    commit_log.note(outcome)
                    progress.note(outcome)
            failures = progress.failures
        elif previous is None or plan.code in previous.codes or allow_other_code:
            begin()
        if not failures and len(requested) == len(missing):
            _finish(run, tell, shards, had_missing=bool(len(missing)))
    for failure in failures[:FAILURES_SHOWN]:
        tell(f"shard {failure.shard} failed: {failure.error}")
    if len(failures) > FAILURES_SHOWN:
        more = len(failures) - FAILURES_SHOWN
        tell(f"and {more:,} more shards failed: headcount status {run.path}")
    return failures


def _finish(run: RunDirectory, tell: Callable[[str], None], shards: int, had_missing: bool) -> None:
    """Note that a run is complete, and delete what lost attempts have left: then a bare glob is
    right, too.
    """
    if had_missing or not run.complete_file.is_file():
        run.note_complete(shards)
    try:
        clean(run, tell)
    except OSError as error:
        tell(
            f"warning: {run.path} is complete, but files of lost attempts cannot be deleted "
            f"({reason(error)}): a bare glob counts their rows twice, headcount query does not"
        )


def refuse_failures(failures: Mapping[RunDirectory, list[Failure]]) -> None:
    """Raise an error if shards of some runs failed; it says how each of these runs continues."""
    if count := sum(map(len, failures.values())):
        failed = [run for run, of_run in failures.items() if of_run]
        advice = "; ".join(f"headcount resume {run.path} continues it" for run in failed)
        raise RunError(
            f"{counted(count, 'shard')} failed, all others are committed; mend the cause, then "
            f"{advice}"
        )


def tokens_of(plan: RunPlan, shards: np.ndarray) -> int:
    """Tokens that some shards send through the model, over all interventions."""
    # The last shard of a run may be short.
    starts = shards * plan.scan.sequences_per_shard
    stops = np.minimum(starts + plan.scan.sequences_per_shard, plan.manifest.sequences)
    return int((stops - starts).sum()) * plan.scan.n_ctx * len(plan.scan.interventions)


class ShardsLeft(NamedTuple):
    """The shards of a run that are not done."""

    missing: np.ndarray
    untrue: list[int]  # of the missing ones, those that have a commit: too short, or of lost files


def shards_left(plan: RunPlan, verify: bool = False) -> ShardsLeft:
    """The shards without a commit, and those whose commit is not true any more; changes nothing."""
    run, manifest = plan.run, plan.manifest
    commit_log = run.commit_log(["stop", *(BY_CONTENT if verify else BY_SIZE)], in_order=False)
    shards = commit_log["shard"].to_numpy()
    # A directory may hold commits beyond the scan's last shard; they are not this scan's.
    is_own = shards < manifest.shards
    # The last shard of a run that grows was short. And a replica that outlived its driver may leave
    # a commit that is older than the run's extension, and lacks sequences.
    is_whole = holds_whole_shard(manifest, commit_log)
    untrue = set(shards[is_own & ~is_whole].tolist())
    damages = (
        files_damaged_by_content(run.path, manifest, commit_log)
        if verify
        else run.damaged_files(commit_log)
    )
    for damage in damages:
        # A roll-up is written again from rows (`headcount compact`). Nothing needs measuring.
        if not damage.is_of_rollup:
            untrue.update(shard for shard in damage.shards if shard < manifest.shards)
    is_missing = np.ones(manifest.shards, bool)
    is_missing[shards[is_whole]] = False
    is_missing[sorted(untrue)] = True
    return ShardsLeft(np.flatnonzero(is_missing), sorted(untrue))


def missing_shards(plan: RunPlan, verify: bool = False) -> np.ndarray:
    """The shards that are to be measured, in order."""
    return shards_left(plan, verify).missing


def begin_measuring(plan: RunPlan, untrue: Sequence[int]) -> None:
    """Write down what a run becomes, and take back shards whose commits are not true any more.

    It is the first change of a run that continues. It comes when nothing can be refused any more: a
    replica is there, and agrees with the run. The manifest is last: if the process is killed
    before, the run misses some shards, and the same command goes on.
    """
    run = plan.run
    check_unextended(plan)
    if untrue:
        run.forget_complete()
        # A last shard that was short is measured again instead of being completed: its data files
        # would stand beside the commit of the shorter shard for a moment. It shares no file with
        # other shards, also after a compaction.
        # Commit files go first. While a segment has the shard, its own file does not count; once a
        # segment has taken the shard back, the file would count again.
        delete(map(run.commit_file, untrue))
        if not gathered_shards(run.commits_directory).isdisjoint(untrue):
            write_segment(run.commits_directory, taken_back(run.run_id, untrue))
    # Drivers that were killed early left them: each gathers only what it measured itself.
    gather_loose(run.commits_directory, run.run_id)
    extend(plan)
