"""Prepare the tokens of a corpus as far as a scan needs them, on the cluster or in this process.

The pieces that the token store has are taken as they are. What is missing is prepared in the order
of the corpus, by Ray tasks of one core each, or here. Every piece is committed by itself, so a
preparation that was killed goes on where it stopped, and so does one that lost a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headcount.jobs.corpus.work import CorpusWork, Order, Watch, unwatched
from headcount.schemas.errors import CorpusError, counted
from headcount.schemas.files.places import Place, absolute, place
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.inputs.store.preparation import prepare_portion
from headcount.workers.inputs.store.token_store import Piece, TokenStore, forget, read_documents
from headcount.workers.inputs.store.verification import verify_portion

if TYPE_CHECKING:
    from headcount.jobs.resources import Resources

FOLDER = "corpora"
"""Directory of the token stores, beside the runs."""

LEAST_TOKENS_ON_RAY = 1 << 22
"""Fewer tokens are prepared in this process: it takes 10 s on a core, and Ray's processes several
to start.
"""

Tell = Callable[[str], None]
"""Is called with a line for the user."""


def corpora_of(scan: Scan) -> Place:
    """The directory that holds the token stores of a scan's corpus."""
    if scan.corpora is not None:
        return absolute(place(scan.corpora))
    return absolute(place(scan.out) / FOLDER)


def _untold(line: str) -> None:
    """Tell a line to nobody."""


class _Runner(Protocol):
    """Where portions are prepared."""

    def prepare(self, orders: Sequence[Order]) -> None:
        """Prepare portions, until they are done or the work is."""
        ...

    def verify(self, portions: Sequence[Portion]) -> list[list[str]]:
        """What differs between the pieces of each portion and its texts."""
        ...


class _InThisProcess:
    """Prepares one portion after the other; the tokenizer takes all cores."""

    def __init__(self, work: CorpusWork) -> None:
        self.work = work

    def prepare(self, orders: Sequence[Order]) -> None:
        work = self.work
        for order in orders:
            prepare_portion(
                work.store,
                work.portions[order.number],
                work.sequences.tokenizer,
                order.most_tokens,
                lambda progress, number=order.number: work.note_progress(number, progress),
            )
            work.finish(order.number)
            if work.is_done:
                return

    def verify(self, portions: Sequence[Portion]) -> list[list[str]]:
        return [verify_portion(self.work.store, portion) for portion in portions]


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus whose tokens are ready, as far as a scan needs them."""

    index: SequenceIndex
    portions: list[Portion]
    """All portions of the corpus, as they were listed."""
    changed_texts: frozenset[str] = frozenset()
    """Keys of portions whose texts were others than their pieces said, when they were verified."""


@dataclass(frozen=True)
class Preparation:
    """How the tokens of a corpus are made ready: where, and who is told."""

    resources: Resources | None = None
    """Ray tasks prepare a large corpus if these have replicas or `ray_prepares`."""
    watch: Watch = unwatched
    verify: bool = False
    """Whether pieces that are there are compared with the texts first."""
    tell: Tell = _untold

    def prepared(self, sequences: Sequences, corpora: Place) -> PreparedCorpus:
        """Prepare what the token store lacks for some sequences."""
        work = CorpusWork(sequences, corpora, self.watch)
        contents = self._verify(work) if self.verify else {}
        if not work.is_done:
            work.store.create()
        while not work.is_done:
            orders = work.orders()
            before = work.state
            self._runner(work, work.expected_tokens(orders)).prepare(orders)
            if work.state == before:
                # Somebody took pieces away that this process has in its index.
                work.start_again()
        changed: set[str] = set()
        for number, old in contents.items():
            new = _contents(work.store, work.pieces[number])
            # Either may reach further into the portion; what both hold must be the same.
            shared = min(len(old), len(new))
            if (old[:shared] != new[:shared]).any():
                changed.add(work.portions[number].key)
        return PreparedCorpus(work.builder.index(), work.portions, frozenset(changed))

    def _verify(self, work: CorpusWork) -> dict[int, np.ndarray]:
        """Compare what is there with the texts, and forget the portions that differ.

        Returns the hashes of the documents that those portions had, by number of the portion.
        """
        numbers = [number for number in work.listed if work.pieces[number]]
        tokens = sum(piece.tokens for number in numbers for piece in work.pieces[number])
        runner = self._runner(work, tokens)
        problems = runner.verify([work.portions[number] for number in numbers])
        for problem in (problem for found in problems for problem in found):
            self.tell(problem)
        different = [number for number, found in zip(numbers, problems, strict=True) if found]
        # Read before the pieces are forgotten: a run compares them with what is prepared anew.
        contents = {number: _contents(work.store, work.pieces[number]) for number in different}
        for number in different:
            forget(work.store, work.pieces[number])
        if different:
            portions = counted(len(different), "portion")
            self.tell(f"{portions} of {len(numbers):,} differed; their texts are prepared again")
            work.start_again()
        return contents

    def _runner(self, work: CorpusWork, tokens: int) -> _Runner:
        """Where about so many tokens are prepared."""
        resources = self.resources
        if resources is None or not (resources.replicas or resources.ray_prepares):
            return _InThisProcess(work)
        if tokens < LEAST_TOKENS_ON_RAY:
            return _InThisProcess(work)
        # Ray takes a second to import, and most commands that prepare nothing do without.
        from headcount.jobs.corpus.preparation_on_ray import OnRay

        return OnRay(work, resources, self.tell)


HERE = Preparation()
"""Prepare in this process, and show nothing."""


def prepare(
    sequences: Sequences,
    corpora: Place,
    resources: Resources | None = None,
    watch: Watch = unwatched,
) -> SequenceIndex:
    """Prepare the corpus of some sequences as far as they need it; returns their index.

    Ray tasks do it, or this process if there are no `resources` or no replicas.
    """
    return Preparation(resources, watch).prepared(sequences, corpora).index


def _contents(store: TokenStore, pieces: Iterable[Piece]) -> np.ndarray:
    """The hashes of the documents of some pieces, up to the first piece that cannot be read."""
    hashes: list[np.ndarray] = []
    for piece in pieces:
        try:
            hashes.append(read_documents(store, piece, ["content"])["content"].to_numpy())
        except CorpusError:
            break
    return np.concatenate([np.empty(0, np.uint64), *hashes])
