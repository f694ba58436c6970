"""Documents of a corpus, the index of their lengths, and the sequences they are cut into.

A corpus is a list of sources in a fixed order. The index holds the number of tokens of every
document; with it, sequence i is a place in the corpus whatever shard, actor or order it is read in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from schemas.errors import CorpusError
from schemas.parquet import parquet_bytes, read_parquet
from schemas.places import Place
from workers.inputs.documents import Document, Source

BAD = -1
"""Length of a row that cannot be read."""

BAD_SHARE = 0.01
"""A shard fails when more of its rows than this are bad."""


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ...

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """The same for several texts at once."""
        ...


@dataclass(frozen=True)
class Corpus:
    """What a corpus family returns: sources in order, and how documents become sequences."""

    sources: tuple[Source, ...]
    packing: str
    shuffled: bool = False
    """Whether the tokens of every sequence are permuted."""
    chunk: int | None = None
    """How many tokens of text are repeated to make a sequence; none means that all of them are
    text.
    """
    repeat_bos: bool = False
    """Whether the beginning-of-sequence token, where there is one, stands before every copy of the
    chunk.
    """

    @property
    def record(self) -> dict[str, Any]:
        """Identifies the corpus without its place on this machine."""
        named = [
            asdict(s) | {"path": Path(s.path).name if s.kind != "hub" else s.path}
            for s in self.sources
        ]
        return {"packing": self.packing, "sources": named}


@dataclass(frozen=True)
class Index:
    """Number of tokens of every document, in corpus order; `BAD` where a row cannot be read."""

    source: np.ndarray
    row: np.ndarray
    n_tokens: np.ndarray
    problems: dict[str, str]
    """Problem by "file:row" of the bad rows."""
    whole_sources: int = 0
    """How many sources of the corpus are indexed to their end."""

    def difference(self, longer: Index, sources: int) -> str | None:
        """Where a longer index of the same corpus does not begin like this one, as far as its first
        `sources` go; none if it does.
        """
        known = int(np.searchsorted(self.source, sources))
        if len(longer.source) < known:
            return f"it held {known:,} documents and holds {len(longer.source):,}"
        same = np.ones(known, bool)
        for column in ("source", "row", "n_tokens"):
            same &= getattr(self, column)[:known] == getattr(longer, column)[:known]
        if same.all():
            return None
        first = int(np.flatnonzero(~same)[0])
        return (
            f"document {first:,} had {self.n_tokens[first]:,} tokens and has "
            f"{longer.n_tokens[first]:,}"
        )

    def to_parquet(self) -> pa.Buffer:
        """The index as a Parquet file."""
        table = pa.table({"source": self.source, "row": self.row, "n_tokens": self.n_tokens})
        metadata = {
            "problems": json.dumps(self.problems),
            "whole_sources": str(self.whole_sources),
        }
        return parquet_bytes(table.replace_schema_metadata(metadata))

    @classmethod
    def read(cls, file: Place) -> Index:
        """Read an index from its Parquet file."""
        table = read_parquet(file)
        metadata = table.schema.metadata or {}
        problems = json.loads(metadata[b"problems"])
        whole_sources = int(metadata.get(b"whole_sources", 0))
        source, row, n_tokens = (table[name].to_numpy() for name in ("source", "row", "n_tokens"))
        return cls(source, row, n_tokens, problems, whole_sources)


@dataclass(frozen=True)
class IndexProgress:
    """How far the tokenising of a corpus is."""

    documents: int
    tokens: int
    sequences: int
    enough: int | None
    """Sequences that are needed; none means all that there are."""
    source: int
    """Sources begun, and how many there are."""
    sources: int


Watch = Callable[[IndexProgress], None]


def unwatched(progress: IndexProgress) -> None:
    """Watch a corpus being tokenised and show nothing."""


def build_index(
    corpus: Corpus,
    tokenizer: Tokenizer,
    length: int,
    enough: int | None = None,
    watch: Watch = unwatched,
) -> Index:
    """Tokenise documents, in order, until there are `enough` sequences of `length` tokens (or to
    the end); `watch` is told now and then how far that is.
    """
    sources: list[int] = []
    rows: list[int] = []
    lengths: list[int] = []
    problems: dict[str, str] = {}
    found = all_tokens = 0
    whole_sources = 0
    for number, source in enumerate(corpus.sources):
        here, tokens = 0, 0
        for documents in _in_batches(source.documents(), 512):
            good = [d for d in documents if d.problem is None]
            counts = [len(ids) for ids in tokenizer.encode_many([d.text for d in good])]
            by_row = dict(zip((d.row for d in good), counts, strict=True))
            sources += [number] * len(documents)
            rows += [d.row for d in documents]
            lengths += [by_row.get(d.row, BAD) for d in documents]
            problems |= {
                f"{source.name}:{d.row}": d.problem for d in documents if d.problem is not None
            }
            tokens += sum(counts) + len(counts)
            all_tokens += sum(counts)
            here = (
                here + sum(c >= length for c in counts)
                if corpus.packing == "document"
                else tokens // length
            )
            progress = IndexProgress(
                documents=len(rows),
                tokens=all_tokens,
                sequences=found + here,
                enough=enough,
                source=number + 1,
                sources=len(corpus.sources),
            )
            watch(progress)
            if enough is not None and found + here >= enough:
                break
        else:
            whole_sources += 1
        found += here
        if enough is not None and found >= enough:
            break
    return Index(
        np.array(sources, np.int32),
        np.array(rows, np.int64),
        np.array(lengths, np.int32),
        problems,
        whole_sources,
    )


def _in_batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    while batch := list(islice(documents, size)):
        yield batch


class SequenceReader:
    """Reads sequences by their index; fast where they are asked for in order, since files are read
    forward only.
    """

    def __init__(
        self, corpus: Corpus, index: Index, tokenizer: Tokenizer, length: int, separator: int | None
    ) -> None:
        """`length` is the number of text tokens in a sequence, `separator` the token that joins
        documents.
        """
        self.corpus, self.index, self.tokenizer = corpus, index, tokenizer
        self.length, self.separator = length, separator
        self._starts = [np.searchsorted(index.source, n) for n in range(len(corpus.sources) + 1)]
        places = [self._cut(n) for n in range(len(corpus.sources))]
        self._document = np.concatenate([d for d, _ in places] or [np.empty(0, np.int64)])
        self._offset = np.concatenate([o for _, o in places] or [np.empty(0, np.int64)])
        self._open: tuple[int, Iterator[Document]] | None = None
        self._current: tuple[int, Document, list[int]] | None = None

    def __len__(self) -> int:
        """The number of sequences in the indexed part of the corpus."""
        return len(self._document)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, dict[str, list[Any]]]:
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and where each one came
        from.
        """
        tokens = np.empty((stop - start, self.length), np.int32)
        origin: dict[str, list[Any]] = {"file": [], "row": [], "offset": [], "pile_set_name": []}
        for i in range(start, stop):
            document, offset = int(self._document[i]), int(self._offset[i])
            origin["file"].append(self.corpus.sources[self.index.source[document]].name)
            origin["row"].append(int(self.index.row[document]))
            origin["offset"].append(offset)
            origin["pile_set_name"].append(self._load(document)[0].pile_set_name)
            tokens[i - start] = self._take(document, offset)
        return tokens, origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows among those the sequences `start .. stop-1` span; too many of them raise
        `CorpusError`.
        """
        first = int(self._document[start]) if start else 0
        last = int(self._document[stop]) if stop < len(self) else len(self.index.row)
        spanned = range(first, max(last, first + 1))
        bad = [i for i in spanned if self.index.n_tokens[i] == BAD]
        names = [
            f"{self.corpus.sources[self.index.source[i]].name}:{self.index.row[i]}" for i in bad
        ]
        named = [f"{name} ({self.index.problems[name]})" for name in names]
        if len(bad) > BAD_SHARE * len(spanned):
            raise CorpusError(
                f"{len(bad)} of {len(spanned)} rows are bad, more than {BAD_SHARE:.0%}: "
                f"{', '.join(named[:3])}{' …' if len(named) > 3 else ''}; mend or remove them"
            )
        return named

    def _cut(self, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the sequences of one source begin: (document in the index, token within it)."""
        first = self._starts[source]
        n_tokens = self.index.n_tokens[first : self._starts[source + 1]]
        if self.corpus.packing == "document":
            long_enough = np.flatnonzero(n_tokens >= self.length)
            return first + long_enough, np.zeros_like(long_enough)
        # Every readable document is followed by one separator.
        ends = np.cumsum(np.where(n_tokens == BAD, 0, n_tokens.astype(np.int64) + 1))
        total = int(ends[-1]) if len(ends) else 0
        starts = np.arange(0, total - self.length + 1, self.length)
        document = np.searchsorted(ends, starts, side="right")
        return first + document, starts - np.where(document > 0, ends[document - 1], 0)

    def _take(self, document: int, offset: int) -> list[int]:
        """`length` tokens from a place on, over as many documents as it takes."""
        taken: list[int] = []
        while len(taken) < self.length:
            if self.index.n_tokens[document] != BAD:
                taken += self._load(document)[1][offset : offset + self.length - len(taken)]
                offset = 0
            document += 1
        return taken

    def _load(self, number: int) -> tuple[Document, list[int]]:
        """A document and its tokens, with the separator behind them where documents are joined.

        Reads forward from where the last one was found.
        """
        if self._current is not None and self._current[0] == number:
            return self._current[1:]
        source, row = int(self.index.source[number]), int(self.index.row[number])
        before = self._current
        forward = (
            self._open is not None
            and self._open[0] == source
            and before is not None
            and before[0] < number
        )
        if not forward:
            self._open = (source, self.corpus.sources[source].documents())
        assert self._open is not None
        opened, self._open = (
            self._open,
            None,
        )  # Where reading fails, the file is opened anew the next time.
        document = next((d for d in opened[1] if d.row == row), None)
        ids = [] if document is None else self.tokenizer.encode(document.text)
        if document is None or len(ids) != self.index.n_tokens[number]:
            raise CorpusError(
                f"{self.corpus.sources[source].name}:{row}: changed since the run was begun"
            )
        if self.corpus.packing == "concat":
            assert self.separator is not None
            ids.append(self.separator)
        self._open, self._current = opened, (number, document, ids)
        return document, ids
