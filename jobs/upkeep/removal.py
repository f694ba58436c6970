"""Delete a run in an order that never leaves half a run.

The manifest goes first, then the commit log, then the rows. If the process is killed on the way,
what is left has no manifest, so no reader takes it for a run.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headcount.jobs import phases
from headcount.jobs.lock import locked
from headcount.schemas.errors import RunError
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.object_stores import delete_directory
from headcount.schemas.places import Place, absolute, is_directory, names, settle
from headcount.schemas.reasons import reason


def check_removable(location: str) -> RunDirectory:
    """The run at a path or address, even broken or half deleted; refuse what is no run's place."""
    run = RunDirectory(absolute(location))
    if not is_directory(run.path):
        if phases.drivers_of(run):
            return run  # Its job ended before the run began.
        raise RunError(f"{run.path}: not there; expected the directory of a run")
    run.refuse_links()
    if not run.path.name.startswith("run_id="):
        # A run may have another name. Then only a manifest shows that it is one; without, this
        # raises.
        run.manifest()
    return run


def describe_run(run: RunDirectory) -> str:
    """A run and how many of its shards are done, in words."""
    try:
        manifest = run.manifest()
        done = int(holds_whole_shard(manifest, run.commit_log(["stop"])).sum())
    except RunError as error:
        return f"{run.path} ({error})"
    return f"{run.path} ({done:,} of {manifest.shards:,} shards done)"


def remove(run: RunDirectory) -> None:
    """Delete a run and what its drivers said; refused while one of this machine is at work."""
    run.refuse_links()
    phases.forget(run)
    # Of a run that never began there was nothing else.
    if not is_directory(run.path):
        return
    try:
        with locked(run):
            run.manifest_file.unlink(missing_ok=True)
            # A power cut must not bring the manifest back when other files are gone.
            settle(run.path)
            for name in [run.commits_directory.name, *sorted(names(run.path))]:
                if name != ".lock":
                    _delete(run.path / name)
        if is_directory(run.path):
            # A store keeps a marker of the directory, and a disk keeps the lock.
            _delete(run.path)
    except OSError as error:
        raise RunError(
            f"{run.path}: cannot be deleted whole ({reason(error)}); mend that, and the same "
            "command continues"
        ) from None


@contextmanager
def removed_if_it_never_began(run: RunDirectory) -> Iterator[None]:
    """Remove a run if a block fails before any shard was tried, as when its model is loaded."""
    try:
        yield
    except Exception:
        # The error is what the user should read, and not that something cannot be removed. A store
        # is not asked: one that does not answer would hold the error back for minutes.
        with suppress(RunError, OSError):
            if isinstance(run.path, Path) and not (
                any(names(run.commits_directory)) or run.failed_shards()
            ):
                remove(run)
        raise


def _delete(path: Place) -> None:
    """Delete a file, or a directory with everything in it; do nothing if there is none."""
    if isinstance(path, Path) and path.is_symlink():
        path.unlink()
    elif not is_directory(path):
        path.unlink(missing_ok=True)
    elif isinstance(path, Path):
        shutil.rmtree(path)
    else:
        delete_directory(path)
