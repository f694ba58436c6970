"""Groups of shards, merged in processes of this machine or on the cores of a Ray cluster."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice

from headcount.jobs.upkeep.merged_files import (
    Group,
    Merged,
    MergeGroups,
    merge_group,
    merged_here,
)
from headcount.schemas.errors import RunError

PROCESS_BYTES = 1e9  # memory of a process, for two million rows of GPT-2's statistics


def merging(processes: int, address: str | None) -> MergeGroups:
    """How a compaction merges: in processes of this machine, or on a cluster."""
    if address is not None:
        return partial(merged_by_tasks, address)
    return partial(merged_by_processes, processes)


def merged_by_processes(processes: int, groups: Iterable[Group]) -> Iterator[Merged]:
    """Merge groups in processes of this machine; 0 means as many as it has cores and memory for."""
    if not processes:
        # This imports torch, which takes seconds.
        from headcount.workers.memory import available_cores, total_memory

        # Half of the memory is left to whatever else runs here.
        with_memory = int(total_memory() / 2 / PROCESS_BYTES)
        processes = max(1, min(available_cores(), with_memory))
    if processes == 1:
        yield from merged_here(groups)
        return
    # A forked process would have this one's locks, but not the threads that release them.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_belong_to_parent) as pool:
        try:
            yield from _as_completed(partial(pool.submit, merge_group), groups, processes)
        except BrokenProcessPool:
            raise RunError(
                "a process that merged files died, perhaps for lack of memory: each takes about "
                f"{PROCESS_BYTES / 1e9:.0f} GB; the same command continues, and --processes 1 "
                "takes least"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def merged_by_tasks(address: str, groups: Iterable[Group]) -> Iterator[Merged]:
    """Merge groups on the cores of a Ray cluster."""
    # Ray takes a second to import.
    import ray

    from headcount.jobs.cluster.ray_cluster import connect, ray_in_words
    from headcount.jobs.resources import Resources

    connect(Resources(address=address))
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    task = ray.remote(max_retries=3, scheduling_strategy="SPREAD")(merge_group)
    with ray_in_words(address):
        yield from _as_completed(lambda group: task.remote(group).future(), groups, cores)


def _as_completed(
    submit: Callable[[Group], Future[Merged]], groups: Iterable[Group], cores: int
) -> Iterator[Merged]:
    """The results as they arrive. Two groups are handed out for each core, so that none waits."""
    remaining = iter(groups)
    pending = {submit(group) for group in islice(remaining, 2 * cores)}
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        pending |= {submit(group) for group in islice(remaining, len(done))}
        for future in done:
            yield future.result()


def _belong_to_parent() -> None:
    """End this process when the one that started it ends, however that ends."""
    # Ctrl-C goes to all processes of a terminal. The parent hears it and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    # Without this a process whose parent was killed would wait for work for ever.
    threading.Thread(target=end_with_parent, daemon=True).start()
