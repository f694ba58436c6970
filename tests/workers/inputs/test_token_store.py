"""The token store: pieces are read as they were written, and damage is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import numpy as np
import pytest

from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.files.places import place
from headcount.workers.inputs.corpus.documents import Reading
from headcount.workers.inputs.store import preparation, token_files
from headcount.workers.inputs.store.portions import Portion, Position
from headcount.workers.inputs.store.preparation import prepare_portion
from headcount.workers.inputs.store.stored_corpora import (
    remove_corpus,
    stored_corpora,
    stored_corpus,
    stored_files,
)
from headcount.workers.inputs.store.token_files import forget_open_files
from headcount.workers.inputs.store.token_store import (
    DOCUMENTS,
    TOKENS,
    Piece,
    TokenStore,
    chain_of,
    forget,
    read_documents,
    read_tokens,
)
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests.tools.s3_server import S3Server
from tests.toys.toy_store import (
    READING,
    TEXTS,
    portion_of,
    store_in,
    text_of,
    tokenizer_of_bytes,
    write_texts,
)

TEXT = "".join(TEXTS)
BYTES = np.frombuffer(TEXT.encode(), np.uint8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return tokenizer_of_bytes(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of several row groups and pieces of few tokens; nothing stays open between tests."""
    monkeypatch.setattr(token_files, "TOKENS_PER_GROUP", 64)
    monkeypatch.setattr(preparation, "PIECE_TOKENS", 1300)
    yield
    forget_open_files()


@dataclass(frozen=True)
class Prepared:
    """A store with three pieces of one portion."""

    corpora: Path
    store: TokenStore
    portion: Portion
    pieces: list[Piece]

    @property
    def folder(self) -> Path:
        """Where the pieces lie."""
        return self.corpora / self.store.key / self.portion.key


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: TextTokenizer) -> Prepared:
    portion = write_texts(tmp_path / "texts.jsonl")
    store = store_in(tmp_path / "corpora", tokenizer)
    pieces = prepare_portion(store, portion, tokenizer)
    assert len(pieces) == 3
    return Prepared(tmp_path / "corpora", store, portion, pieces)


def test_documents_and_tokens_are_those_of_the_texts(prepared: Prepared) -> None:
    store, portion, pieces = prepared.store, prepared.portion, prepared.pieces
    assert store.pieces(portion) == pieces
    assert text_of(store, pieces) == TEXT
    rows = [row for piece in pieces for row in read_documents(store, piece).to_pylist()]
    assert [row["n_tokens"] for row in rows] == [len(text.encode()) for text in TEXTS]
    assert [row["row"] for row in rows] == list(range(100))
    assert [row["field:meta.year"] for row in rows] == [str(1900 + i) for i in range(100)]
    assert {(row["source"], row["pile_set_name"], row["problem"]) for row in rows} == {
        (0, "Greek", None)
    }
    documents = [d for s in portion.sources for d in s.documents(READING)]
    assert [row["content"] for row in rows] == [document.content_hash for document in documents]


def test_any_range_of_tokens_is_read_and_the_callers_own(prepared: Prepared) -> None:
    store, pieces = prepared.store, prepared.pieces
    piece = pieces[1]
    expected = BYTES[pieces[0].tokens :][: piece.tokens]
    for start in (0, 1, 63, 64, 65, 128, 500, piece.tokens - 1, piece.tokens):
        for length in (0, 1, 63, 64, 65, 130, 640):
            stop = min(start + length, piece.tokens)
            tokens = read_tokens(store, piece, start, stop)
            assert tokens.tolist() == expected[start:stop].tolist()
            assert tokens.dtype == np.uint16
            # What was read before must not change by this.
            tokens += 1
    with pytest.raises(CorpusError, match="expected tokens within 0 to"):
        read_tokens(store, piece, 0, piece.tokens + 1)


def test_the_type_of_the_ids_is_the_narrowest(prepared: Prepared, tmp_path: Path) -> None:
    large = replace(prepared.store, d_vocab=(1 << 16) + 1)
    assert replace(large, d_vocab=1 << 16).token_type == prepared.store.token_type
    tokens = [np.array([5, 1 << 16], np.uint32)]
    file = tmp_path / "large.parquet"
    file.write_bytes(token_files.token_bytes(tokens, large.token_type, {}))
    content = token_files.TokenFile(file, 2, {}).read(0, 2)
    assert (content.dtype, content.tolist()) == (np.uint32, [5, 1 << 16])


def test_duckdb_reads_the_files_as_they_are(prepared: Prepared) -> None:
    connection = duckdb.connect()
    tokens = connection.execute(
        f"SELECT count(*), sum(token) FROM '{prepared.folder}/*{TOKENS}'"
    ).fetchone()
    assert tokens == (len(BYTES), int(BYTES.sum(dtype=np.int64)))
    documents = connection.execute(
        f"""SELECT count(*), sum(n_tokens), min(pile_set_name), max("field:meta.year")
        FROM '{prepared.folder}/*{DOCUMENTS}'"""
    ).fetchone()
    assert documents == (100, len(BYTES), "Greek", "1999")


def test_a_chain_takes_the_longest_piece_and_stops_at_a_gap() -> None:
    def piece(start: int, stop: int, ended: bool = False) -> Piece:
        return Piece("p", Position(0, start), Position(0, stop), ended, 1, 1, 0)

    first, longer, second, last = piece(0, 5), piece(0, 8), piece(8, 9), piece(9, 9, True)
    assert chain_of([second, first, longer, last]) == [longer, second, last]
    assert chain_of([second, first, last]) == [first]
    assert chain_of([second, last]) == []
    # Who reads pieces goes on behind them, whatever others have written.
    following = piece(5, 7, True)
    assert chain_of([longer, second, following], [first]) == [first, following]
    # A piece of nothing leads nowhere.
    assert chain_of([first, piece(5, 5)]) == [first]


def test_what_is_read_and_who_reads_it_make_the_key(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    readings = [READING, Reading(), Reading("body"), Reading(before=" ")]
    stores = [TokenStore.of(tmp_path, tokenizer, reading) for reading in readings]
    other = tokenizer_of_bytes(tmp_path / "other")
    assert TokenStore.of(tmp_path, other, READING) == stores[0]
    vocabulary = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary["added_tokens"][0]["content"] = "<|end|>"
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(vocabulary))
    stores.append(TokenStore.of(tmp_path, TextTokenizer(tmp_path / "other", 257), READING))
    assert len({store.key for store in stores}) == 5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "expected format 1, got 2"),
        ({"tokenizer": "abc"}, "expected tokenizer .*, got abc"),
        ({"d_vocab": None}, "expected d_vocab 257, got None"),
        ({"reading": 5}, "not the description of a token store"),
    ],
)
def test_another_store_is_refused(prepared: Prepared, change: dict[str, object], why: str) -> None:
    store = prepared.store
    store.create()
    file = prepared.corpora / store.key / "store.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(RunError, match=f"store.json: {why}; remove this store") as caught:
        store.create()
    assert "\n" not in str(caught.value)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def blank(file: Path) -> None:
    """As a power cut leaves a file whose content was not written yet."""
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [cut, blank, Path.unlink])
@pytest.mark.parametrize("ending", [DOCUMENTS, TOKENS])
def test_a_piece_of_which_a_file_is_cut_or_gone_is_prepared_again(
    prepared: Prepared,
    tokenizer: TextTokenizer,
    damage: Callable[[Path], None],
    ending: str,
) -> None:
    store, portion, pieces = prepared.store, prepared.portion, prepared.pieces
    file = prepared.folder / (pieces[1].name + ending)
    before = file.read_bytes()
    damage(file)
    if (damage, ending) == (blank, TOKENS):
        # Its size is right, so only reading it tells.
        with pytest.raises(CorpusError, match="delete it, then run the same command"):
            read_tokens(store, pieces[1], 0, 1)
        file.unlink()
    assert store.pieces(portion) == pieces[:1]
    assert prepare_portion(store, portion, tokenizer) == pieces
    assert file.read_bytes() == before


def test_files_of_another_piece_are_not_taken_for_its_own(
    prepared: Prepared, tokenizer: TextTokenizer
) -> None:
    store, portion, pieces = prepared.store, prepared.portion, prepared.pieces
    folder = prepared.folder
    for ending in (DOCUMENTS, TOKENS):
        shutil.copy(folder / (pieces[1].name + ending), folder / (pieces[0].name + ending))
    assert store.pieces(portion) == []
    prepare_portion(store, portion, tokenizer)
    # Even if it has the right size: the tokens of two pieces of one length may.
    tokens = folder / (pieces[0].name + TOKENS)
    shutil.copy(folder / (pieces[1].name + TOKENS), tokens)
    with pytest.raises(CorpusError, match=r"holds the tokens of other documents.*delete it"):
        read_tokens(store, pieces[0], 0, 1)
    # Pieces of another store are none of this one.
    other = store_in(prepared.corpora, tokenizer, Reading())
    shutil.copytree(folder, prepared.corpora / other.key / portion.key)
    assert other.pieces(portion) == []


def test_a_flipped_bit_is_found_or_changes_nothing(prepared: Prepared) -> None:
    store, piece = prepared.store, prepared.pieces[2]
    documents = read_documents(store, piece)
    tokens = read_tokens(store, piece, 0, piece.tokens).tolist()
    found = {DOCUMENTS: 0, TOKENS: 0}
    places = 0
    for ending in found:
        file = prepared.folder / (piece.name + ending)
        content = file.read_bytes()
        for at in range(0, len(content), 37):
            places += 1
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            forget_open_files()
            if piece not in store.pieces(prepared.portion):
                found[ending] += 1
                continue
            try:
                same = read_documents(store, piece).equals(documents)
                same &= read_tokens(store, piece, 0, piece.tokens).tolist() == tokens
            except CorpusError:
                found[ending] += 1
            else:
                assert same, f"byte {at} of {file.name}"
        file.write_bytes(content)
    assert sum(found.values()) > places / 2


def test_lists_what_is_stored_and_removes_it(
    prepared: Prepared, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    store, corpora = prepared.store, prepared.corpora
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "abc"}\n\n{"text": 5}\n')
    write_texts(tmp_path / "more.jsonl", TEXTS[:3])
    small = portion_of(bad, tmp_path / "more.jsonl")
    prepare_portion(store, small, tokenizer)
    [corpus] = stored_corpora(corpora)
    assert (corpus.key, corpus.store, corpus.problem) == (store.key, store, None)
    assert (corpus.portions, corpus.pieces) == (2, 4)
    assert (corpus.documents, corpus.bad) == (105, 1)
    assert corpus.tokens == len(BYTES) + 3 + len("".join(TEXTS[:3]).encode())
    stored = [file for file in corpora.rglob("*.*") if file.name != ".lock"]
    assert corpus.bytes == sum(file.stat().st_size for file in stored)
    assert corpus.changed is not None
    newest = max(file.stat().st_mtime for file in stored)
    assert corpus.changed.timestamp() == pytest.approx(newest, abs=1e-3)
    forget(store, prepared.pieces[1:])
    files = {Path(file.name).name: file for file in stored_files(corpora, store.key)}
    assert list(files) == ["bad.jsonl", "more.jsonl", "texts.jsonl"]
    assert [file.whole for file in files.values()] == [True, True, False]
    assert files["bad.jsonl"].problems == [f"{bad}, line 3 (text is int, expected a string)"]
    assert (files["bad.jsonl"].documents, files["bad.jsonl"].tokens) == (2, 3)
    assert files["texts.jsonl"].documents == prepared.pieces[0].documents
    assert files["texts.jsonl"].bytes == prepared.portion.files[0].bytes
    (corpora / store.key / "store.json").write_text("{")
    assert "not the description" in str(stored_corpus(corpora, store.key).problem)
    with pytest.raises(RunError, match=f"did you mean '{store.key}'"):
        remove_corpus(corpora, store.key[:-1] + "_")
    remove_corpus(corpora, store.key)
    assert stored_corpora(corpora) == []
    assert not (corpora / store.key).exists()


def test_a_store_of_objects_holds_the_same_and_is_asked_little(
    prepared: Prepared, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    portion, pieces = prepared.portion, prepared.pieces
    with S3Server() as server:
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        corpora = place("s3://bucket/corpora")
        store = store_in(corpora, tokenizer)
        assert prepare_portion(store, portion, tokenizer) == pieces
        assert store.pieces(portion) == pieces
        assert [corpus.tokens for corpus in stored_corpora(corpora)] == [len(BYTES)]
        forget_open_files()
        server.clear()
        piece = pieces[0]
        for start in range(piece.tokens):
            read_tokens(store, piece, start, start + 1)
        # 16 row groups: its size, its footer and its tokens.
        assert len(server.requests()) <= 4
        assert text_of(store, pieces) == TEXT
        server.clear()
        read_documents(store, piece, ["n_tokens"])
        assert len(server.requests()) <= 2
        remove_corpus(corpora, store.key)
        assert stored_corpora(corpora) == []
