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
import pyarrow.compute
import pyarrow.parquet as pq

from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.files.places import (
    Place,
    StorePath,
    names,
    open_at_once,
    open_whole,
    reason,
    sizes,
    write_whole,
)
from headcount.workers.inputs.corpus.documents import Reading
from headcount.workers.inputs.store.portions import Portion, Position
from headcount.workers.inputs.store.token_files import (
    UNREADABLE,
    digest_of_array,
    forget_open_files,
    guarded,
    guarded_record,
    open_token_file,
    token_bytes,
    unreadable,
    values_of,
)
from headcount.workers.model.files.text_tokenizer import TextTokenizer

pc: Any = pyarrow.compute  # Its functions are made at run time; no type checker finds them.

FORMAT = 1
"""Version of the layout. A store of another version has another key."""

BAD = -1
"""Number of tokens of a row that cannot be read."""

TOKENS = ".tokens.parquet"
DOCUMENTS = ".documents.parquet"
STORE_FILE = "store.json"
LOCK_FILE = ".lock"
"""In the folder of a portion on a disk: held by the process that prepares the portion."""

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

    @classmethod
    def read(cls, folder: Place) -> TokenStore | None:
        """The store in a folder, or None; refuse one of another version, or a broken one."""
        file = folder / STORE_FILE
        try:
            description = json.loads(file.read_bytes())
            if description["format"] != FORMAT:
                raise _unusable(folder, f"expected format {FORMAT}, got {description['format']}")
            reading = description["reading"]
            fields = tuple(reading["fields"])
            return cls(
                folder=folder,
                reading=Reading(reading["text_field"], fields, reading["before"]),
                tokenizer=description["tokenizer"],
                library=description["library"],
                d_vocab=description["d_vocab"],
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(folder, f"cannot be read ({reason(error)})") from None
        except (ValueError, KeyError, TypeError):
            raise _unusable(folder, "not the description of a token store") from None

    def create(self) -> None:
        """Write `store.json` if it is not there; refuse a folder that holds another store."""
        existing = TokenStore.read(self.folder)
        if existing is None:
            description = asdict(self) | {"format": FORMAT}
            del description["folder"]
            write_whole(self.folder / STORE_FILE, json.dumps(description, indent=1).encode())
            return
        for name in ("tokenizer", "library", "d_vocab", "reading"):
            expected, actual = getattr(self, name), getattr(existing, name)
            if expected != actual:
                raise _unusable(self.folder, f"expected {name} {expected}, got {actual}")

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


def _unusable(folder: Place, why: str) -> RunError:
    return RunError(
        f"{folder / STORE_FILE}: {why}; remove this store (headcount corpus remove {folder.name}) "
        "or choose another place with corpora"
    )


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


def _position_name(position: Position) -> str:
    return f"{position.source}-{position.offset}-{position.row}"


@dataclass(frozen=True)
class FilePart:
    """Of which file a piece has documents, as it was when it was listed."""

    source: int
    """Its number within the portion."""
    kind: str
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
    portion_start: int
    """Where the portion begins in its only source, as `Portion.start`."""
    portion_stop: int | None
    files: tuple[FilePart, ...]
    columns: dict[str, str]
    """A digest of each column of the documents file."""

    @classmethod
    def read(cls, metadata: Mapping[bytes, bytes] | None) -> PieceRecord:
        """The record in a file's metadata; raises KeyError, TypeError or ValueError if broken."""
        fields = guarded_record(metadata)
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
            # A Parquet file ends with the length of its footer in 4 bytes, then "PAR1".
            footer_bytes = int.from_bytes(tail[-8:-4], "little") + 8
            if len(tail) < footer_bytes <= size:
                tail = _last_bytes(file, size, footer_bytes)
    except FileNotFoundError:
        return None
    try:
        record = PieceRecord.read(pq.read_metadata(pa.BufferReader(tail)).metadata)
    except (*UNREADABLE, TypeError):
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
    token_content = token_bytes(tokens, store.token_type, dict(_token_record(store, piece)))
    # Tokens first: a piece is committed when its documents file is there.
    write_whole(folder / (piece.name + TOKENS), token_content)
    arrays = [pa.array(documents[field.name], field.type) for field in store.schema]
    table = pa.Table.from_arrays(arrays, schema=store.schema)
    record = PieceRecord(
        store=store.key,
        piece=piece,
        token_bytes=token_content.size,
        portion_start=portion.start,
        portion_stop=portion.stop,
        files=_files_of(portion, piece),
        columns={name: _digest_of_column(table[name]) for name in table.column_names},
    )
    write_whole(folder / (piece.name + DOCUMENTS), _document_bytes(table, record))


def _token_record(store: TokenStore, piece: Piece) -> tuple[tuple[str, str], ...]:
    """What the tokens file of a piece says about itself."""
    return ("store", store.key), ("portion", piece.portion_key), ("piece", piece.name)


def _files_of(portion: Portion, piece: Piece) -> tuple[FilePart, ...]:
    """The files of which a piece has documents."""
    numbers = range(piece.start.source, min(piece.stop.source + 1, len(portion.sources)))
    return tuple(
        FilePart(
            number,
            portion.sources[number].kind,
            portion.sources[number].name,
            portion.files[number].bytes,
            portion.files[number].changed,
        )
        for number in numbers
    )


def _document_bytes(table: pa.Table, record: PieceRecord) -> pa.Buffer:
    # Texts repeat. Numbers of tokens and hashes hardly do.
    distinct = ("row", "n_tokens", "content")
    repeating: Any = [name for name in table.column_names if name not in distinct]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=repeating,
        column_encoding={"row": "DELTA_BINARY_PACKED"},
        write_page_checksum=True,
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(guarded(asdict(record)))
    return sink.getvalue()


def _digest_of_column(column: pa.ChunkedArray) -> str:
    """A digest of the values of a column, whichever way Arrow stores them."""
    if not pa.types.is_string(column.type) and not pa.types.is_dictionary(column.type):
        return digest_of_array(values_of(column))
    texts = pa.chunked_array([column.combine_chunks().cast(pa.string())]).combine_chunks()
    # No text has a length of -1, so NULL and an empty text differ.
    lengths = values_of(pc.fill_null(pc.binary_length(texts), -1))
    content = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], pc.fill_null(texts, "")), "")
    return digest_of_array(lengths) + digest_of_array(
        np.frombuffer(content[0].as_buffer(), np.uint8)
    )


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
    schema = pa.schema([store.schema.field(name) for name in column_names])
    try:
        with open_at_once(file) as content:
            parquet = pq.ParquetFile(content, page_checksum_verification=True)
            record = PieceRecord.read(parquet.metadata.metadata)
            # A name that begins a longer one, as `field:meta` and `field:meta.year`, brings both.
            table = parquet.read(columns=column_names, use_threads=False).select(column_names)
            table = table.cast(schema)
            if (record.store, record.piece) != (store.key, piece):
                raise ValueError("it holds other documents")
            for name in column_names:
                if _digest_of_column(table[name]) != record.columns[name]:
                    raise ValueError("its content is not what was written")
    except (*UNREADABLE, TypeError) as error:
        raise unreadable(file, error) from None
    return table


def read_tokens(store: TokenStore, piece: Piece, start: int, stop: int) -> np.ndarray:
    """Tokens of a piece, counted from its beginning, as an array of the caller's own."""
    if not 0 <= start <= stop <= piece.tokens:
        raise CorpusError(
            f"{store.folder / piece.portion_key / piece.name}: expected tokens within 0 to "
            f"{piece.tokens:,}, got {start:,} to {stop:,}; the run's index is another corpus's"
        )
    file = store.folder / piece.portion_key / (piece.name + TOKENS)
    return open_token_file(file, piece.tokens, _token_record(store, piece)).read(start, stop)
