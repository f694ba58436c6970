"""Let a run grow: more sequences, another batch size, other code that may continue it.

The manifest is written last. If the process is killed before, the run still has its old size and
perhaps misses a shard, which readers know already. The same command extends it again.
"""

from __future__ import annotations

from headcount.jobs.corpus.run_corpus import write_corpus
from headcount.jobs.plan.plan import Plan, write_manifest
from headcount.jobs.upkeep.compaction import clean, merge
from headcount.jobs.upkeep.merged_files import DamagedShards
from headcount.schemas.errors import RunError
from headcount.schemas.files.commits import delete, taken_back, write_segment
from headcount.schemas.files.run_directory import RunDirectory


def extend(plan: Plan) -> None:
    """Write a run's manifest as the plan has it; the caller has the run's lock."""
    previous = plan.previous_manifest
    if previous is None or (plan.manifest == previous and not plan.has_new_index):
        return
    is_longer = plan.manifest.sequences > previous.sequences
    last_shard = previous.shards - 1
    # A last shard that was short is now a longer one. It is measured again instead of being
    # completed: its data files would stand beside the commit of the shorter shard for a moment.
    if is_longer and plan.manifest.stops(last_shard) > previous.sequences:
        take_back(plan.run, last_shard)
    if plan.corpus is not None and (is_longer or plan.has_new_index):
        write_corpus(plan.run, plan.corpus, plan.sequences)
    write_manifest(plan)


def check_unchanged(plan: Plan) -> None:
    """Refuse to continue a run that another process has extended since it was planned."""
    expected = plan.previous_manifest or plan.manifest
    if plan.run.manifest().sequences != expected.sequences:
        raise RunError(
            f"{plan.run.path}: another process has extended this run meanwhile; run the same "
            "command again"
        )


def take_back(run: RunDirectory, shard: int) -> None:
    """Take a shard out of the commit log, and its rows out of merged files: it is missing again."""
    # The commit file goes first. As long as a segment has the shard, its own file does not count;
    # once a segment has taken the shard back, the file would count again.
    run.commit_file(shard).unlink(missing_ok=True)
    commits = {commit.shard: commit for commit in run.commits()}
    if shard in commits:
        # Merged files hold rows of several shards. Those of the others must stay.
        paths = {file.path for file in commits[shard].files}
        neighbours = [
            commit
            for commit in commits.values()
            if commit.shard != shard and paths.intersection(file.path for file in commit.files)
        ]
        try:
            if neighbours:
                # One segment moves the neighbours to a new file and takes the shard back. At no
                # moment does a merged file hold rows that no commit refers to.
                merge(run, neighbours, dropped=[shard])
            else:
                write_segment(run.commits_directory, taken_back(run.run_id, [shard]))
        except DamagedShards:
            # The neighbours lie in the same damaged file: all of them are measured again.
            neighbour_shards = [commit.shard for commit in neighbours]
            delete(run.commit_file(neighbour) for neighbour in neighbour_shards)
            lost = taken_back(run.run_id, [*neighbour_shards, shard])
            write_segment(run.commits_directory, lost)
    clean(run, run.commit_log())
