"""Let a run grow: more sequences, another batch size, other code that may go on with it.

The manifest is written last. Whoever is killed before leaves a run of its old size, which the same
command extends again.
"""

from __future__ import annotations

from jobs.compaction import DamagedShards, clean, merge
from jobs.plan import Plan, write_index, write_manifest
from schemas.commits import Commit, delete, drop
from schemas.errors import RunError
from schemas.run_directory import RunDirectory


def extend(plan: Plan) -> None:
    """Write a run's manifest as the plan has it; the caller has the run's lock."""
    before = plan.before
    if before is None or plan.manifest == before:
        return
    if plan.manifest.sequences > before.sequences:
        last = before.shards - 1
        if plan.manifest.stops(last) > before.sequences:
            take_back(plan.run, last)
        write_index(plan)
    write_manifest(plan)


def check_unchanged(plan: Plan) -> None:
    """Refuse to go on with a run that somebody has extended since it was planned."""
    expected = plan.manifest if plan.before is None else plan.before
    if plan.run.manifest().sequences != expected.sequences:
        raise RunError(
            f"{plan.run.path}: another process has extended this run meanwhile; run the same "
            "command again"
        )


def take_back(run: RunDirectory, shard: int) -> None:
    """Take a shard out of the ledger, and its rows out of merged files: it is missing again."""
    # While there is a fold with the shard, a file of its own does not count; without the fold it
    # would.
    run.commit_file(shard).unlink(missing_ok=True)
    commits = {commit.shard: commit for commit in run.commits()}
    if shard in commits:
        together = _in_the_same_files(commits, shard)
        try:
            if together:
                merge(run, together, dropped=[shard])
            else:
                drop(run.commits_directory, run.run_id, [shard])
        except DamagedShards:
            # The others lie in the same damaged file: all of them are measured again.
            others = [commit.shard for commit in together]
            delete(run.commit_file(other) for other in others)
            drop(run.commits_directory, run.run_id, [*others, shard])
    clean(run, run.ledger())


def _in_the_same_files(commits: dict[int, Commit], shard: int) -> list[Commit]:
    """The other shards with rows in the files that hold a shard's."""
    paths = {file.path for file in commits[shard].files}
    return [
        commit
        for commit in commits.values()
        if commit.shard != shard and paths.intersection(file.path for file in commit.files)
    ]
