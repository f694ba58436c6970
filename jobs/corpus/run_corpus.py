"""The corpus of a run: which portions of the token store it reads, and whether they are the same.

A corpus may change while a run lies there: files are added, a bad row is mended, a file is written
again. That is allowed as long as every committed sequence would still be the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.jobs.corpus.preparation import Preparation, PreparedCorpus
from headcount.schemas.errors import CorpusError, OtherRunError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.places import Place, place, write_whole
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.corpus.sequence_index import IndexBuilder
from headcount.workers.inputs.corpus.sequence_reader import SequenceReader
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.extents import Extent, FileState
from headcount.workers.inputs.store.token_store import Portion

NEWEST_FORMAT = 2
"""Version of the record."""

COMPARED_AT_ONCE = 64
"""Sequences that are read at once to be compared."""


@dataclass(frozen=True)
class RunCorpus:
    """What a run keeps of its corpus: where its tokens lie, and of which files they were made."""

    store: str
    """The directory of the token store."""
    extents: tuple[tuple[Extent, tuple[Portion, ...]], ...]
    """The extents that the run reads, in the order of the corpus, with their portions."""

    @classmethod
    def of(cls, prepared: PreparedCorpus) -> RunCorpus:
        """The record of a corpus that is prepared now."""
        portions = list(prepared.index.portions)[::-1]
        extents: list[tuple[Extent, tuple[Portion, ...]]] = []
        for extent in prepared.extents:
            of_extent: list[Portion] = []
            # The same extent may come twice, if a scan names a file twice.
            while portions and portions[-1][:2] == (extent.key, len(of_extent)):
                of_extent.append(portions.pop())
            if of_extent:
                extents.append((extent, tuple(of_extent)))
        return cls(str(prepared.index.store.folder), tuple(extents))

    @classmethod
    def read(cls, run: RunDirectory) -> RunCorpus:
        """The record of a run."""
        file = _record_file(run)
        try:
            content = json.loads(file.read_bytes())
            if content["format"] != NEWEST_FORMAT:
                raise OtherRunError(
                    f"{file}: format {content['format']}, expected {NEWEST_FORMAT}; another "
                    "version of headcount wrote it"
                )
            extents: list[tuple[Extent, tuple[Portion, ...]]] = []
            for (first, sources, files, *others), portions, is_whole in content["extents"]:
                extent = Extent(
                    first,
                    tuple(Source(*source) for source in sources),
                    tuple(FileState(*state) for state in files),
                    *others,
                )
                last = portions - 1 if is_whole else -1
                of_extent = tuple(Portion(extent.key, i, i == last) for i in range(portions))
                extents.append((extent, of_extent))
            return cls(content["store"], tuple(extents))
        except FileNotFoundError:
            raise OtherRunError(
                f"{file}: gone, so nothing says which corpus the run was begun with; it can be "
                "read but not continued"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise OtherRunError(
                f"{file}: damaged, so nothing says which corpus the run was begun with"
            ) from None

    @property
    def content(self) -> bytes:
        """The record as a file."""
        extents = [
            [astuple(extent), len(portions), portions[-1].is_last]
            for extent, portions in self.extents
        ]
        content: dict[str, Any] = {"format": NEWEST_FORMAT, "store": self.store, "extents": extents}
        return json.dumps(content, ensure_ascii=False).encode()

    @property
    def portions(self) -> Iterator[tuple[Extent, Portion]]:
        """The portions in order, each with its extent."""
        for extent, portions in self.extents:
            for portion in portions:
                yield extent, portion


def index_new_run(sequences: Sequences, corpora: Place, preparation: Preparation) -> RunCorpus:
    """Give the sequences of a run that is about to begin an index of their corpus."""
    prepared = preparation.prepared(sequences, corpora)
    sequences.use_index(prepared.index)
    sequences.check_index()
    return RunCorpus.of(prepared)


def index_continued_run(
    run: RunDirectory,
    manifest: Manifest,
    sequences: Sequences,
    corpora: Place,
    preparation: Preparation,
) -> tuple[RunCorpus, bool]:
    """Give the sequences of a run that continues an index of their corpus.

    Returns the record of the corpus, and whether it is a new one: because the corpus or its place
    changed, or because the run is extended. If the corpus changed, it is refused unless every
    committed sequence is the same as before.
    """
    before = RunCorpus.read(run)
    # The index reaches as far as the run does, even if the scan asks for fewer sequences now.
    sequences.least_sequences = manifest.sequences
    prepared = preparation.prepared(sequences, corpora)
    sequences.use_index(prepared.index)
    now = RunCorpus.of(prepared)
    is_read_as = before.store == now.store and (
        [portion for _, portion in before.portions] == [portion for _, portion in now.portions]
    )
    if is_read_as and not prepared.changed_texts:
        return before, False
    sequences.check_index()
    change = _change(run, manifest, sequences, before, now, prepared.changed_texts)
    is_too_short = not sequences.is_drawn and len(sequences.reader) < manifest.sequences
    if change is None and is_too_short:
        change = f"it held {manifest.sequences:,} sequences and holds {len(sequences.reader):,}"
    if change is not None:
        raise OtherRunError(f"{run.path}: the corpus has changed since the run was begun: {change}")
    return now, True


def write_corpus(run: RunDirectory, corpus: RunCorpus, sequences: Sequences) -> None:
    """Keep with the run what it reads of its corpus, and what becomes of each document."""
    write_whole(_record_file(run), corpus.content)
    assert sequences.fates is not None
    fates = json.dumps(sequences.fates.record, indent=1, ensure_ascii=False)
    write_whole(run.fates_file, fates.encode())


def _record_file(run: RunDirectory) -> Place:
    return run.index / "corpus.json"


def _change(
    run: RunDirectory,
    manifest: Manifest,
    sequences: Sequences,
    before: RunCorpus,
    now: RunCorpus,
    changed_texts: frozenset[str],
) -> str | None:
    """Why a committed sequence would not be the same; None if all are the same."""
    assert sequences.corpus is not None
    old, new = list(before.portions), list(now.portions)
    folder = place(before.store)
    same = 0
    # Another version of the tokenizer's library has another store, and may make other tokens.
    if folder.name == place(now.store).name:
        pairs = zip(old, new, strict=False)
        is_same = (_is_same(*pair) and pair[1][1].extent not in changed_texts for pair in pairs)
        same = sum(takewhile(bool, is_same))
    if same == len(old) == len(new):
        return None
    # Sequences before the difference are what they were. If the whole corpus is read first, for
    # example to shuffle it, a difference anywhere may move all of them.
    first = 0
    if same and not sequences.corpus.is_read_whole:
        first = int(sequences.reader.index.ends[same - 1])
    commit_log = run.commit_log(["start", "stop"])
    whole_shards = commit_log.filter(pa.array(holds_whole_shard(manifest, commit_log)))
    starts, stops = whole_shards["start"].to_pylist(), whole_shards["stop"].to_pylist()
    committed = [(max(a, first), b) for a, b in zip(starts, stops, strict=True) if b > first]
    if not committed:
        return None
    changed_file = old[min(same, len(old) - 1)][0].sources[0].file_name
    if same < len(new) and new[same][1].extent in changed_texts:
        return f"{changed_file} holds other texts, although its time did not change"
    run_reader = _reader_of_run(manifest, sequences, before)
    if run_reader is None:
        return (
            f"{changed_file} is not as it was, and the tokens that the run was begun with are gone "
            f"from {before.store}, so nothing says whether its sequences are the same"
        )
    if sequences.corpus.counted is not None:
        return _moved_counts(run_reader.index.token_counts, sequences.reader.index.token_counts)
    differences = (
        _moved_sequence(run_reader, sequences.reader, begin, min(begin + COMPARED_AT_ONCE, stop))
        for start, stop in committed
        for begin in range(start, stop, COMPARED_AT_ONCE)
    )
    return next(filter(None, differences), None)


def _reader_of_run(
    manifest: Manifest, sequences: Sequences, before: RunCorpus
) -> SequenceReader | None:
    """The sequences as a run was measured by; None if portions of it are gone."""
    assert sequences.corpus is not None
    sources = {
        extent.first_source + i: source
        for extent, _ in before.extents
        for i, source in enumerate(extent.sources)
    }
    in_order = tuple(source for _, source in sorted(sources.items()))
    corpus = replace(sequences.corpus, sources=in_order)
    folder = place(before.store)
    store = replace(sequences.store(folder.parent), folder=folder)
    builder = IndexBuilder(corpus, store, sequences.text_length, manifest.sequences, None)
    try:
        for extent, portion in before.portions:
            builder.add(extent, portion)
        return sequences.reader_of(builder.index(), corpus)
    except CorpusError:
        return None


def _is_same(before: tuple[Extent, Portion], now: tuple[Extent, Portion]) -> bool:
    """Whether a portion holds what it held; its files may have moved since."""
    (old_extent, old_portion), (extent, portion) = before, now
    if old_portion == portion:
        return True
    old_range = (old_extent.first_source, old_extent.start, old_extent.stop, *old_portion[1:])
    if old_range != (extent.first_source, extent.start, extent.stop, *portion[1:]):
        return False
    if len(old_extent.sources) != len(extent.sources):
        return False
    # Only the key says which version of a data set of the Hub this is.
    pairs = zip(old_extent.sources, old_extent.files, extent.sources, extent.files, strict=True)
    return all(
        source.kind != "hub" and old_source.kind == source.kind and old_state.is_same_file(state)
        for old_source, old_state, source, state in pairs
    )


def _moved_sequence(
    before: SequenceReader, now: SequenceReader, start: int, stop: int
) -> str | None:
    """Why one of the sequences `start .. stop-1` is not the same now; None if all are the same."""
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
            if not is_file_same or old_origin[0] != origin[0]:
                old_place = _place_of(before, old_file, old_origin[0])
                place = _place_of(now, file, origin[0])
                return f"sequence {start + i:,} came from {old_place} and would come from {place}"
            if old_origin != origin or (old_tokens[i] != tokens[i]).any():
                place = _place_of(now, file, origin[0])
                return f"sequence {start + i:,}, which begins in {place}, would not be the same"
    if there < stop:
        return f"it held {len(before):,} sequences and holds {len(now):,}"
    return None


def _place_of(reader: SequenceReader, file: str, row: int) -> str:
    """Where a sequence begins, for people."""
    return next(source for source in reader.corpus.sources if source.name == file).place_of(row)


def _moved_counts(before: np.ndarray | None, now: np.ndarray | None) -> str | None:
    """Why tokens are not drawn as they were; None if they are."""
    assert before is not None
    assert now is not None
    moved = np.flatnonzero(before != now)
    if not len(moved):
        return None
    token = int(moved[0])
    return f"token {token} occurred {before[token]:,} times and occurs {now[token]:,} times"
