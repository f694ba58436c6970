"""Groups of shards, merged in several processes of this machine."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice

from headcount.jobs.upkeep.merged_files import Group, Merged, merge_group, merged_here
from headcount.schemas.errors import RunError

AHEAD = 2
"""Groups that are handed out for each core, so that none waits for the next one."""


PROCESS_BYTES = 1e9
"""Memory that a process needs for a group of two million rows of GPT-2's statistics."""


def merged_by_processes(processes: int, groups: Iterable[Group]) -> Iterator[Merged]:
    """Merge groups in processes of this machine; 0 means as many as it has cores and memory for."""
    remaining = iter(groups)
    first_groups = list(islice(remaining, 2))
    if len(first_groups) < 2:
        # Most runs have one group, and then no process is worth its start.
        processes = 1
    elif not processes:
        # This imports torch, which takes seconds.
        from headcount.workers.memory import available_cores, total_memory

        # Half of the memory is left to whatever else runs here.
        with_memory = int(total_memory() / 2 / PROCESS_BYTES)
        processes = max(1, min(available_cores(), with_memory))
    all_groups = chain(first_groups, remaining)
    if processes == 1:
        yield from merged_here(all_groups)
        return
    # A forked process would have this one's locks, but not the threads that release them.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_belong_to_parent) as pool:
        try:
            submit = partial(pool.submit, merge_group)
            yield from as_completed(submit, all_groups, AHEAD * processes)
        except BrokenProcessPool:
            raise RunError(
                "a process that merged files died, perhaps for lack of memory: each takes about "
                f"{PROCESS_BYTES / 1e9:.0f} GB; the same command continues, and --processes 1 "
                "takes least"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def as_completed(
    submit: Callable[[Group], Future[Merged]], groups: Iterable[Group], most: int
) -> Iterator[Merged]:
    """The results as they arrive, with at most `most` groups handed out."""
    remaining = iter(groups)
    pending = {submit(group) for group in islice(remaining, most)}
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        pending |= {submit(group) for group in islice(remaining, len(done))}
        for future in done:
            yield future.result()


def _belong_to_parent() -> None:
    """End this process when the one that started it ends, however that ends."""
    # Ctrl-C goes to all processes of a terminal. The parent hears it and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_end() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    # Without this a process whose parent was killed would wait for work for ever.
    threading.Thread(target=wait_for_end, daemon=True).start()
