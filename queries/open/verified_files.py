"""Files that a query reads are compared with their commits first, and whole ones are remembered.

The memory lies outside the runs, as sixteen bytes a file: a digest of its path, of what the file
system says of it and of what was committed. A file that has changed in any of these is read again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import platformdirs
import pyarrow as pa

from headcount.queries.open.run import Run
from headcount.schemas.files.damage import (
    CommittedFile,
    Damage,
    committed_files,
    declared_bounds,
    problem,
)
from headcount.schemas.files.places import stats
from headcount.schemas.files.run_directory import pc

KEY_BYTES = 16
"""Bytes of a key."""

CLOCK_TICK_SECONDS = 2.0
"""Seconds after its last change before a file is remembered.

Clocks of file systems tick: within a tick a file may change again and look the same.
"""

SECONDS_BEFORE_NOTICE = 2.0
"""Seconds of reading after which the user is told what takes so long."""

Tell = Callable[[str], None]
"""Called with a line for the user."""


def damage_in(run: Run, tables: Iterable[str], tell: Tell) -> list[Damage]:
    """Files of some tables of a run that are not as committed.

    Files in an object store are not read: that would fetch all of them.
    """
    home = run.directory.path
    if not isinstance(home, Path):
        return []
    tables = list(tables)
    memory = _VerifiedFiles(home)
    keys = _keys(home, run.done, tables)
    unverified = {path for path, key in keys.items() if key not in memory.keys}
    files = [file for file in committed_files(run.done, tables) if file.path in unverified]
    if not files:
        return []
    bounds = declared_bounds(run.manifest)
    damaged: list[Damage] = []

    def examine(file: CommittedFile) -> None:
        why = problem(home, file, bounds)
        if why is not None:
            damaged.append(Damage(file.path, file.shards, why))
        # A file that changed a moment ago has no key, and is read again next time.
        elif key := keys[file.path]:
            memory.new_keys[file.path] = key

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        examinations = [pool.submit(examine, file) for file in files]
        wait(examinations, SECONDS_BEFORE_NOTICE, FIRST_EXCEPTION)
        if not all(examination.done() for examination in examinations):
            byte_count = sum(file.bytes for file in files)
            tell(f"checking {byte_count / 1e9:,.1f} GB against the commits, once")
        # Waits for each, and raises what went wrong in it.
        for examination in examinations:
            examination.result()
    finally:
        # After Ctrl-C the user may ask on: keep what was read, and do not read the rest.
        pool.shutdown(cancel_futures=True)
        # The keys of now: a file that changed while it was read has another one.
        memory.save(_keys(home, run.done, tables))
    return sorted(damaged, key=lambda damage: damage.path)


def _keys(home: Path, commit_log: pa.Table, tables: list[str]) -> dict[str, bytes]:
    """A key for each file of some tables, by path. Empty if it cannot be remembered now."""
    files = pc.list_flatten(commit_log["files"])
    is_of_tables = pc.is_in(pc.struct_field(files, "table"), pa.array(tables, pa.string()))
    files = files.filter(is_of_tables)
    paths = pc.struct_field(files, "path").to_pylist()
    digests = pc.struct_field(files, "digest").to_pylist()
    latest_change = time.time_ns() - int(CLOCK_TICK_SECONDS * 1e9)
    listings: dict[str, dict[str, os.stat_result]] = {}
    keys: dict[str, bytes] = {}
    for path, digest in dict(zip(paths, digests, strict=True)).items():
        folder, _, name = path.rpartition("/")
        # One listing of a folder costs less than asking for each of its files.
        if folder not in listings:
            listings[folder] = dict(stats(home / folder))
        status = listings[folder].get(name)
        # Tools that copy may set back the time of the content, but not that of the inode.
        if status is None or max(status.st_mtime_ns, status.st_ctime_ns) > latest_change:
            keys[path] = b""
        else:
            keys[path] = _key(path, digest, status)
    return keys


def _key(path: str, digest: str, status: os.stat_result) -> bytes:
    """A digest of a file's path, of what was committed and of what the file system says of it."""
    numbers = (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    )
    text = "\0".join([path, digest, *map(str, numbers)])
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class _VerifiedFiles:
    """The keys of a run's files that were found whole. If it is lost, files are read once more."""

    def __init__(self, home: Path) -> None:
        run_digest = hashlib.blake2b(os.fsencode(home), digest_size=KEY_BYTES).hexdigest()
        self.key_files = [folder / f"{run_digest}.keys" for folder in _key_folders()]
        self.keys: frozenset[bytes] = frozenset(self._read())
        self.new_keys: dict[str, bytes] = {}
        """Keys of what was found whole now, by path."""

    def _read(self) -> list[bytes]:
        for file in self.key_files:
            try:
                content = file.read_bytes()
            except OSError:
                continue
            # A key that was cut short is left out. `void`, as numpy strips zeros from bytes.
            whole_bytes = len(content) // KEY_BYTES * KEY_BYTES
            return np.frombuffer(content[:whole_bytes], np.dtype((np.void, KEY_BYTES))).tolist()
        return []

    def save(self, keys_now: dict[str, bytes]) -> None:
        """Add the new keys, except those of files that changed while they were read."""
        unchanged = {key for path, key in self.new_keys.items() if keys_now[path] == key}
        if not unchanged:
            return
        content = b"".join(self.keys | unchanged)
        for file in self.key_files:
            # Renaming makes the file appear whole, whoever else writes it at the same time.
            temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(content)
                os.replace(temporary, file)
                return
            except OSError:
                continue


def _key_folders() -> list[Path]:
    """Where keys may lie, best first: the user's caches, and the temporary directory."""
    temporary = Path(tempfile.gettempdir()) / f"headcount-{os.getuid()}"
    try:
        caches = platformdirs.user_cache_path("headcount")
    except RuntimeError:
        # A user of a container may have neither HOME nor an entry in passwd.
        return [temporary / "verified"]
    return [caches / "verified", temporary / "verified"]
