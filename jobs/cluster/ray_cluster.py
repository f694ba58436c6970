"""Connect to Ray: start it on this machine, or join a cluster. Every error becomes one line."""

import atexit
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
import ray.exceptions

# Ray does not promise to keep these names, so no other file has one.
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants
from ray._private.state import state
from ray._private.worker import global_worker

from headcount.jobs import phases
from headcount.jobs.cluster.job_interpreter import SETUP_HOOK
from headcount.jobs.endings import fail_at_once, starting_processes
from headcount.jobs.resources import Resources
from headcount.schemas.errors import HeadcountError, RunError
from headcount.schemas.packages import PACKAGE
from headcount.schemas.reasons import reason
from headcount.workers.inputs.corpus.text_files import BUNDLED_LICENSE, located
from headcount.workers.memory import available_cores

SYSTEM_CONFIG = {"prestart_worker_first_driver": False}
"""Settings of a whole cluster. Ray would start a worker for every core at once. Replicas take many
cores each, so most of these workers would import Ray and then have nothing to do.
"""

START_SECONDS = 60.0  # give up if Ray does not start here in this time; idle, it takes 2 s

LONGEST_DIRECTORY = 39
"""Longest directory in which Ray makes its sockets, in bytes. Their names have up to 64 more, and
macOS takes 103 in all, Linux 107.
"""

JOIN_SECONDS = 30.0  # give up if a cluster's head does not answer in this time
CONNECT_SECONDS = 10.0  # give up if a machine does not accept a connection in this time

RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable of Ray: it ends a process that has no head for so many seconds. KubeRay sets it if a new
head goes on with what the old one knew.
"""

HEAD_SECONDS = 10.0  # by default a command ends so long after its head; Ray's takes 60

WATCH_SECONDS = 1.0  # seconds between two looks at whether Ray is there
PROBE_SECONDS = 2.0  # a process of Ray that does not accept a connection in this time is gone

JOINING = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
"""A program that joins a cluster and leaves it."""


def connect(resources: Resources) -> Resources:
    """Start Ray here or join a cluster; returns the resources with cores and device filled in."""
    address = resources.cluster
    cores = resources.cores
    if not cores:
        # This machine's cores say nothing about those of a cluster.
        cores = 1 if address else max(1, available_cores() // resources.replicas)
    if not ray.is_initialized():
        try:
            with starting_processes():
                if address:
                    _join(address)
                else:
                    _start(resources.replicas * cores)
        except HeadcountError:
            raise
        except ray.exceptions.AuthenticationError as error:
            raise RunError(
                f"{address}: the cluster refused the token ({reason(error)}); put its token into "
                "RAY_AUTH_TOKEN, or its file into RAY_AUTH_TOKEN_PATH"
            ) from None
        except Exception as error:  # Ray raises a plain `Exception` if its processes do not start.
            if problem := version_problem(error):
                raise RunError(f"{address}: {problem}") from None
            # If a token is missing, Ray says only that it found no cluster.
            has_token = bool(os.environ.get("RAY_AUTH_MODE"))
            hint = "" if has_token else "; if it wants a token: RAY_AUTH_MODE=token"
            raise RunError(
                f"{address or 'Ray on this machine'}: no cluster that can be used "
                f"({reason(error)}){hint}"
            ) from None
    device = resources.device
    if device == "auto":
        # Ray is asked, because a cluster may have GPUs that this machine has not.
        gpus = ray.cluster_resources().get("GPU", 0)
        device = "cuda" if gpus >= resources.replicas else "cpu"
    return replace(resources, cores=cores, device=device)


def version_problem(error: Exception) -> str | None:
    """How the versions of a cluster differ from those here, and what to do; None if they do not."""
    pairs = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))
    if len(pairs) != 2:
        return None
    (cluster_ray, cluster_python), (own_ray, own_python) = pairs
    submitted = "or headcount submit --address http://HOST:8265, whose driver runs on the cluster"
    if cluster_ray.split(".")[:2] != own_ray.split(".")[:2]:
        # A submitted job would have the cluster's Ray, too.
        advice = f'pip install "ray[default]=={own_ray}" on the cluster\'s machines, start it again'
    elif cluster_ray != own_ray:
        advice = f'pip install "ray[default]=={cluster_ray}" here, {submitted}'
    else:
        advice = f"run it with Python {cluster_python} here, {submitted}"
    return (
        f"the cluster runs Ray {cluster_ray} with Python {cluster_python}, this machine Ray "
        f"{own_ray} with Python {own_python}; {advice}"
    )


def _start(cores: int) -> None:
    """Start a cluster of this machine alone, which ends with this process."""
    # Ray would run the replicas at nice 15, behind everything else that wants a core. But the scan
    # is what this command was started for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would keep a token in HOME, which need not be there or be writable. This cluster ends with
    # this process, and so does its token.
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Ray lets workers import from the directory that it is started in, before all others. In the
    # user's directory a `jobs.py` may lie, so Ray is started in the directory of our code. The
    # replicas change back, because paths of a scan are relative to the user's directory.
    directory = _short_directory()
    with _within(START_SECONDS, directory), _on_the_loopback(), contextlib.chdir(PACKAGE.parent):
        ray.init(
            _temp_dir=directory,
            address="local",  # A cluster of its own, even if another one runs on this machine.
            num_cpus=cores,
            # Only the index of a corpus is kept there. Ray's own default is 30 % of the memory.
            object_store_memory=min(1 << 30, psutil.virtual_memory().available // 4),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config=SYSTEM_CONFIG,
        )
    if directory is not None:
        # Where Ray did not start, its logs stay.
        atexit.register(_remove_with_ray, directory, os.getpid())


def _short_directory() -> str | None:
    """A new directory for Ray's sockets; none if Ray's own, which `TMPDIR` or `RAY_TMPDIR` may
    name, is short enough.
    """
    if len(os.fsencode(os.path.abspath(get_default_ray_temp_dir()))) <= LONGEST_DIRECTORY:
        return None
    for parent in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix="headcount-ray-", dir=parent)
    raise RunError(
        f"{get_default_ray_temp_dir()}: too long for the names of Ray's sockets, expected at most "
        f"{LONGEST_DIRECTORY} bytes; set RAY_TMPDIR to a shorter directory that can be written, or "
        "--replicas 0 measures without Ray"
    )


def _remove_with_ray(directory: str, process: int) -> None:
    """End Ray, and remove the directory that it worked in."""
    # Ray itself would end only after this. A forked process has its parent's Ray.
    if os.getpid() == process:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _on_the_loopback() -> Iterator[None]:
    """Let the Ray that is started listen on the loopback alone, as it does where no other machine
    may join. On every network of this machine it would answer /metrics without the token.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        # This process may join a cluster later, whose address is not the loopback's.
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _within(seconds: float, directory: str | None) -> Iterator[None]:
    """Give up if Ray does not start in time: without a loopback device it would wait for ever."""

    class TooLong(BaseException):
        """Ray tries again after every `Exception`."""

    def give_up(number: int, frame: object) -> NoReturn:
        raise TooLong

    # Python takes signals in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TooLong:
        raise RunError(
            f"Ray on this machine did not start in {seconds:.0f} s; --replicas 0 measures without "
            f"it, and its logs are in {directory or get_default_ray_temp_dir()}/session_latest/logs"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


def _join(address: str) -> None:
    """Join a cluster that this machine belongs to, and send it our code."""
    if address.startswith(("ray://", "http://", "https://")):
        raise RunError(
            f"{address}: expected HOST:PORT of the cluster's head, on a machine of the cluster; "
            "from elsewhere use headcount submit --address http://HOST:8265"
        )
    # The replicas of a job have the code that the job was submitted with, and its cluster answers.
    if phases.JOB_VARIABLE in os.environ:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        # Ray would try for minutes and then end this process, so another process tries it first.
        # What fails in time is said better by Ray in this process.
        program = [sys.executable, "-P", "-c", JOINING, address]
        subprocess.run(program, timeout=JOIN_SECONDS, capture_output=True, check=False)
    except (OSError, OverflowError, ValueError, subprocess.TimeoutExpired) as error:
        problem = reason(error)
        if isinstance(error, subprocess.TimeoutExpired):
            problem = f"it takes connections, and has said nothing in {JOIN_SECONDS:.0f} s"
        raise RunError(
            f"{address}: no head of a Ray cluster answers there ({problem}); expected HOST:PORT of "
            "the cluster's head; the port is 6379 unless chosen otherwise"
        ) from None
    with staged_code() as code:
        ray.init(
            address=address,
            runtime_env={"working_dir": str(code)},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


def room_of_replica(resources: Resources) -> dict[str, int]:
    """What Ray keeps free for a replica, in its words."""
    on_gpu = resources.device == "cuda"
    cores = max(1, resources.cores) if on_gpu else resources.cores
    return {"num_cpus": cores, "num_gpus": int(on_gpu)}


def lack_of_room(resources: Resources) -> str | None:
    """What a replica needs that no machine of the cluster has; it may start one that has it."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most_cores = int(max((machine.get("CPU", 0) for machine in machines), default=0))
    if resources.device == "cuda" and not any(machine.get("GPU", 0) for machine in machines):
        return (
            f"{resources.replicas} GPUs wanted, one for each replica, and the cluster has none: "
            "waiting for a machine with one; if it never gets one, stop and use --device cpu"
        )
    if resources.cores > most_cores:
        return (
            f"each replica wants {resources.cores} cores, and no machine of the cluster has more "
            f"than {most_cores}: waiting for one; if it never gets one, stop and use --cores "
            f"{max(1, most_cores)}"
        )
    return None


@contextmanager
def ray_in_words(subject: str) -> Iterator[None]:
    """Say in one line that Ray gave up or is gone, and so ended `subject`."""
    is_over = threading.Event()
    threading.Thread(target=_watch_ray, args=[subject, is_over], daemon=True).start()
    try:
        yield
    except ray.exceptions.RayError as error:
        raise RunError(
            f"{subject}: Ray gave up ({last_line(str(error))}); the same command continues where "
            "it stopped"
        ) from None
    finally:
        is_over.set()


def _watch_ray(subject: str, is_over: threading.Event) -> None:
    """End this command if Ray is gone from this machine, or the cluster has no head any more.

    Ray would end it later, from a thread of its own and with its log instead of an error. A call of
    Ray waits for the head, so none is made here.
    """
    node: Any = global_worker.node
    head_host, _, head_port = node.gcs_address.rpartition(":")
    # A little sooner than Ray.
    patience = float(os.environ[RECONNECT]) - 5 if RECONNECT in os.environ else HEAD_SECONDS
    last_answer = time.monotonic()
    while not is_over.wait(WATCH_SECONDS):
        problem = None
        if not accepts_connections(node.node_ip_address, node.node_manager_port):
            problem = "Ray has ended on this machine"
        elif accepts_connections(head_host, head_port):
            last_answer = time.monotonic()
        elif time.monotonic() - last_answer > patience:
            problem = f"the cluster's head, {node.gcs_address}, is gone for {patience:.0f} s"
        if problem is not None and not is_over.is_set():
            # A command that has a Ray of its own starts it again by itself.
            first = "" if node.is_head() else "start the cluster again, and "
            advice = f"{first}the same command continues where it stopped"
            fail_at_once(f"{subject}: {problem}; {advice}", partial(phases.fail, problem))


def accepts_connections(host: str, port: int | str) -> bool:
    """Whether a process of Ray accepts connections."""
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def draining_nodes() -> set[str]:
    """The nodes that the cluster is about to lose, and that get no new actor."""
    return set(state.get_draining_nodes())


@contextmanager
def staged_code() -> Iterator[Path]:
    """A temporary directory with the project's code and nothing else, which Ray sends to nodes."""
    with tempfile.TemporaryDirectory(prefix="headcount-") as directory:
        code = Path(directory)
        shutil.copytree(PACKAGE, code / "headcount", ignore=shutil.ignore_patterns("__pycache__"))
        # The text of the input `bundled:LICENSE` lies beside the package.
        shutil.copy(located(BUNDLED_LICENSE), code)
        yield code


def hook_variables() -> dict[str, str]:
    """Variables of a job that make Ray call `make_interpreter_known` in each process of the job.

    What Ray documents, `worker_process_setup_hook`, reaches the driver's workers, and not the actor
    that starts the driver. This variable is how Ray itself passes it on.
    """
    return {ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR: SETUP_HOOK}


def last_line(text: str) -> str:
    """The last line of a message of Ray: it is the error, and above it are the stacks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    # Errors of ours explain themselves without the name of their class.
    message = re.sub(r"^headcount\.schemas\.errors\.\w+: ", "", lines[-1])
    return reason(RuntimeError(message))
