"""The token store: a corpus as one tokenizer reads it, in pieces that are written once.

corpora/KEY/store.json                               which tokenizer reads which fields
corpora/KEY/PORTION/START_STOP.tokens.parquet        token ids of all documents, without separators
corpora/KEY/PORTION/START_STOP.documents.parquet     one row per document; written last

A corpus is cut into portions, a portion is read from its beginning on, and every few million tokens
a piece is written whole. A piece is there if and only if its documents file is whole and its tokens
file has the size that the documents file says. START and STOP are positions in the portion, so
pieces follow one another without a gap, however often their preparation was killed.

All documents of the files are kept, also those that a scan does not take. So every scan that reads
the same files and fields with the same tokenizer finds its tokens here.
"""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from schemas.digests import digest_of
from schemas.errors import CorpusError, RunError, counted
from schemas.places import (
    Place,
    StorePath,
    names,
    open_at_once,
    open_whole,
    reason,
    sizes,
    write_whole,
)
from workers.inputs.documents import Reading
from workers.inputs.portions import Portion, Position
from workers.inputs.token_files import (
    damaged,
    forget_open_files,
    open_token_file,
    token_bytes,
    unreadable,
)
from workers.model.text_tokenizer import TextTokenizer

FORMAT = 1
"""Version of the layout. A store of another version has another key."""

BAD = -1
"""Number of tokens of a row that cannot be read."""

TOKENS = ".tokens.parquet"
DOCUMENTS = ".documents.parquet"
STORE_FILE = "store.json"

SMALL_IDS = 1 << 16
"""Tokens of a tokenizer whose ids fit into 16 bits."""

FOOTER_BYTES = 1 << 16
"""Bytes at the end of a documents file that are read at first. They nearly always hold its record.
"""

READERS = 16
"""Records that are read at once from a store, which answers each request slowly."""


@dataclass(frozen=True)
class TokenStore:
    """Where the tokens of a corpus lie, and how they were made. It holds no open files."""

    folder: Place
    reading: Reading
    tokenizer: str
    """Fingerprint of the tokenizer."""
    library: str
    """The library that applies the tokenizer, and its version."""
    d_vocab: int
    """One more than the largest token id of the tokenizer."""

    @classmethod
    def of(cls, corpora: Place, tokenizer: TextTokenizer, reading: Reading) -> TokenStore:
        """The store under `corpora` for what a tokenizer makes of some fields."""
        key = store_key(tokenizer.fingerprint, tokenizer.library, reading)
        return cls(
            corpora / key, reading, tokenizer.fingerprint, tokenizer.library, tokenizer.ids_end
        )

    @property
    def key(self) -> str:
        """The store's name among other stores."""
        return self.folder.name

    @property
    def token_type(self) -> pa.DataType:
        """The narrowest type that holds every token id."""
        return pa.uint16() if self.d_vocab <= SMALL_IDS else pa.uint32()

    @property
    def schema(self) -> pa.Schema:
        """Columns of a documents file."""
        columns = [
            # Counted within the portion.
            pa.field("source", pa.int32(), nullable=False),
            pa.field("row", pa.int64(), nullable=False),
            pa.field("n_tokens", pa.int32(), nullable=False),
            pa.field("content", pa.uint64(), nullable=False),
            pa.field("pile_set_name", pa.dictionary(pa.int32(), pa.string())),
            pa.field("problem", pa.string()),
        ]
        fields = [pa.field(field_column(name), pa.string()) for name in self.reading.fields]
        return pa.schema([*columns, *fields])

    def create(self) -> None:
        """Write `store.json` if it is not there; refuse a store that is not this one."""
        expected = self._description()
        try:
            content = (self.folder / STORE_FILE).read_bytes()
        except FileNotFoundError:
            write_whole(self.folder / STORE_FILE, json.dumps(expected, indent=1).encode())
            return
        except OSError as error:
            raise RunError(
                f"{self.folder / STORE_FILE}: cannot be read ({reason(error)}); make it readable, "
                "or choose another place with corpora"
            ) from None
        found = described(content)
        for name, value in expected.items():
            if found.get(name) != value:
                raise RunError(
                    f"{self.folder / STORE_FILE}: expected {name} {json.dumps(value)}, got "
                    f"{json.dumps(found.get(name))}; remove this store (headcount corpus remove "
                    f"{self.key}), or choose another place with corpora"
                )

    def _description(self) -> dict[str, Any]:
        reading = asdict(self.reading)
        return {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "library": self.library,
            "d_vocab": self.d_vocab,
            "reading": reading | {"fields": list(self.reading.fields)},
        }

    def pieces(self, portion: Portion, first: Sequence[Piece] = ()) -> list[Piece]:
        """The committed pieces from the portion's beginning on, in order and without a gap.

        The chain begins with the pieces of `first`, which the caller already reads. Of several that
        begin at one place the longest follows.
        """
        return chain_of(self.committed(portion.key), first)

    def committed(self, portion_key: str) -> list[Piece]:
        """All committed pieces of a portion, also those that no chain needs, unordered."""
        return [record.piece for record in self.records(portion_key)]

    def has_piece_at(self, portion_key: str, position: Position) -> bool:
        """Whether a piece that begins at a position seems to be committed, by its name alone."""
        beginning = f"{_position_name(position)}_"
        listed = names(self.folder / portion_key)
        return any(name.startswith(beginning) and name.endswith(DOCUMENTS) for name in listed)

    def records(self, portion_key: str) -> list[PieceRecord]:
        """What the committed pieces of a portion say of themselves, unordered."""
        folder = self.folder / portion_key
        try:
            bytes_by_name = dict(sizes(folder))
            document_files = [name for name in bytes_by_name if name.endswith(DOCUMENTS)]
            if isinstance(folder, StorePath) and len(document_files) > 1:
                with ThreadPoolExecutor(READERS) as readers:
                    jobs = [readers.submit(_read_record, folder, name) for name in document_files]
                    records = [job.result() for job in jobs]
            else:
                records = [_read_record(folder, name) for name in document_files]
        except OSError as error:
            raise RunError(
                f"{folder}: cannot be read ({reason(error)}); mend the access or the store, then "
                "run the same command again"
            ) from None
        return [
            record
            for record in records
            if record is not None
            and record.store == self.key
            and record.piece.portion_key == portion_key
            and record.token_bytes == bytes_by_name.get(record.piece.name + TOKENS)
        ]


def store_key(tokenizer: str, library: str, reading: Reading) -> str:
    """The name of a store: it identifies what becomes of a text."""
    content = [FORMAT, tokenizer, library, reading.text_field, reading.fields, reading.before]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def field_column(name: str) -> str:
    """The column of a documents file that holds a field of the documents, as JSON."""
    return f"field:{name}"


def described(content: bytes) -> dict[str, Any]:
    """What a `store.json` says; nothing if it is broken."""
    try:
        description = json.loads(content)
    except ValueError:
        return {}
    return description if isinstance(description, dict) else {}


# Pieces


@dataclass(frozen=True)
class Piece:
    """Committed documents of a portion and their tokens. They never change."""

    portion_key: str
    start: Position
    stop: Position
    ended: bool
    """Whether it is the portion's last."""
    documents: int
    """Bad ones included."""
    tokens: int
    bad: int

    @property
    def name(self) -> str:
        """Name of its files, without the ending."""
        return f"{_position_name(self.start)}_{_position_name(self.stop)}"

    @property
    def record(self) -> tuple[tuple[str, str], ...]:
        """What its tokens file says about itself."""
        return ("portion", self.portion_key), ("piece", self.name)


def _position_name(position: Position) -> str:
    return f"{position.source}-{position.offset}-{position.row}"


@dataclass(frozen=True)
class FilePart:
    """Of which file a piece has documents, as it was when it was listed."""

    source: int
    """Its number within the portion."""
    name: str
    """Path or address."""
    bytes: int
    changed: int
    """When it was changed last, in nanoseconds; 0 if that is not known."""


@dataclass(frozen=True)
class PieceRecord:
    """What a committed piece says of itself."""

    store: str
    piece: Piece
    token_bytes: int
    """Size of the tokens file."""
    token_digest: str
    """Digest of the tokens file."""
    portion_start: int
    """Where the portion begins in its only source, as `Portion.start`."""
    files: tuple[FilePart, ...]

    def content(self) -> str:
        """The record as text."""
        return json.dumps(asdict(self))

    @classmethod
    def parsed(cls, text: str) -> PieceRecord:
        """The record that a text holds; raises KeyError, TypeError or ValueError if it is none."""
        fields = json.loads(text)
        piece = fields.pop("piece")
        start, stop = Position(**piece.pop("start")), Position(**piece.pop("stop"))
        files = tuple(FilePart(**part) for part in fields.pop("files"))
        return cls(**fields, piece=Piece(**piece, start=start, stop=stop), files=files)


def chain_of(pieces: Iterable[Piece], first: Sequence[Piece] = ()) -> list[Piece]:
    """Pieces that follow one another from the portion's beginning on, as far as there are any."""
    longest: dict[Position, Piece] = {}
    for piece in pieces:
        other = longest.get(piece.start)
        if other is None or (piece.stop, piece.ended) > (other.stop, other.ended):
            longest[piece.start] = piece
    chain = list(first)
    while not chain or not chain[-1].ended:
        position = chain[-1].stop if chain else Position()
        following = longest.get(position)
        # A piece that leads nowhere would be followed by itself.
        if following is None or (following.stop == position and not following.ended):
            break
        chain.append(following)
    return chain


def _read_record(folder: Place, name: str) -> PieceRecord | None:
    """The record of a documents file; None if the file is gone or not whole.

    OSError is raised only if the file cannot be read, not if its content is wrong.
    """
    try:
        with open_whole(folder / name) as file:
            size = file.seek(0, os.SEEK_END)
            tail = _last_bytes(file, size, FOOTER_BYTES)
            footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
            if len(tail) < footer_bytes <= size:
                tail = _last_bytes(file, size, footer_bytes)
    except FileNotFoundError:
        return None
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail)).metadata or {}
        content = metadata[b"record"]
        if metadata[b"digest"] != digest_of(content).encode():
            return None
        record = PieceRecord.parsed(content.decode())
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError):
        return None
    return record if record.piece.name + DOCUMENTS == name else None


def _last_bytes(file: Any, size: int, count: int) -> bytes:  # noqa: ANN401 (pyarrow has no types)
    start = max(0, size - count)
    file.seek(start)
    return file.read(size - start)


# Writing and deleting


def commit_piece(
    store: TokenStore,
    portion: Portion,
    piece: Piece,
    tokens: Sequence[np.ndarray],
    documents: Mapping[str, Sequence[Any]],
) -> None:
    """Write the files of a piece. Two writers of the same piece write the same files.

    `tokens` are those of the documents, one after the other; `documents` has a list for each column
    of the store's schema.
    """
    folder = store.folder / portion.key
    token_content = token_bytes(tokens, store.token_type, dict(piece.record))
    record = PieceRecord(
        store=store.key,
        piece=piece,
        token_bytes=token_content.size,
        token_digest=digest_of(token_content),
        portion_start=portion.start,
        files=_files_of(portion, piece),
    )
    write_whole(folder / (piece.name + TOKENS), token_content)
    document_content = _document_bytes(store.schema, documents, record)
    write_whole(folder / (piece.name + DOCUMENTS), document_content)


def _files_of(portion: Portion, piece: Piece) -> tuple[FilePart, ...]:
    """The files of which a piece has documents."""
    numbers = range(piece.start.source, min(piece.stop.source + 1, len(portion.sources)))
    return tuple(
        FilePart(
            number,
            portion.sources[number].name,
            portion.files[number].bytes,
            portion.files[number].changed,
        )
        for number in numbers
    )


def _document_bytes(
    schema: pa.Schema, documents: Mapping[str, Sequence[Any]], record: PieceRecord
) -> pa.Buffer:
    arrays = [pa.array(documents[field.name], field.type) for field in schema]
    content = record.content()
    # Texts repeat. Numbers of tokens and hashes hardly do.
    repeating: Any = [name for name in schema.names if name not in ("n_tokens", "content", "row")]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=repeating,
        column_encoding={"row": "DELTA_BINARY_PACKED"},
        write_page_checksum=True,
    ) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        writer.add_key_value_metadata({"record": content, "digest": digest_of(content.encode())})
    return sink.getvalue()


def forget(store: TokenStore, pieces: Iterable[Piece]) -> None:
    """Delete pieces, so that they are prepared again."""
    for piece in pieces:
        folder = store.folder / piece.portion_key
        try:
            # Without its documents a piece is none, whatever happens to its tokens.
            (folder / (piece.name + DOCUMENTS)).unlink(missing_ok=True)
            (folder / (piece.name + TOKENS)).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(
                f"{folder / piece.name}: cannot be deleted ({reason(error)}); delete its two files"
            ) from None
    forget_open_files()


# Reading


def read_documents(
    store: TokenStore, piece: Piece, columns: Sequence[str] | None = None
) -> pa.Table:
    """The documents of a piece, one row each; `columns` are by default those of the schema."""
    file = store.folder / piece.portion_key / (piece.name + DOCUMENTS)
    column_names = store.schema.names if columns is None else list(columns)
    try:
        with open_at_once(file) as content:
            parquet = pq.ParquetFile(content, page_checksum_verification=True)
            # A name that begins a longer one, as `field:meta` and `field:meta.year`, brings both.
            table = parquet.read(columns=column_names, use_threads=False).select(column_names)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise unreadable(file, error) from None
    if table.num_rows != piece.documents:
        expected = counted(piece.documents, "document")
        raise damaged(file, f"expected {expected}, got {table.num_rows:,}")
    return table


def read_tokens(store: TokenStore, piece: Piece, start: int, stop: int) -> np.ndarray:
    """Tokens of a piece, counted from its beginning, as an array of the caller's own."""
    if not 0 <= start <= stop <= piece.tokens:
        raise CorpusError(
            f"{store.folder / piece.portion_key / piece.name}: expected tokens within 0 to "
            f"{piece.tokens:,}, got {start:,} to {stop:,}; the run's index is another corpus's"
        )
    file = store.folder / piece.portion_key / (piece.name + TOKENS)
    return open_token_file(file, piece.tokens, piece.record).read(start, stop)
