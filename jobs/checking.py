"""What a reading of every file of a run finds."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.damage import BY_CONTENT, Damage, examined_files
from schemas.errors import RunError
from schemas.kinds import TABLES
from schemas.places import names, reason
from schemas.run_directory import RunDirectory, check_merged


@dataclass(frozen=True)
class Checked:
    """What was found of one run."""

    shards: int
    """Commits that count."""
    files: int
    bytes: int
    damaged: list[Damage]
    """In the order of shards."""
    unreferenced: int
    """Files in the data directories that no commit refers to."""
    without_digest: int
    """Files that older code committed."""


def check_run(run: RunDirectory) -> Checked:
    """Read every committed file of a run, in a store too, and count the others."""
    manifest, ledger = run.manifest(), run.ledger(BY_CONTENT)
    check_merged(ledger)
    damaged: list[Damage] = []
    known: set[str] = set()
    size = without_digest = 0
    try:
        for file, why in examined_files(run.path, manifest, [ledger]):
            known.add(file.path)
            size += file.bytes
            without_digest += not file.digest
            if why is not None:
                damaged.append(Damage(file.path, file.shards, why))
        unreferenced = sum(
            f"{table}/{folder}/{name}" not in known
            for table in TABLES
            for folder in names(run.path / table)
            for name in names(run.path / table / folder)
        )
    except OSError as error:
        raise RunError(f"{run.path}: cannot be read ({reason(error)})") from None
    return Checked(
        shards=len(ledger),
        files=len(known),
        bytes=size,
        damaged=sorted(damaged, key=lambda damage: (min(damage.shards), damage.path)),
        unreferenced=unreferenced,
        without_digest=without_digest,
    )
