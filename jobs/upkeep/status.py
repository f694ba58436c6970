"""How far a run is, how fast it goes and what went wrong.

What is done, the commit log says. What is being done, the run's drivers say (`phases`).
"""

import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.jobs.clocks import changed
from headcount.jobs.console import duration
from headcount.jobs.phases import drivers_of, runs_with_drivers
from headcount.schemas.errors import RunError, printable
from headcount.schemas.files.damage import BY_SIZE
from headcount.schemas.files.document_fates import Fates
from headcount.schemas.files.run_directory import RunDirectory, find_runs, holds_whole_shard, pc
from headcount.schemas.places import Place

RECENT = timedelta(minutes=10)  # a speed is of commits this long before the run's last

REASONS = 10  # failures and damaged files that are read and shown; the others are counted

REPLICAS_SHOWN = 20

STORE_READERS = 16  # runs that are read at a time from a store

COLUMNS = [
    "stop", "tokens", "compute_seconds", "idle_seconds", "finished", "host", "replica", "bad_rows",
]  # fmt: skip
"""Columns of the commit log that a status needs."""


@dataclass(frozen=True)
class Pace:
    """How fast a replica is."""

    replica: str
    host: str
    tokens_per_second: float
    busy: float  # share of its time that it computes
    shards: int  # recent shards, from which the speed is taken


@dataclass(frozen=True)
class Status:
    """A run as it stands."""

    run_id: str
    run: str
    begun: bool = True  # Whether it has a manifest. Before, only its drivers are known.
    complete: bool = False
    phase: str | None = None  # what its drivers do, or why the last one ended; none without any
    model: str = "-"
    input: str = "-"
    created: str = "-"
    shards: int = 0
    done: int = 0
    missing: int = 0
    failed: int = 0  # of the missing ones, those with an attempt that failed
    damaged: int = 0  # of the missing ones, those committed whose files are not whole
    tokens: int = 0
    tokens_done: int = 0
    tokens_in_hand: int = 0  # measured by drivers that live, and not committed yet
    bad_rows: int = 0
    damage: list[str] = field(default_factory=list)  # problems of the first damaged files
    documents: dict[str, int] | None = None  # of the corpus, by their fate
    failures: dict[int, str] = field(default_factory=dict)  # errors of the first failed shards
    last_commit: str | None = None  # time of the last commit, by the clock of the host that made it
    last_host: str | None = None
    seconds_since: float | None = None  # by the clock here; 0 if the host's is ahead
    at_work: bool = False  # whether a driver was heard of lately
    tokens_per_second: float | None = None  # of all drivers; none if none has measured
    seconds_left: float | None = None
    replicas: list[Pace] = field(default_factory=list)


def read_status(run: RunDirectory, now: datetime | None = None) -> Status:
    """Read what a run's drivers say, its manifest, its commit log and the notes of failures."""
    now_seconds = (now or datetime.now(UTC)).timestamp()
    drivers = drivers_of(run)
    alive = [driver for driver in drivers if driver.is_alive(now_seconds)]
    # Without a driver that lives, the last one that was heard of is the one to ask about.
    phase = "; ".join(driver.line(now_seconds) for driver in alive or drivers[-1:]) or None
    try:
        manifest = run.manifest()
    except RunError:
        if not drivers or run.manifest_file.is_file():
            raise
        return Status(run.run_id, str(run.path), begun=False, phase=phase, at_work=bool(alive))
    # A shard is done if its commit is whole and its files are there. A roll-up only repeats rows.
    commit_log = run.commit_log([*COLUMNS, *BY_SIZE], in_order=False)
    damages = [one for one in run.damaged_files(commit_log) if not one.is_of_rollup]
    damages.sort(key=lambda damage: damage.shards)
    damaged_shards = {shard for damage in damages for shard in damage.shards}
    is_whole = ~np.isin(commit_log["shard"].to_numpy(), list(damaged_shards))
    is_done = holds_whole_shard(manifest, commit_log) & is_whole
    # Paths and sizes have served. Without them a million commits take half of the memory.
    commit_log = commit_log.select(["shard", *COLUMNS])
    if not is_done.all():
        commit_log = commit_log.take(pa.array(np.flatnonzero(is_done)))
    done_shards = commit_log["shard"].to_numpy()
    complete = len(done_shards) == manifest.shards

    # The shards with a note of a failure that no later attempt has measured.
    failed_shards = np.array(run.failed_shards(), np.int64)
    failed_shards = failed_shards[~np.isin(failed_shards, done_shards)]
    failures: dict[int, str] = {}
    for shard in failed_shards[:REASONS].tolist():
        failure = run.failure(shard)
        failures[shard] = "its note cannot be read" if failure is None else failure[1]

    scan = manifest.identity["scan"]
    # They go through the model once for each intervention.
    tokens = manifest.sequences * int(scan["n_ctx"]) * len(scan["interventions"])
    tokens_done = int(pc.sum(commit_log["tokens"]).as_py() or 0)
    tokens_in_hand = sum(driver.tokens_in_hand for driver in alive)
    speed = sum(driver.tokens_per_second or 0.0 for driver in alive)
    is_measured = speed > 0 and not complete
    fates = run.fates()
    last_commit: dict[str, Any] = {}
    if len(commit_log):
        last = int(np.argmax(commit_log["finished"].cast(pa.int64()).to_numpy()))
        finished = commit_log["finished"][last].as_py().astimezone(UTC)
        # Its own file, until it is gathered, is as old as the disk or the store says.
        file_changed = changed(run.commit_file(commit_log["shard"][last].as_py()))
        committed = finished.timestamp() if file_changed is None else file_changed
        last_commit = {
            "last_commit": finished.isoformat(timespec="seconds"),
            "last_host": commit_log["host"][last].as_py(),
            "seconds_since": round(max(0.0, now_seconds - committed), 1),
        }
    return Status(
        run_id=run.run_id,
        run=str(run.path),
        complete=complete,
        phase=None if complete and not alive else phase,
        model=str(scan["model"]),
        input=str(scan["input"]["family"]),
        created=manifest.created,
        shards=manifest.shards,
        done=len(done_shards),
        missing=manifest.shards - len(done_shards),
        failed=len(failed_shards),
        damaged=len(damaged_shards),
        tokens=tokens,
        tokens_done=tokens_done,
        tokens_in_hand=tokens_in_hand,
        bad_rows=pc.count_distinct(pc.list_flatten(commit_log["bad_rows"])).as_py(),
        damage=[str(damage) for damage in damages[:REASONS]],
        documents=fates.all if fates else None,
        failures=failures,
        at_work=bool(alive),
        tokens_per_second=speed if is_measured else None,
        seconds_left=max(0, tokens - tokens_done - tokens_in_hand) / speed if is_measured else None,
        replicas=_paces(commit_log) if is_measured else [],
        **last_commit,
    )


def _paces(commit_log: pa.Table) -> list[Pace]:
    """The paces of the replicas that have committed lately, the fastest first."""
    if not len(commit_log):
        return []
    finished = commit_log["finished"]
    recent = commit_log.filter(pc.greater(finished, pc.subtract(pc.max(finished), RECENT)))
    sums = recent.group_by(["replica", "host"]).aggregate([
        ("tokens", "sum"), ("compute_seconds", "sum"), ("idle_seconds", "sum"), ("stop", "count"),
    ])  # fmt: skip
    paces: list[Pace] = []
    for row in sums.to_pylist():
        # The replica measured these itself: clocks of two machines may differ.
        busy_seconds = row["compute_seconds_sum"]
        seconds = busy_seconds + row["idle_seconds_sum"]
        # Broken times make no speed.
        if 0 < seconds < float("inf"):
            speed = round(row["tokens_sum"] / seconds, 1)
            busy = round(busy_seconds / seconds, 3)
            paces.append(Pace(row["replica"], row["host"], speed, busy, row["stop_count"]))
    return sorted(paces, key=lambda pace: (-pace.tokens_per_second, pace.replica))


def as_lines(status: Status) -> list[str]:
    """A status as lines for people, of which each begins with a word for its subject."""
    facts = [("run", status.run)]
    if status.begun:
        facts += _progress(status)
    # A speed says more than that the run is measured.
    if status.phase is not None and status.tokens_per_second is None:
        facts.append(("phase", status.phase))
    if status.documents:
        facts.append(("corpus", Fates({"": status.documents}).line))
    elif status.bad_rows:
        facts.append(("bad rows", f"{status.bad_rows:,} left out"))
    facts += [
        ("replica", f"{pace.replica}: {pace.tokens_per_second:,.0f} tokens/s, busy {pace.busy:.0%}")
        for pace in status.replicas[:REPLICAS_SHOWN]
    ]
    if len(status.replicas) > REPLICAS_SHOWN:
        facts.append(("replica", f"and {len(status.replicas) - REPLICAS_SHOWN:,} more"))
    if status.damaged:
        again = f"headcount resume {status.run} measures them anew"
        facts.append(("damaged", f"{status.damaged:,} of the missing were committed; {again}"))
    facts += [("damaged", damage) for damage in status.damage]
    facts += [
        ("failed", f"shard {shard}: {' '.join(error.split())}")
        for shard, error in status.failures.items()
    ]
    if status.failed > len(status.failures):
        facts.append(("failed", f"and {status.failed - len(status.failures):,} more"))
    return [printable(f"{subject:<10}{fact}") for subject, fact in facts]


def _progress(status: Status) -> Iterator[tuple[str, str]]:
    """How far a run is, how fast it goes or that it stopped, and its last commit."""
    share = status.tokens_done / status.tokens if status.tokens else 1.0
    shards = f"{status.done:,} of {status.shards:,} done, {status.missing:,} missing"
    yield "shards", f"{shards}, {status.failed:,} of them failed"
    in_hand = f", {status.tokens_in_hand:,} more in hand" if status.tokens_in_hand else ""
    yield "tokens", f"{status.tokens_done:,} of {status.tokens:,} ({share:.1%}){in_hand}"
    if status.complete:
        yield "complete", "every shard is committed"
    elif status.tokens_per_second is not None and status.seconds_left is not None:
        left = duration(status.seconds_left)
        yield "speed", f"{status.tokens_per_second:,.0f} tokens/s, {left} left"
    elif not status.at_work:
        command = f"headcount resume {shlex.quote(status.run)}"
        yield "stopped", f"no driver was heard of lately; {command} continues it"
    commit = "none yet"
    if status.last_commit is not None:
        clock = f"at {status.last_commit} by the clock of {status.last_host}"
        commit = f"the last {duration(status.seconds_since or 0)} ago, {clock}"
    yield "commit", commit


HEADINGS = ("run", "model", "input", "shards", "failed", "tokens", "created", "phase")
"""The columns of a table of runs."""


def as_row(status: Status) -> tuple[str, ...]:
    """A run's row in a table of runs, under `HEADINGS`."""
    counts = ("-", "-", "-")
    if status.begun:
        shards = f"{status.done:,}/{status.shards:,}"
        counts = (shards, f"{status.failed:,}", f"{status.tokens_done:,}/{status.tokens:,}")
    facts = (status.run_id, status.model, status.input, *counts, status.created)
    return (*facts, status.phase or "")


def runs_in(out: Place, may_be_empty: bool = False) -> list[RunDirectory]:
    """The runs of a directory, also those that begin only now; raises `RunError` without any."""
    beginning = runs_with_drivers(out)
    try:
        begun = find_runs(out)
    except RunError:
        if not beginning and not may_be_empty:
            raise
        begun = []
    return [*begun, *(run for run in beginning if run not in begun)]


def read_statuses(out: Place, may_be_empty: bool = False) -> tuple[list[Status], list[str]]:
    """The statuses of the runs of a directory, and what is wrong with runs."""

    def status_or_problem(run: RunDirectory) -> Status | str:
        try:
            return read_status(run)
        except RunError as error:
            return str(error)

    # A disk answers at once; a store is asked for many runs at a time.
    with ThreadPoolExecutor(1 if isinstance(out, Path) else STORE_READERS) as pool:
        found = list(pool.map(status_or_problem, runs_in(out, may_be_empty)))
    statuses = [one for one in found if isinstance(one, Status)]
    return statuses, [one for one in found if isinstance(one, str)]
