"""Small corpora in token stores, whose tokens are the bytes of their texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from headcount.schemas.files.places import Place
from headcount.workers.inputs.corpus.documents import Reading, Source
from headcount.workers.inputs.store.portions import Portion, portions_of
from headcount.workers.inputs.store.token_store import (
    Piece,
    TokenStore,
    read_documents,
    read_tokens,
)
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests.toys.toy_models import byte_tokenizer

READING = Reading(fields=("meta.year",))

TEXTS = [f"text {i} ä " * (i % 7) for i in range(100)]
"""Some are empty. One letter of each of the others has two bytes."""


def tokenizer_of_bytes(folder: Path) -> TextTokenizer:
    """A tokenizer whose ids are bytes, written to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return TextTokenizer(byte_tokenizer(folder), 257)


def write_texts(file: Path, texts: Iterable[str] = TEXTS) -> Portion:
    """A file of documents, each with a year, as one portion."""
    lines = [
        json.dumps({"text": text, "meta": {"pile_set_name": "Greek", "year": 1900 + i}})
        for i, text in enumerate(texts)
    ]
    file.write_text("".join(f"{line}\n" for line in lines))
    return portion_of(file)


def portion_of(*files: Path, kind: str = "jsonl") -> Portion:
    """Files as one portion."""
    [portion] = portions_of([Source(kind, str(file), file.stat().st_size) for file in files])
    return portion


def store_in(corpora: Place, tokenizer: TextTokenizer, reading: Reading = READING) -> TokenStore:
    """A token store of the tokenizer, with its description."""
    store = TokenStore.of(corpora, tokenizer, reading)
    store.create()
    return store


def text_of(store: TokenStore, pieces: Iterable[Piece]) -> str:
    """The texts that the tokens of some pieces stand for, one after the other."""
    return b"".join(
        read_tokens(store, piece, 0, piece.tokens).astype(np.uint8).tobytes() for piece in pieces
    ).decode()


def rows_of(store: TokenStore, pieces: Iterable[Piece]) -> list[int]:
    """The rows of the documents of some pieces."""
    return [row for piece in pieces for row in read_documents(store, piece)["row"].to_pylist()]
