"""How far a run is, how fast it goes and what went wrong, from its directory alone.

Every speed is tokens over the seconds that a replica measured itself, so clocks that are wrong do
not enter it. They enter which commits are recent: those of a replica are compared with its own last
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

from jobs.console import duration
from schemas.damage import Damage
from schemas.document_fates import Fates
from schemas.errors import printable
from schemas.manifest import Manifest
from schemas.places import Place
from schemas.run_directory import RunDirectory, holds_whole_shard, pc

RECENT = 600.0
"""Seconds before a replica's last commit that its speed is taken from."""

PATIENCE = 5.0
"""A replica is at work if its last commit is no older than so many of its shards take, or `QUIET`
seconds.
"""

QUIET = 60.0

REASONS = 10
"""Failures that are read and shown; the others are counted."""

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


@dataclass(frozen=True)
class Pace:
    """One replica at work."""

    replica: str
    host: str
    tokens_per_second: float
    busy: float
    """Share of its time that it computes."""
    shards: int
    """Recent ones, which the speed is taken from."""


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
    """Documents of the corpus by what became of them; none where there is no corpus, or an older run
    did not keep it.
    """
    failures: dict[int, str] = field(default_factory=dict)
    """Reason by shard, of the first few."""
    last_commit: str | None = None
    """When, by the clock of the host that made it."""
    last_host: str | None = None
    seconds_since: float | None = None
    """Since the last commit, by the clock here; 0 where the host's clock is ahead."""
    seconds_ahead: float = 0.0
    """How far the clock of `last_host` is ahead of the one here, if it is."""
    tokens_per_second: float | None = None
    """Of the replicas at work; none where none is."""
    seconds_left: float | None = None
    replicas: list[Pace] = field(default_factory=list)
    at_work: bool | None = None
    """Whether a process of this machine has the run's lock; none where that cannot be known."""


def read_status(run: RunDirectory, now: datetime | None = None) -> Status:
    """Read a run's manifest, ledger and notes of failures."""
    manifest = run.manifest()
    ledger, damaged = done_and_damaged(run, manifest, COLUMNS)
    done = ledger["shard"].to_numpy()
    failed = np.setdiff1d(np.array(run.failed_shards(), np.int64), done)
    notes = {int(shard): run.failure(int(shard)) for shard in failed[:REASONS]}
    tokens, tokens_done = tokens_of(manifest), int(pc.sum(ledger["tokens"]).as_py() or 0)
    complete = len(done) == manifest.shards
    last = _last_commit(ledger, (now or datetime.now(UTC)).timestamp())
    at_work = _locked(run.path)
    paces = [] if complete else _paces(ledger, (now or datetime.now(UTC)).timestamp())
    if at_work is False:
        # Replicas of this machine end with the process that has the lock; others may be at work.
        paces = [pace for pace in paces if pace.host != socket.gethostname()]
    speed = sum(pace.tokens_per_second for pace in paces) or None
    fates = run.fates()
    return Status(
        run_id=run.run_id,
        run=str(run.path),
        complete=complete,
        shards=manifest.shards,
        done=len(done),
        missing=manifest.shards - len(done),
        failed=len(failed),
        damaged=len({shard for damage in damaged for shard in damage.shards}),
        tokens=tokens,
        tokens_done=tokens_done,
        bad_rows=pc.count_distinct(pc.list_flatten(ledger["bad_rows"])).as_py(),
        damage=[str(damage) for damage in damaged[:REASONS]],
        documents=fates.all if fates else None,
        failures={
            shard: note[1] if note else "its note cannot be read" for shard, note in notes.items()
        },
        tokens_per_second=speed,
        seconds_left=max(0, tokens - tokens_done) / speed if speed else None,
        replicas=paces,
        at_work=at_work,
        **last,
    )


def done_and_damaged(
    run: RunDirectory, manifest: Manifest, columns: Sequence[str]
) -> tuple[pa.Table, list[Damage]]:
    """Columns of the commits of shards that are done, and files that are gone or of another size."""
    ledger = run.ledger(columns)
    # In parts, because the names of all files take as much memory as everything else.
    damaged = run.damaged_by_size()
    broken = [shard for damage in damaged for shard in damage.shards]
    done = holds_whole_shard(manifest, ledger) & ~np.isin(ledger["shard"].to_numpy(), broken)
    return ledger.filter(pa.array(done)), damaged


def tokens_of(manifest: Manifest) -> int:
    """Tokens that go through the model in a whole run, over all interventions."""
    scan = manifest.identity["scan"]
    return manifest.sequences * int(scan["n_ctx"]) * len(scan["interventions"])


def _last_commit(ledger: pa.Table, now: float) -> dict[str, Any]:
    if not len(ledger):
        return {}
    last = int(np.argmax(_seconds(ledger)))
    made = ledger["finished"][last].as_py()
    since = now - made.timestamp()
    return {
        "last_commit": made.astimezone(UTC).isoformat(timespec="seconds"),
        "last_host": ledger["host"][last].as_py(),
        "seconds_since": round(max(0.0, since), 1),
        "seconds_ahead": round(max(0.0, -since), 1),
    }


def _seconds(ledger: pa.Table) -> np.ndarray:
    """When each commit was made, in seconds since 1970."""
    return ledger["finished"].cast(pa.int64()).to_numpy() / 1e6


def _paces(ledger: pa.Table, now: float) -> list[Pace]:
    """The replicas at work, the fastest first."""
    replicas = ledger["replica"].combine_chunks().dictionary_encode()
    if not len(ledger):
        return []
    codes, count = replicas.indices.to_numpy(), len(replicas.dictionary)
    finished = _seconds(ledger)
    newest = np.full(count, -np.inf)
    np.maximum.at(newest, codes, finished)
    recent = np.flatnonzero(finished >= newest[codes] - RECENT)
    codes = codes[recent]

    def total(values: np.ndarray | None) -> np.ndarray:
        return np.bincount(codes, values, minlength=count)

    shards = total(None)
    tokens, computed, idle = (
        total(np.maximum(0, np.nan_to_num(ledger[name].to_numpy()[recent].astype(float), posinf=0)))
        for name in ("tokens", "compute_seconds", "idle_seconds")
    )
    seconds = computed + idle
    at_work = (seconds > 0) & (
        now - newest <= np.maximum(QUIET, PATIENCE * seconds / np.maximum(1, shards))
    )
    _, rows = np.unique(codes, return_index=True)  # Each replica has a recent commit: its newest.
    hosts = ledger["host"].take(pa.array(recent[rows]))
    found = [
        Pace(
            replica=replicas.dictionary[code].as_py(),
            host=hosts[code].as_py(),
            tokens_per_second=round(float(tokens[code] / seconds[code]), 1),
            busy=round(float(computed[code] / seconds[code]), 3),
            shards=int(shards[code]),
        )
        for code in np.flatnonzero(at_work).tolist()
    ]
    return sorted(found, key=lambda pace: (-pace.tokens_per_second, pace.replica))


def _locked(path: Place) -> bool | None:
    """Whether a process of this machine holds the lock of a run; looked up, because taking it would
    be in a driver's way.
    """
    if not isinstance(path, Path):
        return None
    try:
        inode = os.stat(path / ".lock").st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return any("FLOCK" in line and f":{inode} " in line for line in locks)


def as_json(status: Status) -> dict[str, Any]:
    """A status as one JSON object."""
    return asdict(status)


def as_lines(status: Status, most: int = 20) -> list[str]:
    """A status as lines for people."""
    share = status.tokens_done / status.tokens if status.tokens else 1.0
    lines = [
        f"run       {status.run}",
        f"shards    {status.done:,} of {status.shards:,} done, {status.missing:,} missing, "
        f"{status.failed:,} of them failed",
        f"tokens    {status.tokens_done:,} of {status.tokens:,} ({share:.1%})",
    ]
    if status.complete:
        lines.append("complete  every shard is committed")
    elif status.tokens_per_second is not None and status.seconds_left is not None:
        lines.append(
            f"speed     {status.tokens_per_second:,.0f} tokens/s, {duration(status.seconds_left)} "
            "left"
        )
    elif status.at_work is False:
        lines.append(
            "stopped   no process of this machine is at work on this run; headcount resume "
            f"{shlex.quote(status.run)} goes on"
        )
    if status.last_commit is not None:
        ahead = (
            f", whose clock is {duration(status.seconds_ahead)} ahead"
            if status.seconds_ahead >= 1
            else ""
        )
        since = "just now" if ahead else f"{duration(status.seconds_since or 0)} ago"
        lines.append(
            f"commit    the last {since}, at {status.last_commit} by the clock of "
            f"{status.last_host}{ahead}"
        )
    else:
        lines.append("commit    none yet")
    if status.at_work:
        lines.append("process   one of this machine is at work on this run")
    if status.documents:
        lines.append(f"corpus    {Fates({'': status.documents}).line}")
    elif status.bad_rows:
        lines.append(f"bad rows  {status.bad_rows:,} left out")
    lines += [
        f"replica   {p.replica}: {p.tokens_per_second:,.0f} tokens/s, busy {p.busy:.0%}"
        for p in status.replicas[:most]
    ]
    if len(status.replicas) > most:
        lines.append(f"replica   and {len(status.replicas) - most:,} more")
    if status.damaged:
        lines.append(
            f"damaged   {status.damaged:,} of the missing were committed; headcount resume "
            f"{status.run} measures them anew"
        )
        lines += [f"damaged   {line}" for line in status.damage]
    lines += [
        f"failed    shard {shard}: {' '.join(error.split())}"
        for shard, error in status.failures.items()
    ]
    if status.failed > len(status.failures):
        lines.append(f"failed    and {status.failed - len(status.failures):,} more")
    return [printable(line) for line in lines]


HEADINGS = ("run", "model", "input", "shards", "failed", "tokens", "created", "process")
"""Of the columns of a table of runs."""


def list_line(run: RunDirectory) -> tuple[str, ...]:
    """A run in a table of runs, under `HEADINGS`."""
    manifest = run.manifest()
    ledger, _ = done_and_damaged(run, manifest, ["stop", "tokens"])
    done = ledger["shard"].to_numpy()
    failed = np.setdiff1d(np.array(run.failed_shards(), np.int64), done)
    tokens = pc.sum(ledger["tokens"]).as_py() or 0
    scan = manifest.identity["scan"]
    return (
        run.run_id,
        str(scan["model"]),
        str(scan["input"]["family"]),
        f"{len(done):,}/{manifest.shards:,}",
        f"{len(failed):,}",
        f"{tokens:,}/{tokens_of(manifest):,}",
        manifest.created,
        "at work" if _locked(run.path) else "",
    )
