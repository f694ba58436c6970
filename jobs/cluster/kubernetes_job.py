"""The command of a job that KubeRay starts: `headcount`, and a refusal that is not tried again.

`python -m headcount.jobs.cluster.kubernetes_job scan …` runs `headcount scan …`. KubeRay makes a
new cluster for a job that has failed, where a refusal would be the same. For a job that was stopped
it makes none. So a job that is refused stops itself.
"""

import json
import os
import subprocess
import sys
import time

from ray.job_submission import JobSubmissionClient

REFUSED = 2  # the exit code of every error that has a line
DASHBOARD = "http://127.0.0.1:8265"  # of the head, where the command of a job runs
STOP_SECONDS = 60.0  # for Ray to end this process


def main() -> None:
    """Run the command; if it was refused, stop the job."""
    code = subprocess.run([sys.executable, "-m", "headcount", *sys.argv[1:]]).returncode
    if code == REFUSED:
        # Ray describes a job to its command in this variable.
        job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
        dashboard = os.environ.get("RAY_API_SERVER_ADDRESS", DASHBOARD)
        JobSubmissionClient(dashboard).stop_job(job["metadata"]["job_submission_id"])
        time.sleep(STOP_SECONDS)
    # A command that was ended by a signal has its number below zero.
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
