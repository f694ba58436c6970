"""Bring a run to its end: find what is missing, measure it, keep the ledger small.

There is one such loop. `scan`, `resume` and `reproduce` use it, with Ray and without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from rich.console import Console

from jobs.dispatch import dispatch
from jobs.in_process import measure_in_process
from jobs.plan import Plan
from jobs.progress import say, show_progress
from jobs.ray_cluster import Resources, connect
from jobs.run_lock import locked
from schemas.commits import FOLD, Commit, Failure, commits_of, drop, fold
from schemas.errors import RunError
from schemas.run_directory import RunDirectory
from workers.replica import Replica

MOST_FAILURES = 20
"""Stop a run after this many shards failed, if none has succeeded."""


def run_to_end(
    plan: Plan,
    resources: Resources,
    console: Console,
    verify: bool = False,
    replica: type[Replica] = Replica,
    stop_at_failure: bool = False,
) -> list[Failure]:
    """Measure every shard that is not done; returns the failures.

    `verify` opens every data file and measures broken ones again. `stop_at_failure` raises at the
    first failure instead of going on with the other shards.
    """
    with locked(plan.run):
        missing = missing_shards(plan, verify)
        shards = plan.manifest.shards
        done = shards - len(missing)
        say(
            console,
            f"{plan.run.run_id}: {plan.tokens:,} tokens, {shards:,} shards, {done:,} of them done",
        )
        if not len(missing):
            return []
        if resources.replicas:
            resources = connect(resources)
            outcomes = dispatch(plan, missing, resources, lambda line: say(console, line), replica)
        else:
            outcomes = measure_in_process(plan, missing, resources.device, resources.cores, replica)
        if stop_at_failure:
            outcomes = stop_at_first_failure(plan.run.run_id, outcomes)
        outcomes = stop_if_none_succeeds(plan.run.run_id, outcomes)
        outcomes = fold_commits(plan.run, outcomes)
        tokens_done = plan.tokens - tokens_of(plan, missing)
        failures = show_progress(outcomes, plan.tokens, tokens_done, console)
    for failure in failures:
        say(console, f"shard {failure.shard} failed: {failure.error}")
    return failures


def tokens_of(plan: Plan, shards: np.ndarray) -> int:
    """Tokens that some shards send through the model; the last shard of a run may be short."""
    size = plan.scan.sequences_per_shard
    starts = shards * size
    stops = np.minimum(starts + size, len(plan.sequences))
    sequences = int((stops - starts).sum())
    return sequences * plan.scan.n_ctx * len(plan.scan.interventions)


def missing_shards(plan: Plan, verify: bool = False) -> np.ndarray:
    """The shards that have no commit yet, and those whose files are gone or broken.

    Commits of the latter are taken out of the ledger's merged file, so that nothing counts them.
    """
    survey = _LedgerSurvey(plan.manifest.shards)
    parts = survey.watch(plan.run.ledger_parts(["files"]))
    damaged_files = plan.run.damaged_files(parts, verify)
    damaged: set[int] = set()
    for shards in damaged_files.values():
        damaged.update(shard for shard in shards if shard < plan.manifest.shards)

    folded_and_damaged = [shard for shard in sorted(damaged) if survey.folded[shard]]
    if folded_and_damaged:
        drop(plan.run.commits_directory, plan.run.run_id, folded_and_damaged)
    if survey.loose_commits >= FOLD:
        _fold_loose_commits(plan.run, damaged)

    missing = ~survey.committed
    missing[list(damaged)] = True
    return np.flatnonzero(missing)


class _LedgerSurvey:
    """What the ledger says of a run's shards. The ledger of a large run is read in parts, once, and
    the parts are also what finds damaged files: so the survey is taken while they go by.
    """

    def __init__(self, shards: int) -> None:
        self.committed = np.zeros(shards, bool)
        self.folded = np.zeros(shards, bool)
        """Whether a shard's commit is in a merged file."""
        self.loose_commits = 0
        """Commits in files of their own."""

    def watch(self, parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Pass the parts of a ledger on."""
        for part in parts:
            shards = part["shard"].to_numpy()
            in_merged_file = part["folded"].to_numpy()
            # A directory may hold commits beyond the scan's last shard; they are not this scan's.
            own = shards < len(self.committed)
            self.committed[shards[own]] = True
            self.folded[shards[own & in_merged_file]] = True
            self.loose_commits += np.count_nonzero(~in_merged_file)
            yield part


def _fold_loose_commits(run: RunDirectory, damaged: set[int]) -> None:
    ledger = run.ledger()
    loose = ledger.filter(pa.array(~ledger["folded"].to_numpy()))
    whole = [commit for commit in commits_of(loose) if commit.shard not in damaged]
    fold(run.commits_directory, whole)


def stop_at_first_failure(
    run_id: str, outcomes: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on until one is a failure, which is raised."""
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RunError(f"{run_id}: shard {outcome.shard} failed: {outcome.error}")
        yield outcome


def stop_if_none_succeeds(
    run_id: str, outcomes: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on; raise when many shards have failed and none has succeeded: then the cause
    is not in the shards.
    """
    failures = 0
    any_success = False
    for outcome in outcomes:
        if isinstance(outcome, Commit):
            any_success = True
        else:
            failures += 1
            if failures >= MOST_FAILURES and not any_success:
                raise RunError(
                    f"{run_id}: {failures} shards failed and none succeeded, the last with: "
                    f"{outcome.error}; mend the cause and run the same command again"
                )
        yield outcome


def fold_commits(
    run: RunDirectory, outcomes: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on, and merge commits into one file whenever there are enough.

    One merge runs at a time, in the background: a store may take seconds for it. The next one waits
    for it, so what went wrong with a merge is raised and not lost.
    """
    unmerged: list[Commit] = []
    with ThreadPoolExecutor(1) as background:
        merge: Future[None] | None = None
        for outcome in outcomes:
            if isinstance(outcome, Commit):
                unmerged.append(outcome)
            if len(unmerged) == FOLD:
                if merge is not None:
                    merge.result()
                merge = background.submit(fold, run.commits_directory, unmerged)
                unmerged = []
            yield outcome
        if merge is not None:
            merge.result()
