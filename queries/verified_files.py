"""Files that a query reads are held to their commits first, and what was found whole is remembered.

It is remembered outside the runs, as sixteen bytes a file: a digest of its path, of what the system
says of it and of what was committed. A file that has changed in any of these is read again.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import platformdirs
import pyarrow as pa

from queries.run import Run
from schemas.damage import CommittedFile, Damage, committed_files, declared_bounds, problem
from schemas.places import stats
from schemas.run_directory import pc

KEY = 16
"""Bytes of a key."""

TICK = 2.0
"""Seconds after its last change in which a file may change again and look the same, because clocks
of file systems tick: it is not remembered before.
"""

PATIENCE = 2.0
"""Seconds of reading after which the user is told what takes so long."""

Tell = Callable[[str], None]


def damage_in(run: Run, tables: Iterable[str], tell: Tell) -> list[Damage]:
    """Files of some tables of a run that are not as committed; those of a store are not read."""
    home = run.directory.path
    if not isinstance(home, Path):
        return []
    memory = _Memory(home)
    keys = _keys(home, run.done, list(tables))
    unknown = {path for path, key in keys.items() if key not in memory.keys}
    files = [file for file in committed_files(run.done, tables) if file.path in unknown]
    if not files:
        return []
    bounds = declared_bounds(run.manifest)
    found: list[Damage] = []

    def examine(file: CommittedFile) -> None:
        why = problem(home, run.manifest, file, bounds)
        if why is not None:
            found.append(Damage(file.path, file.shards, why))
        elif key := keys[file.path]:
            memory.new.append((file.path, key))

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        _await([pool.submit(examine, file) for file in files], sum(f.bytes for f in files), tell)
    finally:
        # Whoever is interrupted goes on with the next question.
        pool.shutdown(cancel_futures=True)
        memory.keep(_keys(home, run.done, list(tables)))
    return sorted(found, key=lambda damage: damage.path)


def _await(examinations: list[Future[None]], size: int, tell: Tell) -> None:
    """Wait for files to be read; say what takes so long, if it does."""
    wait(examinations, PATIENCE, FIRST_EXCEPTION)
    if not all(examination.done() for examination in examinations):
        tell(f"checking {size / 1e9:,.1f} GB against the commits, once")
    for examination in examinations:
        examination.result()


def _keys(home: Path, ledger: pa.Table, tables: list[str]) -> dict[str, bytes]:
    """A key for each file of some tables; empty where it cannot be remembered now."""
    files = pc.list_flatten(ledger["files"])
    asked = files.filter(pc.is_in(pc.struct_field(files, "table"), pa.array(tables, pa.string())))
    paths, digests = (pc.struct_field(asked, name).to_pylist() for name in ("path", "digest"))
    committed = dict(zip(paths, digests, strict=True))
    latest = time.time_ns() - int(TICK * 1e9)
    listings: dict[str, dict[str, os.stat_result]] = {}
    keys: dict[str, bytes] = {}
    for path, digest in committed.items():
        folder, _, name = path.rpartition("/")
        if folder not in listings:
            listings[folder] = dict(stats(home / folder))
        found = listings[folder].get(name)
        if found is None or max(found.st_mtime_ns, found.st_ctime_ns) > latest:
            keys[path] = b""
        else:
            says = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
            text = "\0".join([path, digest, *map(str, says)])
            keys[path] = hashlib.blake2b(text.encode(), digest_size=KEY).digest()
    return keys


class _Memory:
    """The keys of a run's files that were found whole; nothing is lost with it but time."""

    def __init__(self, home: Path) -> None:
        of_run = hashlib.blake2b(os.fsencode(home), digest_size=KEY).hexdigest()
        self.places = [folder / f"{of_run}.keys" for folder in _folders()]
        self.keys: frozenset[bytes] = frozenset(self._read())
        self.new: list[tuple[str, bytes]] = []
        """Path and key of what was found whole now."""

    def _read(self) -> list[bytes]:
        for place in self.places:
            try:
                content = place.read_bytes()
            except OSError:
                continue
            whole = len(content) // KEY * KEY
            return np.frombuffer(content[:whole], np.dtype((np.void, KEY))).tolist()
        return []

    def keep(self, now: dict[str, bytes]) -> None:
        """Add the new keys, but for files that changed while they were read."""
        new = {key for path, key in self.new if now[path] == key}
        if not new:
            return
        content = b"".join(self.keys | new)
        for place in self.places:
            temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(content)
                os.replace(temporary, place)
                return
            except OSError:
                continue


def _folders() -> list[Path]:
    """Where keys may be kept: the user's caches, or the temporary directory where there are none."""
    temporary = Path(tempfile.gettempdir()) / f"headcount-{os.getuid()}"
    try:
        caches = platformdirs.user_cache_path("headcount")
    except RuntimeError:
        # A user of a container may have neither HOME nor an entry in passwd.
        return [temporary / "verified"]
    return [caches / "verified", temporary / "verified"]
