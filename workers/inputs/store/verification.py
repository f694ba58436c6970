"""Compares the pieces of a token store with the texts that they were made of."""

# pyarrow has no types.
# pyright: basic

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from headcount.schemas.errors import CorpusError, printable
from headcount.workers.inputs.store.portions import Portion, PortionReader
from headcount.workers.inputs.store.token_files import forget_open_files
from headcount.workers.inputs.store.token_store import (
    BAD,
    Piece,
    TokenStore,
    read_documents,
    read_tokens,
)


def verify_portion(store: TokenStore, portion: Portion) -> list[str]:
    """What is wrong with the pieces of a portion, one line each.

    All texts are read again, but none is tokenised. What is wrong is mended by taking the
    `damaged_pieces` away (`forget`) and preparing the portion again.
    """
    return list(damaged_pieces(store, portion).values())


def damaged_pieces(store: TokenStore, portion: Portion) -> dict[Piece, str]:
    """The pieces of a portion that do not hold what they should, each with what is wrong."""
    # Nothing that is already decoded: the files themselves are looked at.
    forget_open_files()
    texts = _texts(store, portion)
    damages: dict[Piece, str] = {}
    for piece in store.pieces(portion):
        # They are read even if the piece's files are damaged: the next piece follows them.
        texts_of_piece = list(islice(texts, piece.documents))
        try:
            read_documents(store, piece)
            read_tokens(store, piece, 0, piece.tokens)
        except CorpusError as error:
            why = str(error)
        else:
            why = _difference(store, portion, piece, texts_of_piece)
        if why is None and piece.ended and (additional := next(texts, None)):
            why = f"{_place(portion, additional)}: was not there when the corpus was tokenised"
        if why is not None:
            damages[piece] = why
    return damages


class _Text(NamedTuple):
    """A document as the files have it now."""

    source: int
    """Number of its source within the portion."""
    row: int
    content: int
    is_bad: bool


def _texts(store: TokenStore, portion: Portion) -> Iterator[_Text]:
    for number, record in PortionReader(portion, store.reading):
        document = portion.sources[number].document_of(record, store.reading)
        is_bad = document.problem is not None
        yield _Text(number, document.row, document.content_hash, is_bad)


def _place(portion: Portion, text: _Text) -> str:
    """Where a text is, for people."""
    source = portion.sources[text.source]
    if portion.begins_source:
        return source.place_of(text.row)
    # How many rows lie before the range is not known here.
    return f"{printable(source.name)}, row {text.row + 1:,} from {portion.start:,} on"


def _difference(
    store: TokenStore, portion: Portion, piece: Piece, texts: Sequence[_Text]
) -> str | None:
    """The first document of a piece that is not as the files have it now."""
    table = read_documents(store, piece, ["source", "row", "content", "n_tokens"])
    stored = [table[name].to_pylist() for name in table.column_names]
    for text, source, row, content, n_tokens in zip(texts, *stored, strict=False):
        if text != (source, row, content, n_tokens == BAD):
            return f"{_place(portion, text)}: is not what was tokenised"
    if len(texts) < piece.documents:
        source = portion.sources[piece.stop.source]
        return f"{printable(source.name)}: has fewer documents than were tokenised"
    return None
