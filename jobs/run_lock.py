"""One process at a time at work on a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from schemas.errors import RunError
from schemas.run_directory import RunDirectory


@contextmanager
def locked(run: RunDirectory) -> Iterator[None]:
    """Refuse a second driver of the same run, where the run lies on a disk; the lock ends with the
    process.

    A store has no locks: two drivers there measure twice and write each row once.
    """
    if not isinstance(run.path, Path):
        yield
        return
    lock = FileLock(run.path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(
            f"{run.path}: another process is at work on this run; wait for it, or stop it and run "
            "the same command again"
        ) from None
    except OSError as error:
        raise RunError(f"{run.path}: cannot be locked ({error.strerror})") from None
    with lock:
        yield
