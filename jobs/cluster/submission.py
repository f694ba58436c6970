"""Runs as jobs of a Ray cluster, from a machine that need not belong to it.

The first job of a run has the run's id. A cluster takes each id once, so submitting a scan twice
makes one job, even if both commands run at the same time. Ray does not support giving the id of a
deleted job to another, so a job that resumes a run gets a number: NAME-HASH, NAME-HASH.2,
NAME-HASH.3. The last one stands for the run. (NAME-HASH-2, with a hyphen, is another run of the
same scan.)

A cluster takes a job before anything of it runs. What then goes wrong is only in the job's log, and
nobody looks there after a command that reported success. So `JobClient.wait` waits for a commit.
"""

import json
import logging
import os
import re
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from typing import NamedTuple
from urllib.parse import urlsplit

import ray
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from headcount.jobs.cluster.job_interpreter import INTERPRETER
from headcount.jobs.cluster.ray_cluster import (
    hook_variables,
    last_line,
    staged_code,
)
from headcount.jobs.job_state import JobState, is_state, states_in
from headcount.jobs.resources import Resources
from headcount.jobs.run_names import last_run, next_run
from headcount.schemas.errors import HeadcountError, RunError, printable, unknown
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.places import StorePath, place
from headcount.schemas.reasons import reason
from headcount.schemas.scans.scan import Scan, safe_name

CONNECT_SECONDS = 10.0  # give up after this many seconds if a cluster does not answer

STOP_SECONDS = 60.0  # give up if a job has not stopped; Ray kills it after three
AGENT_SECONDS = 60.0  # give up if a head that has just started takes no job
QUEUED_SECONDS = 180.0  # stop waiting for a job that has not started, or has no replica
LOG_SECONDS = 1.0  # pause between two looks at a log, a line every ten seconds

LOG_LINES = 10  # the last lines of a log that are shown if a job has failed at once

LINES_OF_RAY = ("Running entrypoint for job", "Runtime env is setting up")
"""What a log also holds, and what tells a user nothing."""

TALKATIVE_MODULES = (
    "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)  # fmt: skip
"""Modules of Ray whose messages on stderr tell the user nothing new."""


class Job(NamedTuple):
    """A job of a cluster that measures a run."""

    job_id: str
    run_id: str
    run: str  # path or address of the run directory
    attempt: int
    state: str  # PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED
    message: str  # last line of Ray's message about it
    started: float  # seconds since 1970
    exit_code: int | None  # of the driver, if it has ended by itself

    @classmethod
    def of(cls, details: JobDetails) -> "Job":
        """Read Ray's description of a job that `JobClient.start` has made."""
        metadata = details.metadata or {}
        return cls(
            job_id=details.submission_id or "",
            run_id=metadata["headcount"],
            run=metadata["run"],
            attempt=int(metadata["attempt"]),
            state=str(details.status),
            message=last_line(details.message or ""),
            started=(details.start_time or 0) / 1000,  # Ray counts milliseconds.
            exit_code=details.driver_exit_code,
        )

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def has_begun(self) -> bool | None:
        """Whether its run is there to be resumed; none if it lies on a disk of the cluster."""
        return has_begun(RunDirectory(place(self.run)))


def has_begun(run: RunDirectory) -> bool | None:
    """Whether a run is there to be resumed; none if it lies on a disk that is not seen here."""
    if isinstance(run.path, StorePath) or run.path.parent.is_dir():
        return run.manifest_file.is_file()
    return None


class Submission(NamedTuple):
    """What became of a command that submits a run."""

    run_id: str
    job_id: str
    line: str  # what was done, in words
    is_new: bool = False  # whether it started a job; else the run's is at work or succeeded


class JobClient:
    """The jobs of a Ray cluster."""

    def __init__(self, address: str) -> None:
        self.url = _url(address)
        for module in TALKATIVE_MODULES:
            logging.getLogger(module).setLevel(logging.WARNING)
        # Ray prefers what these name to the address that it is given.
        for variable in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            os.environ.pop(variable, None)
        with self._explained():
            self._check_connection()
            self.client = JobSubmissionClient(self.url)

    def jobs(self) -> list[Job]:
        """The jobs that measure runs, by run, those of a run in their order."""
        with self._explained():
            # Other programs may have jobs there, too.
            all_jobs = self.client.list_jobs()
            ours = [Job.of(each) for each in all_jobs if "headcount" in (each.metadata or {})]
            return sorted(ours, key=lambda job: (job.run_id, job.attempt, job.started))

    def last(self, run: RunDirectory) -> Job | None:
        """The last job of a run; none if it never had one.

        The same scan with another `out` makes another run, with the same id.
        """
        jobs = [job for job in self.jobs() if job.run == str(run.path)]
        return jobs[-1] if jobs else None

    def find(self, name: str) -> Job:
        """The job with an id, or the last job of a run by the run's id, directory or address."""
        jobs = self.jobs()
        job_or_run_id = name.rstrip("/").rpartition("/")[2].removeprefix("run_id=")
        # The id of a run is also that of its first job, and stands for the last one.
        matches = [job for job in jobs if job_or_run_id in (job.run_id, job.job_id)]
        if not matches:
            ids = {job.run_id for job in jobs} | {job.job_id for job in jobs}
            raise RunError(f"{self.url}: {unknown('job', job_or_run_id, ids)}")
        return matches[-1]

    def job(self, job_id: str) -> Job:
        """The job with an id that is known, as it is at present."""
        with self._explained():
            return Job.of(self.client.get_job_info(job_id))

    def start(
        self,
        run: RunDirectory,
        words: Sequence[str],
        variables: Sequence[str],
        files: Mapping[str, bytes] | None = None,
    ) -> Submission:
        """Start a job for a run, unless one is at work.

        `words` follow `headcount` on the job's command line. `variables` are the names of those of
        this machine that the job gets. `files` are sent with the code, by name.
        """
        for name in variables:
            if name not in os.environ:
                raise RunError(f"--env {name}: expected the name of a variable that is set here")
        self._check_ray_version()
        # All of this must be of one moment, or two commands could start two jobs.
        same_id = [job for job in self.jobs() if job.run_id == run.run_id]
        at_work = [job for job in same_id if job.run == str(run.path) and not job.ended]
        if at_work:
            return self._already_submitted(at_work[-1])
        attempt = max((job.attempt for job in same_id), default=0) + 1
        job_id = run.run_id if attempt == 1 else f"{run.run_id}.{attempt}"
        metadata = {"headcount": run.run_id, "run": str(run.path), "attempt": f"{attempt}"}
        env_vars = hook_variables() | {name: os.environ[name] for name in variables}
        with self._explained(), staged_code() as code:
            for name, content in (files or {}).items():
                (code / name).parent.mkdir(parents=True, exist_ok=True)
                (code / name).write_bytes(content)
            runtime_env = {"working_dir": str(code), "env_vars": env_vars}
            return self._submitted(job_id, command_line(words), runtime_env, metadata)

    def _check_ray_version(self) -> None:
        """Refuse a cluster with a Ray that does not talk to ours."""
        cluster_version, own_version = self.client._server_ray_version or "unknown", ray.__version__
        # Versions that differ only in their last part talk to each other.
        if cluster_version.split(".")[:2] != own_version.split(".")[:2]:
            raise RunError(
                f"{self.url}: the cluster runs Ray {cluster_version}, this machine {own_version}; "
                f"install ray[default]=={cluster_version} here, or start the cluster from the "
                "image of this version"
            )

    def _submitted(
        self,
        job_id: str,
        entrypoint: str,
        runtime_env: Mapping[str, object],
        metadata: dict[str, str],
    ) -> Submission:
        """Submit a job. A head that has just started is asked again for a while."""
        deadline = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                self.client.submit_job(
                    entrypoint=entrypoint,
                    submission_id=job_id,
                    runtime_env=dict(runtime_env),
                    metadata=metadata,
                )
            except (RuntimeError, OSError) as error:
                # Two commands may find the same last job and submit the same id: Ray refuses the
                # second. Ray's answer may also be lost on the way. In both cases the job is there,
                # and that is what the user wanted.
                jobs_by_id = {job.job_id: job for job in self.jobs()}
                if job_id in jobs_by_id:
                    return self._already_submitted(jobs_by_id[job_id])
                is_early = "No available agent to submit job" in str(error)
                if not is_early or time.monotonic() > deadline:
                    raise
                time.sleep(1)
            else:
                line = f"{job_id}: submitted to {self.url}"
                return Submission(metadata["headcount"], job_id, line, is_new=True)

    def _already_submitted(self, job: Job) -> Submission:
        line = f"{job.job_id}: already submitted to {self.url}, {job.state}; headcount logs "
        return Submission(job.run_id, job.job_id, f"{line}{job.run_id} shows what it does")

    def wait(self, job_id: str) -> str:
        """Wait until a job has committed a shard or lacks machines; raises if it fails before."""
        deadline = time.monotonic() + QUEUED_SECONDS
        while True:
            job = self.job(job_id)
            if job.state == "SUCCEEDED":
                return f"{job_id}: has ended, SUCCEEDED"
            if job.ended:
                raise RunError(self._failure(job))
            told = self._last_state(job)
            if told is not None and told.state == "measuring":
                return f"{job_id}: {told.words}"
            is_late = time.monotonic() >= deadline
            problem = ""
            # A model that is being loaded is no lack of machines, unless it takes long.
            if told is not None and (is_late or told.state == "short of machines"):
                problem = told.words
            if is_late and job.state == "PENDING":
                problem = f"queued: the cluster has not started it in {QUEUED_SECONDS:.0f} s"
                problem += f" ({job.message})" if job.message else ""
            if problem:
                at = f"{job_id} --address {self.url}"
                return (
                    f"{job_id}: {problem}; it stays submitted: headcount logs {at} shows what it "
                    f"does, headcount stop {at} takes it back"
                )
            time.sleep(0.5)

    def _failure(self, job: Job) -> str:
        """Why a job has failed that was just submitted, and what to do about it; in lines."""
        code = "" if job.exit_code is None else f" with exit code {job.exit_code}"
        lines = [f"{job.job_id}: the job has ended, {job.state}{code}"]
        log_lines = self._log_lines(job)
        if log_lines:
            lines[0] += "; the last lines of its log:"
            lines += [f"    {printable(line)}" for line in log_lines[-LOG_LINES:]]
        elif job.message:
            lines[0] += f": {job.message}"
        missing = set(re.findall(r"No module named '?(\w+)", "\n".join(log_lines)))
        # The usual cause if another Python than that of the cluster's Ray was meant to run the job.
        if missing - {"headcount"}:
            lines.append(
                "the Python that runs Ray on that cluster lacks a library: install what "
                "deploy/requirements.txt names beside it, on every node, or use the image"
            )
        # A run that never began has left nothing that could be resumed.
        advice = "submit it again (without --new)"
        if job.has_begun is True:
            advice = f"headcount resume {job.run} --address {self.url}"
        return "\n".join([*lines, f"mend the cause, then {advice}"])

    def stop(self, job: Job) -> Job:
        """Stop a job and wait until it has ended; returns it with its last state."""
        deadline = time.monotonic() + STOP_SECONDS
        while not job.ended:
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self.url}: job {job.job_id} is still {job.state} after {STOP_SECONDS:.0f} "
                    "s; stop it again"
                )
            with self._explained():
                # A job that waits for its node cannot be stopped yet, so ask again and again.
                self.client.stop_job(job.job_id)
            time.sleep(0.5)
            job = self.job(job.job_id)
        return job

    def log(self, job: Job, follow: bool = False) -> Iterator[str]:
        """Yield what a job's driver printed for people; with `follow`, also what it prints until it
        ends.
        """
        printed = 0
        while True:
            # Asked before the log, which then holds all that the driver has printed.
            ended = self.job(job.job_id).ended
            text = self._whole_log(job)
            # The last line may be cut off, and nobody knows yet whether it is for people.
            end = text.rfind("\n") + 1 if follow and not ended else len(text)
            lines = text[printed:end].splitlines(keepends=True)
            yield "".join(line for line in lines if not is_state(line))
            printed = end
            if ended or not follow:
                return
            time.sleep(LOG_SECONDS)

    def _whole_log(self, job: Job) -> str:
        with self._explained():
            return self.client.get_job_logs(job.job_id)

    def _last_state(self, job: Job) -> JobState | None:
        """The last state that a job's driver has told; none before its first."""
        states = [] if job.state == "PENDING" else [*states_in(self._whole_log(job))]
        return states[-1] if states else None

    def _log_lines(self, job: Job) -> list[str]:
        """What a job's driver has printed for people until now, without Ray's own lines."""
        if job.state == "PENDING":
            return []
        lines = "".join(self.log(job)).splitlines()
        return [line for line in lines if line.strip() and not any(map(line.count, LINES_OF_RAY))]

    def phase(self, job: Job) -> str:
        """What a job's driver has said last; of one that failed, its last error."""
        if job.state == "PENDING":
            return "submitted"
        lines = self._log_lines(job)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        # A driver that was killed has said no error.
        said = errors if job.state == "FAILED" and errors else lines
        return printable(said[-1]) if said else job.message or "starting"

    def _check_connection(self) -> None:
        """Fail soon if nobody answers: Ray would wait for minutes."""
        try:
            urllib.request.urlopen(f"{self.url}/api/version", timeout=CONNECT_SECONDS).close()
        except urllib.error.HTTPError:
            return  # It answers. Ray's client says what it wants, such as a token.
        except (OSError, HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise ConnectionError(f"nothing said in {CONNECT_SECONDS:.0f} s") from None
            # Ray's client says what is wrong with a certificate.
            if not isinstance(cause, SSLError):
                raise ConnectionError(reason(cause)) from None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn every error between this machine and the cluster into one line."""
        try:
            yield
        except HeadcountError:
            raise
        except AuthenticationError as error:
            # Ray's message goes on with pages of advice.
            sentence = error.message.strip().partition("\n")[0].partition(". ")[0]
            raise RunError(
                f"{self.url}: the cluster refused the token ({reason(RuntimeError(sentence))}); "
                "set RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN or its file "
                "in RAY_AUTH_TOKEN_PATH (else ~/.ray/auth_token)"
            ) from None
        except ConnectionError as error:
            raise RunError(
                f"{self.url}: no Ray cluster answers there ({reason(error)}); expected the address "
                "of its dashboard, for instance http://127.0.0.1:8265 while `ray dashboard "
                "cluster.yaml` runs"
            ) from None
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            # Ray's client takes any answer for one of a cluster, so another server's answer shows
            # as a missing key or a wrong type.
            raise RunError(
                f"{self.url}: what answers there is no Ray cluster, or failed "
                f"({last_line(str(error))}); expected the address of a cluster's dashboard"
            ) from None


def submit(
    cluster: JobClient,
    scan: Scan,
    scan_file: Path,
    overrides: Sequence[str],
    resources: Resources,
    variables: Sequence[str],
    new: bool = False,
) -> Submission:
    """Start the job of a scan's newest run, or with `new` of another run of the scan.

    A run whose job is at work, or succeeded, is left alone; one that was begun and has stopped is
    for `resume`. A job that failed before has left nothing to resume, and of a run on a disk of the
    cluster nothing is seen here: then the scan is submitted again, which continues what is there.
    """
    first_run = RunDirectory.of(scan.out, scan.run_id(scan_file.stem))
    # A run whose job has just started has no directory yet, so the cluster's jobs count too.
    out = first_run.path.parent
    there = [job.run_id for job in cluster.jobs() if job.run == f"{out}/run_id={job.run_id}"]
    run = next_run(first_run, there) if new else last_run(first_run, there)

    begun: bool | None = None
    last_job = cluster.last(run)
    if last_job is not None and last_job.ended:
        begun = last_job.has_begun
        extends = begun and scan.sequences != "all" and scan.sequences > run.manifest().sequences
        line = f"{last_job.job_id}: has ended, {last_job.state}"
        if last_job.state == "SUCCEEDED" and not extends:
            line += f"; headcount status {run.path}"
            return Submission(run.run_id, last_job.job_id, line)
        if begun and not extends:
            message = f" ({last_job.message})" if last_job.message else ""
            raise RunError(
                f"{line}{message}; headcount resume {run.path} --address {cluster.url} "
                "continues the run"
            )
    name = f"{safe_name(scan_file.stem)}.toml"
    files = {name: scan_file.read_bytes()}
    if scan.plugins:
        of_plugins = _files_of_plugins(scan)
        sent = [file for file in of_plugins if not file.endswith(".sql")]
        overrides = [*overrides, f"plugins={json.dumps(sent)}"]
        files |= of_plugins
    words = ["scan", name, *options(overrides, resources)]
    # The driver numbers its run by what lies in `out`, where one that never began left nothing.
    if new or (begun is False and run != first_run):
        words.append("--new")
    elif run != first_run:
        words += ["--run", run.run_id]
    return cluster.start(run, words, variables, files)


def _files_of_plugins(scan: Scan) -> dict[str, bytes]:
    """The plug-ins of a scan by their names on the cluster, each with the queries beside it."""
    files: dict[str, bytes] = {}
    for plugin in scan.plugins:
        folder = f"plugins/{plugin.digest}"
        files[f"{folder}/{plugin.name}"] = plugin.content
        files |= {f"{folder}/{query.name}.sql": query.content for query in plugin.queries}
    return files


def options(overrides: Sequence[str], resources: Resources) -> list[str]:
    """The words that pass on what was set, and where to measure."""
    words = [word for override in overrides for word in ("--set", override)]
    words += ["--replicas", f"{resources.replicas}", "--cores", f"{resources.cores}"]
    return [*words, "--device", resources.device]


def command_line(words: Sequence[str]) -> str:
    r"""The command of a job that runs `headcount` with some words, as a shell reads it.

    >>> print(command_line(["scan", "my texts.toml"]))
    "${HEADCOUNT_PYTHON:-python}" -m headcount scan 'my texts.toml'
    """
    return f'"${{{INTERPRETER}:-python}}" -m headcount {shlex.join(words)}'


def _url(address: str) -> str:
    """The URL of a dashboard; refuse an address that cannot be one."""
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urlsplit(url)
        # Reading the port raises if it is no number from 0 to 65535.
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise RunError(
            f"{address}: expected http://HOST:8265, the address of the cluster's dashboard"
        )
    return url
