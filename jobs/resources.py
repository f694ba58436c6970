"""Where a scan is measured: on how many replicas, with which cores, device and cluster."""

import os
from dataclasses import dataclass
from typing import Literal

from headcount.schemas.errors import RunError, counted
from headcount.workers.memory import available_gpus

JOB_ADDRESS = "RAY_ADDRESS"  # variable that Ray sets in the processes of a job

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Resources:
    """Number, cores and device of the replicas, and the cluster that they run on."""

    replicas: int = 1  # actors, a model in each; 0 is one in this process, without Ray
    cores: int = 0  # of each replica; 0 divides this machine's, and is 1 on a cluster
    device: Device = "auto"  # auto means a GPU for each replica if Ray has as many, else CPU cores
    address: str | None = None
    """Address of a Ray cluster. None starts Ray on this machine, or joins the cluster that this job
    runs on.
    """
    ray_prepares: bool = False  # whether Ray prepares a large corpus even if this process measures

    @classmethod
    def asked_for(
        cls, replicas: int | None, cores: int, device: Device, address: str | None
    ) -> "Resources":
        """The resources of a command that may leave the number of replicas open.

        Then it is one on a cluster, and here one for each GPU. Without a GPU this process measures:
        one replica on Ray would do no more, and Ray takes seconds to start.
        """
        if replicas is not None:
            return cls(replicas, cores, device, address)
        if address or os.environ.get(JOB_ADDRESS):
            return cls(1, cores, device, address)
        return cls(0 if device == "cpu" else available_gpus(), cores, device, ray_prepares=True)

    def __post_init__(self) -> None:
        """Refuse a cluster for a replica in this process."""
        if self.address and not self.replicas:
            raise RunError(
                f"--replicas 0 measures in this process, --address {self.address} on a cluster; "
                "leave out one"
            )

    @property
    def on_cpu(self) -> bool:
        """Whether replicas surely compute on CPUs. Of a cluster, nobody knows before."""
        if self.device == "auto":
            return self.cluster is None and not available_gpus()
        return self.device == "cpu"

    @property
    def cluster(self) -> str | None:
        """Address of the cluster to join; none if Ray is started here, or not needed."""
        return self.address or (os.environ.get(JOB_ADDRESS) if self.replicas else None)

    @property
    def directory(self) -> str | None:
        """The directory from which relative names of files are meant, if others there have it."""
        return None if self.cluster else os.getcwd()

    def check_here(self) -> None:
        """Refuse GPUs that this machine does not have, before anything else takes time."""
        if self.device != "cuda" or self.cluster is not None:
            return
        gpus_wanted, gpus_here = max(1, self.replicas), available_gpus()
        if gpus_here < gpus_wanted:
            advice = f"--replicas {gpus_here}, or " if gpus_here else ""
            raise RunError(
                f"--device cuda: {counted(gpus_wanted, 'GPU')} wanted, one for each replica, and "
                f"this machine has {gpus_here or 'none'}; {advice}--device cpu needs none"
            )
