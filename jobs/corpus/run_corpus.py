"""The corpus of a run: which portions of the token store it reads, and whether they are the same.

A corpus may change while a run lies there: files are added, a bad row is mended, a file is written
again. That is allowed as long as every committed sequence would still be the same.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from headcount.jobs.corpus.preparation import Preparation
from headcount.schemas.errors import CorpusError, OtherRunError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.schemas.places import Place, place, read_as, unread, write_whole
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.corpus.sequence_index import SequenceIndex
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.token_store import Portion

RECORD = "corpus.json"  # name of the record, in the directory `index` of the run
COMPARED_AT_ONCE = 64  # sequences that are read at once to be compared


class RunPortion(NamedTuple):
    """A portion that a run reads."""

    first_source: int  # number in the corpus of its extent's first source
    portion: Portion
    content: str  # identifies what it holds, wherever its files lie


class RunCorpus(BaseModel):
    """What a run keeps of its corpus: where its tokens lie, and of which files they were made."""

    model_config = ConfigDict(frozen=True)
    format: Literal[4] = 4
    store: str  # the directory of the token store
    sources: tuple[Source, ...]
    portions: tuple[RunPortion, ...]

    @classmethod
    def of(cls, index: SequenceIndex) -> "RunCorpus":
        """The record of a corpus that is prepared now."""
        first_sources = [place.first_source for place in index.places]
        in_order = zip(first_sources, index.portions, index.contents, strict=False)
        portions = tuple(RunPortion(*portion) for portion in in_order)
        store = str(index.store.folder)
        return cls(store=store, sources=index.corpus.sources, portions=portions)

    @classmethod
    def read(cls, run: RunDirectory) -> "RunCorpus":
        """The record of a run."""
        try:
            return read_as(run.index / RECORD, cls.model_validate_json)
        except FileNotFoundError:
            raise OtherRunError(
                f"{run.index / RECORD}: gone, so nothing says which corpus the run was begun with; "
                "it can be read but not continued"
            ) from None
        except OSError as error:
            raise unread(run.index / RECORD, error) from None
        except ValueError:
            raise OtherRunError(
                f"{run.index / RECORD}: damaged, or of another version of headcount, so nothing "
                "says which corpus the run was begun with"
            ) from None

    def is_the_one_of(self, run: RunDirectory) -> bool:
        """Whether a run reads the same corpus, wherever it lies: the same names and content, as far
        as both are prepared.
        """
        try:
            other = RunCorpus.read(run)
        except OtherRunError:
            return False
        names = ([s.file_name for s in c.sources if s.kind != "hub"] for c in (self, other))
        contents = ([portion.content for portion in c.portions] for c in (self, other))
        return _begin_alike(*names) and _begin_alike(*contents) and bool(other.portions)


def _begin_alike(first: Sequence[str], second: Sequence[str]) -> bool:
    return all(a == b for a, b in zip(first, second, strict=False))


def index_run(
    run: RunDirectory,
    manifest: Manifest | None,
    sequences: Sequences,
    corpora: Place,
    preparation: Preparation,
) -> tuple[RunCorpus, bool]:
    """Give the sequences of a run an index of their corpus; `manifest` is that of a begun one.

    Returns the record of the corpus, and whether it replaces another one: because the corpus or its
    place changed, or because the run is extended. If the corpus changed, it is refused unless every
    committed sequence is the same as before.
    """
    before = None if manifest is None else RunCorpus.read(run)
    sequences.use_index(preparation.prepared(sequences, corpora))
    now = RunCorpus.of(sequences.reader)
    if before is not None and (before.store, before.portions) == (now.store, now.portions):
        return before, False
    sequences.check_index()
    if manifest is None or before is None:
        return now, False
    change = _change(run, manifest, sequences, before, now)
    if change is None and not sequences.is_drawn and len(sequences.reader) < manifest.sequences:
        change = f"it held {manifest.sequences:,} sequences and holds {len(sequences.reader):,}"
    if change is not None:
        raise OtherRunError(f"{run.path}: the corpus has changed since the run was begun: {change}")
    return now, True


def write_corpus(run: RunDirectory, corpus: RunCorpus, sequences: Sequences) -> None:
    """Keep with the run what it reads of its corpus, and what becomes of each document."""
    write_whole(run.index / RECORD, corpus.model_dump_json().encode())
    assert sequences.fates is not None
    fates = json.dumps(sequences.fates.record, indent=1, ensure_ascii=False)
    write_whole(run.fates_file, fates.encode())


def _change(
    run: RunDirectory, manifest: Manifest, sequences: Sequences, before: RunCorpus, now: RunCorpus
) -> str | None:
    """Why a committed sequence would not be the same; None if all are the same."""
    index = sequences.reader
    old, new = ([portion.content for portion in corpus.portions] for corpus in (before, now))
    same = sum(takewhile(bool, (a == b for a, b in zip(old, new, strict=False))))
    if same == len(old) == len(new):
        return None
    # Sequences before the difference are what they were. If the whole corpus is read first, for
    # example to shuffle it, a difference anywhere may move all of them.
    first = index.ends[same - 1] if same and not index.corpus.is_read_whole else 0
    commit_log = run.commit_log(["start", "stop"])
    whole_shards = commit_log.filter(pa.array(holds_whole_shard(manifest, commit_log)))
    starts, stops = whole_shards["start"].to_pylist(), whole_shards["stop"].to_pylist()
    committed = [(max(a, first), b) for a, b in zip(starts, stops, strict=True) if b > first]
    if not committed:
        return None
    # The sequences as the run was measured by.
    folder = place(before.store)
    run_index = SequenceIndex(
        replace(index.store, folder=folder),
        replace(index.corpus, sources=before.sources),
        index.length,
        index.separator,
        manifest.sequences,
        beyond=index.beyond,
    )
    try:
        for first_source, portion, _ in before.portions:
            run_index.add(first_source, portion)
    except CorpusError:
        pass  # Some portions are gone.
    if run_index.contents != old:
        changed = before.portions[min(same, len(old) - 1)]
        return (
            f"{before.sources[changed.first_source].file_name} is not as it was, and the tokens "
            f"that the run was begun with are gone from {before.store}, so nothing says whether "
            "its sequences are the same"
        )
    run_index = run_index.ended()
    if index.token_counts is not None and run_index.token_counts is not None:
        moved = np.flatnonzero(run_index.token_counts != index.token_counts)
        if not len(moved):
            return None
        times, times_now = run_index.token_counts[moved[0]], index.token_counts[moved[0]]
        return f"token {moved[0]} occurred {times:,} times and occurs {times_now:,} times"
    changes = (
        _moved_sequence(run_index, index, begin, min(begin + COMPARED_AT_ONCE, stop))
        for start, stop in committed
        for begin in range(start, stop, COMPARED_AT_ONCE)
    )
    return next(filter(None, changes), None)


def _moved_sequence(before: SequenceIndex, now: SequenceIndex, start: int, stop: int) -> str | None:
    """Why one of the sequences `start .. stop-1` is not the same now; None if all are the same."""

    def place_of(index: SequenceIndex, file: str, row: int) -> str:
        return next(one for one in index.corpus.sources if one.name == file).place_of(row)

    there = min(stop, len(now))
    if start < there:
        old_tokens, old_origins = before.read(start, there)
        tokens, origins = now.read(start, there)
        for i in range(there - start):
            # A file may lie elsewhere now.
            (old_file, *old_origin), (file, *origin) = (
                [values[i] for values in columns.values()] for columns in (old_origins, origins)
            )
            is_file_same = old_file.rpartition("/")[2] == file.rpartition("/")[2]
            where = place_of(now, file, origin[0])
            if not is_file_same or old_origin[0] != origin[0]:
                old_place = place_of(before, old_file, old_origin[0])
                return f"sequence {start + i:,} came from {old_place} and would come from {where}"
            if old_origin != origin or (old_tokens[i] != tokens[i]).any():
                return f"sequence {start + i:,}, which begins in {where}, would not be the same"
    if there < stop:
        return f"it held {len(before):,} sequences and holds {len(now):,}"
    return None
