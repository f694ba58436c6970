"""Groups of shards, merged on the cores of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import ray
import ray.exceptions

from headcount.jobs.cluster.ray_cluster import connect, last_line
from headcount.jobs.resources import Resources
from headcount.jobs.upkeep.merge_processes import AHEAD, as_completed
from headcount.jobs.upkeep.merged_files import Group, Merged, merge_group
from headcount.schemas.errors import RunError

TASK_RETRIES = 3
"""How often Ray tries a group again whose process or node died."""


def merged_by_tasks(address: str, groups: Iterable[Group]) -> Iterator[Merged]:
    """Merge groups on the cores of a Ray cluster."""
    connect(Resources(address=address))
    cores = int(ray.cluster_resources().get("CPU", 1))
    task = ray.remote(num_cpus=1, max_retries=TASK_RETRIES, scheduling_strategy="SPREAD")(
        merge_group
    )
    try:
        yield from as_completed(
            lambda group: task.remote(group).future(), groups, AHEAD * max(1, cores)
        )
    except ray.exceptions.RayError as error:
        raise RunError(
            f"{address}: Ray gave up ({last_line(str(error))}); the same command continues"
        ) from None
