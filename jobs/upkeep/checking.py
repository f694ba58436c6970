"""Read every file of a run, and compare it with its commits."""

from dataclasses import dataclass

from headcount.schemas.errors import counted
from headcount.schemas.files.content_check import BY_CONTENT, examined_files
from headcount.schemas.files.damage import Damage
from headcount.schemas.files.run_directory import RunDirectory, check_merged
from headcount.schemas.filled_tables import TABLES
from headcount.schemas.places import names, unread


@dataclass(frozen=True)
class Checked:
    """The result of checking one run."""

    shards: int  # shards with a commit that counts
    files: int  # data files that commits refer to
    bytes: int  # their size, as committed
    damaged: list[Damage]  # in the order of shards
    unreferenced: int  # files in the data directories that no commit refers to


def check_run(run: RunDirectory) -> Checked:
    """Read every committed file of a run, also in a store, and count the other files."""
    manifest = run.manifest()
    commit_log = run.commit_log(BY_CONTENT)
    run.check_complete(commit_log)
    # Otherwise rows would be counted twice, which no single file shows.
    check_merged(commit_log)
    damaged: list[Damage] = []
    committed_paths: set[str] = set()
    committed_bytes = 0
    try:
        for file, why in examined_files(run.path, manifest, commit_log):
            committed_paths.add(file.path)
            committed_bytes += file.bytes
            if why is not None:
                damaged.append(Damage(file.path, file.shards, why))
        unreferenced = sum(
            f"{table}/{folder}/{name}" not in committed_paths
            for table in TABLES
            for folder in names(run.path / table)
            for name in names(run.path / table / folder)
        )
    except OSError as error:
        raise unread(run.path, error) from None
    return Checked(
        shards=len(commit_log),
        files=len(committed_paths),
        bytes=committed_bytes,
        damaged=sorted(damaged, key=lambda damage: (min(damage.shards), damage.path)),
        unreferenced=unreferenced,
    )


def findings(run: RunDirectory, checked: Checked) -> list[str]:
    """What a check has found, and which command mends it, in lines."""
    lines = [str(damage) for damage in checked.damaged]
    if checked.unreferenced:
        # Not an error: a killed process left them, and no reader sees them.
        lines.append(
            f"{counted(checked.unreferenced, 'file')} that no commit refers to; headcount compact "
            f"{run.path} deletes what it may"
        )
    size = f"{counted(checked.files, 'file')}, {checked.bytes / 1e6:,.1f} MB"
    if not checked.damaged:
        return [*lines, f"{counted(checked.shards, 'shard')}, {size}, as committed"]
    # Rows are measured again, but roll-ups only repeat rows: two commands mend two damages.
    if rollups := sum(damage.is_of_rollup for damage in checked.damaged):
        lines.append(
            f"{counted(rollups, 'roll-up')} damaged, in {size}; headcount compact {run.path} "
            "writes them again from their rows"
        )
    if shards := {
        shard for damage in checked.damaged if not damage.is_of_rollup for shard in damage.shards
    }:
        lines.append(
            f"{counted(len(shards), 'shard')} of {checked.shards:,} damaged, in {size}; headcount "
            f"resume {run.path} --verify measures them anew"
        )
    return lines
