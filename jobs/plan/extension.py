"""Let a run grow: more sequences, another batch size, other code that may continue it.

The manifest is written last. If the process is killed before, the run still has its old size and
perhaps misses a shard, which readers know already. The same command extends it again.
"""

from __future__ import annotations

from headcount.jobs.corpus.run_corpus import write_corpus
from headcount.jobs.plan.plan import Plan, write_manifest
from headcount.schemas.errors import RunError
from headcount.schemas.files.commits import taken_back, write_segment
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
    """Take the short last shard out of the commit log: it is missing again.

    Its files hold no rows of other shards, also after a compaction.
    """
    # The commit file goes first. As long as a segment has the shard, its own file does not count;
    # once the segment has dropped the shard, the file would count again.
    run.commit_file(shard).unlink(missing_ok=True)
    if shard in run.commit_log([])["shard"].to_pylist():
        write_segment(run.commits_directory, taken_back(run.run_id, [shard]))
