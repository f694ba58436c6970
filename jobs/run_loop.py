"""Bring a run to its end: find what is missing, measure it, keep the ledger small.

There is one such loop. `scan`, `resume` and `reproduce` use it, with Ray and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from rich.console import Console

from jobs.console import say
from jobs.dispatch import dispatch
from jobs.extension import check_unchanged, extend
from jobs.in_process import measure_in_process
from jobs.plan import Plan
from jobs.progress import show_progress
from jobs.ray_cluster import Resources, connect
from jobs.run_lock import locked
from schemas.commits import COMMITS_PER_FOLD, Commit, Failure, commits_of, delete, drop, fold
from schemas.damage import BY_CONTENT, BY_SIZE
from schemas.errors import RunError, counted
from schemas.manifest import Manifest
from schemas.run_directory import RunDirectory, differing_keys, holds_whole_shard
from workers.replica import Replica

MOST_FAILURES = 20
"""Stop a run after this many shards failed, if none has succeeded."""

FAILURES_SHOWN = 10
"""Failures that are said one by one at the end; a full disk may have hundreds."""


def run_to_end(
    plan: Plan,
    resources: Resources,
    console: Console,
    verify: bool = False,
    replica: type[Replica] = Replica,
    stop_at_failure: bool = False,
    allow_other_code: bool = False,
) -> list[Failure]:
    """Measure every shard that is not done; returns the failures.

    `verify` reads every data file and measures damaged ones again. `stop_at_failure` raises at the
    first failure instead of going on with the other shards. `allow_other_code` goes on with a run
    that other measuring code began.
    """
    resources.check_here()
    with locked(plan.run):
        check_unchanged(plan)
        if plan.other_code and not allow_other_code:
            _refuse_other_code(plan, verify)
        else:
            extend(plan)
        missing = missing_shards(plan, verify)
        shards = plan.manifest.shards
        done = shards - len(missing)
        for note in plan.notes:
            say(console, f"{plan.run.run_id}: {note}")
        say(
            console,
            f"{plan.run.run_id}: {counted(plan.tokens, 'token')}, {counted(shards, 'shard')}, {done:,} of them done",
        )
        missing = _requested(plan, missing)
        if not len(missing):
            return []
        if resources.replicas:
            resources = connect(resources)
            outcomes = dispatch(plan, missing, resources, lambda line: say(console, line), replica)
        else:
            outcomes = measure_in_process(plan, missing, resources.device, resources.cores, replica)
        outcomes = say_what_differs(plan.run, outcomes, lambda line: say(console, line))
        if stop_at_failure:
            outcomes = stop_at_first_failure(plan.run.run_id, outcomes)
        outcomes = stop_if_none_succeeds(plan.run.run_id, outcomes)
        outcomes = fold_commits(plan.run, outcomes)
        tokens_done = plan.tokens - tokens_of(plan, missing)
        failures = show_progress(outcomes, plan.tokens, tokens_done, console)
    for failure in failures[:FAILURES_SHOWN]:
        say(console, f"shard {failure.shard} failed: {failure.error}")
    if len(failures) > FAILURES_SHOWN:
        more = len(failures) - FAILURES_SHOWN
        say(console, f"and {more:,} more shards failed: headcount status {plan.run.path}")
    return failures


def _refuse_other_code(plan: Plan, verify: bool) -> None:
    """Refuse to measure with code that has no part in the run; a run with nothing to measure needs
    none.
    """
    assert plan.before is not None
    grows = plan.manifest.sequences > plan.before.sequences
    if grows or len(_requested(plan, missing_shards(plan, verify))):
        raise RunError(
            f"{plan.run.run_id}: begun with code {plan.before.code}, and the code here is "
            f"{plan.code}, which may measure something else; --allow-other-code goes on, and every "
            f"shard says which code measured it; or {plan.way}"
        )


def _requested(plan: Plan, shards: np.ndarray) -> np.ndarray:
    """Those of some shards that have sequences that were asked for."""
    return shards[shards * plan.scan.sequences_per_shard < plan.requested]


def tokens_of(plan: Plan, shards: np.ndarray) -> int:
    """Tokens that some shards send through the model; the last shard of a run may be short."""
    size = plan.scan.sequences_per_shard
    starts = shards * size
    stops = np.minimum(starts + size, len(plan.sequences))
    sequences = int((stops - starts).sum())
    return sequences * plan.scan.n_ctx * len(plan.scan.interventions)


def missing_shards(plan: Plan, verify: bool = False) -> np.ndarray:
    """The shards that have no commit yet, and those whose files are not as committed: by name and
    size, or by content to `verify` them.

    Commits of the latter are taken out of the ledger: nothing counts them, and a replica does not
    write a shard that is committed.
    """
    survey = _LedgerSurvey(plan.manifest)
    columns = BY_CONTENT if verify else BY_SIZE
    parts = survey.watch(plan.run.ledger_parts(["stop", *columns]))
    damaged: set[int] = set(survey.short)
    for damage in plan.run.damaged_files(parts, plan.manifest if verify else None):
        damaged.update(shard for shard in damage.shards if shard < plan.manifest.shards)

    # Files first: without the fold, a file of the same shard would count.
    delete(plan.run.commit_file(shard) for shard in sorted(damaged))
    folded_and_damaged = [shard for shard in sorted(damaged) if survey.folded[shard]]
    if folded_and_damaged:
        drop(plan.run.commits_directory, plan.run.run_id, folded_and_damaged)
    if survey.loose_commits >= COMMITS_PER_FOLD:
        _fold_loose_commits(plan.run, damaged)

    missing = ~survey.committed
    missing[list(damaged)] = True
    return np.flatnonzero(missing)


class _LedgerSurvey:
    """What the ledger says of a run's shards. The ledger of a large run is read in parts, once, and
    the parts are also what finds damaged files: so the survey is taken while they go by.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.committed = np.zeros(manifest.shards, bool)
        self.folded = np.zeros(manifest.shards, bool)
        """Whether a shard's commit is in a merged file."""
        self.loose_commits = 0
        """Commits in files of their own."""
        self.short: list[int] = []
        """Shards whose commit is older than the run's extension, and lacks sequences. A replica
        that outlived its driver may leave one.
        """

    def watch(self, parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Pass the parts of a ledger on."""
        for part in parts:
            shards = part["shard"].to_numpy()
            in_merged_file = part["folded"].to_numpy()
            # A directory may hold commits beyond the scan's last shard; they are not this scan's.
            own = shards < len(self.committed)
            self.short += shards[own & ~holds_whole_shard(self.manifest, part)].tolist()
            self.committed[shards[own]] = True
            self.folded[shards[own & in_merged_file]] = True
            self.loose_commits += np.count_nonzero(~in_merged_file)
            yield part


def _fold_loose_commits(run: RunDirectory, damaged: set[int]) -> None:
    ledger = run.ledger()
    loose = ledger.filter(pa.array(~ledger["folded"].to_numpy()))
    whole = [commit for commit in commits_of(loose) if commit.shard not in damaged]
    fold(run.commits_directory, whole)


def say_what_differs(
    run: RunDirectory, outcomes: Iterable[Commit | Failure], tell: Callable[[str], None]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on; say once of each device and each set of libraries that the run was not begun
    with.
    """
    oldest = run.oldest_commit(["device", "versions"])
    begun = None if oldest is None else (oldest["device"], _versions(oldest["versions"]))
    said: set[str] = set()
    for outcome in outcomes:
        if isinstance(outcome, Commit):
            device = outcome.device
            versions = _versions([version.model_dump() for version in outcome.versions])
            begun = begun or (device, versions)
            differing = differing_keys(begun[1], versions) if begun[1] else []
            if begun[0] and device != begun[0]:
                differing = [f"{device}, begun on {begun[0]}", *differing]
            line = f"{run.run_id}: measured on {outcome.host} with {', '.join(differing)}"
            if differing and line not in said:
                tell(line)
                said.add(line)
        yield outcome


def _versions(versions: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {version["library"]: version["version"] for version in versions}


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
                    f"{run_id}: {counted(failures, 'shard')} failed and none succeeded, the last with: "
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
            if len(unmerged) == COMMITS_PER_FOLD:
                if merge is not None:
                    merge.result()
                merge = background.submit(fold, run.commits_directory, unmerged)
                unmerged = []
            yield outcome
        if merge is not None:
            merge.result()
