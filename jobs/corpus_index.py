"""Indexes of corpora that `headcount plan` keeps, so that the scan does not tokenise again.

They lie beside the runs, in `corpus_index/`. NAME.parquet is the index, as a run has it. NAME.json
is its record: what was tokenised, and how. The record is written last, so an index without one is
not used. An index is used only if the same tokenizer reads the same files with the same content.
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
"""Directory of the kept indexes, beside the runs."""


def index_corpus(
    sequences: Sequences, out: Place, watch: Watch = unwatched, known: Index | None = None
) -> None:
    """Give sequences of a corpus their index: the one that a plan kept in `out`, or a new one.

    Documents of a `known` index are not tokenised again.
    """
    kept_index = KeptIndex.of(sequences, out)
    if kept_index is not None:
        sequences.index = kept_index.read(sequences)
    sequences.make_index(watch, known)


@dataclass(frozen=True)
class KeptIndex:
    """Where an index is kept outside of any run, and what it depends on."""

    file: Place
    record_file: Place
    record: dict[str, Any]
    """What the index depends on, except the content of the files."""

    @classmethod
    def of(cls, sequences: Sequences, out: Place) -> KeptIndex | None:
        """Where the index of these sequences is kept in `out`; none if it cannot be kept.

        An index of a data set of the Hub cannot: only fetching it would tell whether its content is
        still the same.
        """
        corpus = sequences.corpus
        if corpus is None or any(source.kind == "hub" for source in corpus.sources):
            return None
        record = {
            "tokenizer": sequences.tokenizer.fingerprint,
            # Another version may tokenise otherwise. Making an index again costs time only.
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
        """The index, if there is one and the files that it was made from have not changed."""
        try:
            record = json.loads(self.record_file.read_bytes())
            index = Index.read(self.file)
        except (OSError, ValueError, LookupError, pa.ArrowException):
            # It is missing or damaged. Then it is made again, which costs time only.
            return None
        # Through JSON, because a record that is read has lists where this one has tuples.
        expected = json.loads(json.dumps(self.record)) | {"content": _content(sequences, index)}
        return index if record == expected else None

    def write(self, sequences: Sequences) -> None:
        """Keep the index of these sequences."""
        index = sequences.index
        assert index is not None
        write_whole(self.file, index.to_parquet())
        record = self.record | {"content": _content(sequences, index)}
        write_whole(self.record_file, json.dumps(record, indent=1).encode())


def _content(sequences: Sequences, index: Index) -> list[str]:
    """The fingerprint of each file that an index was made from."""
    assert sequences.corpus is not None
    sources = sequences.corpus.sources
    if sequences.enough is not None:
        # The index ends where the scan has enough sequences; later files do not matter.
        sources = sources[: len(index.files)]
    return [_content_of(source) for source in sources]


def _content_of(source: Source) -> str:
    """The fingerprint of one file, or of what a store says of an object."""
    where = place(source.path)
    if isinstance(where, StorePath):
        # An object never changes in place, so a new content has a new time.
        info = where.filesystem.get_file_info(where.key)
        return f"{info.size} bytes of {info.mtime_ns}"
    with where.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
