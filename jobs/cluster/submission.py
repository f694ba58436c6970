"""Runs as jobs of a Ray cluster, from a machine that need not belong to it.

The first job of a run has the run's id. A cluster takes each id once, so submitting a scan twice
makes one job, even if both commands run at the same time. Ray does not support giving the id of a
deleted job to another, so a job that resumes a run gets a number: NAME-HASH, NAME-HASH.2,
NAME-HASH.3. The last one stands for the run. (NAME-HASH-2, with a hyphen, is another run of the
same scan.)
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from ssl import SSLError
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import ray
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from headcount.jobs.cluster.job_interpreter import SETUP_HOOK, command_line
from headcount.jobs.cluster.ray_cluster import last_line, staged_code
from headcount.jobs.plan.identity import last_run, next_run
from headcount.jobs.resources import Resources
from headcount.jobs.upkeep import phases
from headcount.schemas.errors import HeadcountError, RunError, unknown
from headcount.schemas.files.places import StorePath, place, reason
from headcount.schemas.files.run_directory import RunDirectory
from headcount.schemas.scans.scan import Scan, safe_name

CONNECT_SECONDS = 10.0
"""Give up after this many seconds if a cluster does not answer."""

STOP_SECONDS = 60.0
"""Give up after this many seconds if a job does not stop; Ray kills it after three."""

AGENT_SECONDS = 60.0
"""Give up after this many seconds if a head that has just started takes no job yet."""

NO_AGENT = "No available agent to submit job"
"""What Ray answers meanwhile."""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of a job that has ended."""

ADDRESS_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Environment variables that Ray prefers to the address that it is given."""

TALKATIVE_MODULES = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
"""Modules of Ray whose messages on stderr tell the user nothing new."""


@dataclass(frozen=True)
class Job:
    """A job of a cluster that measures a run."""

    job_id: str
    run_id: str
    run: str
    """Path or address of the run directory."""
    attempt: int
    state: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str
    """Last line of Ray's message about it."""
    started: float
    """Seconds since 1970."""
    exit_code: int | None = None
    """Of the driver, if it has ended by itself."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in ENDED


@dataclass(frozen=True)
class Submission:
    """What became of a command that submits a run."""

    run: RunDirectory
    job_id: str
    line: str
    """What was done, in words."""
    is_new: bool
    """Whether it started a job; otherwise the run has one that is at work or succeeded."""


class JobClient:
    """The jobs of a Ray cluster."""

    def __init__(self, address: str) -> None:
        self.url = _url(address)
        for module in TALKATIVE_MODULES:
            logging.getLogger(module).setLevel(logging.WARNING)
        with self._explained(), _without_address_variables():
            _check_connection(self.url)
            self.client = JobSubmissionClient(self.url)

    def jobs(self) -> list[Job]:
        """The jobs that measure runs, by run, those of a run in their order."""
        with self._explained():
            jobs = [_job_of(details) for details in self.client.list_jobs()]
        # Other programs may have jobs there, too.
        our_jobs = [job for job in jobs if job is not None]
        return sorted(our_jobs, key=lambda job: (job.run_id, job.attempt, job.started))

    def last(self, run: RunDirectory) -> Job | None:
        """The last job of a run; none if it never had one.

        The same scan with another `out` makes another run, with the same id.
        """
        jobs = [job for job in self.jobs() if job.run == str(run.path)]
        return jobs[-1] if jobs else None

    def find(self, name: str) -> Job:
        """The job with an id, or the last job of a run by the run's id, directory or address."""
        jobs = self.jobs()
        last_part = name.rstrip("/").rpartition("/")[2]
        name_or_id = last_part.removeprefix("run_id=")
        # The id of a run is also that of its first job. It stands for the last one, which is kept
        # here because it comes last in `jobs`.
        by_name = {job.run_id: job for job in jobs}
        by_name |= {job.job_id: job for job in jobs if job.job_id != job.run_id}
        if name_or_id not in by_name:
            raise RunError(f"{self.url}: {unknown('job', name_or_id, by_name)}")
        return by_name[name_or_id]

    def start(
        self,
        run: RunDirectory,
        words: list[str],
        env: dict[str, str],
        scan_file: Path | None = None,
    ) -> Submission:
        """Start a job for a run, unless one is at work.

        `words` follow `headcount` on the job's command line. The scan file is sent with the code.
        """
        self._check_version()
        # All of this must be of one moment, or two commands could start two jobs.
        same_id = [job for job in self.jobs() if job.run_id == run.run_id]
        at_work = [job for job in same_id if job.run == str(run.path) and not job.ended]
        if at_work:
            return self._already_submitted(run, at_work[-1])
        attempt = max((job.attempt for job in same_id), default=0) + 1
        job_id = run.run_id if attempt == 1 else f"{run.run_id}.{attempt}"
        metadata = {"headcount": run.run_id, "run": str(run.path), "attempt": str(attempt)}
        with self._explained(), staged_code() as code:
            if scan_file is not None:
                shutil.copy(scan_file, code / f"{safe_name(scan_file.stem)}.toml")
            # What Ray documents, `worker_process_setup_hook`, reaches the driver's workers, and not
            # the actor that starts the driver. This variable is how Ray itself passes it on.
            variables = env | {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: SETUP_HOOK}
            runtime_env = {"working_dir": str(code), "env_vars": variables}
            try:
                self._submit(job_id, command_line(words), runtime_env, metadata)
            except (RuntimeError, OSError):
                # Two commands may find the same last job and submit the same id: Ray refuses the
                # second. Ray's answer may also be lost on the way. In both cases the job is there,
                # and that is what the user wanted.
                jobs_by_id = {job.job_id: job for job in self.jobs()}
                if job_id not in jobs_by_id:
                    raise
                return self._already_submitted(run, jobs_by_id[job_id])
        phases.note_submission(run, self.url)
        return Submission(run, job_id, f"{job_id}: submitted to {self.url}", is_new=True)

    def _submit(
        self, job_id: str, command: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> None:
        """Submit a job; a head that has just started is asked again for a while."""
        deadline = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                self.client.submit_job(
                    entrypoint=command,
                    submission_id=job_id,
                    runtime_env=runtime_env,
                    metadata=metadata,
                )
            except RuntimeError as error:
                if NO_AGENT not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(1)
            else:
                return

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
            job = replace(job, state=self.state(job))
        return job

    def state(self, job: Job) -> str:
        """The present state of a job."""
        with self._explained():
            return str(self.client.get_job_status(job.job_id))

    def job(self, job_id: str) -> Job:
        """The job with an id that `start` has returned, as it is at present."""
        with self._explained():
            job = _job_of(self.client.get_job_info(job_id))
        assert job is not None
        return job

    def log(self, job: Job, follow: bool = False) -> Iterator[str]:
        """Yield what a job's driver printed; with `follow`, also what it prints until it ends."""
        with self._explained():
            if not follow:
                yield self.client.get_job_logs(job.job_id)
                return
            from aiohttp import ClientError

            texts = self.client.tail_job_logs(job.job_id)

            async def next_text() -> str | None:
                try:
                    return await anext(texts, None)
                except ClientError as error:
                    # So that `_explained` knows it.
                    raise ConnectionError(str(error)) from None

            # Ray's log is an asynchronous generator. One event loop serves all of its steps: the
            # connection behind it belongs to the loop that opened it.
            with asyncio.Runner() as runner:
                while (text := runner.run(next_text())) is not None:
                    yield text

    def whole_log(self, job: Job) -> str:
        """What a job's driver has printed until now."""
        return "".join(self.log(job))

    def has_begun(self, job: Job) -> bool:
        """Whether the run of a job is there to be resumed, as far as this machine can know."""
        run = RunDirectory(place(job.run))
        if isinstance(run.path, StorePath) or run.path.parent.is_dir():
            return run.manifest_file.is_file()
        if job.state == "SUCCEEDED":
            return True
        # The run lies on a disk of the cluster. Only the logs of its jobs are seen from here.
        jobs_of_run = [each for each in self.jobs() if each.run == job.run]
        said = [phases.last_in_log(self.whole_log(each)) for each in jobs_of_run]
        return any(phase not in (None, *phases.PLANNING) for phase in said)

    def _already_submitted(self, run: RunDirectory, job: Job) -> Submission:
        line = (
            f"{job.job_id}: already submitted to {self.url}, {job.state}; "
            f"headcount logs {job.run_id} shows what it does"
        )
        return Submission(run, job.job_id, line, is_new=False)

    def _check_version(self) -> None:
        """Refuse a cluster with another release of Ray: a job would end in a stack trace."""
        cluster_version = self.client._server_ray_version or "unknown"
        own_version = ray.__version__
        # Versions that differ only in their last part talk to each other.
        if cluster_version.split(".")[:2] != own_version.split(".")[:2]:
            raise RunError(
                f"{self.url}: the cluster runs Ray {cluster_version}, this machine {own_version}; "
                f"install ray[default]=={cluster_version} here, or start the cluster from the "
                "image of this version"
            )

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
    overrides: list[str],
    resources: Resources,
    env: list[str],
    new: bool = False,
) -> Submission:
    """Start the job of a scan's newest run, or with `new` of another run of the scan.

    A run whose job is at work, or succeeded, is left alone. A job that failed before the run began
    leaves nothing to resume, so that the scan is submitted again.
    """
    first_run = RunDirectory.of(scan.out, scan.run_id(scan_file.stem))
    # A run whose job has just started has no directory yet, so the cluster's jobs count too.
    submitted_run_ids = [
        job.run_id
        for job in cluster.jobs()
        if job.run == f"{first_run.path.parent / f'run_id={job.run_id}'}"
    ]
    newest_or_next = next_run if new else last_run
    run = newest_or_next(first_run, submitted_run_ids)

    last_job = cluster.last(run)
    never_began = last_job is not None and last_job.ended and not cluster.has_begun(last_job)
    # As far as this machine can know: it sees a store, and no disk of the cluster.
    extends = (
        scan.sequences != "all"
        and run.manifest_file.is_file()
        and scan.sequences > run.manifest().sequences
    )
    if last_job is not None and last_job.ended and not never_began and not extends:
        line = _line_of_ended(last_job, cluster)
        return Submission(run, last_job.job_id, line, is_new=False)
    words = ["scan", f"{safe_name(scan_file.stem)}.toml", *_set_options(overrides)]
    # The driver numbers its run by what lies in `out`, where this one has left nothing.
    if new or (never_began and run != first_run):
        words.append("--new")
    elif run != first_run:
        words += ["--run", run.run_id]
    words += _resource_options(resources)
    return cluster.start(run, words, _forwarded(env), scan_file)


def _line_of_ended(job: Job, cluster: JobClient) -> str:
    """Say that a run's job succeeded; if it did not, name the command that resumes the run."""
    if job.state == "SUCCEEDED":
        return f"{job.job_id}: has ended, SUCCEEDED; headcount status {job.run}"
    message = f" ({job.message})" if job.message else ""
    raise RunError(
        f"{job.job_id}: has ended, {job.state}{message}; "
        f"headcount resume {job.run} --address {cluster.url} continues the run"
    )


def resume(
    cluster: JobClient,
    run: RunDirectory,
    resources: Resources,
    env: list[str],
    overrides: list[str],
    flags: list[str],
) -> Submission:
    """Start another job for a run whose last one has ended; `flags` are more of its options."""
    words = ["resume", str(run.path), *_set_options(overrides), *flags]
    words += _resource_options(resources)
    return cluster.start(run, words, _forwarded(env))


def _set_options(overrides: list[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _resource_options(resources: Resources) -> list[str]:
    return [
        "--replicas",
        f"{resources.replicas}",
        "--cores",
        f"{resources.cores}",
        "--device",
        resources.device,
    ]


def _forwarded(names: list[str]) -> dict[str, str]:
    """The values of those environment variables of this machine that a job gets."""
    for name in names:
        if name not in os.environ:
            raise RunError(f"--env {name}: expected the name of a variable that is set here")
    return {name: os.environ[name] for name in names}


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


@contextmanager
def _without_address_variables() -> Iterator[None]:
    """Hide the variables that Ray prefers, so that the address on the command line counts."""
    variables = {name: os.environ.pop(name) for name in ADDRESS_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(variables)


def _check_connection(url: str) -> None:
    """Fail soon if nobody answers: Ray would wait for minutes."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    # Behind a proxy the host need not be reachable from here.
    if getproxies().get(parts.scheme) and not proxy_bypass(host):
        return
    connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = connection_class(host, parts.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
        connection.request("GET", "/api/version")
        connection.getresponse()
    except SSLError:
        return  # Ray's client says what is wrong with a certificate.
    except TimeoutError:
        raise ConnectionError(f"nothing said in {CONNECT_SECONDS:.0f} s") from None
    except (OSError, HTTPException) as error:
        raise ConnectionError(reason(error)) from None
    finally:
        connection.close()


def _job_of(details: JobDetails) -> Job | None:
    """Read Ray's description of a job; none if headcount did not submit it."""
    metadata = details.metadata or {}
    if "headcount" not in metadata or details.submission_id is None:
        return None
    return Job(
        job_id=details.submission_id,
        run_id=metadata["headcount"],
        run=metadata.get("run", ""),
        attempt=int(metadata.get("attempt", "1")),
        state=str(details.status),
        message=last_line(details.message or ""),
        started=(details.start_time or 0) / 1000,  # Ray counts milliseconds.
        exit_code=details.driver_exit_code,
    )
