"""Files that a query reads are compared with their commits first, and whole ones are remembered.

The memory lies outside the runs, as sixteen bytes a file: a digest of its path, of what the file
system says of it and of what was committed. A file that has changed in any of these is read again.
"""

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import platformdirs
import pyarrow as pa

from headcount.queries.open.rooms import COMPARED
from headcount.queries.open.run import READINGS, Run, read_run
from headcount.schemas.errors import QueryError
from headcount.schemas.files.damage import Damage
from headcount.schemas.files.run_directory import pc
from headcount.schemas.packages import entered
from headcount.schemas.places import stats

KEY_BYTES = 16  # bytes of a key

CLOCK_TICK_SECONDS = 2.0
"""Seconds after its last change before a file is remembered.

Clocks of file systems tick: within a tick a file may change again and look the same.
"""

Tell = Callable[[str], None]  # called with a line for the user


def verified(run: Run, tables: Iterable[str], tell: Tell) -> Run:
    """The run without what is damaged of some tables. The same object if nothing is."""
    for _ in range(READINGS):
        known_paths = {damage.path for damage in run.damaged}
        damage = [each for each in damage_in(run, tables, tell) if each.path not in known_paths]
        if not damage:
            return run
        # The run may have changed since it was opened: files that were measured again, extended
        # or merged are not damaged, so look again with the commit log of now.
        run_now = read_run(run.directory, run.code)
        if run_now.commit_log.equals(run.commit_log):
            return replace(run, damaged=[*run.damaged, *damage])
        run = run_now
    raise changing_too_fast(run)


def changing_too_fast(run: Run) -> QueryError:
    """The error of a run that is never the same when it is read again."""
    return QueryError(
        f"the files of {run.directory.path} change faster than they are read; wait for whoever is "
        "at work on the run, then ask again"
    )


def damage_in(run: Run, tables: Iterable[str], tell: Tell) -> list[Damage]:
    """Damaged files of some tables of a run; none in a store, where that would fetch them all."""
    home = run.directory.path
    tables = list(tables)
    if not isinstance(home, Path) or not tables:
        return []
    known_keys = _read_keys(home)
    keys = _keys(home, run.done, tables)
    unknown = {path for path, key in keys.items() if key not in known_keys}
    if not unknown:
        return []
    whole: list[str] = []
    try:
        damaged = entered(COMPARED)(run, home, unknown, whole, tell)
    finally:
        # After Ctrl-C the user may ask on: keep what was read.
        # A file that changed while it was read has another key now. One that changed a moment ago
        # has none, and is read again next time.
        keys_now = _keys(home, run.done, tables)
        new_keys = {keys[path] for path in whole if keys[path] == keys_now[path] != b""}
        if new_keys:
            _write_keys(home, known_keys | new_keys)
    return sorted(damaged, key=lambda damage: damage.path)


def _keys(home: Path, commit_log: pa.Table, tables: list[str]) -> dict[str, bytes]:
    """A key for each file of some tables, by path: a digest of its path, of what was committed and
    of what the file system says of it. Empty if it cannot be remembered now.
    """
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
            continue
        times = status.st_mtime_ns, status.st_ctime_ns
        said = (path, digest, status.st_size, *times, status.st_ino, status.st_dev)
        text = "\0".join(map(str, said)).encode()
        keys[path] = hashlib.blake2b(text, digest_size=KEY_BYTES).digest()
    return keys


def _read_keys(home: Path) -> frozenset[bytes]:
    """The keys of a run's files that were found whole. If they are lost, files are read again."""
    for file in _key_files(home):
        try:
            content = file.read_bytes()
        except OSError:
            continue
        # A key that was cut short is left out. `void`, as numpy strips zeros from bytes.
        whole_bytes = len(content) // KEY_BYTES * KEY_BYTES
        keys = np.frombuffer(content[:whole_bytes], np.dtype((np.void, KEY_BYTES)))
        return frozenset(keys.tolist())
    return frozenset()


def _write_keys(home: Path, keys: frozenset[bytes]) -> None:
    for file in _key_files(home):
        # Renaming makes the file appear whole, whoever else writes it at the same time.
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(b"".join(keys))
            os.replace(temporary, file)
            return
        except OSError:
            continue


def _key_files(home: Path) -> list[Path]:
    """Where the keys of a run may lie, best first."""
    run_digest = hashlib.blake2b(os.fsencode(home), digest_size=KEY_BYTES).hexdigest()
    return [folder / f"{run_digest}.keys" for folder in _key_folders()]


def _key_folders() -> list[Path]:
    folders = [Path(tempfile.gettempdir()) / f"headcount-{os.getuid()}" / "verified"]
    # A user of a container may have neither HOME nor an entry in passwd.
    with suppress(RuntimeError):
        folders.insert(0, platformdirs.user_cache_path("headcount") / "verified")
    return folders
