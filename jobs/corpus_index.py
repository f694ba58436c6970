"""Indexes of corpora that `headcount plan` keeps, so that the scan does not tokenise again.

They lie beside the runs, in `corpus_index/` of the directory that holds them: NAME.parquet is the
index, as a run has it, and NAME.json says what it is of. That record is written last. An index is
taken only if the same tokenizer reads the same files with the same content.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from schemas.places import Place, StorePath, place, write_whole
from workers.inputs.document_index import Index, Watch, unwatched
from workers.inputs.documents import Source
from workers.inputs.sequences import Sequences

FOLDER = "corpus_index"


def index_corpus(
    sequences: Sequences, out: Place, watch: Watch = unwatched, known: Index | None = None
) -> None:
    """Give sequences of a corpus their index: the one that a plan kept in `out`, or a new one, for
    which the documents of a `known` one are not tokenised again.
    """
    kept = KeptIndex.of(sequences, out)
    if kept is not None:
        sequences.index = kept.read(sequences)
    sequences.make_index(watch, known)


@dataclass(frozen=True)
class KeptIndex:
    """The place of an index outside of any run."""

    file: Place
    record_file: Place
    record: dict[str, Any]
    """What the index depends on, but for the content of the files."""

    @classmethod
    def of(cls, sequences: Sequences, out: Place) -> KeptIndex | None:
        """Where the index of these sequences is kept in `out`.

        None for a data set of the Hub: nothing here says whether its content is still the same.
        """
        corpus = sequences.corpus
        if corpus is None or any(source.kind == "hub" for source in corpus.sources):
            return None
        record = {
            "tokenizer": sequences.tokenizer.fingerprint,
            "library": sequences.tokenizer.library,
            "packing": corpus.packing,
            "length": sequences.text_length,
            "sequences": sequences.enough,
            "sources": [[source.kind, source.path] for source in corpus.sources],
            "choice": asdict(corpus.choice),
            "bad_rows_in_a_row": sequences.bad_rows.in_a_row,
        }
        name = hashlib.sha256(json.dumps(record).encode()).hexdigest()[:12]
        folder = out / FOLDER
        return cls(folder / f"{name}.parquet", folder / f"{name}.json", record)

    def read(self, sequences: Sequences) -> Index | None:
        """The index, if there is one and the files that it was made from are as they were."""
        try:
            record = json.loads(self.record_file.read_bytes())
            index = Index.read(self.file)
        except (OSError, ValueError, LookupError, pa.ArrowException):
            # Not there, or not whole: it is made anew, which costs time and nothing else.
            return None
        if record != json.loads(json.dumps(self.record)) | {"content": _content(sequences, index)}:
            return None
        return index

    def write(self, sequences: Sequences) -> None:
        """Keep the index of these sequences."""
        index = sequences.index
        assert index is not None
        write_whole(self.file, index.to_parquet())
        record = self.record | {"content": _content(sequences, index)}
        write_whole(self.record_file, json.dumps(record, indent=1).encode())


def _content(sequences: Sequences, index: Index) -> list[str]:
    """What is in the files that an index was made from: it may need the first ones only."""
    assert sequences.corpus is not None
    sources = sequences.corpus.sources
    if sequences.enough is not None:
        sources = sources[: len(index.files)]
    return [_content_of(source) for source in sources]


def _content_of(source: Source) -> str:
    where = place(source.path)
    if isinstance(where, StorePath):
        # An object never changes in place, so its time says what its content would.
        info = where.filesystem.get_file_info(where.key)
        return f"{info.size} bytes of {info.mtime_ns}"
    with where.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
