"""Runs that were read before: a look for news reads again only what may have changed.

A run is reused if the names, sizes and times of its manifest, its commits and its data files are as
they were when it was read. Two things keep that exact. A new commit is a new name. And a file that
is written again under its name has another time of change, except within a tick of the clock of its
file system. So a state of a run counts only once the run was read a tick after the state was first
seen. That takes a clock which only goes forward, and compares no clocks of two machines.
"""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from headcount.queries.open.run import Run, read_run
from headcount.queries.open.verified_files import CLOCK_TICK_SECONDS
from headcount.schemas.files.damage import data_folders
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.object_stores import listed
from headcount.schemas.places import Place, StorePath, stats, unread

Fingerprint: TypeAlias = tuple[int, int]
"""Tells two states of a file or directory apart: how many entries it has, and a digest of them."""

State = dict[str, Fingerprint]  # what its manifest and directories look like, by path


@dataclass(frozen=True)
class _Read:
    run: Run
    folders: list[str]  # the directories of its data files
    state: State
    first_seen: float  # when this state was seen first, on a clock that only goes forward
    is_settled: bool  # whether it was read so late that whatever is written now has another state


class RunMemory:
    """Remembers runs. What it returns is what `read_run` would return now."""

    def __init__(self, tick_seconds: float = CLOCK_TICK_SECONDS) -> None:
        self.tick_seconds = tick_seconds  # of the clock of the file system
        self._reads: dict[tuple[Place, str | None], _Read] = {}

    def read_run(self, directory: RunDirectory, code: str | None) -> Run:
        """The same object as before if nothing has changed."""
        began = time.monotonic()
        key = directory.path, code
        last = self._reads.get(key)
        # Seen before it is read: what changes meanwhile is another state when it is seen next.
        state = _state(directory, last.folders if last else [])
        if last and last.is_settled and last.state == state:
            return last.run
        run = read_run(directory, code)
        folders = data_folders(run.commit_log)
        if last and last.state == state and last.folders == folders:
            is_settled = began - last.first_seen >= self.tick_seconds
            self._reads[key] = _Read(run, folders, state, last.first_seen, is_settled)
        else:
            # Directories that were not known are seen after the run was read. That does no harm:
            # it is read once more before this state counts.
            seen_later = _state(directory, folders)
            state = {name: state.get(name, seen_later[name]) for name in seen_later}
            self._reads[key] = _Read(run, folders, state, time.monotonic(), is_settled=False)
        return run


def _state(directory: RunDirectory, folders: Iterable[str]) -> State:
    try:
        return {
            "manifest.json": _fingerprint(directory.path),
            "commits": _fingerprint(directory.commits_directory),
            **{folder: _fingerprint(directory.path / folder) for folder in folders},
        }
    except OSError as error:
        raise unread(directory.path, error) from None


def _fingerprint(directory: Place) -> Fingerprint:
    """Changes with the name, the size and the times of anything in a directory.

    It does not read files: what is written again with the same size within a tick of the clock of
    the file system may look the same.
    """
    if isinstance(directory, StorePath):
        looks = ((info.base_name, info.size, info.mtime_ns) for info in listed(directory))
    else:
        # Nobody can set ctime, the time of the last change of the inode.
        looks = (
            (name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            for name, status in stats(directory)
        )
    count, total = 0, 0
    # A sum, because the order of a listing is any, and a million names are too many to keep.
    for look in looks:
        count += 1
        total += int.from_bytes(hashlib.blake2b(repr(look).encode(), digest_size=16).digest())
    return count, total % 2**128
