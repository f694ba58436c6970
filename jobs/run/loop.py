"""Bring a run to its end: find what is missing, measure it, keep the commit log small.

There is one such loop. `scan`, `resume` and `reproduce` use it, with Ray and without. Outcomes of
shards, each a commit or a failure, come from `dispatch` or `measure_in_process`.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.console import Console

from headcount.jobs.console import say
from headcount.jobs.endings import finishing_work_in_hand, is_finishing, work_begins
from headcount.jobs.plan.identity import begun_precisions, check_code_of_run
from headcount.jobs.plan.plan import Plan, check_unextended, extend
from headcount.jobs.resources import Resources
from headcount.jobs.run.commit_log import CommitLog
from headcount.jobs.run.lock import locked
from headcount.jobs.run.progress import WholeProgress, shown_progress
from headcount.jobs.run.shards import Attempts, GatheredElsewhere, order_of_driver
from headcount.jobs.upkeep import phases
from headcount.jobs.upkeep.compaction import clean
from headcount.jobs.upkeep.removal import removed_if_it_never_began
from headcount.schemas.errors import RunError, SilentStoreError, counted
from headcount.schemas.files.commit import Commit, Failure
from headcount.schemas.files.commits import (
    delete,
    gather_loose,
    gathered_shards,
    taken_back,
    write_segment,
)
from headcount.schemas.files.damage import BY_CONTENT, BY_SIZE
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.places import reason
from headcount.schemas.scans.scan import Scan
from headcount.workers.interventions.settlement import check_begun
from headcount.workers.known_models import KnownModels
from headcount.workers.model.info.model_info import ModelInfo
from headcount.workers.process import prepare_process
from headcount.workers.replica import Replica, is_device_failure, resolve_device
from headcount.workers.shard import committed_shard, failure_of, note_failure, run_shard

FAILURES_SHOWN = 10  # Failures that are said one by one at the end. A full disk may cause hundreds.


def run_to_end(
    plan: Plan,
    resources: Resources,
    console: Console,
    replica_class: type[Replica] = Replica,
    *,
    verify: bool = False,
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
            words = "waiting for replicas" if resources.replicas else "loading the model"
            with shown_progress(console, plan.tokens, tokens_done, words, all_runs) as progress:
                if resources.replicas:
                    outcomes = dispatched(
                        plan, requested, resources, tell, replica_class, begin, progress.measured
                    )
                else:
                    make = partial(replica_class, load=models.load) if models else replica_class
                    outcomes = measure_in_process(
                        plan, requested, resources, make, begin, progress.measured
                    )
                with (
                    # An error keeps a generator alive. Closed here, replicas end while there is
                    # still a Ray.
                    closing(outcomes),
                    finishing_work_in_hand(),
                    CommitLog(run, tell, stop_at_failure) as commit_log,
                ):
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


def dispatched(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    tell: Callable[[str], None],
    replica_class: type[Replica],
    begin: Callable[[], None],
    measured: Callable[[int, int], None],
) -> Generator[Commit | Failure, None, None]:
    """Measure `shards` on Ray, which takes a second to import."""
    from headcount.jobs.cluster.ray_cluster import connect
    from headcount.jobs.run.ray_replicas import measure_on_ray

    return measure_on_ray(plan, shards, connect(resources), tell, replica_class, begin, measured)


def refuse_failures(failures: Mapping[RunDirectory, list[Failure]]) -> None:
    """Raise an error if shards of some runs failed; it says how each of these runs continues."""
    if count := sum(map(len, failures.values())):
        failed = [run for run, of_run in failures.items() if of_run]
        advice = "; ".join(f"headcount resume {run.path} continues it" for run in failed)
        raise RunError(
            f"{counted(count, 'shard')} failed, all others are committed; mend the cause, then "
            f"{advice}"
        )


def tokens_of(plan: Plan, shards: np.ndarray) -> int:
    """Tokens that some shards send through the model, over all interventions."""
    # The last shard of a run may be short.
    starts = shards * plan.scan.sequences_per_shard
    stops = np.minimum(starts + plan.scan.sequences_per_shard, len(plan.sequences))
    return int((stops - starts).sum()) * plan.scan.n_ctx * len(plan.scan.interventions)


class ShardsLeft(NamedTuple):
    """The shards of a run that are not done."""

    missing: np.ndarray
    untrue: list[int]  # of the missing ones, those that have a commit: too short, or of lost files


def shards_left(plan: Plan, verify: bool = False) -> ShardsLeft:
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
    for damage in run.damaged_files(commit_log, manifest if verify else None):
        # A roll-up is written again from rows (`headcount compact`). Nothing needs measuring.
        if not damage.is_of_rollup:
            untrue.update(shard for shard in damage.shards if shard < manifest.shards)
    is_missing = np.ones(manifest.shards, bool)
    is_missing[shards[is_whole]] = False
    is_missing[sorted(untrue)] = True
    return ShardsLeft(np.flatnonzero(is_missing), sorted(untrue))


def missing_shards(plan: Plan, verify: bool = False) -> np.ndarray:
    """The shards that are to be measured, in order."""
    return shards_left(plan, verify).missing


def begin_measuring(plan: Plan, untrue: Sequence[int]) -> None:
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


def measure_in_process(
    plan: Plan,
    shards: np.ndarray,
    resources: Resources,
    make_replica: Callable[[ModelInfo, Scan, str], Replica] = Replica,
    begin: Callable[[], None] = lambda: None,
    measured: Callable[[int, int], None] = lambda shard, tokens: None,
) -> Generator[Commit | Failure, None, None]:
    """Measure `shards` in turn; yields each commit and failure. SIGTERM ends it after a shard.

    `begin` is called once the replica is there, and before the first shard; `measured` with how
    many tokens of a shard are measured, after each batch.
    """
    device = resolve_device(resources.device)
    prepare_process(threads=resources.cores or None)
    phases.note("loading the model")
    replica = make_replica(plan.info, plan.scan, device)
    check_begun(begun_precisions(plan.run), replica.precision, plan.run.run_id, device)
    begin()
    attempts = Attempts(plan.run)
    elsewhere = GatheredElsewhere(plan.run)
    remaining = deque(order_of_driver(plan.run, shards).tolist())
    while remaining and not is_finishing():
        shard = remaining.popleft()
        if shard in elsewhere:
            continue
        attempt = attempts.failed(shard) + 1
        replica.after_batch = partial(measured, shard)
        measured(shard, 0)
        try:
            outcome = committed_shard(plan.run, shard, int(plan.manifest.stops(shard)))
            if outcome is None:
                outcome = run_shard(replica, plan.run, plan.sequences.shard(shard), attempt)
        except SilentStoreError:
            raise  # It was asked for minutes, and would be again for a note or another shard.
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
        # Before the first outcome the model was loaded, which is not worth waiting for.
        work_begins()
        yield outcome
