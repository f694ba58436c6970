"""Delete files of a run that no commit names."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.fs as pafs

from headcount.schemas.errors import counted
from headcount.schemas.files.commits import delete
from headcount.schemas.files.run_directory import RunDirectory, pc
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.object_stores import listed
from headcount.schemas.places import Place, names

GRACE = timedelta(hours=1)
"""How long files stay in a store after they were written, and after a segment ceased to name them.

A query that began before reads them, and another compaction may be about to name them.
"""

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def clean(run: RunDirectory, tell: Callable[[str], None]) -> None:
    """Delete files that no commit names, of shards that are done; the caller has the run's lock.

    Those of lost attempts go at once, and on a disk also those that were merged, so that a bare
    glob is right. In a store what was merged goes an hour later. A file of a shard that is not done
    stays: somebody may be about to commit it.
    """
    # Listed before the commit log is read: an attempt that is committed meanwhile loses nothing.
    times = {
        f"{table}/{folder}": _times(run.path / table / folder)
        for table in TABLES
        for folder in names(run.path / table)
    }
    # Unless shards were merged, each has one file in a directory. The commit log is read only if
    # that is not so, because in a store each commit is two requests.
    shards = [list(map(shard_of, files)) for files in times.values()]
    if all(None not in each and len(set(each)) == len(each) for each in shards):
        return
    commit_log = run.commit_log(["files.path"])
    paths = pc.struct_field(pc.list_flatten(commit_log["files"]), "path")
    shard_of_path = commit_log["shard"].take(pc.list_parent_indices(commit_log["files"]))
    merged = set(shard_of_path.filter(pc.match_substring(paths, "/merged-")).to_pylist())
    attempted = set(commit_log["shard"].to_pylist()) - merged
    named = set(paths.to_pylist())
    unnamed = {
        run.path / directory / name: written
        for directory, files in times.items()
        for name, written in files.items()
        if f"{directory}/{name}" not in named
    }
    lost = [f for f in unnamed if f.name.endswith(".tmp") or shard_of(f.name) in attempted]
    replaced = [f for f in unnamed if f.name.startswith("merged-") or shard_of(f.name) in merged]
    # Until the newest segment was written, another one may have named any of them.
    segments = {name: t for name, t in _times(run.commits_directory).items() if "segment-" in name}
    newest_segment = max(segments.values(), default=LONG_AGO)
    # In a store `locked` has just written this object, so it tells the time by the store's clock.
    now = _times(run.path).get(".lock", LONG_AGO)
    limit = now if isinstance(run.path, Path) else now - GRACE
    old = [file for file in replaced if max(unnamed[file], newest_segment) <= limit]
    delete([*lost, *old])
    if waiting := len(replaced) - len(old):
        tell(
            f"{run.run_id}: {counted(waiting, 'file')} may still be read and can go in an hour, by "
            f"headcount compact {run.path}; until then a bare glob counts rows twice"
        )


def _times(directory: Place) -> dict[str, datetime]:
    """When each file was written, by the clock of the store. On a disk it does not matter."""
    if isinstance(directory, Path):
        return dict.fromkeys(names(directory), LONG_AGO)
    files = [info for info in listed(directory) if info.type is pafs.FileType.File]
    return {file.base_name: file.mtime for file in files}


SHARD_FILE = re.compile(r"shard-(\d+)(-[0-9a-f]+)?\.(json|parquet)")
"""Names of the files of one shard: its commit, and its data."""


def shard_of(name: str) -> int | None:
    """The shard that a file is named after; none if it has another kind of name."""
    match = SHARD_FILE.fullmatch(name)
    return int(match[1]) if match else None
