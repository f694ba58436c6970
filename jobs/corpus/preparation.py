"""Prepare the tokens of a corpus as far as a scan needs them, on the cluster or in this process.

The portions that the token store has are taken as they are. The others are prepared in the order of
the corpus until there is enough, by Ray tasks or here. A portion is there if its file is, so nobody
who prepares a corpus need hear of others that do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headcount.jobs.corpus.work import CorpusWork, Watch, prepare_here, unwatched
from headcount.schemas.errors import RunError, counted
from headcount.schemas.files.places import Place, absolute, place
from headcount.schemas.scans.scan import Scan
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.extents import Extent
from headcount.workers.inputs.store.preparation import damaged_portions
from headcount.workers.inputs.store.token_store import Portion

if TYPE_CHECKING:
    from headcount.jobs.resources import Resources

FOLDER = "corpora"
"""Directory of the token stores, beside the runs."""

LEAST_BYTES_ON_RAY = 1 << 24
"""Fewer bytes of text are prepared in this process: that takes 10 s on a core, and Ray's processes
several to start.
"""

Tell = Callable[[str], None]
"""Is called with a line for the user."""


def untold(line: str) -> None:
    """Tell a line to nobody."""


def corpora_of(scan: Scan) -> Place:
    """The directory that holds the token stores of a scan's corpus."""
    if scan.corpora is not None:
        return absolute(place(scan.corpora))
    return absolute(place(scan.out) / FOLDER)


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus whose tokens are ready, as far as a scan needs them."""

    index: SequenceIndex
    extents: list[Extent]
    """All extents of the corpus, as they were listed."""
    changed_texts: frozenset[str] = frozenset()
    """Keys of extents whose texts were others than their portions said, when they were verified."""


@dataclass(frozen=True)
class Preparation:
    """How the tokens of a corpus are made ready: where, and who is told."""

    resources: Resources | None = None
    """Ray tasks prepare a large corpus if these have replicas or `ray_prepares`."""
    watch: Watch = unwatched
    verify: bool = False
    """Whether portions that are there are compared with the texts first."""
    tell: Tell = untold

    def prepared(self, sequences: Sequences, corpora: Place) -> PreparedCorpus:
        """Prepare what the token store lacks for some sequences."""
        work = CorpusWork(sequences, corpora, self.watch)
        changed = self._verify(work) if self.verify else frozenset[str]()
        if not work.is_done:
            work.store.create()
            work.show()
            resources = self.resources
            on_ray = resources is not None and (resources.replicas or resources.ray_prepares)
            bytes_missing = sum(extent.bytes for extent in work.missing())
            if on_ray and min(bytes_missing, work.letters_wanted()) >= LEAST_BYTES_ON_RAY:
                # Ray takes a second to import, and most commands that prepare nothing do without.
                from headcount.jobs.corpus.preparation_on_ray import prepare_on_ray

                assert resources is not None
                prepare_on_ray(work, resources, self.tell)
            else:
                prepare_here(work)
            if not work.is_done:
                raise RunError(
                    f"{work.store.folder}: somebody deletes portions while they are prepared; run "
                    "the same command again"
                )
        return PreparedCorpus(work.builder.index(), work.extents, changed)

    def _verify(self, work: CorpusWork) -> frozenset[str]:
        """Compare what is there with the texts, and forget the portions that differ.

        Returns the keys of the extents whose texts changed.
        """
        damaged: list[Portion] = []
        changed: set[str] = set()
        # Those whose portions are in the index.
        for extent in work.extents[: work.frontier + 1]:
            damages, is_text_changed = damaged_portions(work.store, extent)
            for problem in damages.values():
                self.tell(problem)
            damaged += damages
            if is_text_changed:
                changed.add(extent.key)
        if damaged:
            self.tell(f"{counted(len(damaged), 'portion')} differed and will be prepared again")
            work.store.forget(damaged)
            work.start_again()
        return frozenset(changed)


HERE = Preparation()
"""Prepare in this process, and show nothing."""
