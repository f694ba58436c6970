"""How far a run is, how fast it goes and what went wrong, read from its directory alone.

Clocks of machines may be wrong. So a speed is tokens over seconds that a replica measured itself.
Only which commits are recent depends on clocks: a replica's commits are compared with its own last
one, and only that one with the clock here.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.jobs.console import duration
from headcount.jobs.upkeep import phases
from headcount.schemas.errors import printable
from headcount.schemas.files.damage import BY_SIZE, Damage
from headcount.schemas.files.document_fates import Fates
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.places import Place
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard, pc

RECENT_SECONDS = 600.0
"""A replica's speed is taken from this long before its last commit."""

PATIENCE_SHARDS = 5.0
"""A replica is at work if its last commit is no older than this many of its shards take."""

PATIENCE_SECONDS = 60.0
"""It is also at work if its last commit is no older than this, however short its shards are."""

REASONS = 10
"""Failures and damaged files that are read and shown; the others are counted."""

COLUMNS = [
    "stop",
    "tokens",
    "compute_seconds",
    "idle_seconds",
    "finished",
    "host",
    "replica",
    "bad_rows",
]
"""Columns of the commit log that a status needs."""


@dataclass(frozen=True)
class Pace:
    """How fast a replica at work is."""

    replica: str
    host: str
    tokens_per_second: float
    busy: float
    """Share of its time that it computes."""
    shards: int
    """Recent shards, from which the speed is taken."""


@dataclass(frozen=True)
class Status:
    """A run as it stands."""

    run_id: str
    run: str
    complete: bool
    shards: int
    done: int
    missing: int
    failed: int
    """Of the missing ones, those with an attempt that failed."""
    damaged: int
    """Of the missing ones, those with a commit whose files are gone or of another size."""
    tokens: int
    tokens_done: int
    bad_rows: int
    damage: list[str] = field(default_factory=list)
    """What is wrong with the first few damaged files."""
    documents: dict[str, int] | None = None
    """Documents of the corpus by what became of them. None without a corpus, and for older runs,
    which did not record it.
    """
    failures: dict[int, str] = field(default_factory=dict)
    """The error of each of the first few failed shards."""
    last_commit: str | None = None
    """Time of the last commit, by the clock of the host that made it."""
    last_host: str | None = None
    seconds_since: float | None = None
    """Since the last commit, by the clock here; 0 if the host's clock is ahead."""
    seconds_ahead: float = 0.0
    """How far the clock of `last_host` is ahead of the one here, if it is."""
    tokens_per_second: float | None = None
    """Of all replicas at work together; none if no replica is at work."""
    seconds_left: float | None = None
    replicas: list[Pace] = field(default_factory=list)
    at_work: bool | None = None
    """Whether a process of this machine has the run's lock; none if that cannot be known."""
    phase: str | None = None
    """What the driver does, or why it ended; none if it says nothing."""
    driver_lives: bool = False
    """Whether a driver was heard of lately."""


@dataclass(frozen=True)
class StatusBefore:
    """A run that has no manifest yet: it is being prepared, or that failed."""

    run_id: str
    run: str
    phase: str
    complete: bool = False


def read_status(run: RunDirectory, now: datetime | None = None) -> Status:
    """Read a run's manifest, its commit log and the notes of failures; `now` is the time here."""
    now_seconds = (now or datetime.now(UTC)).timestamp()
    manifest = run.manifest()
    commit_log, damages = done_and_damaged(run, manifest, COLUMNS)
    done_shards = commit_log["shard"].to_numpy()
    failed_shards = _failed_shards(run, done_shards)
    failures: dict[int, str] = {}
    for shard in failed_shards[:REASONS].tolist():
        failure = run.failure(shard)
        failures[shard] = "its note cannot be read" if failure is None else failure[1]
    tokens = tokens_of(manifest)
    tokens_done = int(pc.sum(commit_log["tokens"]).as_py() or 0)
    complete = len(done_shards) == manifest.shards
    last_commit = _last_commit(commit_log, now_seconds)
    at_work = _is_locked(run.path)
    paces = [] if complete else _paces(commit_log, now_seconds)
    if at_work is False:
        # Replicas of this machine end with the process that has the lock, even if their last
        # commits are recent. Those of other machines may be at work.
        paces = [pace for pace in paces if pace.host != socket.gethostname()]
    tokens_per_second = sum(pace.tokens_per_second for pace in paces) or None
    tokens_left = max(0, tokens - tokens_done)
    fates = run.fates()
    note = None if complete else phases.read_note(run)
    return Status(
        run_id=run.run_id,
        run=str(run.path),
        complete=complete,
        shards=manifest.shards,
        done=len(done_shards),
        missing=manifest.shards - len(done_shards),
        failed=len(failed_shards),
        damaged=len({shard for damage in damages for shard in damage.shards}),
        tokens=tokens,
        tokens_done=tokens_done,
        bad_rows=pc.count_distinct(pc.list_flatten(commit_log["bad_rows"])).as_py(),
        damage=[str(damage) for damage in damages[:REASONS]],
        documents=fates.all if fates else None,
        failures=failures,
        tokens_per_second=tokens_per_second,
        seconds_left=tokens_left / tokens_per_second if tokens_per_second else None,
        replicas=paces,
        at_work=at_work,
        phase=_phase(note, at_work, now_seconds),
        driver_lives=note is not None and note.is_alive(now_seconds),
        **last_commit,
    )


def _phase(note: phases.Note | None, at_work: bool | None, now: float) -> str | None:
    """What a note says of the driver; none if it is about one that another has followed."""
    if note is None or (at_work and note.end() is not None):
        return None
    return note.line(now)


def read_status_before(run: RunDirectory, now: datetime | None = None) -> StatusBefore | None:
    """What is known of a run that has no manifest yet; none if nothing is."""
    if run.manifest_file.is_file():
        return None
    note = phases.read_note(run)
    if note is None:
        return None
    now_seconds = (now or datetime.now(UTC)).timestamp()
    return StatusBefore(run.run_id, str(run.path), note.line(now_seconds))


def done_and_damaged(
    run: RunDirectory, manifest: Manifest, columns: Sequence[str]
) -> tuple[pa.Table, list[Damage]]:
    """The commit log of the shards that are done, and the files that are gone or of another size.

    A roll-up only repeats rows, so it is not among these files.
    """
    commit_log = run.commit_log([*columns, *BY_SIZE])
    damages = [one for one in run.damaged_files([commit_log]) if not one.is_of_rollup]
    damaged_shards = [shard for damage in damages for shard in damage.shards]
    is_whole = ~np.isin(commit_log["shard"].to_numpy(), damaged_shards)
    is_done = holds_whole_shard(manifest, commit_log) & is_whole
    # Paths and sizes have served. Without them a million commits take half of the memory.
    return commit_log.select(["shard", *columns]).filter(pa.array(is_done)), damages


def tokens_of(manifest: Manifest) -> int:
    """Tokens that go through the model in a whole run, over all interventions."""
    scan = manifest.identity["scan"]
    return manifest.sequences * int(scan["n_ctx"]) * len(scan["interventions"])


def _failed_shards(run: RunDirectory, done_shards: np.ndarray) -> np.ndarray:
    """The shards with a note of a failure that no later attempt has measured."""
    noted_shards = np.array(run.failed_shards(), np.int64)
    return np.setdiff1d(noted_shards, done_shards)


def _last_commit(commit_log: pa.Table, now: float) -> dict[str, Any]:
    """The fields of a status that tell of the last commit."""
    if not len(commit_log):
        return {}
    last = int(np.argmax(_finished_seconds(commit_log)))
    finished = commit_log["finished"][last].as_py()
    seconds_since = now - finished.timestamp()
    return {
        "last_commit": finished.astimezone(UTC).isoformat(timespec="seconds"),
        "last_host": commit_log["host"][last].as_py(),
        "seconds_since": round(max(0.0, seconds_since), 1),
        # A commit of the future was made by a clock that is ahead.
        "seconds_ahead": round(max(0.0, -seconds_since), 1),
    }


def _finished_seconds(commit_log: pa.Table) -> np.ndarray:
    """When each commit was made, in seconds since 1970."""
    return commit_log["finished"].cast(pa.int64()).to_numpy() / 1e6


def _paces(commit_log: pa.Table, now: float) -> list[Pace]:
    """The paces of the replicas at work, the fastest first."""
    if not len(commit_log):
        return []
    # A run may have a million commits, so they are summed by arrays. Each replica has a number, and
    # `replica_of` holds the number of the replica that made each recent commit.
    encoded = commit_log["replica"].combine_chunks().dictionary_encode()
    replica_names = encoded.dictionary
    count = len(replica_names)
    replica_of_all = encoded.indices.to_numpy()
    finished = _finished_seconds(commit_log)
    newest = np.full(count, -np.inf)
    # `newest[replica_of_all] = …` would keep the last of several commits, not the latest.
    np.maximum.at(newest, replica_of_all, finished)
    recent = np.flatnonzero(finished >= newest[replica_of_all] - RECENT_SECONDS)
    replica_of = replica_of_all[recent]

    def total(column: str) -> np.ndarray:
        """The sum of a column over the recent commits of each replica."""
        values = commit_log[column].to_numpy()[recent].astype(float)
        # One commit with a broken number must not spoil the sums of its replica.
        finite_values = np.maximum(0, np.nan_to_num(values, posinf=0))
        return np.bincount(replica_of, finite_values, minlength=count)

    shards = np.bincount(replica_of, minlength=count)
    tokens = total("tokens")
    compute_seconds = total("compute_seconds")
    seconds = compute_seconds + total("idle_seconds")
    seconds_per_shard = seconds / np.maximum(1, shards)
    patience = np.maximum(PATIENCE_SECONDS, PATIENCE_SHARDS * seconds_per_shard)
    is_at_work = (seconds > 0) & (now - newest <= patience)

    # Each replica has a recent commit, its newest, so this has one entry for each replica.
    _, first_commits = np.unique(replica_of, return_index=True)
    hosts = commit_log["host"].take(pa.array(recent[first_commits]))
    paces = [
        Pace(
            replica=replica_names[number].as_py(),
            host=hosts[number].as_py(),
            tokens_per_second=round(float(tokens[number] / seconds[number]), 1),
            busy=round(float(compute_seconds[number] / seconds[number]), 3),
            shards=int(shards[number]),
        )
        for number in np.flatnonzero(is_at_work).tolist()
    ]
    return sorted(paces, key=lambda pace: (-pace.tokens_per_second, pace.replica))


def _is_locked(path: Place) -> bool | None:
    """Whether a process of this machine holds the lock of a run; none if that cannot be known.

    The system's list of locks is read instead of taking the lock, which would be in a driver's way.
    """
    if not isinstance(path, Path):
        return None
    try:
        inode = os.stat(path / ".lock").st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    # A line is `1: FLOCK ADVISORY WRITE 1234 00:2f:5678 0 EOF`, with the inode after the device.
    return any("FLOCK" in line and f":{inode} " in line for line in locks)


def as_json(status: Status | StatusBefore) -> dict[str, Any]:
    """A status as one JSON object."""
    return asdict(status)


def as_lines(status: Status | StatusBefore, most_replicas: int = 20) -> list[str]:
    """A status as lines for people, of which each begins with a word for its subject."""
    if isinstance(status, StatusBefore):
        lines = [f"run       {status.run}", f"phase     {status.phase}"]
        return [printable(line) for line in lines]
    share = status.tokens_done / status.tokens if status.tokens else 1.0
    lines = [
        f"run       {status.run}",
        f"shards    {status.done:,} of {status.shards:,} done, {status.missing:,} missing, "
        f"{status.failed:,} of them failed",
        f"tokens    {status.tokens_done:,} of {status.tokens:,} ({share:.1%})",
        *_progress_lines(status),
        _commit_line(status),
    ]
    # A speed says more than that the run is measured.
    if status.phase and not (status.replicas and status.driver_lives):
        lines.append(f"phase     {status.phase}")
    if status.at_work:
        lines.append("process   one of this machine is at work on this run")
    if status.documents:
        lines.append(f"corpus    {Fates({'': status.documents}).line}")
    elif status.bad_rows:
        lines.append(f"bad rows  {status.bad_rows:,} left out")
    lines += [
        f"replica   {pace.replica}: {pace.tokens_per_second:,.0f} tokens/s, busy {pace.busy:.0%}"
        for pace in status.replicas[:most_replicas]
    ]
    if len(status.replicas) > most_replicas:
        lines.append(f"replica   and {len(status.replicas) - most_replicas:,} more")
    lines += _problem_lines(status)
    return [printable(line) for line in lines]


def _progress_lines(status: Status) -> list[str]:
    """Whether a run is complete, how fast it goes, or that it stopped; no line if nobody knows."""
    if status.complete:
        return ["complete  every shard is committed"]
    if status.tokens_per_second is not None and status.seconds_left is not None:
        time_left = duration(status.seconds_left)
        return [f"speed     {status.tokens_per_second:,.0f} tokens/s, {time_left} left"]
    if status.at_work is False and not status.driver_lives:
        return [
            "stopped   no process of this machine is at work on this run; headcount resume "
            f"{shlex.quote(status.run)} continues it"
        ]
    return []


def _commit_line(status: Status) -> str:
    """When the last commit was made, and on which host."""
    if status.last_commit is None:
        return "commit    none yet"
    since, ahead = f"{duration(status.seconds_since or 0)} ago", ""
    if status.seconds_ahead >= 1:
        since, ahead = "just now", f", whose clock is {duration(status.seconds_ahead)} ahead"
    return (
        f"commit    the last {since}, at {status.last_commit} by the clock of "
        f"{status.last_host}{ahead}"
    )


def _problem_lines(status: Status) -> list[str]:
    """Damaged files and failed shards, the first few of each."""
    lines: list[str] = []
    if status.damaged:
        lines.append(
            f"damaged   {status.damaged:,} of the missing were committed; headcount resume "
            f"{status.run} measures them anew"
        )
        lines += [f"damaged   {line}" for line in status.damage]
    for shard, error in status.failures.items():
        lines.append(f"failed    shard {shard}: {' '.join(error.split())}")
    if status.failed > len(status.failures):
        lines.append(f"failed    and {status.failed - len(status.failures):,} more")
    return lines


HEADINGS = ("run", "model", "input", "shards", "failed", "tokens", "created", "phase")
"""The columns of a table of runs."""

Row = tuple[str, ...]
"""A row of that table."""


def list_line(run: RunDirectory, now: datetime | None = None) -> Row:
    """A run's row in a table of runs, under `HEADINGS`."""
    manifest = run.manifest()
    commit_log, _ = done_and_damaged(run, manifest, ["stop", "tokens"])
    done_shards = commit_log["shard"].to_numpy()
    tokens_done = pc.sum(commit_log["tokens"]).as_py() or 0
    scan = manifest.identity["scan"]
    phase = ""
    if len(done_shards) < manifest.shards:
        now_seconds = (now or datetime.now(UTC)).timestamp()
        at_work = _is_locked(run.path)
        phase = _phase(phases.read_note(run), at_work, now_seconds) or ""
        if at_work and not phase:
            phase = "at work"
    return (
        run.run_id,
        str(scan["model"]),
        str(scan["input"]["family"]),
        f"{len(done_shards):,}/{manifest.shards:,}",
        f"{len(_failed_shards(run, done_shards)):,}",
        f"{tokens_done:,}/{tokens_of(manifest):,}",
        manifest.created,
        phase,
    )


def line_before(run_id: str, phase: str) -> Row:
    """The row of a run that has no manifest yet."""
    return (run_id, *("-" for _ in HEADINGS[1:-1]), phase)
