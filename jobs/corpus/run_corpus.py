"""The corpus of a run: which pieces of the token store it reads, and whether they are still right.

A corpus may change while a run lies there: files are added, a bad row is mended, a file is written
again. That is allowed as long as every committed sequence would still be made of the same
documents.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from headcount.jobs.corpus.preparation import Preparation, PreparedCorpus
from headcount.schemas.errors import OtherRunError
from headcount.schemas.files.manifest import Manifest
from headcount.schemas.files.places import Place, place, write_whole
from headcount.schemas.files.run_directory import RunDirectory, holds_whole_shard
from headcount.workers.inputs.corpus.corpus import Corpus
from headcount.workers.inputs.corpus.documents import Source
from headcount.workers.inputs.corpus.sequence_index import IndexBuilder, SequenceIndex
from headcount.workers.inputs.corpus.sequence_reader import moved_counts, moved_sequence
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.inputs.store.portions import FileState, Portion

NEWEST_FORMAT = 1
"""Version of the record."""


@dataclass(frozen=True)
class PortionRecord:
    """A portion of a corpus as a run reads it."""

    portion: Portion
    pieces: tuple[str, ...]
    """The names of its pieces."""

    @property
    def content(self) -> dict[str, Any]:
        """The record as JSON."""
        portion = self.portion
        return {
            "first_source": portion.first_source,
            "sources": [asdict(source) for source in portion.sources],
            "files": [list(state) for state in portion.files],
            "start": portion.start,
            "stop": portion.stop,
            "bytes": portion.bytes,
            "key": portion.key,
            "pieces": list(self.pieces),
        }

    @classmethod
    def read(cls, content: dict[str, Any]) -> PortionRecord:
        """The record that some JSON holds."""
        portion = Portion(
            content["first_source"],
            tuple(Source(**source) for source in content["sources"]),
            tuple(FileState(*state) for state in content["files"]),
            content["start"],
            content["stop"],
            content["bytes"],
        )
        return cls(portion, tuple(content["pieces"]))


@dataclass(frozen=True)
class RunCorpus:
    """What a run keeps of its corpus: where its tokens lie, and of which files they were made."""

    store: str
    """The directory of the token store."""
    portions: tuple[PortionRecord, ...]
    """The portions that the run reads, in the order of the corpus."""

    @classmethod
    def of(cls, prepared: PreparedCorpus) -> RunCorpus:
        """The record of a corpus that is prepared now."""
        pieces = list(prepared.index.pieces)
        records: list[PortionRecord] = []
        for portion in prepared.portions:
            names: list[str] = []
            while pieces and pieces[0].portion_key == portion.key:
                names.append(pieces[0].name)
                # The same portion may come twice, if a scan names a file twice.
                if pieces.pop(0).ended:
                    break
            if names:
                records.append(PortionRecord(portion, tuple(names)))
        return cls(str(prepared.index.store.folder), tuple(records))

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
            portions = tuple(PortionRecord.read(portion) for portion in content["portions"])
            return cls(content["store"], portions)
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
        content = {
            "format": NEWEST_FORMAT,
            "store": self.store,
            "portions": [record.content for record in self.portions],
        }
        return json.dumps(content, ensure_ascii=False).encode()

    def first_difference(self, now: RunCorpus, changed_texts: Set[str]) -> int | None:
        """The number of the first portion that is not as it was; None if there is none.

        The corpus of now may have more portions, or fewer if fewer are read. `changed_texts` are
        keys of portions that hold other texts although their files look the same.
        """
        # Another version of the tokenizer's library may make other tokens of the same text.
        if place(self.store).name != place(now.store).name:
            return 0
        for number, (before, after) in enumerate(zip(self.portions, now.portions, strict=False)):
            has_other_text = after.portion.key in changed_texts
            if has_other_text or not _is_same(before.portion, after.portion):
                return number
        return None

    def is_read_as(self, now: RunCorpus) -> bool:
        """Whether both read the same pieces of the same portions."""
        return self.store == now.store and [
            (record.portion.key, record.pieces) for record in self.portions
        ] == [(record.portion.key, record.pieces) for record in now.portions]


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
    if before.is_read_as(now) and not prepared.changed_texts:
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


def _is_same(before: Portion, now: Portion) -> bool:
    """Whether a portion holds what it held; its files may have moved since."""
    if before.key == now.key:
        return True
    is_same_range = (before.first_source, before.start, before.stop) == (
        now.first_source,
        now.start,
        now.stop,
    )
    if not is_same_range or len(before.sources) != len(now.sources):
        return False
    pairs = zip(before.sources, before.files, now.sources, now.files, strict=True)
    return all(
        # Only the key says which version of a data set of the Hub this is.
        "hub" not in (old_source.kind, source.kind)
        and old_source.kind == source.kind
        and old_state.is_same_file(state)
        for old_source, old_state, source, state in pairs
    )


def _change(
    run: RunDirectory,
    manifest: Manifest,
    sequences: Sequences,
    before: RunCorpus,
    now: RunCorpus,
    changed_texts: Set[str],
) -> str | None:
    """Why a committed sequence would not be the same; None if all are the same."""
    difference = before.first_difference(now, changed_texts)
    if difference is None:
        return None
    assert sequences.corpus is not None
    # Sequences that end before the difference are what they were. If the whole corpus is read
    # first, for example to shuffle it, a difference anywhere may move all of them.
    first_sequence = 0
    if not sequences.corpus.is_read_whole:
        assert sequences.index is not None
        pieces_before = sum(len(record.pieces) for record in now.portions[:difference])
        if pieces_before:
            first_sequence = int(sequences.index.ends[pieces_before - 1])
    commit_log = run.commit_log(["start", "stop"])
    whole_shards = commit_log.filter(pa.array(holds_whole_shard(manifest, commit_log)))
    starts, stops = whole_shards["start"].to_pylist(), whole_shards["stop"].to_pylist()
    committed = [
        i
        for start, stop in zip(starts, stops, strict=True)
        for i in range(max(start, first_sequence), stop)
    ]
    if not committed:
        return None
    portion = before.portions[min(difference, len(before.portions) - 1)].portion
    if portion.key in changed_texts:
        return f"{portion.sources[0].file_name} holds other texts, although its time did not change"
    run_corpus = replace(sequences.corpus, sources=_sources_of_run(before, sequences.corpus))
    run_index = _index_of_run(manifest, sequences, before, run_corpus)
    if run_index is None:
        return (
            f"{portion.sources[0].file_name} is not as it was, and the tokens that the run was "
            f"begun with are gone from {before.store}, so nothing says whether its sequences are "
            "the same"
        )
    if sequences.corpus.counted is not None:
        return moved_counts(run_index, sequences.reader.index)
    return moved_sequence(sequences.reader_of(run_index, run_corpus), sequences.reader, committed)


def _index_of_run(
    manifest: Manifest, sequences: Sequences, before: RunCorpus, run_corpus: Corpus
) -> SequenceIndex | None:
    """The index by which a run was measured; None if pieces of it are gone."""
    folder = place(before.store)
    store = sequences.store(folder.parent)
    # Another version of the tokenizer's library, which began the run, has a store of its own.
    if store.folder.name != folder.name:
        store = replace(store, folder=folder)
    builder = IndexBuilder(run_corpus, store, sequences.text_length, manifest.sequences, None)
    for record in before.portions:
        pieces = store.pieces(record.portion)
        for piece in pieces:
            if not builder.may_stop:
                builder.add(record.portion, [piece])
        # The last portion of a run need not be read to its end.
        is_last = record is before.portions[-1]
        if not builder.may_stop and not (pieces and (pieces[-1].ended or is_last)):
            return None
    index = builder.index()
    is_whole = sequences.is_drawn or index.sequences >= manifest.sequences
    return index if is_whole else None


def _sources_of_run(before: RunCorpus, corpus: Corpus) -> tuple[Source, ...]:
    """The sources that a run was begun with, in its order; a file may be gone, or have moved."""
    sources: dict[int, Source] = {}
    for record in before.portions:
        sources |= dict(enumerate(record.portion.sources, record.portion.first_source))
    unmatched = list(corpus.sources)
    run_sources: list[Source] = []
    for _, source in sorted(sources.items()):
        matches = [other for other in unmatched if other.file_name == source.file_name]
        if matches:
            # Two files may have one name: each source stands for one file only.
            unmatched.remove(matches[0])
        # Texts are compared by the places of their documents, which name files as they are now.
        run_sources.append(matches[0] if matches else source)
    return tuple(run_sources)
