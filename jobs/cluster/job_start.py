"""Wait until the driver of a job has planned its run, or say why it has not.

A cluster takes a job before anything of it runs. What then goes wrong is only in the job's log, and
nobody looks there after a command that reported success.
"""

from __future__ import annotations

import re
import time

from headcount.jobs.cluster.submission import Job, JobClient
from headcount.jobs.upkeep.phases import PLANNING, last_in_log
from headcount.schemas.errors import RunError, printable

DRIVER_SECONDS = 120.0
"""Stop waiting after this many seconds. The job stays submitted."""

PLANNING_SECONDS = 60.0
"""Wait this much longer for a driver that plans: what `plan` refuses, ends it then. A large corpus
takes longer.
"""

ASKING_SECONDS = 0.5
"""Pause between two questions to the cluster."""

LOG_LINES = 10
"""The last lines of a log that are shown."""

NO_MODULE = re.compile(r"No module named '?(\w+)")
"""What Python says of a package that is not there, and the package."""

OF_RAY = ("Running entrypoint for job", "Runtime env is setting up")
"""What a log also holds, and what tells a user nothing."""


def wait_for_driver(cluster: JobClient, job_id: str) -> str:
    """Wait until a job's driver has planned its run; returns a line that says what it does.

    If the job fails before, raises with the last lines of its log. If the cluster does not start it
    in time, the line says so.
    """
    deadline = time.monotonic() + DRIVER_SECONDS
    planned_by: float | None = None
    while True:
        job = cluster.job(job_id)
        if job.ended:
            return _end_of(cluster, job)
        # Only the log is seen from here: the notes of phases may lie on a disk of the cluster.
        phase = last_in_log(cluster.whole_log(job)) if job.state == "RUNNING" else None
        if phase is not None:
            # From the driver's first word on: before it, the cluster may have to start a machine.
            planned_by = planned_by or time.monotonic() + PLANNING_SECONDS
            if phase not in PLANNING:
                return f"{job_id}: its driver is there: {phase}"
            if time.monotonic() >= planned_by:
                return (
                    f"{job_id}: its driver is there: {phase}; it may still refuse the scan: "
                    f"headcount status {job.run} --address {cluster.url}"
                )
        elif time.monotonic() >= deadline:
            return _why_waiting(cluster, job)
        time.sleep(ASKING_SECONDS)


def phase_of(cluster: JobClient, job: Job) -> str:
    """What a job does, as far as the cluster alone knows."""
    if job.state == "PENDING":
        return "submitted"
    if job.state == "RUNNING":
        return last_in_log(cluster.whole_log(job)) or "starting"
    return f"ended, {job.state}"


def _end_of(cluster: JobClient, job: Job) -> str:
    """Say that a job has succeeded already, or was stopped; raise if it failed."""
    if job.state != "FAILED":
        return f"{job.job_id}: has ended, {job.state}"
    code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
    lines = [f"{job.job_id}: the job has ended at once, FAILED{code}"]
    log_lines = _log_lines(cluster, job)
    if log_lines:
        lines[0] += "; the last lines of its log:"
        lines += [f"    {printable(line)}" for line in log_lines[-LOG_LINES:]]
    elif job.message:
        lines[0] += f": {job.message}"
    missing = {name for line in log_lines for name in NO_MODULE.findall(line)}
    # The usual cause if another Python than that of the cluster's Ray was meant to run the job.
    if missing - {"headcount"}:
        lines.append(
            "the Python that runs Ray on that cluster lacks a library: install what "
            "deploy/requirements.txt names beside it, on every node, or use the image"
        )
    # A run that never began has left nothing that could be resumed.
    if cluster.has_begun(job):
        lines.append(f"mend the cause, then headcount resume {job.run} --address {cluster.url}")
    else:
        lines.append("mend the cause, then submit it again (without --new)")
    raise RunError("\n".join(lines))


def reason_of_failure(cluster: JobClient, job: Job) -> str:
    """Why a job failed: the last error that its driver has said, else the end of its log."""
    lines = _log_lines(cluster, job)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    # A driver that was killed has said no error.
    last_lines = [*lines[-1:], *errors[-1:]]
    return printable(last_lines[-1]) if last_lines else job.message


def _log_lines(cluster: JobClient, job: Job) -> list[str]:
    """What a job's driver has printed, without Ray's own lines."""
    log = [line for line in cluster.whole_log(job).splitlines() if line.strip()]
    return [line for line in log if not any(words in line for words in OF_RAY)]


def _why_waiting(cluster: JobClient, job: Job) -> str:
    """Say that a job waits, and what the user can do."""
    at = f"{job.job_id} --address {cluster.url}"
    if job.state == "PENDING":
        problem = f"queued: the cluster has not started it in {DRIVER_SECONDS:.0f} s"
        if job.message:
            problem += f" ({job.message})"
    else:
        problem = f"starting: its driver has said nothing in {DRIVER_SECONDS:.0f} s"
    return (
        f"{job.job_id}: {problem}; it stays submitted: headcount logs {at} shows what it does, "
        f"headcount stop {at} takes it back"
    )
