"""Documents of a corpus, the index of their lengths, and the sequences they are cut into.

A corpus is a list of sources in a fixed order. The index holds the number of tokens of every document; with it, sequence i
is a place in the corpus whatever shard, actor or order it is read in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from schemas.errors import CorpusError

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
class Document:
    """One row of a source: its text, or the problem that it has instead."""

    row: int
    text: str = ""
    pile_set_name: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """A file of documents, or one shard of a Hub data set."""

    kind: str
    path: str
    bytes: int
    split: str = "train"
    part: int = 0
    parts: int = 1

    def documents(self) -> Iterator[Document]:
        """The documents in order; a problem of the whole file raises `CorpusError`."""
        readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "text": _read_text, "hub": _read_hub}
        try:
            yield from readers[self.kind](self)
        except (OSError, zstandard.ZstdError, pa.ArrowException) as error:
            raise CorpusError(f"{self.path}: cannot be read ({error}); is the file complete?") from None


@dataclass(frozen=True)
class Corpus:
    """What a corpus family returns: sources in order, and how documents become sequences."""

    sources: tuple[Source, ...]
    packing: str

    @property
    def record(self) -> dict[str, Any]:
        """Identifies the corpus without its place on this machine."""
        named = [asdict(s) | {"path": Path(s.path).name if s.kind != "hub" else s.path} for s in self.sources]
        return {"packing": self.packing, "sources": named}


def _read_jsonl(source: Source) -> Iterator[Document]:
    for row, line in enumerate(_lines(source.path)):
        yield _from_json(row, line)


def _lines(path: str) -> Iterator[bytes]:
    if not path.endswith(".zst"):
        with open(path, "rb") as file:
            yield from file
        return
    rest = b""
    for chunk in _decompressed(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _decompressed(path: str) -> Iterator[bytes]:
    """The content of a .zst file of one or more frames; a file that ends inside a frame is an error, not an end."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    whole = True
    with open(path, "rb") as file:
        while compressed := file.read(1 << 18):
            while compressed:
                whole = False
                yield frame.decompress(compressed)
                compressed = b""
                if frame.eof:
                    whole, compressed = True, frame.unused_data
                    frame = zstandard.ZstdDecompressor().decompressobj()
    if not whole:
        raise CorpusError(f"{path}: the zstd stream ends in the middle; fetch the file again")


def _from_json(row: int, line: bytes) -> Document:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Document(row, problem="not UTF-8")
    except ValueError:
        return Document(row, problem="invalid JSON")
    if not isinstance(fields, dict):
        return Document(row, problem=f"expected a JSON object, got {type(fields).__name__}")
    return _from_fields(row, fields.get("text"), fields.get("meta"))


def _from_fields(row: int, text: Any, meta: Any) -> Document:
    if not isinstance(text, str):
        return Document(row, problem=f"text is {'null' if text is None else type(text).__name__}, expected a string")
    if not text:
        return Document(row, problem="text is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return Document(row, problem="text has lone surrogates, which are not UTF-8")
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except ValueError:
            meta = None
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    return Document(row, text, name if isinstance(name, str) else None)


def _read_parquet(source: Source) -> Iterator[Document]:
    file = pq.ParquetFile(source.path)
    names = file.schema_arrow.names
    if "text" not in names:
        raise CorpusError(f"{source.path}: expected a column text, found {', '.join(names)}")
    row = 0
    for batch in file.iter_batches(batch_size=256, columns=[n for n in ("text", "meta") if n in names]):
        for fields in batch.to_pylist():
            yield _from_fields(row, fields["text"], fields.get("meta"))
            row += 1


def _read_text(source: Source) -> Iterator[Document]:
    try:
        yield _from_fields(0, Path(source.path).read_bytes().decode("utf-8"), None)
    except UnicodeDecodeError as error:
        yield Document(0, problem=f"not UTF-8 (byte {error.start})")


def _read_hub(source: Source) -> Iterator[Document]:
    rows = open_hub(source.path, source.split)
    if source.parts > 1:
        rows = rows.shard(source.parts, source.part, contiguous=True)
    for row, fields in enumerate(rows):
        yield _from_fields(row, fields.get("text"), fields.get("meta"))


def open_hub(name: str, split: str) -> Any:
    """A Hub data set (or a local directory of one) as a stream of rows."""
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split, streaming=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(f"data set {name!r}, split {split!r}: cannot be opened ({reason})") from None


@dataclass(frozen=True)
class Index:
    """Number of tokens of every document, in corpus order; `BAD` where a row cannot be read."""

    source: np.ndarray
    row: np.ndarray
    n_tokens: np.ndarray
    problems: dict[str, str]
    """Problem by "file:row" of the bad rows."""

    def to_parquet(self) -> pa.Buffer:
        """The index as a Parquet file."""
        table = pa.table({"source": self.source, "row": self.row, "n_tokens": self.n_tokens})
        sink = pa.BufferOutputStream()
        pq.write_table(table.replace_schema_metadata({"problems": json.dumps(self.problems)}), sink, compression="zstd")
        return sink.getvalue()

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read an index from its Parquet file."""
        table = pq.read_table(path)
        problems = json.loads((table.schema.metadata or {})[b"problems"])
        return cls(*(table[name].to_numpy() for name in ("source", "row", "n_tokens")), problems)


def build_index(corpus: Corpus, tokenizer: Tokenizer, length: int, enough: int | None = None) -> Index:
    """Tokenise documents, in order, until there are `enough` sequences of `length` tokens (or to the end)."""
    sources: list[int] = []
    rows: list[int] = []
    lengths: list[int] = []
    problems: dict[str, str] = {}
    found = 0
    for number, source in enumerate(corpus.sources):
        here, tokens = 0, 0
        for documents in _in_batches(source.documents(), 512):
            good = [d for d in documents if d.problem is None]
            counts = [len(ids) for ids in tokenizer.encode_many([d.text for d in good])]
            by_row = dict(zip((d.row for d in good), counts, strict=True))
            sources += [number] * len(documents)
            rows += [d.row for d in documents]
            lengths += [by_row.get(d.row, BAD) for d in documents]
            problems |= {f"{source.path}:{d.row}": d.problem for d in documents if d.problem is not None}
            tokens += sum(counts) + len(counts)
            here = here + sum(c >= length for c in counts) if corpus.packing == "document" else tokens // length
            if enough is not None and found + here >= enough:
                break
        found += here
        if enough is not None and found >= enough:
            break
    return Index(np.array(sources, np.int32), np.array(rows, np.int64), np.array(lengths, np.int32), problems)


def _in_batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    while batch := list(islice(documents, size)):
        yield batch


class SequenceReader:
    """Reads sequences by their index; fast where they are asked for in order, since files are read forward only."""

    def __init__(self, corpus: Corpus, index: Index, tokenizer: Tokenizer, length: int, separator: int | None) -> None:
        """`length` is the number of text tokens in a sequence, `separator` the token that joins documents."""
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
        """Tokens `[sequence length]` of the sequences `start .. stop-1`, and where each one came from."""
        tokens = np.empty((stop - start, self.length), np.int32)
        origin: dict[str, list[Any]] = {"file": [], "row": [], "offset": [], "pile_set_name": []}
        for i in range(start, stop):
            document, offset = int(self._document[i]), int(self._offset[i])
            origin["file"].append(self.corpus.sources[self.index.source[document]].path)
            origin["row"].append(int(self.index.row[document]))
            origin["offset"].append(offset)
            origin["pile_set_name"].append(self._load(document)[0].pile_set_name)
            tokens[i - start] = self._take(document, offset)
        return tokens, origin

    def bad_rows(self, start: int, stop: int) -> list[str]:
        """The bad rows among those the sequences `start .. stop-1` span; too many of them raise `CorpusError`."""
        first = int(self._document[start]) if start else 0
        last = int(self._document[stop]) if stop < len(self) else len(self.index.row)
        spanned = range(first, max(last, first + 1))
        bad = [i for i in spanned if self.index.n_tokens[i] == BAD]
        names = [f"{self.corpus.sources[self.index.source[i]].path}:{self.index.row[i]}" for i in bad]
        named = [f"{name} ({self.index.problems[name]})" for name in names]
        if len(bad) > BAD_SHARE * len(spanned):
            raise CorpusError(
                f"{len(bad)} of {len(spanned)} rows are bad, more than {BAD_SHARE:.0%}: {', '.join(named[:3])}"
                f"{' …' if len(named) > 3 else ''}; mend or remove them"
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
                ids = self._load(document)[1]
                if self.corpus.packing == "concat":
                    assert self.separator is not None
                    ids = [*ids, self.separator]
                taken += ids[offset : offset + self.length - len(taken)]
                offset = 0
            document += 1
        return taken

    def _load(self, number: int) -> tuple[Document, list[int]]:
        """A document and its tokens; reads forward from where the last one was found."""
        if self._current is not None and self._current[0] == number:
            return self._current[1:]
        source, row = int(self.index.source[number]), int(self.index.row[number])
        before = self._current
        forward = self._open is not None and self._open[0] == source and before is not None and before[0] < number
        if not forward:
            self._open = (source, self.corpus.sources[source].documents())
        assert self._open is not None
        document = next((d for d in self._open[1] if d.row == row), None)
        ids = [] if document is None else self.tokenizer.encode(document.text)
        if document is None or len(ids) != self.index.n_tokens[number]:
            raise CorpusError(f"{self.corpus.sources[source].path}:{row}: changed since the run began; start a new run")
        self._current = (number, document, ids)
        return document, ids
