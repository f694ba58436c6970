"""Bring a run to its end: find what is missing, measure it, keep the ledger small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from rich.console import Console

from jobs.dispatch import dispatch
from jobs.in_process import measure_in_process
from jobs.plan import Plan, check_precision
from jobs.progress import say, watch
from jobs.ray_cluster import Resources, connect
from jobs.run_lock import locked
from schemas.commits import FOLD, Commit, Failure, commits_of, drop, fold
from schemas.errors import RunError
from schemas.run_directory import RunDirectory
from workers.replica import Replica

HOPELESS = 20
"""When so many shards have failed and none has succeeded, the rest is not tried."""


def run_to_end(
    plan: Plan,
    resources: Resources,
    console: Console,
    verify: bool = False,
    replica: type[Replica] = Replica,
) -> list[Failure]:
    """Measure every shard that is not done; returns those that failed. `verify` opens every file
    there is.
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
            check_precision(plan, resources.device)
            outcomes = dispatch(plan, missing, resources, lambda line: say(console, line), replica)
        else:
            outcomes = measure_in_process(plan, missing, resources.device, resources.cores, replica)
        outcomes = folded(plan.run, stop_when_hopeless(plan.run.run_id, outcomes))
        failures = watch(outcomes, plan.tokens, plan.tokens - tokens_of(plan, missing), console)
    for failure in failures:
        say(console, f"shard {failure.shard} failed: {failure.error}")
    return failures


def tokens_of(plan: Plan, shards: np.ndarray) -> int:
    """Tokens that some shards send through the model; the last one of a run may be short."""
    size = plan.scan.sequences_per_shard
    sequences = np.minimum((shards + 1) * size, len(plan.sequences)) - shards * size
    return int(sequences.sum()) * plan.scan.n_ctx * len(plan.scan.interventions)


def missing_shards(plan: Plan, verify: bool = False) -> np.ndarray:
    """The shards that have no commit yet, or whose files are gone or not whole; the latter are
    taken out of the ledger.
    """
    missing = np.ones(plan.manifest.shards, bool)
    folded = np.zeros(plan.manifest.shards, bool)
    loose = 0

    def noted(parts: Iterable[pa.Table]) -> Iterator[pa.Table]:
        nonlocal loose
        for part in parts:
            shards, in_fold = part["shard"].to_numpy(), part["folded"].to_numpy()
            missing[shards[shards < len(missing)]] = False
            folded[shards[in_fold & (shards < len(missing))]] = True
            loose += np.count_nonzero(~in_fold)
            yield part

    found = plan.run.damaged_files(noted(plan.run.ledger_parts(["files"])), verify)
    damaged = {shard for shards in found.values() for shard in shards if shard < len(missing)}
    missing[list(damaged)] = True
    if back := [shard for shard in sorted(damaged) if folded[shard]]:
        drop(plan.run.commits_directory, plan.run.run_id, back)
    if loose >= FOLD:
        _fold_files(plan.run, damaged)
    return np.flatnonzero(missing)


def _fold_files(run: RunDirectory, damaged: set[int]) -> None:
    ledger = run.ledger()
    loose = ledger.filter(pa.array(~ledger["folded"].to_numpy()))
    fold(run.commits_directory, [c for c in commits_of(loose) if c.shard not in damaged])


def stop_when_hopeless(
    run_id: str, outcomes: Iterable[Commit | Failure]
) -> Iterator[Commit | Failure]:
    """Pass outcomes on; when many have failed and none has succeeded, the rest is not tried."""
    failed, succeeded = 0, False
    for outcome in outcomes:
        if isinstance(outcome, Commit):
            succeeded = True
        else:
            failed += 1
            if failed >= HOPELESS and not succeeded:
                raise RunError(
                    f"{run_id}: {failed} shards failed and none succeeded, the last with: {outcome.error}; "
                    "mend the cause and run the same command again"
                )
        yield outcome


def folded(run: RunDirectory, outcomes: Iterable[Commit | Failure]) -> Iterator[Commit | Failure]:
    """Pass outcomes on, and fold commits into one file whenever there are enough."""
    waiting: list[Commit] = []
    with ThreadPoolExecutor(1) as background:
        last: Future[None] | None = None
        for outcome in outcomes:
            if isinstance(outcome, Commit):
                waiting.append(outcome)
            if len(waiting) == FOLD:
                if last is not None:
                    last.result()
                last, waiting = background.submit(fold, run.commits_directory, waiting), []
            yield outcome
        if last is not None:
            last.result()
