"""The subcommands for jobs of a cluster: `submit`, `logs` and `stop`.

Torch and Ray take seconds to import, so they are imported inside the functions that need them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headcount.jobs.commands.options import (
    Address,
    CommandOfAScan,
    Cores,
    DeviceOption,
    Env,
    New,
    Overrides,
    Plugins,
    Replicas,
    RunOrJob,
    SkipDuplicates,
)
from headcount.jobs.console import tell

if TYPE_CHECKING:
    from headcount.jobs.cluster.submission import JobClient, Submission

commands = typer.Typer(rich_markup_mode=None)


@commands.command(cls=CommandOfAScan)
def submit(
    scan_file: Annotated[Path, typer.Argument(metavar="SCAN", help="A scan file (TOML).")],
    address: Address,
    overrides: Overrides = None,
    plugins: Plugins = None,
    replicas: Replicas = 1,
    cores: Cores = 0,
    device: DeviceOption = "auto",
    env: Env = None,
    new: New = False,
    skip_duplicates: SkipDuplicates = False,
) -> None:
    """Run a scan as a job of a Ray cluster; a scan of several checkpoints as a job each.

    The job runs the code of this machine. Submitting the same scan twice makes one job. The command
    ends when the job has committed its first shard or lacks machines, or says why it failed.
    """
    from headcount.jobs.cluster.submission import JobClient
    from headcount.jobs.cluster.submission import submit as submit_scan
    from headcount.jobs.plan.same_weights import without_duplicates
    from headcount.jobs.plan.scan_files import portable_scan, scans_of
    from headcount.jobs.resources import Resources
    from headcount.workers.process import prepare_process

    prepare_process()
    listed = scans_of(scan_file, overrides or (), plugins or ())
    checkpoints = without_duplicates(listed, skip_duplicates)
    # All are checked before the first job is made.
    scans = [(portable_scan(scan_file, each.overrides), each.overrides) for each in checkpoints]
    resources = Resources(replicas, cores, device, address)
    cluster = JobClient(address)
    for scan, settings in scans:
        submission = submit_scan(cluster, scan, scan_file, settings, resources, env or [], new)
        # A script reads the id from stdout; people read the lines on stderr.
        print(submission.run_id, flush=True)
        tell_submission(cluster, submission)


def tell_submission(cluster: JobClient, submission: Submission) -> None:
    """Say what was submitted; if it is a new job, wait until it measures."""
    tell(submission.line)
    if submission.is_new:
        tell(cluster.wait(submission.job_id))


@commands.command()
def logs(
    run: RunOrJob,
    address: Address,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the job ends.")
    ] = False,
) -> None:
    """Print the output of a run's last job."""
    from headcount.jobs.cluster.submission import JobClient

    cluster = JobClient(address)
    job = cluster.find(run)
    for text in cluster.log(job, follow):
        # The text has its own line ends.
        sys.stdout.write(text)
        sys.stdout.flush()
    if follow:
        tell(f"{job.job_id}: {cluster.job(job.job_id).state}")


@commands.command()
def stop(run: RunOrJob, address: Address) -> None:
    """Stop a run's job. Committed shards stay, and `resume` continues the run."""
    from headcount.jobs.cluster.submission import JobClient
    from headcount.jobs.phases import forget
    from headcount.schemas.files.run_directory import RunDirectory
    from headcount.schemas.places import place

    cluster = JobClient(address)
    job = cluster.find(run)
    if job.ended:
        tell(f"{job.job_id}: has ended before, {job.state}")
        return
    state = cluster.stop(job).state
    # Ray kills a driver that takes its time to say so itself.
    forget(RunDirectory(place(job.run)))
    advice = "submitting the scan again continues it"
    if job.has_begun:
        advice = f"headcount resume {job.run} --address {cluster.url} continues the run"
    tell(f"{job.job_id}: {state}; {advice}")
