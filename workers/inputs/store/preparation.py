"""Reads and tokenises a portion of a corpus, and commits its pieces to the token store.

Whoever prepares a portion goes on behind its last committed piece, so nothing but the piece in
progress is lost when a preparation is killed. Two may prepare one portion at once: on a disk the
second waits for the first and takes over its pieces, in a store both write the same pieces.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock, Timeout

from headcount.schemas.errors import CorpusError
from headcount.workers.inputs.corpus.documents import Document
from headcount.workers.inputs.store.portions import Portion, PortionReader, Position
from headcount.workers.inputs.store.token_store import (
    BAD,
    LOCK_FILE,
    Piece,
    TokenStore,
    chain_of,
    commit_piece,
    field_column,
)

PIECE_TOKENS = 1 << 23
"""Tokens of a piece at most, unless a single document has more."""

PIECE_DOCUMENTS = 1 << 17
"""Documents of a piece at most."""

PIECE_CHARACTERS = 1 << 26
"""Characters that the fields of a piece's documents have at most, its texts not counted."""

BATCH_CHARACTERS = 1 << 20
"""Characters that are tokenised at once for each core, unless a single document has more."""

BATCH_DOCUMENTS = 1 << 12
"""Documents that are tokenised at once."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Environment variable that the library tokenizers reads whenever it tokenises."""

CHARACTERS_PER_TOKEN = 4
"""About how long a token is. It decides how much is read at once for a few tokens."""

LOOK_SECONDS = 1.0
"""Pause between two looks at what another process has written."""

PATIENCE_SECONDS = 600.0
"""Time without a new piece after which another process is no longer waited for."""


class Tokenizer(Protocol):
    """What preparation needs of a tokenizer."""

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Token ids of several texts at once."""
        ...


@dataclass(frozen=True)
class PreparationProgress:
    """How far a portion is, with the pieces that were there before."""

    documents: int
    tokens: int
    bad: int
    pieces: int
    """Committed pieces."""
    waiting: bool = False
    """Whether another process prepares the portion, so that this one waits for it."""


Watch = Callable[[PreparationProgress], None]
"""Is called after every batch of documents."""


def unwatched(progress: PreparationProgress) -> None:
    """Watch a portion being prepared and show nothing."""


def use_one_core() -> None:
    """Have tokenizers use no more than one core, in a process that has only one.

    Otherwise it starts a thread for every core of the machine.
    """
    os.environ[PARALLELISM] = "false"


def _cores() -> int:
    """Cores that tokenizers uses in this process."""
    if os.environ.get(PARALLELISM) == "false":
        return 1
    # macOS cannot bind a process to cores.
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def prepare_portion(
    store: TokenStore,
    portion: Portion,
    tokenizer: Tokenizer,
    most_tokens: int | None = None,
    watch: Watch = unwatched,
) -> list[Piece]:
    """Tokenise a portion from behind its committed pieces on, and return all of its pieces.

    Preparation stops after the piece with which it has written `most_tokens`. That piece ends
    early. None means that the portion is prepared to its end.
    """
    preparation = _Preparation(store, portion, tokenizer, watch)
    preparation.look()
    # Nothing is locked if there is nothing to do.
    if not preparation.ended:
        with _alone(preparation):
            preparation.run(most_tokens)
    return preparation.pieces


class _Preparation:
    """The preparation of one portion, as far as it is."""

    def __init__(
        self, store: TokenStore, portion: Portion, tokenizer: Tokenizer, watch: Watch
    ) -> None:
        self.store = store
        self.portion = portion
        self.tokenizer = tokenizer
        self.watch = watch
        self.pieces: list[Piece] = []
        self.later_starts: set[Position] = set()
        """Where committed pieces begin that lie behind a gap."""

    @property
    def ended(self) -> bool:
        """Whether the portion is prepared to its end."""
        return bool(self.pieces) and self.pieces[-1].ended

    @property
    def position(self) -> Position:
        """Where the next piece begins."""
        return self.pieces[-1].stop if self.pieces else Position()

    def look(self) -> None:
        """Take over the pieces that are committed behind those that are known."""
        committed = self.store.committed(self.portion.key)
        self.pieces = chain_of(committed, self.pieces)
        self.later_starts = {piece.start for piece in committed if piece.start > self.position}

    def run(self, most_tokens: int | None) -> None:
        """Commit pieces until `most_tokens` are written, or to the end of the portion."""
        self.look()
        tokens_left = most_tokens
        documents = _TokenisedDocuments(self, self.position)
        while not self.ended and (tokens_left is None or tokens_left > 0):
            # What another process has written meanwhile is not written again. The names are looked
            # at first: records need many requests.
            if self.store.has_piece_at(self.portion.key, self.position):
                pieces_before = len(self.pieces)
                self.look()
                if len(self.pieces) > pieces_before:
                    documents = _TokenisedDocuments(self, self.position)
                    continue
            piece = self._write_piece(documents, tokens_left)
            self.pieces.append(piece)
            if tokens_left is not None:
                tokens_left -= piece.tokens

    def report(self, unfinished: _UnfinishedPiece | None = None, waiting: bool = False) -> None:
        """Tell the watcher how far the portion is."""
        parts: list[Any] = [*self.pieces, *([unfinished] if unfinished else [])]
        progress = PreparationProgress(
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            bad=sum(part.bad for part in parts),
            pieces=len(self.pieces),
            waiting=waiting,
        )
        self.watch(progress)

    def _write_piece(self, documents: _TokenisedDocuments, most_tokens: int | None) -> Piece:
        """Commit the next documents as one piece, of `most_tokens` and one document at most."""
        unfinished = _UnfinishedPiece(documents.position)
        try:
            self._fill(unfinished, documents, most_tokens)
        except CorpusError:
            # The portion cannot be read further. What lies before that place is kept.
            if unfinished.documents:
                self._commit(unfinished, documents)
            raise
        return self._commit(unfinished, documents)

    def _fill(
        self,
        unfinished: _UnfinishedPiece,
        documents: _TokenisedDocuments,
        most_tokens: int | None,
    ) -> None:
        tokens_left = PIECE_TOKENS if most_tokens is None else most_tokens
        while unfinished.tokens < tokens_left:
            document = documents.next(tokens_left - unfinished.tokens)
            if document is None or not unfinished.has_room_for(document):
                return
            # Taken only now: one that has no room begins the next piece.
            documents.take()
            unfinished.add(document)
            # A committed piece goes on from here, so this one ends.
            if documents.position in self.later_starts:
                return
            if documents.batch_ended:
                self.report(unfinished)

    def _commit(self, unfinished: _UnfinishedPiece, documents: _TokenisedDocuments) -> Piece:
        # A file that changed while it was read may have been read half old and half new.
        self.portion.check_unchanged()
        piece = Piece(
            portion_key=self.portion.key,
            start=unfinished.start,
            stop=documents.position,
            ended=documents.ended,
            documents=unfinished.documents,
            tokens=unfinished.tokens,
            bad=unfinished.bad,
        )
        columns = unfinished.columns(self.store.reading.fields)
        commit_piece(self.store, self.portion, piece, unfinished.token_ids, columns)
        return piece


@dataclass(frozen=True)
class _TokenisedDocument:
    source: int
    """Number of its source within the portion."""
    document: Document
    token_ids: np.ndarray
    position: Position
    """Where reading goes on behind it."""


class _TokenisedDocuments:
    """The documents of a portion from a position on, tokenised in batches."""

    def __init__(self, preparation: _Preparation, position: Position) -> None:
        self.position = position
        """Behind the last document that was taken."""
        self._portion = preparation.portion
        self._reading = preparation.store.reading
        self._tokenizer = preparation.tokenizer
        self._id_type = preparation.store.token_type.to_pandas_dtype()
        self._reader = PortionReader(self._portion, self._reading, position)
        self._records = iter(self._reader)
        self._batch: deque[_TokenisedDocument] = deque()

    @property
    def batch_ended(self) -> bool:
        """Whether every document that was tokenised is taken."""
        return not self._batch

    @property
    def ended(self) -> bool:
        """Whether every document is taken."""
        return self._reader.ended and self.batch_ended

    def next(self, tokens: int) -> _TokenisedDocument | None:
        """The next document, which is not taken yet; None at the end.

        `tokens` is how many are needed: for a few tokens no large batch is tokenised.
        """
        if not self._batch:
            self._batch.extend(self._tokenised(tokens * CHARACTERS_PER_TOKEN))
        if not self._batch:
            # Blank lines may lie behind the last document.
            self.position = self._reader.position
            return None
        return self._batch[0]

    def take(self) -> None:
        """Go behind the next document."""
        self.position = self._batch.popleft().position

    def _tokenised(self, characters: int) -> Iterator[_TokenisedDocument]:
        """The next batch of documents, of about so many characters at most."""
        batch: list[tuple[int, Document, Position]] = []
        texts: list[str] = []
        characters_left = min(characters, BATCH_CHARACTERS * _cores())
        for number, record in self._records:
            document = self._portion.sources[number].document_of(record, self._reading)
            batch.append((number, document, self._reader.position))
            if document.problem is None:
                texts.append(document.text)
                characters_left -= len(document.text)
            if characters_left <= 0 or len(batch) == BATCH_DOCUMENTS:
                break
        token_ids = iter(self._tokenizer.encode_many(texts))
        for number, document, position in batch:
            ids = next(token_ids) if document.problem is None else []
            yield _TokenisedDocument(number, document, np.array(ids, self._id_type), position)


class _UnfinishedPiece:
    """The documents of a piece that is not committed yet, in compact arrays."""

    def __init__(self, start: Position) -> None:
        self.start = start
        self.tokens = 0
        self.bad = 0
        self.token_ids: list[np.ndarray] = []
        self._characters = 0
        self._source = array("i")
        self._row = array("q")
        self._n_tokens = array("i")
        self._content = array("Q")
        self._pile_set_name: list[str | None] = []
        self._problem: list[str | None] = []
        self._fields: list[tuple[str | None, ...]] = []

    @property
    def documents(self) -> int:
        """How many there are, bad ones included."""
        return len(self._row)

    def has_room_for(self, document: _TokenisedDocument) -> bool:
        """Whether a document can be added; a first one always can."""
        if not self.documents:
            return True
        return (
            self.documents < PIECE_DOCUMENTS
            and self.tokens + len(document.token_ids) <= PIECE_TOKENS
            and self._characters < PIECE_CHARACTERS
        )

    def add(self, tokenised: _TokenisedDocument) -> None:
        """Add a document with its tokens."""
        document = tokenised.document
        is_bad = document.problem is not None
        self.tokens += len(tokenised.token_ids)
        self.bad += is_bad
        self.token_ids.append(tokenised.token_ids)
        self._characters += sum(len(value) for value in document.fields if value is not None)
        self._source.append(tokenised.source)
        self._row.append(document.row)
        self._n_tokens.append(BAD if is_bad else len(tokenised.token_ids))
        self._content.append(document.content_hash)
        self._pile_set_name.append(document.pile_set_name)
        self._problem.append(document.problem)
        self._fields.append(document.fields)

    def columns(self, fields: tuple[str, ...]) -> dict[str, Any]:
        """The columns of the documents file."""
        columns: dict[str, Any] = {
            "source": np.array(self._source, np.int32),
            "row": np.array(self._row, np.int64),
            "n_tokens": np.array(self._n_tokens, np.int32),
            "content": np.array(self._content, np.uint64),
            "pile_set_name": self._pile_set_name,
            "problem": self._problem,
        }
        for number, name in enumerate(fields):
            # A bad document has no fields.
            columns[field_column(name)] = [
                values[number] if values else None for values in self._fields
            ]
        return columns


@contextmanager
def _alone(preparation: _Preparation) -> Iterator[None]:
    """Hold the lock of a portion that lies on a disk, so that nobody else does the same work.

    While another process holds it, its pieces are taken over. The lock only spares work: a process
    that waits for too long, or on a disk without locks, goes on without it.
    """
    folder = preparation.store.folder / preparation.portion.key
    if not isinstance(folder, Path):
        yield
        return
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for(lock, preparation)
    except (OSError, NotImplementedError):
        # If the folder cannot be written, writing a piece says so.
        pass
    try:
        yield
    finally:
        lock.release()


def _wait_for(lock: FileLock, preparation: _Preparation) -> None:
    """Take the lock, or give up if whoever holds it writes nothing for a long time."""
    position = preparation.position
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            lock.acquire(timeout=LOOK_SECONDS)
            return
        except Timeout:
            preparation.look()
            preparation.report(waiting=True)
        if preparation.position != position:
            position = preparation.position
            deadline = time.monotonic() + PATIENCE_SECONDS
