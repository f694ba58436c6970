"""Ray on this machine, or a cluster that is already there. What goes wrong is one line."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil
import ray
import ray.exceptions

from schemas.errors import RunError
from schemas.places import reason
from workers.memory import available_cores

ROOT = Path(__file__).parent.parent
CODE = ("headcount.py", "schemas", "workers", "jobs", "queries", "reproduce", "models")
"""What a node needs of this project. A job starts `headcount.py`, which imports every room for its
commands, so `queries` and `reproduce` are sent too; together they are 0.4 MB of 6.
"""

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Resources:
    """What the replicas get."""

    replicas: int = 1
    """Models in actors of their own; 0 means one in this process, without Ray."""
    cores: int = 0
    """Cores of each replica; 0 shares out this machine's, and means 1 on a cluster."""
    device: Device = "auto"
    """auto: a GPU for each replica where Ray has as many, else CPU cores."""
    address: str | None = None
    """Of a Ray cluster. None starts Ray on this machine, or joins the cluster that this job runs
    on.
    """

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.address and not self.replicas:
            raise RunError(
                f"--replicas 0 measures in this process, --address {self.address} on a cluster; "
                "leave out one"
            )


def connect(resources: Resources) -> Resources:
    """Start Ray here or join a cluster; returns the resources with cores and device filled in."""
    address = resources.address or os.environ.get("RAY_ADDRESS")
    shared = max(1, available_cores() // resources.replicas)
    cores = resources.cores or (1 if address else shared)
    if not ray.is_initialized():
        # Ray's C++ core reports on stderr what happens by design. Fatal errors stay: that the
        # cluster's head died is said there, and ends this process.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
        with explained(address or "Ray on this machine"):
            _join(address) if address else _start(resources.replicas * cores)
    device = resources.device
    if device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU", 0) >= resources.replicas else "cpu"
    return replace(resources, cores=cores, device=device)


def _start(cores: int) -> None:
    # Ray would run the replicas at nice 15, behind everything else that wants a core. But the scan
    # is what this command was started for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",  # A cluster of its own, whatever else runs on this machine.
        num_cpus=cores,
        object_store_memory=min(1 << 30, psutil.virtual_memory().available // 4),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _join(address: str) -> None:
    if address.startswith(("ray://", "http://", "https://")):
        raise RunError(
            f"{address}: expected HOST:PORT of the cluster's head, on a machine of the cluster; "
            "from elsewhere use headcount submit --address http://HOST:8265"
        )
    with staged_code() as code:
        # A job's replicas have the code that the job was submitted with. Any other driver sends its
        # own.
        in_a_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        runtime_env = None if in_a_job else {"working_dir": str(code)}
        ray.init(
            address=address,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@contextmanager
def staged_code() -> Iterator[Path]:
    """A temporary directory with the project's code and nothing else, for Ray to send to the nodes."""
    with tempfile.TemporaryDirectory(prefix="headcount-") as directory:
        for name in CODE:
            source = ROOT / name
            target = Path(directory) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        yield Path(directory)


@contextmanager
def explained(cluster: str) -> Iterator[None]:
    """Turn what Ray raises if a cluster cannot be used into one line."""
    try:
        yield
    except ray.exceptions.AuthenticationError as error:
        raise RunError(
            f"{cluster}: the cluster refused the token ({reason(error)}); put its token into "
            "RAY_AUTH_TOKEN, or its file into RAY_AUTH_TOKEN_PATH"
        ) from None
    except (
        ConnectionError,
        TimeoutError,
        ray.exceptions.RayError,
        RuntimeError,
        ValueError,
    ) as error:
        raise RunError(f"{cluster}: no cluster that can be used ({reason(error)})") from None


def last_line(text: str) -> str:
    """The last line of what Ray says. It is what went wrong; above it are the stacks."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    message = re.sub(r"^schemas\.errors\.\w+: ", "", lines[-1])
    return reason(RuntimeError(message))
