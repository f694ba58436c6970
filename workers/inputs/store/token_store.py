"""The token store: a corpus as one tokenizer reads it, in portions that are written once.

corpora/KEY/store.json                     which tokenizer reads which fields
corpora/KEY/EXTENT-NUMBER.parquet          a portion: one row for each document, with its tokens
corpora/KEY/EXTENT-NUMBER-end.parquet      the last portion of an extent

A portion is there if and only if its file is. Two writers of one portion write the same file.

All documents of the files are kept, also those that a scan does not take. So every scan that reads
the same files and fields with the same tokenizer finds its tokens here.
"""

import hashlib
import json
import re
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import xxhash

from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.files.digests import digest_of
from headcount.schemas.places import (
    Place,
    StorePath,
    names,
    open_whole,
    read_as,
    unread,
    write_whole,
)
from headcount.schemas.reasons import reason
from headcount.workers.inputs.corpus.documents import Document, Reading
from headcount.workers.inputs.store.extents import Extent
from headcount.workers.model.info.text_tokenizer import TextTokenizer

pc: Any = pyarrow.compute  # Its functions are made at run time; no type checker finds them.

FORMAT = 4  # Version of the layout. A store of another version has another key.
BAD = -1  # number of tokens of a row that cannot be read

STORE_FILE = "store.json"
PORTION_FILE = re.compile(r"([0-9a-f]{16})-(\d{5,})(-end)?\.parquet")

SMALL_IDS = 1 << 16  # tokens of a tokenizer whose ids fit into 16 bits

TOKENS_PER_GROUP = 1 << 15  # of a row group, decoded in 0.2 ms; no document is cut
OPEN_FILES = 16  # portions that a process keeps open; those of a store are held, 7 MB each
DECODED_GROUPS = 64  # row groups kept of a portion: 4 MiB of ids of 16 bits

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, pa.ArrowException)
"""What is raised of a file that is missing, or whose content is broken."""


class Portion(NamedTuple):
    """A committed portion. It never changes."""

    extent: str  # the key of its extent
    number: int  # among the portions of that extent
    is_last: bool

    @property
    def file_name(self) -> str:
        """The name of its file in the store."""
        return f"{self.extent}-{self.number:05}{'-end' if self.is_last else ''}.parquet"


@dataclass(frozen=True)
class TokenStore:
    """Where the tokens of a corpus lie, and how they were made. It holds no open files."""

    folder: Place
    reading: Reading
    tokenizer: str  # fingerprint of the tokenizer
    library: str  # the library that applies the tokenizer, and its version
    d_vocab: int  # one more than the largest token id of the tokenizer

    @classmethod
    def of(cls, corpora: Place, tokenizer: TextTokenizer, reading: Reading) -> "TokenStore":
        """The store under `corpora` for what a tokenizer makes of some fields."""
        identity = [FORMAT, tokenizer.fingerprint, tokenizer.library]
        content = json.dumps([*identity, reading.text_field, reading.fields, reading.before])
        key = hashlib.sha256(content.encode()).hexdigest()[:12]
        return cls(
            corpora / key, reading, tokenizer.fingerprint, tokenizer.library, tokenizer.ids_end
        )

    @classmethod
    def read(cls, folder: Place) -> "TokenStore | None":
        """The store in a folder, or None; refuse one of another version, or a broken one."""

        def parse(content: bytes) -> TokenStore:
            description = json.loads(content)
            if description.pop("format") != FORMAT:
                raise ValueError(f"expected format {FORMAT}")
            reading = description.pop("reading")
            reading["fields"] = tuple(reading["fields"])
            return cls(folder=folder, reading=Reading(**reading), **description)

        try:
            return read_as(folder / STORE_FILE, parse)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unread(folder / STORE_FILE, error) from None
        except UNREADABLE as error:
            raise RunError(
                f"{folder / STORE_FILE}: not the description of a token store ({reason(error)}); "
                "bring back a copy, or choose another place with corpora"
            ) from None

    def create(self) -> None:
        """Write `store.json` if it is not there."""
        if TokenStore.read(self.folder) is None:
            description = asdict(self) | {"format": FORMAT}
            del description["folder"]
            write_whole(self.folder / STORE_FILE, json.dumps(description, indent=1).encode())

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
        """Columns of a portion."""
        tokens = pa.list_(pa.field("element", self.token_type, nullable=False))
        return pa.schema(
            [
                # Counted within the extent.
                pa.field("source", pa.int32(), nullable=False),
                # Counted in the extent from the beginning of the source, or of the range of it.
                pa.field("row", pa.int64(), nullable=False),
                # The byte of the (decompressed) lines, or the row of other sources.
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("n_tokens", pa.int32(), nullable=False),
                pa.field("content", pa.uint64(), nullable=False),
                pa.field("pile_set_name", pa.string()),
                pa.field("problem", pa.string()),
                *(pa.field(field_column(name), pa.string()) for name in self.reading.fields),
                pa.field("tokens", tokens, nullable=False),
            ]
        )

    def portions(self) -> dict[str, dict[int, Portion]]:
        """The committed portions by the keys of their extents, and by number."""
        found: dict[str, dict[int, Portion]] = defaultdict(dict)
        try:
            for name in names(self.folder):
                if match := PORTION_FILE.fullmatch(name):
                    portion = Portion(match[1], int(match[2]), match[3] is not None)
                    found[portion.extent][portion.number] = portion
        except OSError as error:
            raise RunError(
                f"{self.folder}: cannot be read ({reason(error)}); mend the access or the store, "
                "then run the same command again"
            ) from None
        return found

    def find(self, extent: str, number: int) -> Portion | None:
        """A portion of an extent if it is committed. A large store is not listed for it."""
        both = (Portion(extent, number, is_last) for is_last in (False, True))
        return next((p for p in both if (self.folder / p.file_name).is_file()), None)

    def forget(self, portions: Iterable[Portion]) -> None:
        """Delete portions, so that they are prepared again."""
        for portion in portions:
            file = self.folder / portion.file_name
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise RunError(f"{file}: cannot be deleted ({reason(error)}); delete it") from None
        forget_open_files()


def field_column(name: str) -> str:
    """The column of a portion that holds a field of the documents, as JSON."""
    return f"field:{name}"


@dataclass(frozen=True)
class PortionRecord:
    """What a portion says of itself, in the metadata of its file."""

    store: str
    extent: str
    number: int
    documents: int  # bad ones included
    tokens: int
    bad: int
    rows: int  # rows of its last source that the extent has up to here, blank lines counted
    start: int  # where the extent begins in its only source, as `Extent.start`
    stop: int | None
    spelled_out: dict[str, int]  # by special token: how many texts spell it out
    files: dict[str, tuple[str, str, int, int]]
    """By number within the extent: kind, path or address, bytes, and when it was changed last."""
    digest: str  # of the columns that say where a document comes from
    groups: tuple[tuple[int, str], ...]  # of row groups: the token behind, and a digest


# Writing


def commit_portion(
    store: TokenStore,
    extent: Extent,
    portion: Portion,
    documents: Sequence[tuple[int, int, Document]],
    tokens: Sequence[np.ndarray],
    rows: int,
    spelled_out: Mapping[str, int],
) -> None:
    """Write a portion: of each document the number of its source, its offset and its tokens."""
    fields = [field_column(name) for name in store.reading.fields]
    content = [
        {
            "source": source,
            "row": document.row,
            "offset": offset,
            "n_tokens": len(ids) if document.problem is None else BAD,
            "content": document.content_hash,
            "pile_set_name": document.pile_set_name,
            "problem": document.problem,
            "tokens": ids,
            # A bad document has no fields.
            **dict(zip(fields, document.fields, strict=False)),
        }
        for (source, offset, document), ids in zip(documents, tokens, strict=True)
    ]
    table = pa.Table.from_pylist(content, store.schema)
    ids = table["tokens"].combine_chunks().values
    lengths = np.array([len(each) for each in tokens], np.int64)
    ends = np.cumsum(lengths)
    # A group begins with the first document that begins in the next `TOKENS_PER_GROUP`.
    group_of_document = (ends - lengths) // TOKENS_PER_GROUP
    bounds = [0, *(np.flatnonzero(np.diff(group_of_document)) + 1).tolist(), len(table)]
    group_ends = [0, *(int(ends[bound - 1]) if bound else 0 for bound in bounds[1:])]
    numbers = {source for source, _, _ in documents}
    record = PortionRecord(
        store=store.key,
        extent=extent.key,
        number=portion.number,
        documents=len(table),
        tokens=group_ends[-1],
        bad=sum(document.problem is not None for _, _, document in documents),
        rows=rows,
        start=extent.start,
        stop=extent.stop,
        spelled_out=dict(spelled_out),
        files={
            str(number): (source.kind, source.name, source.bytes, source.changed)
            for number, source in enumerate(extent.sources)
            if number in numbers
        },
        digest=_digest_of_documents(table.drop_columns(["tokens"])),
        groups=tuple(
            (end, xxhash.xxh3_64_hexdigest(ids.slice(begin, end - begin).to_numpy().data))
            for begin, end in pairwise(group_ends)
        ),
    )
    record_text = json.dumps(asdict(record))
    sink = pa.BufferOutputStream()
    # Texts repeat. Rows, hashes and tokens hardly do.
    repeating: Any = [
        field.name for field in store.schema if field.name == "source" or field.type == pa.string()
    ]
    encodings: Any = {
        "row": "DELTA_BINARY_PACKED",
        "offset": "DELTA_BINARY_PACKED",
        # Parquet has no numbers of 16 bits. Split into bytes, the upper two of four are all 0.
        "tokens.list.element": "BYTE_STREAM_SPLIT",
    }
    with pq.ParquetWriter(
        sink,
        store.schema,
        compression="zstd",
        use_dictionary=repeating,
        column_encoding=encodings,
        # Nobody looks for a token by its number.
        write_statistics=False,
    ) as writer:
        for begin, end in pairwise(bounds):
            writer.write_table(table.slice(begin, end - begin), row_group_size=max(1, end - begin))
        writer.add_key_value_metadata(
            {"record": record_text, "digest": digest_of(record_text.encode())}
        )
    write_whole(store.folder / portion.file_name, sink.getvalue())


def _digest_of_documents(table: pa.Table) -> str:
    """A digest of the values of some columns, whichever way Arrow stores them."""
    digest = xxhash.xxh3_128()
    for column in table.columns:
        if pa.types.is_string(column.type):
            # No text has a length of -1, so NULL and an empty text differ.
            digest.update(pc.fill_null(pc.binary_length(column), -1).to_numpy().data)
            digest.update("".join(pc.fill_null(column, "").to_pylist()).encode())
        else:
            digest.update(column.to_numpy().data)
    return digest.hexdigest()


# Reading


def read_record(store: TokenStore, portion: Portion) -> PortionRecord:
    """What a portion says of itself. Only the end of its file is read."""
    file = store.folder / portion.file_name
    try:
        with open_whole(file) as content:
            return _checked_record(store, portion, pq.read_metadata(content))
    except UNREADABLE as error:
        raise _unreadable(file, error) from None


@lru_cache(maxsize=OPEN_FILES)
def open_portion(store: TokenStore, portion: Portion) -> "PortionFile":
    """An open portion. A process keeps the last ones that it used."""
    return PortionFile(store, portion)


def forget_open_files() -> None:
    """Close the files that this process keeps open, for example because they are deleted."""
    open_portion.cache_clear()


class PortionFile:
    """A portion that is open for reading. Threads may share it.

    A digest of the values covers all that is returned, so that a flipped bit anywhere in the file
    is found, also one in a header.
    """

    def __init__(self, store: TokenStore, portion: Portion) -> None:
        self._place = store.folder / portion.file_name
        self._schema = store.schema
        self._lock = threading.Lock()
        self._decoded: dict[int, np.ndarray] = {}

        def parse(content: Any) -> tuple[pq.ParquetFile, PortionRecord]:  # noqa: ANN401
            file = pq.ParquetFile(content)
            return file, _checked_record(store, portion, file.metadata)

        try:
            # From a store a portion is fetched whole: a request takes as long as a megabyte. A file
            # of Python's own would have to be closed.
            if isinstance(self._place, StorePath):
                self._parquet, self.record = read_as(
                    self._place, lambda content: parse(pa.BufferReader(content))
                )
            else:
                self._parquet, self.record = parse(pa.OSFile(str(self._place)))
            self._ends = [end for end, _ in self.record.groups]
        except UNREADABLE as error:
            raise _unreadable(self._place, error) from None

    def documents(self) -> pa.Table:
        """The documents, one row each, without their tokens."""
        wanted = self._schema.names[:-1]
        try:
            # A name that begins a longer one, as `field:meta` and `field:meta.year`, brings both.
            table = self._parquet.read(columns=wanted, use_threads=False).select(wanted)
            table = table.cast(pa.schema([self._schema.field(name) for name in wanted]))
            if _digest_of_documents(table) != self.record.digest:
                raise ValueError("its content is not what was written")
        except UNREADABLE as error:
            raise _unreadable(self._place, error) from None
        return table

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens from `start` to `stop`, as an array of the caller's own."""
        if start == stop:
            return np.empty(0, self._schema.field("tokens").type.value_type.to_pandas_dtype())
        first, last = bisect_right(self._ends, start), bisect_right(self._ends, stop - 1)
        with self._lock:
            groups = self._groups(range(first, last + 1))
        # The ends are cut before the groups are joined, so that joining is the only copy.
        groups[-1] = groups[-1][: stop - self._begin(last)]
        groups[0] = groups[0][start - self._begin(first) :]
        return groups[0].copy() if first == last else np.concatenate(groups)

    def _begin(self, group: int) -> int:
        return self._ends[group - 1] if group else 0

    def _groups(self, numbers: range) -> list[np.ndarray]:
        """The tokens of some row groups. Those that are not decoded yet are read at once."""
        missing = [number for number in numbers if number not in self._decoded]
        if missing:
            try:
                table = self._parquet.read_row_groups(missing, ["tokens"], use_threads=False)
                tokens = table.column(0).combine_chunks().values.to_numpy()
                stops = np.cumsum([self._ends[n] - self._begin(n) for n in missing])
                for number, part in zip(missing, np.split(tokens, stops[:-1]), strict=True):
                    if xxhash.xxh3_64_hexdigest(part.data) != self.record.groups[number][1]:
                        raise ValueError("its content is not what was written")
                    self._decoded[number] = part
            except UNREADABLE as error:
                raise _unreadable(self._place, error) from None
        groups = [self._decoded[number] for number in numbers]
        # Those that were decoded first go.
        for number in list(self._decoded)[:-DECODED_GROUPS]:
            del self._decoded[number]
        return groups


def _checked_record(store: TokenStore, portion: Portion, footer: Any) -> PortionRecord:  # noqa: ANN401 (pyarrow has no types)
    """The record in the metadata of a file; any error of `UNREADABLE` if it is not this portion."""
    content = (footer.metadata or {})[b"record"]
    if digest_of(content).encode() != footer.metadata[b"digest"]:
        raise ValueError("its record is damaged")
    record = PortionRecord(**json.loads(content))
    if (record.store, record.extent, record.number) != (store.key, *portion[:2]):
        raise ValueError("it holds other documents")
    return record


def _unreadable(file: Place, error: BaseException) -> CorpusError:
    """The error about a portion that is missing or cannot be read."""
    if isinstance(error, FileNotFoundError):
        return CorpusError(f"{file}: not there; run the same command, which prepares it again")
    return CorpusError(
        f"{file}: cannot be read ({reason(error)}); if it is damaged, move it away, then run the "
        "same command, which prepares it again"
    )
