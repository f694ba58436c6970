"""The lock of a run: one process at a time is at work on it."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import write_whole


@contextmanager
def locked(run: RunDirectory) -> Iterator[None]:
    """Hold the lock of a run that lies on a disk; refuse if another process holds it.

    The system releases the lock when the process ends, however it ends, so a stale lock file locks
    nobody out. A store has no locks: there, drivers share the shards (`jobs.run.shards`).
    """
    if not isinstance(run.path, Path):
        # A store that takes nothing is to refuse this, before anything is measured.
        write_whole(run.path / ".lock", f"{socket.gethostname()} {os.getpid()}\n".encode())
        yield
        return
    run.refuse_links()
    lock = FileLock(run.path / ".lock")
    try:
        # Do not wait: a run takes hours.
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(
            f"{run.path}: another process is at work on this run; wait for it, or stop it and run "
            "the same command again"
        ) from None
    except OSError as error:
        raise RunError(
            f"{run.path}: cannot be locked ({error.strerror}); expected a directory that "
            "this user may write to"
        ) from None
    # Leaving this block releases what `acquire` took.
    with lock:
        yield
