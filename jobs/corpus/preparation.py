"""Prepare the tokens of a corpus as far as a scan needs them, on the cluster or in this process.

The portions that the token store has are taken as they are. The others are prepared in the order of
the corpus until there is enough, by Ray tasks or here. A portion is there if its file is, so nobody
who prepares a corpus need hear of others that do, and a task returns nothing: what it committed
lies in the store.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from rich.console import Console

from headcount.jobs import phases
from headcount.jobs.bars import Show, bar
from headcount.jobs.console import duration, say
from headcount.jobs.job_state import StateTeller
from headcount.jobs.metrics import TOKENS_PREPARED, node_name
from headcount.schemas.errors import HeadcountError, RunError, counted, printable
from headcount.schemas.object_stores import wait_for_store
from headcount.schemas.places import Place, absolute, place
from headcount.schemas.reasons import reason
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.corpus.documents import content_bytes_of
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.extents import Extent, extents_of
from headcount.workers.inputs.store.preparation import (
    PORTION_LETTERS,
    damaged_portions,
    is_whole,
    prepare_extent,
    use_cores,
)
from headcount.workers.inputs.store.token_store import Portion, TokenStore, open_portion
from headcount.workers.model.info.text_tokenizer import TextTokenizer
from headcount.workers.provenance.code_fingerprint import Code, check_code, read_code

if TYPE_CHECKING:
    import ray

    from headcount.jobs.resources import Resources

FOLDER = "corpora"  # directory of the token stores, beside the runs

LEAST_BYTES_ON_RAY = 1 << 24
"""Fewer bytes of text are prepared in this process: that takes 10 s on a core, and Ray's processes
several to start.
"""

LETTERS_PER_TOKEN = 4  # about how long a token is
TASK_MEMORY = 1 << 30  # bytes of memory that a task asks Ray for
DEATHS = 3  # how often the task of one extent may die
NAMED_SPECIAL_TOKENS = 3  # special tokens in texts that a line names, with their numbers of texts
LOOK_SECONDS = 5.0  # time between two looks at what is committed, if no task ends
NO_NEWS = "no news of the tokens yet: all cores are taken"
STARTING_NOTICE = 30.0  # seconds without a new portion after which a line says why nothing happens


def corpora_of(scan: Scan) -> Place:
    """The directory that holds the token stores of a scan's corpus."""
    if scan.corpora is not None:
        return absolute(place(scan.corpora))
    return absolute(place(scan.out) / FOLDER)


SILENT = Console(quiet=True)


@dataclass(frozen=True)
class Preparation:
    """How the tokens of a corpus are made ready: where, and who is told."""

    resources: Resources | None = None  # Ray prepares a large corpus if these say so
    console: Console = SILENT  # shows how far it is
    verify: bool = False  # whether portions that are there are compared with the texts first
    ray_bytes: int = LEAST_BYTES_ON_RAY  # what is smaller is prepared here in any case

    def prepared(self, sequences: Sequences, corpora: Place) -> SequenceIndex:
        """Prepare what the token store lacks for some sequences; returns their index."""
        with bar(self.console, "preparing tokens", "preparing tokens: ") as show:
            return self._prepared(CorpusWork(sequences, corpora, show))

    def _prepared(self, work: CorpusWork) -> SequenceIndex:
        tell = partial(say, self.console)
        if self.verify:
            # The extents whose portions are in the index.
            damages: dict[Portion, str] = {}
            for extent in work.extents[: work.frontier + 1]:
                damages |= damaged_portions(work.store, extent)
            for problem in damages.values():
                tell(problem)
            if damages:
                tell(f"{counted(len(damages), 'portion')} differed and will be prepared again")
                work.store.forget(damages)
                work.start_again()
        if not work.is_done:
            work.store.create()
            work.show()
            resources = self.resources
            bytes_missing = sum(extent.bytes for extent in work.missing())
            is_large = min(bytes_missing, work.letters_wanted()) >= self.ray_bytes
            if is_large and resources and (resources.replicas or resources.ray_prepares):
                prepare_on_ray(work, resources, tell)
            else:
                prepare_here(work)
            if not work.is_done:
                raise RunError(
                    f"{work.store.folder}: somebody deletes portions while they are prepared; run "
                    "the same command again"
                )
        return work.index.ended()


HERE = Preparation()  # prepare in this process, and show nothing
_content_bytes = lru_cache(content_bytes_of)  # a sample of a compressed file is read once


class CorpusWork:
    """What is there of a corpus, up to the first missing portion, and what is to be prepared."""

    def __init__(
        self,
        sequences: Sequences,
        corpora: Place,
        show: Show | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert sequences.corpus is not None
        self.sequences = sequences
        self.clock = clock
        self.show_words = show
        self.store = sequences.store(corpora)
        self.extents = extents_of(sequences.corpus.sources)
        self.total_bytes = sum(extent.bytes for extent in self.extents)
        self.began = clock()
        self.start_again()
        self.tokens_before = self.index.tokens  # tokens that earlier preparations left

    def start_again(self) -> None:
        """Add what the store has, from the beginning of the corpus on."""
        self.index = self.sequences.new_index(self.store)
        self.frontier = 0  # the first extent that is not in the index with all portions
        self.added = 0  # portions of that extent that are in the index
        self.portions = self.store.portions()  # committed ones by extent's key and number
        self._add_in_order()

    def look(self, committed: Portion | None = None) -> None:
        """Take in a portion that was committed now, or all that are in the store."""
        if committed is None:
            self.portions = self.store.portions()
        else:
            self.portions[committed.extent][committed.number] = committed
        tokens_before = self.index.tokens
        self._add_in_order()
        TOKENS_PREPARED.tell(self.index.tokens - tokens_before, node=node_name())
        self.show()

    def _add_in_order(self) -> None:
        while not self.is_done:
            extent = self.extents[self.frontier]
            portion = self.portions[extent.key].get(self.added)
            if portion is None:
                return
            self.index.add(extent.first_source, portion)
            self.added += 1
            if portion.is_last:
                self.frontier += 1
                self.added = 0

    @property
    def is_done(self) -> bool:
        """Whether the index has all that the scan needs, or so many bad rows that it ends."""
        return self.index.may_stop or self.frontier == len(self.extents)

    def missing(self) -> list[Extent]:
        """The extents that are not prepared to their ends, from the frontier on."""
        return [e for e in self.extents[self.frontier :] if not is_whole(self.portions[e.key])]

    def letters_wanted(self) -> float:
        """About how many letters of text the scan still needs, if it takes every document."""
        index = self.index
        if index.enough is None or index.corpus.is_read_whole:
            return math.inf
        return (index.enough - len(index)) * index.length * LETTERS_PER_TOKEN

    def covered_bytes(self) -> float:
        """About how many stored bytes the portions in the index are made of."""
        covered = float(sum(extent.bytes for extent in self.extents[: self.frontier]))
        if self.added:
            extent = self.extents[self.frontier]
            documents = open_portion(self.store, self.index.portions[-1]).documents()
            # The offset counts bytes of lines, and rows of other sources, which are fewer than
            # their letters.
            last_offset = documents["offset"][-1].as_py() - extent.start
            content = max(self.added * PORTION_LETTERS, last_offset)
            stored = _content_bytes(extent.sources[0].path, extent.bytes)
            covered += extent.bytes * min(1.0, content / max(1, stored))
        return covered

    def show(self) -> None:
        """Tell how far the preparation is, what was there before included."""
        index = self.index
        share = None
        if index.enough is not None and not index.corpus.is_read_whole:
            share = min(1.0, len(index) / index.enough)
        elif self.total_bytes:
            share = self.covered_bytes() / self.total_bytes
        parts = amounts(index)
        if share is not None:
            parts.append(f"{share:.0%}")
        if prepared := index.tokens - self.tokens_before:
            speed = prepared / (self.clock() - self.began)
            parts.append(f"{speed:,.0f} tokens/s")
            if share:
                parts.append(f"{duration(index.tokens * (1 - share) / share / speed)} left")
        phases.note("preparing tokens", ", ".join(parts))
        if self.show_words is not None:
            self.show_words(", ".join(parts), share)


def amounts(index: SequenceIndex) -> list[str]:
    """What an index of a corpus holds, in words."""
    bad = [counted(index.bad, "bad row")] if index.bad else []
    return [counted(index.documents, "document"), counted(index.tokens, "token"), *bad]


def special_tokens_line(index: SequenceIndex) -> str | None:
    """What becomes of special tokens that texts spell out; None if none does."""
    counts = index.spelled_out.most_common(NAMED_SPECIAL_TOKENS)
    if not counts:
        return None
    named = ", ".join(f"{printable(token)} in {count:,}" for token, count in counts)
    more = ", …" if len(index.spelled_out) > len(counts) else ""
    return (
        f"Texts spell out special tokens, which stay text ({named}{more}); Hugging Face's own "
        "tokenizers make tokens of them."
    )


def prepare_here(work: CorpusWork, most: int | None = None) -> None:
    """Prepare portions until there is enough, `most` at most; the tokenizer takes all cores."""
    prepared = 0
    for extent in work.missing():
        for portion in prepare_extent(work.store, extent, work.sequences.tokenizer):
            work.look(portion)
            prepared += 1
            if work.is_done or prepared == most:
                return
        if not is_whole(work.portions[extent.key]):
            # Somebody else has prepared a part of it meanwhile.
            work.look()


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
        check_code(code)
        if tokenizer.library != store.library:
            raise RunError(
                f"this node has {tokenizer.library}, and the driver {store.library}; install the "
                "same version"
            )
        # Other tasks have the other cores.
        use_cores(cores)
        # A task that starts while a store stands still must not end the run.
        for where in (store.folder, *(place(source.path) for source in extent.sources)):
            wait_for_store(where)
        for _ in prepare_extent(store, extent, tokenizer):
            pass
    except HeadcountError as error:
        return error
    except Exception as error:
        # Without this, Ray would try again what fails everywhere.
        return RunError(f"{extent.sources[0].name}: cannot be prepared ({reason(error)})")
    return None


def prepare_on_ray(work: CorpusWork, resources: Resources, tell: Callable[[str], None]) -> None:
    """Prepare missing extents, in order, until there is enough; Ray repeats those of dead nodes."""
    # Ray takes a second to import, and most commands that prepare nothing do without.
    import ray

    from headcount.jobs.cluster.ray_cluster import connect, lack_of_room, ray_in_words

    state = StateTeller(tell)
    is_for_replicas = resources.replicas > 0
    resources = connect(replace(resources, replicas=max(1, resources.replicas)))
    code, directory = read_code(), resources.directory
    tokenizer = ray.put(work.sequences.tokenizer)
    waiting = deque(work.missing())
    extents = len(waiting)
    running: dict[ray.ObjectRef[HeadcountError | None], Extent] = {}
    last_news = time.monotonic()

    def start_tasks() -> None:
        nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        cores = max(1, int(sum(nodes)))
        # No more tasks than the scan probably needs. A file that is read from its beginning is one
        # task, which then has several cores.
        tasks = min(extents, 1 + work.letters_wanted() // PORTION_LETTERS)
        cores_of_task = max(1, min(int(cores // tasks), int(max(nodes, default=1))))
        # As many again wait, so that a cluster sees that it may grow.
        while waiting and len(running) < min(tasks, 2 * cores // cores_of_task):
            extent = waiting.popleft()
            task = ray.remote(prepare_on_node).options(
                num_cpus=cores_of_task,
                memory=TASK_MEMORY,
                scheduling_strategy="SPREAD",
                max_retries=DEATHS - 1,
            )
            arguments = (code, directory, work.store, extent, tokenizer, cores_of_task)
            running[task.remote(*arguments)] = extent

    try:
        with ray_in_words("the preparation of the corpus"):
            while (waiting or running) and not work.is_done:
                start_tasks()
                ended, _ = ray.wait(list(running), num_returns=1, timeout=LOOK_SECONDS)
                for reference in ended:
                    _check_end(reference, running.pop(reference))
                documents_before = work.index.documents
                work.look()
                if ended or work.index.documents > documents_before:
                    last_news = time.monotonic()
                if time.monotonic() - last_news > STARTING_NOTICE:
                    if lack := lack_of_room(replace(resources, device="cpu", cores=1)):
                        state.tell("short of machines", lack)
                    else:
                        state.tell("without replicas", NO_NEWS)
                    last_news = time.monotonic()
    finally:
        # What the tasks that are left have committed stays.
        for reference in running:
            ray.cancel(reference, force=True)
        if not is_for_replicas:
            # This process will measure, and then has all cores and all memory.
            ray.shutdown()


def _check_end(reference: ray.ObjectRef[HeadcountError | None], extent: Extent) -> None:
    """Raise what kept a task from its end."""
    import ray.exceptions

    from headcount.jobs.cluster.ray_cluster import last_line

    try:
        error = ray.get(reference)
    except ray.exceptions.RayError as death:
        raise RunError(
            f"{printable(extent.sources[0].name)}: its task died {DEATHS} times "
            f"({last_line(str(death))}); what it has prepared stays, and the same command continues"
        ) from None
    if error is not None:
        raise error
