"""Prepare portions of a corpus in Ray tasks, one core each, on whatever nodes the cluster has.

A task that dies with its node is given out again, and goes on behind the pieces that it committed.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray
import ray.exceptions

from headcount.jobs.cluster.ray_cluster import connect, lack_of_room, last_line
from headcount.jobs.corpus.preparation_task import (
    Node,
    PortionNews,
    prepare_on_node,
    verify_on_node,
)
from headcount.jobs.corpus.work import CorpusWork, Order
from headcount.jobs.resources import Resources
from headcount.schemas.errors import RunError, printable
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.provenance.code_fingerprint import read_code

TASK_MEMORY = 1 << 30
"""Bytes of memory that a task asks Ray for."""

ATTEMPTS = 3
"""How often tasks of one portion may die one after the other, without a new piece."""

TASKS_PER_CORE = 2
"""Tasks that Ray has for each core, so that none waits and a cluster sees that it may grow."""

STARTING_NOTICE = 30.0
"""Seconds without any news after which a line says why nothing happens."""


class OnRay:
    """Prepares portions in as many Ray tasks at once as the cluster has cores."""

    def __init__(self, work: CorpusWork, resources: Resources, tell: Callable[[str], None]) -> None:
        self.work = work
        self.tell = tell
        self.is_for_replicas = resources.replicas > 0
        self.resources = connect(replace(resources, replicas=max(1, resources.replicas)))
        # Names of files may be relative to this directory; another machine does not have it.
        directory = None if resources.cluster else os.getcwd()
        self.node = Node(read_code(), directory)
        self.tokenizer = ray.put(work.sequences.tokenizer)
        self.waiting: deque[Order] = deque()
        self.running: dict[ray.ObjectRefGenerator, Order] = {}
        """The order of each task, by the stream of its news."""
        self.deaths: Counter[int] = Counter()
        """Tasks that died one after the other, by number of the portion."""

    def prepare(self, orders: Sequence[Order]) -> None:
        """Prepare portions, until they are done or the work is."""
        self.waiting = deque(orders)
        last_news = time.monotonic()
        try:
            while (self.waiting or self.running) and not self.work.is_done:
                self._fill()
                # A second at most: a cluster that grows gets more tasks, and silence is noticed.
                arrived, _ = ray.wait(list(self.running), num_returns=1, timeout=1.0)
                for stream in arrived:
                    self._hear(stream)
                if arrived:
                    last_news = time.monotonic()
                elif time.monotonic() - last_news > STARTING_NOTICE:
                    lack = lack_of_room(replace(self.resources, device="cpu", cores=1))
                    self.tell(lack or "no news of the tokens yet: all cores are taken")
                    last_news = time.monotonic()
        except ray.exceptions.RayError as error:
            raise RunError(
                f"the preparation of the corpus: Ray gave up ({last_line(str(error))}); the same "
                "command continues where it stopped"
            ) from None
        finally:
            # What the tasks that are left have committed stays.
            for stream in self.running:
                ray.cancel(stream, force=True)
            self.running = {}
            self._leave()

    def verify(self, portions: Sequence[Portion]) -> list[list[str]]:
        """What differs between the pieces of each portion and its texts."""
        task = verify_on_node.options(num_cpus=1, memory=TASK_MEMORY, scheduling_strategy="SPREAD")
        references = [task.remote(self.node, self.work.store, portion) for portion in portions]
        try:
            return ray.get(references)
        except ray.exceptions.RayError as error:
            for reference in references:
                ray.cancel(reference, force=True)
            raise RunError(
                f"the corpus cannot be verified ({last_line(str(error))}); the same command tries "
                "again"
            ) from None
        finally:
            self._leave()

    def _fill(self) -> None:
        """Start tasks, as many as the cluster can run soon."""
        cores = int(ray.cluster_resources().get("CPU", 0))
        while self.waiting and len(self.running) < TASKS_PER_CORE * max(1, cores):
            order = self.waiting.popleft()
            task = prepare_on_node.options(
                num_cpus=1,
                memory=TASK_MEMORY,
                num_returns="streaming",
                scheduling_strategy="SPREAD",
                # A stream cannot begin again, so a task that died is started again here.
                max_retries=0,
            )
            stream = task.remote(
                self.node,
                self.work.store,
                self.work.portions[order.number],
                self.tokenizer,
                order.most_tokens,
            )
            self.running[stream] = order

    def _hear(self, stream: ray.ObjectRefGenerator) -> None:
        """Take in the next message of a task, or its death."""
        order = self.running[stream]
        try:
            reference: ray.ObjectRef[PortionNews] = next(stream)
            news = ray.get(reference)
        # A stream that ends without a last message is one whose task died.
        except (ray.exceptions.RayError, StopIteration) as error:
            del self.running[stream]
            self._start_again(order, error)
            return
        if news.error is not None:
            raise news.error
        if news.progress is not None:
            self.work.note_progress(order.number, news.progress)
        else:
            del self.running[stream]
            self.work.finish(order.number)

    def _start_again(self, order: Order, error: Exception) -> None:
        """Order a portion again whose task died; give up if it dies again and again."""
        number = order.number
        pieces_before = len(self.work.pieces.get(number, []))
        self.work.finish(number)
        has_new_piece = len(self.work.pieces[number]) > pieces_before
        # A machine that was taken back says nothing about the portion.
        is_preempted = getattr(error, "preempted", False)
        if not is_preempted:
            self.deaths[number] = 1 if has_new_piece else self.deaths[number] + 1
        if self.deaths[number] >= ATTEMPTS:
            name = printable(self.work.portions[number].sources[0].name)
            raise RunError(
                f"{name}: its task died {ATTEMPTS} times ({last_line(str(error))}); what it has "
                "prepared stays, and the same command continues"
            )
        self.waiting.appendleft(order)

    def _leave(self) -> None:
        """End Ray if this process will measure, which then has all cores and all memory."""
        if not self.is_for_replicas:
            ray.shutdown()
