"""One compaction at a time in a store, which has no locks.

A compaction keeps a small object beside the commit log and writes it again and again. Another one
that finds the object watches it: if it changes, its owner is alive, and the newcomer gives up. If
it does not change for `STALE_SECONDS`, its owner is dead.

Two that begin in the same moment see each other, and both give up. A process that was asleep for
longer finds out before its next segment, and stops. What remains is a segment whose one request
hangs for so long that another compaction begins meanwhile. Then some shards refer to files that are
gone, which is found as damage, and `headcount resume` measures them again.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pyarrow.fs as pafs

from headcount.schemas.errors import RunError
from headcount.schemas.files.places import StorePath, write_whole
from headcount.schemas.files.run_directory import RunDirectory

RENEWAL_SECONDS = 5.0
"""Time between two writes of the object."""

STALE_SECONDS = 30.0
"""Time without a write after which the owner counts as dead."""

LOOK_SECONDS = 1.0
"""Time between two looks at the object of another compaction."""


class Lease:
    """The right to gather and to delete. On a disk a lock gives it, and this is always valid."""

    def check(self) -> None:
        """Raise `RunError` if another process may have taken the run."""


class _StoreLease(Lease):
    """A lease as an object in a store, which a thread writes again and again."""

    def __init__(self, run: RunDirectory, directory: StorePath) -> None:
        self.run = run
        self.file = directory / f"{secrets.token_hex(8)}.json"
        owner = {"host": socket.gethostname(), "process": os.getpid()}
        self.content = json.dumps(owner).encode()
        self.renewed = 0.0
        """When the last write that succeeded began, by the monotonic clock."""
        self.has_ended = threading.Event()
        # A daemon, so that an error elsewhere never keeps the process alive.
        self.thread = threading.Thread(target=self._keep, daemon=True)

    def renew(self) -> None:
        """Write the object."""
        # From before the write: the store may take it long before it answers.
        began = time.monotonic()
        write_whole(self.file, self.content)
        self.renewed = began

    def _keep(self) -> None:
        while not self.has_ended.wait(RENEWAL_SECONDS):
            try:
                self.renew()
            except RunError:
                continue  # `check` notices if this lasts.

    def check(self) -> None:
        """Raise `RunError` if the object is too old to keep others away."""
        if time.monotonic() - self.renewed > STALE_SECONDS / 2:
            raise RunError(
                f"{self.run.path}: this compaction could not write {self.file} for "
                f"{STALE_SECONDS / 2:.0f} s, so another one may have begun; nothing is lost, run "
                "the same command again"
            )

    def end(self) -> None:
        """Delete the object."""
        self.has_ended.set()
        # Otherwise the thread might write the object again after it was deleted.
        if self.thread.is_alive():
            self.thread.join()
        self.file.unlink(missing_ok=True)


@contextmanager
def leased(run: RunDirectory) -> Iterator[Lease]:
    """Hold the lease of a run in a store; refuse if another compaction is alive."""
    if isinstance(run.path, Path):
        yield Lease()
        return
    directory = run.path / "compactions"
    lease = _StoreLease(run, directory)
    # Written before the others are looked for. So of two at least one sees the other.
    lease.renew()
    lease.thread.start()
    try:
        _wait_for_death(run, directory, lease)
        yield lease
    finally:
        lease.end()


def _wait_for_death(run: RunDirectory, directory: StorePath, own: Lease) -> None:
    """Return when no other compaction is alive; raise `RunError` if one is."""
    assert isinstance(own, _StoreLease)
    first_seen = _written(directory)
    others = first_seen.keys() - {own.file.name}
    deadline = time.monotonic() + STALE_SECONDS
    while others and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        now = _written(directory)
        others &= now.keys()
        alive = [name for name in others if now[name] != first_seen[name]]
        # One that began meanwhile saw this one, and gives up.
        if alive:
            owner = _owner(directory / alive[0])
            raise RunError(
                f"{run.path}: another compaction is at work on this run ({owner}); wait for it, or "
                "stop it and run the same command again"
            )
    # Nobody has renewed these.
    for name in others:
        (directory / name).unlink(missing_ok=True)


def _written(directory: StorePath) -> dict[str, datetime]:
    """When each lease was last written, by the clock of the store."""
    selector = pafs.FileSelector(directory.key, allow_not_found=True)
    return {info.base_name: info.mtime for info in directory.filesystem.get_file_info(selector)}


def _owner(file: StorePath) -> str:
    """Who holds a lease, in words."""
    try:
        owner = json.loads(file.read_bytes())
        return f"process {owner['process']} on {owner['host']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "its process is not known"
