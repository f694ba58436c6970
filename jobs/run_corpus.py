"""The corpus of a run: the index that is kept with it, and whether its text is still the same.

A corpus may change while a run lies there: files are added, a bad row is mended, a file is written
again. That is allowed as long as every committed sequence would still be made of the same
documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from jobs.corpus_index import index_corpus
from schemas.errors import OtherRunError
from schemas.manifest import Manifest
from schemas.places import Place, write_whole
from schemas.run_directory import RunDirectory, holds_whole_shard
from workers.inputs.corpus import Corpus
from workers.inputs.document_index import FileState, Index, Watch, same_files
from workers.inputs.documents import Source
from workers.inputs.sequence_reader import moved_sequence
from workers.inputs.sequences import Sequences


def index_new_run(run: RunDirectory, sequences: Sequences, watch: Watch) -> None:
    """Give the sequences of a run that is about to begin an index of their corpus."""
    index_corpus(sequences, run.path.parent, watch)
    sequences.check_index()


def index_continued_run(
    run: RunDirectory, manifest: Manifest, sequences: Sequences, watch: Watch
) -> bool:
    """Give the sequences of a run the run's index, or a new one; returns whether it is a new one.

    A new one is made if the corpus changed, or if the run is extended beyond the old one. It is
    refused unless every committed sequence is the same by both.
    """
    run_index = Index.read(_index_file(run))
    run_files = run_index.files or _files_of_manifest(manifest)
    sequences.use_index(run_index)
    corpus = sequences.corpus
    assert corpus is not None
    _check_separators(run, run_index, corpus)
    if same_files(run_files, corpus.sources) and sequences.indexed_enough(manifest.sequences):
        return False

    # The new index reaches as far as the run does, even if the scan asks for fewer sequences now.
    sequences.use_index(None)
    sequences.least_sequences = manifest.sequences
    index_corpus(sequences, run.path.parent, watch, run_index)
    sequences.check_index()

    # The old index speaks of the files that the run was begun with, even if some are gone.
    run_corpus = replace(corpus, sources=_sources_of_run(run_files, corpus))
    run_reader = sequences.reader_of(run_index, run_corpus)
    change = moved_sequence(run_reader, sequences.reader, _committed_sequences(run, manifest))
    if change is None and len(sequences.reader) < manifest.sequences:
        change = f"it held {manifest.sequences:,} sequences and holds {len(sequences.reader):,}"
    if change is not None:
        raise OtherRunError(f"{run.path}: the corpus has changed since the run was begun: {change}")
    return True


def write_index(run: RunDirectory, sequences: Sequences) -> None:
    """Keep with the run the index of its corpus, and what becomes of each document."""
    if sequences.index is None or sequences.fates is None:
        return
    write_whole(_index_file(run), sequences.index.to_parquet())
    fates = json.dumps(sequences.fates.record, indent=1, ensure_ascii=False)
    write_whole(run.fates_file, fates.encode())


def _index_file(run: RunDirectory) -> Place:
    return run.index / "documents.parquet"


def _check_separators(run: RunDirectory, run_index: Index, corpus: Corpus) -> None:
    """Refuse an index of older code that gave documents without a token an end of text.

    Today's code gives them none, so the tokens behind them would move. Such an index is known by
    the lack of `content`, the fingerprints of its documents.
    """
    has_empty_documents = bool((run_index.n_tokens == 0).any())
    if run_index.content is None and corpus.packing == "concat" and has_empty_documents:
        raise OtherRunError(
            f"{run.path}: begun by an older headcount, which put an end of text behind documents "
            "without a token"
        )


def _files_of_manifest(manifest: Manifest) -> tuple[FileState, ...]:
    """The files that a run was begun with, for an index too old to record them."""
    sources = [Source(**source) for source in manifest.identity["corpus"]["sources"]]
    return tuple(FileState(source.file_name, source.bytes, 0) for source in sources)


def _sources_of_run(run_files: tuple[FileState, ...], corpus: Corpus) -> tuple[Source, ...]:
    """The sources that a run was begun with, in its order; a file that is gone is one of them."""
    unmatched = list(corpus.sources)
    run_sources: list[Source] = []
    for file in run_files:
        matches = [source for source in unmatched if source.file_name == file.name]
        if matches:
            # Two files may have one name: each source stands for one file only.
            unmatched.remove(matches[0])
            run_sources.append(matches[0])
        else:
            # It is named in the error, and never read: any kind of file will do.
            run_sources.append(Source("jsonl", file.name, file.bytes))
    return tuple(run_sources)


def _committed_sequences(run: RunDirectory, manifest: Manifest) -> Iterator[int]:
    """The numbers of the sequences that are committed."""
    ledger = run.ledger(["start", "stop"])
    whole_shards = ledger.filter(pa.array(holds_whole_shard(manifest, ledger)))
    starts, stops = whole_shards["start"].to_pylist(), whole_shards["stop"].to_pylist()
    for start, stop in zip(starts, stops, strict=True):
        yield from range(start, stop)
