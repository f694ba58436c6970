"""Bring a run to its end: find what is missing, measure it, keep the commit log small.

There is one such loop. `scan`, `resume` and `reproduce` use it, with Ray and without. It is a chain
of generators: outcomes of shards come from `dispatch` or `measure_in_process`, and pass through
those that stop the run, gather commits and show progress.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console

from headcount.jobs.console import say
from headcount.jobs.endings import finishing_work_in_hand, is_finishing, work_begins
from headcount.jobs.plan.extension import check_unchanged, extend
from headcount.jobs.plan.identity import begun_precisions
from headcount.jobs.plan.plan import Plan
from headcount.jobs.resources import Resources
from headcount.jobs.run.attempts import Attempts
from headcount.jobs.run.lock import locked
from headcount.jobs.run.progress import WholeProgress, show_progress
from headcount.jobs.upkeep import phases
from headcount.jobs.upkeep.compaction import clean
from headcount.jobs.upkeep.removal import removed_if_it_never_began
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.commits import (
    COMMITS_PER_SEGMENT,
    Commit,
    Failure,
    commits_of,
    delete,
    drop,
    gather,
)
from headcount.schemas.files.damage import BY_CONTENT, BY_SIZE
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.places import reason
from headcount.schemas.files.run_directory import RunDirectory, differing_keys, holds_whole_shard
from headcount.schemas.scans.scan import Scan
from headcount.workers.interventions.settlement import check_begun
from headcount.workers.model.files.known_models import KnownModels
from headcount.workers.model.files.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica, is_device_failure, resolve_device
from headcount.workers.shard import failure_of, note_failure, run_shard

MOST_FAILURES = 20
"""Stop a run after so many shards in a row could not be measured: the cause is not in them."""

MOST_UNWRITTEN = 3
"""The same if they were measured, and the disk or the store did not take them."""

FAILURES_SHOWN = 10
"""Failures that are said one by one at the end. A full disk may cause hundreds."""


def run_to_end(
    plan: Plan,
    resources: Resources,
    console: Console,
    verify: bool = False,
    replica_class: type[Replica] = Replica,
    stop_at_failure: bool = False,
    allow_other_code: bool = False,
    models: KnownModels | None = None,
    all_runs: WholeProgress | None = None,
) -> list[Failure]:
    """Measure every shard that is not done; returns the failures.

    `verify` reads every data file and measures damaged ones again. `stop_at_failure` raises at the
    first failure instead of measuring the other shards. `allow_other_code` continues a run that
    other measuring code began. `models` shares loaded models between runs in this process.
    `all_runs` is told what is measured of several runs.
    """
    resources.check_here()
    is_new = plan.previous_manifest is None
    with removed_if_it_never_began(plan.run) if is_new else nullcontext(), locked(plan.run):
        # The plan was made before the lock was held.
        check_unchanged(plan)
        if plan.needs_permission and not allow_other_code:
            _refuse_to_measure(plan, verify)
        else:
            extend(plan)
        missing = missing_shards(plan, verify)
        for note in plan.notes:
            say(console, f"{plan.run.run_id}: {note}")
        shards = plan.manifest.shards
        say(
            console,
            f"{plan.run.run_id}: {counted(plan.tokens, 'token')}, {counted(shards, 'shard')}, "
            f"{shards - len(missing):,} of them done",
        )
        # A run may miss shards beyond what this command asks for.
        requested = _requested_shards(plan, missing)
        if not len(requested):
            if not len(missing):
                _make_globs_right(plan.run, console)
            return []
        tokens_done = plan.tokens - tokens_of(plan, requested)
        measured = _outcomes(plan, requested, resources, console, replica_class, models)
        # An error keeps a generator alive. Closed here, replicas end while there is still a Ray.
        with closing(measured):
            outcomes = phases.of_outcomes(measured)
            outcomes = stop_after_failures_in_a_row(plan.run.run_id, outcomes)
            if stop_at_failure:
                outcomes = stop_at_first_failure(plan.run.run_id, outcomes)
            outcomes = gather_commits(plan.run, outcomes)
            # The generators above have measured nothing yet. They run as this asks for outcomes.
            with finishing_work_in_hand():
                failures = show_progress(outcomes, plan.tokens, tokens_done, console, all_runs)
        if not failures and len(requested) == len(missing):
            _make_globs_right(plan.run, console)
    for failure in failures[:FAILURES_SHOWN]:
        say(console, f"shard {failure.shard} failed: {failure.error}")
    if len(failures) > FAILURES_SHOWN:
        more = len(failures) - FAILURES_SHOWN
        say(console, f"and {more:,} more shards failed: headcount status {plan.run.path}")
    return failures


def _outcomes(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    console: Console,
    replica_class: type[Replica],
    models: KnownModels | None,
) -> Generator[Commit | Failure, None, None]:
    """The outcomes of shards as they arrive, measured on Ray's replicas or in this process."""

    def tell(line: str) -> None:
        say(console, line)

    if resources.replicas:
        # Ray takes a second to import.
        from headcount.jobs.cluster.ray_cluster import connect
        from headcount.jobs.run.dispatch import dispatch

        outcomes = dispatch(plan, shards, connect(resources), tell, replica_class)
    else:
        make_replica = replica_class if models is None else partial(replica_class, load=models.load)
        outcomes = until_stopped(
            measure_in_process(plan, shards, resources.device, resources.cores, make_replica)
        )
    return say_what_differs(plan.run, outcomes, tell)


def _make_globs_right(run: RunDirectory, console: Console) -> None:
    """Leave only files that count in a run of which all is done."""
    try:
        clean(run, lambda line: say(console, line))
    except OSError as error:
        say(
            console,
            f"warning: {run.path} is complete, but files of lost attempts cannot be deleted "
            f"({reason(error)}): a bare glob counts their rows twice, headcount query does not",
        )


def _refuse_to_measure(plan: Plan, verify: bool) -> None:
    """Refuse to measure with code that has no part in the run yet.

    A run that is complete is not refused: after an update, the same command still says that nothing
    is missing.
    """
    assert plan.previous_manifest is not None
    is_extended = plan.manifest.sequences > plan.previous_manifest.sequences
    if is_extended or len(_requested_shards(plan, missing_shards(plan, verify))):
        raise RunError(
            f"{plan.run.run_id}: begun with code {plan.previous_manifest.code}, and the code here "
            f"is {plan.code}, which may measure something else; --allow-other-code continues it, "
            f"and every shard says which code measured it; or {plan.alternative}"
        )


def _requested_shards(plan: Plan, shards: np.ndarray) -> np.ndarray:
    """Those of some shards that begin before the last sequence that was asked for."""
    return shards[shards * plan.scan.sequences_per_shard < plan.requested_sequences]


def tokens_of(plan: Plan, shards: np.ndarray) -> int:
    """Tokens that some shards send through the model, over all interventions."""
    size = plan.scan.sequences_per_shard
    # The last shard of a run may be short.
    starts = shards * size
    stops = np.minimum(starts + size, len(plan.sequences))
    sequences = int((stops - starts).sum())
    return sequences * plan.scan.n_ctx * len(plan.scan.interventions)


def missing_shards(plan: Plan, verify: bool = False) -> np.ndarray:
    """The shards that have no commit, and those with files that are not as committed.

    Files are compared by name and size, or by content to `verify` them. The commits of damaged
    shards are taken out of the commit log: a replica does not write a shard that is committed.
    """
    survey = _CommitLogSurvey(plan.manifest)
    columns = BY_CONTENT if verify else BY_SIZE
    parts = survey.watch(plan.run.commit_log_parts(["stop", *columns]))
    damaged: set[int] = set(survey.short)
    # This reads the parts, and fills the survey on the way.
    for damage in plan.run.damaged_files(parts, plan.manifest if verify else None):
        # A roll-up is written again from rows (`headcount compact`). Nothing needs measuring.
        if not damage.is_of_rollup:
            damaged.update(shard for shard in damage.shards if shard < plan.manifest.shards)

    # Commit files go first. While a segment has the shard, its own file does not count; once the
    # segment has dropped the shard, the file would count again.
    delete(plan.run.commit_file(shard) for shard in sorted(damaged))
    gathered_and_damaged = [shard for shard in sorted(damaged) if survey.is_gathered[shard]]
    if gathered_and_damaged:
        drop(plan.run.commits_directory, plan.run.run_id, gathered_and_damaged)
    if survey.loose_commits >= COMMITS_PER_SEGMENT:
        # Drivers that were killed early left them: each gathers only what it measured itself.
        commit_log = plan.run.commit_log()
        loose = commit_log.filter(pa.array(~commit_log["gathered"].to_numpy()))
        undamaged = [commit for commit in commits_of(loose) if commit.shard not in damaged]
        gather(plan.run.commits_directory, undamaged)

    # The survey is from before the commits of damaged shards were taken out.
    is_missing = ~survey.is_committed
    is_missing[list(damaged)] = True
    return np.flatnonzero(is_missing)


class _CommitLogSurvey:
    """What the commit log says of each shard of a run.

    The commit log of a large run is read once, in parts. The search for damaged files needs the
    same parts, so the survey is taken while they go by.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.is_committed = np.zeros(manifest.shards, bool)
        """By shard."""
        self.is_gathered = np.zeros(manifest.shards, bool)
        """Whether a shard's commit is in a segment, by shard."""
        self.loose_commits = 0
        """Commits in files of their own."""
        self.short: list[int] = []
        """Shards whose commit is older than the run's extension, and lacks sequences. A replica
        that outlived its driver may leave one.
        """

    def watch(self, parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Pass the parts of a commit log on, and note what they say."""
        for part in parts:
            shards = part["shard"].to_numpy()
            is_gathered = part["gathered"].to_numpy()
            # A directory may hold commits beyond the scan's last shard; they are not this scan's.
            is_own = shards < len(self.is_committed)
            self.short += shards[is_own & ~holds_whole_shard(self.manifest, part)].tolist()
            self.is_committed[shards[is_own]] = True
            self.is_gathered[shards[is_own & is_gathered]] = True
            self.loose_commits += np.count_nonzero(~is_gathered)
            yield part


def say_what_differs(
    run: RunDirectory, outcomes: Iterable[Commit | Failure], tell: Callable[[str], None]
) -> Generator[Commit | Failure, None, None]:
    """Pass outcomes on; name each device and each set of libraries that differ from the run's.

    Those of the run are what one of its first commits says, or else the first commit that arrives.
    Each difference is said once.
    """
    begun: _Origin | None = None
    first = run.oldest_commit(["device", "versions"])
    if first is not None:
        begun_versions = {entry["library"]: entry["version"] for entry in first["versions"]}
        begun = _Origin(first["device"], begun_versions)
    lines_said: set[str] = set()
    for outcome in outcomes:
        if isinstance(outcome, Commit):
            versions = {entry.library: entry.version for entry in outcome.versions}
            begun = begun or _Origin(outcome.device, versions)
            differences = differing_keys(begun.versions, versions)
            if outcome.device != begun.device:
                differences = [f"{outcome.device}, begun on {begun.device}", *differences]
            line = f"{run.run_id}: measured on {outcome.host} with {', '.join(differences)}"
            if differences and line not in lines_said:
                tell(line)
                lines_said.add(line)
        yield outcome


class _Origin(NamedTuple):
    """What a shard was measured on and with."""

    device: str
    versions: dict[str, str]
    """The version of each library."""


def until_stopped(outcomes: Iterable[Commit | Failure]) -> Iterator[Commit | Failure]:
    """Pass outcomes on until the shard is finished that was measured when SIGTERM came."""
    for outcome in outcomes:
        # Before the first outcome the model was loaded, which is not worth waiting for.
        work_begins()
        yield outcome
        if is_finishing():
            return


def stop_at_first_failure(
    run_id: str, outcomes: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on until one is a failure, which is raised."""
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RunError(
                f"{run_id}: shard {outcome.shard} failed: {outcome.error}; mend the cause and run "
                "the same command again"
            )
        yield outcome


def stop_after_failures_in_a_row(
    run_id: str, attempts: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes of shards on; raise if attempts at many shards in a row failed in one way.

    Then the cause is not in the shards, and the others need not be tried. Attempts after which a
    shard is tried again are left out.
    """
    failed_shards: dict[bool, set[int]] = {True: set(), False: set()}
    for attempt in attempts:
        if isinstance(attempt, Commit):
            failed_shards = {True: set(), False: set()}
            yield attempt
            continue
        # A set: a shard that fails three times is one shard.
        in_a_row = failed_shards[attempt.of_writing]
        in_a_row.add(attempt.shard)
        most = MOST_UNWRITTEN if attempt.of_writing else MOST_FAILURES
        if len(in_a_row) >= most:
            # An error of writing says itself what to do.
            what, advice = "measured", "; mend the cause and run the same command again"
            if attempt.of_writing:
                what, advice = "written", ""
            raise RunError(
                f"{run_id}: stopped, because {most} shards in a row could not be {what}, the last "
                f"with: {attempt.error}{advice}"
            )
        if attempt.is_last:
            yield attempt


def gather_commits(
    run: RunDirectory, outcomes: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on, and gather their commits into one file whenever there are enough.

    A segment is written in the background, because a store may take seconds for it. The next one
    waits for it: so there is one at a time, and an error of a segment is raised and not lost.
    """
    ungathered: list[Commit] = []
    with ThreadPoolExecutor(1) as background:
        gathering: Future[None] | None = None
        for outcome in outcomes:
            if isinstance(outcome, Commit):
                ungathered.append(outcome)
            # The last few commits stay in files of their own, until there are enough of them.
            if len(ungathered) == COMMITS_PER_SEGMENT:
                if gathering is not None:
                    gathering.result()
                gathering = background.submit(gather, run.commits_directory, ungathered)
                ungathered = []
            yield outcome
        if gathering is not None:
            gathering.result()


MakeReplica = Callable[[ModelInfo, Scan, str], Replica]
"""Makes the replica that measures: a class, or a function that shares a loaded model."""


def measure_in_process(
    plan: Plan,
    shards: np.ndarray,
    device: str,
    cores: int = 0,
    make_replica: MakeReplica = Replica,
) -> Iterator[Commit | Failure]:
    """Measure `shards` one after the other; yields each commit and each failed attempt.

    Uses all cores if `cores` is 0.
    """
    device = resolve_device(device)
    prepare_process(threads=cores or None)
    replica = make_replica(plan.info, plan.scan, device)
    check_begun(begun_precisions(plan.run), replica.precision, plan.run.run_id, device)
    attempts = Attempts(plan.run)
    remaining = deque(shards.tolist())
    while remaining:
        shard = remaining.popleft()
        attempt = attempts.failed(shard) + 1
        try:
            outcome = run_shard(replica, plan.run, plan.sequences.shard(shard), attempt)
        except Exception as error:
            outcome = note_failure(plan.run, failure_of(shard, error), attempt)
            # After such an error every call on the device fails, so the other shards would too.
            if is_device_failure(error):
                raise RunError(
                    f"shard {shard}: {outcome.error}; the same command continues in a new process"
                ) from None
            if attempts.may_try_again(shard):
                # At once: then a cause that is in every shard is known after a few of them.
                remaining.appendleft(shard)
                outcome = replace(outcome, is_last=False)
        yield outcome
