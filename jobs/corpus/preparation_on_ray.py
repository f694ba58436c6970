"""Prepare extents of a corpus in Ray tasks, on whatever nodes the cluster has.

A task commits portions and returns nothing: what is committed lies in the store. Ray gives a task
that dies with its node to another one, which goes on behind the portions that are there.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import ray
import ray.exceptions

from headcount.jobs.cluster.ray_cluster import connect, lack_of_room, last_line
from headcount.jobs.corpus.work import CorpusWork
from headcount.jobs.resources import Resources
from headcount.schemas.errors import HeadcountError, RunError, printable
from headcount.schemas.files.places import reason
from headcount.workers.inputs.store.extents import Extent
from headcount.workers.inputs.store.preparation import PORTION_LETTERS, prepare_extent, use_cores
from headcount.workers.inputs.store.token_store import TokenStore
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from headcount.workers.provenance.code_fingerprint import (
    Code,
    code_fingerprint,
    learn_fingerprint,
    read_code,
)

TASK_MEMORY = 1 << 30
"""Bytes of memory that a task asks Ray for."""

DEATHS = 3
"""How often the task of one extent may die."""

LOOK_SECONDS = 5.0
"""Pause between two looks at what is committed."""

STARTING_NOTICE = 30.0
"""Seconds without a new portion after which a line says why nothing happens."""


@ray.remote
def prepare_on_node(
    code: Code,
    directory: str | None,
    store: TokenStore,
    extent: Extent,
    tokenizer: TextTokenizer,
    cores: int,
) -> HeadcountError | None:
    """Prepare an extent; returns why it cannot be prepared, on this node or any other.

    `code` and `directory` are the driver's; names of files are meant from its directory, if it is
    on this machine. Other code and another library may tokenise otherwise.
    """
    try:
        if directory is not None:
            os.chdir(directory)
        learn_fingerprint(code)
        local_code = code_fingerprint()
        if local_code != code.fingerprint:
            raise RunError(
                f"this node runs code {local_code}, the driver {code.fingerprint}; remove the copy "
                "of headcount that is installed there"
            )
        if tokenizer.library != store.library:
            raise RunError(
                f"this node has {tokenizer.library}, and the driver {store.library}; install the "
                "same version"
            )
        # Other tasks have the other cores.
        use_cores(cores)
        for _ in prepare_extent(store, extent, tokenizer):
            pass
    except HeadcountError as error:
        return error
    except Exception as error:
        # Without this, Ray would try again what fails everywhere.
        return RunError(f"{extent.sources[0].name}: cannot be prepared ({reason(error)})")
    return None


def prepare_on_ray(work: CorpusWork, resources: Resources, tell: Callable[[str], None]) -> None:
    """Prepare the extents that are missing, in their order, until there is enough."""
    is_for_replicas = resources.replicas > 0
    resources = connect(replace(resources, replicas=max(1, resources.replicas)))
    # Names of files may be relative to this directory; another machine does not have it.
    directory = None if resources.cluster else os.getcwd()
    code = read_code()
    tokenizer = ray.put(work.sequences.tokenizer)
    waiting = deque(work.missing())
    extents = len(waiting)
    running: dict[ray.ObjectRef[HeadcountError | None], Extent] = {}
    last_look = last_news = time.monotonic()
    try:
        while (waiting or running) and not work.is_done:
            nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
            cores = max(1, int(sum(nodes)))
            # No more tasks than the scan probably needs. A file that is read from its beginning is
            # one task, which then has several cores.
            tasks = min(extents, 1 + work.letters_wanted() // PORTION_LETTERS)
            cores_of_task = max(1, min(int(cores // tasks), int(max(nodes, default=1))))
            # As many again wait, so that a cluster sees that it may grow.
            while waiting and len(running) < min(tasks, 2 * cores // cores_of_task):
                extent = waiting.popleft()
                task = prepare_on_node.options(
                    num_cpus=cores_of_task,
                    memory=TASK_MEMORY,
                    scheduling_strategy="SPREAD",
                    max_retries=DEATHS - 1,
                )
                reference = task.remote(
                    code, directory, work.store, extent, tokenizer, cores_of_task
                )
                running[reference] = extent
            ended, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for reference in ended:
                _check_end(reference, running.pop(reference))
            if ended or time.monotonic() - last_look > LOOK_SECONDS:
                before = work.index.documents
                work.look()
                last_look = time.monotonic()
                if ended or work.index.documents > before:
                    last_news = last_look
            if time.monotonic() - last_news > STARTING_NOTICE:
                lack = lack_of_room(replace(resources, device="cpu", cores=1))
                tell(lack or "no news of the tokens yet: all cores are taken")
                last_news = time.monotonic()
    except ray.exceptions.RayError as error:
        raise RunError(
            f"the preparation of the corpus: Ray gave up ({last_line(str(error))}); the same "
            "command continues where it stopped"
        ) from None
    finally:
        # What the tasks that are left have committed stays.
        for reference in running:
            ray.cancel(reference, force=True)
        if not is_for_replicas:
            # This process will measure, and then has all cores and all memory.
            ray.shutdown()


def _check_end(reference: ray.ObjectRef[HeadcountError | None], extent: Extent) -> None:
    """Raise what kept a task from its end."""
    try:
        error = ray.get(reference)
    except ray.exceptions.RayError as death:
        raise RunError(
            f"{printable(extent.sources[0].name)}: its task died {DEATHS} times "
            f"({last_line(str(death))}); what it has prepared stays, and the same command continues"
        ) from None
    if error is not None:
        raise error
