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


def corpora_of(scan: Scan) -> Place:
    """The directory that holds the token stores of a scan's corpus."""
    if scan.corpora is not None:
        return absolute(place(scan.corpora))
    return absolute(place(scan.out) / FOLDER)


@dataclass(frozen=True)
class Preparation:
    """How the tokens of a corpus are made ready: where, and who is told."""

    resources: Resources | None = None
    """Ray tasks prepare a large corpus if these have replicas or `ray_prepares`."""
    watch: Watch = unwatched
    verify: bool = False
    """Whether portions that are there are compared with the texts first."""
    tell: Tell = lambda line: None

    def prepared(self, sequences: Sequences, corpora: Place) -> SequenceIndex:
        """Prepare what the token store lacks for some sequences."""
        work = CorpusWork(sequences, corpora, self.watch)
        if self.verify:
            self._prepare_damaged_again(work)
        if not work.is_done:
            work.store.create()
            work.show()
            resources = self.resources
            bytes_missing = sum(extent.bytes for extent in work.missing())
            is_large = min(bytes_missing, work.letters_wanted()) >= LEAST_BYTES_ON_RAY
            if is_large and resources and (resources.replicas or resources.ray_prepares):
                # Ray takes a second to import, and most commands that prepare nothing do without.
                from headcount.jobs.corpus.preparation_on_ray import prepare_on_ray

                prepare_on_ray(work, resources, self.tell)
            else:
                prepare_here(work)
            if not work.is_done:
                raise RunError(
                    f"{work.store.folder}: somebody deletes portions while they are prepared; run "
                    "the same command again"
                )
        return work.index.ended()

    def _prepare_damaged_again(self, work: CorpusWork) -> None:
        """Compare what is there with the texts, and forget the portions that differ."""
        damages: dict[Portion, str] = {}
        # Those whose portions are in the index.
        for extent in work.extents[: work.frontier + 1]:
            damages |= damaged_portions(work.store, extent)
        for problem in damages.values():
            self.tell(problem)
        if damages:
            self.tell(f"{counted(len(damages), 'portion')} differed and will be prepared again")
            work.store.forget(damages)
            work.start_again()


HERE = Preparation()
"""Prepare in this process, and show nothing."""
