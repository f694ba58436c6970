"""The token store: the same tokens, however often preparation stops or is killed, and no damage is
read.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from headcount.schemas.errors import CorpusError, RunError
from headcount.schemas.files.places import place
from headcount.workers.inputs.corpus.documents import Reading
from headcount.workers.inputs.store import preparation, token_files
from headcount.workers.inputs.store.portions import Portion
from headcount.workers.inputs.store.preparation import PreparationProgress, Watch, prepare_portion
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
    forget,
    read_documents,
    read_tokens,
)
from headcount.workers.inputs.store.verification import damaged_pieces, verify_portion
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests.toys.object_stores import object_store
from tests.toys.refusals import refused
from tests.toys.toy_store import (
    READING,
    TEXTS,
    portion_of,
    rows_of,
    store_in,
    text_of,
    tokenizer_of_bytes,
    write_texts,
)

TEXT = "".join(TEXTS)
BYTES = np.frombuffer(TEXT.encode(), np.uint8)


class CountingTokenizer:
    """A tokenizer of bytes that counts what it tokenises."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        self.texts += texts
        return self.tokenizer.encode_many(texts)


@dataclass
class Corpus:
    """A file of texts that is not prepared yet."""

    file: Path
    corpora: Path
    store: TokenStore
    tokenizer: CountingTokenizer
    portion: Portion

    @property
    def folder(self) -> Path:
        """Where the pieces lie."""
        return self.corpora / self.store.key / self.portion.key

    def prepare(self, watch: Watch = lambda _: None, most_tokens: int | None = None) -> list[Piece]:
        return prepare_portion(self.store, self.portion, self.tokenizer, most_tokens, watch)

    def pieces(self) -> list[Piece]:
        """The committed pieces, which hold the first texts of the file."""
        pieces = self.store.pieces(self.portion)
        documents = sum(piece.documents for piece in pieces)
        assert rows_of(self.store, pieces) == list(range(documents))
        assert text_of(self.store, pieces) == "".join(TEXTS[:documents])
        return pieces

    def check_whole(self) -> list[Piece]:
        """Prepare to the end: all texts are there, in their order, once."""
        pieces = self.prepare()
        assert [piece.ended for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert text_of(self.store, pieces) == TEXT
        assert self.pieces() == pieces
        return pieces


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return tokenizer_of_bytes(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def corpus(tmp_path: Path, bytes_tokenizer: TextTokenizer) -> Corpus:
    file, corpora = tmp_path / "texts.jsonl", tmp_path / "corpora"
    store = store_in(corpora, bytes_tokenizer)
    return Corpus(file, corpora, store, CountingTokenizer(bytes_tokenizer), write_texts(file))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces, row groups and batches of little; nothing stays open between tests."""
    monkeypatch.setattr(token_files, "TOKENS_PER_GROUP", 64)
    monkeypatch.setattr(preparation, "PIECE_TOKENS", 1000)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(preparation, "LOOK_SECONDS", 0.02)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    yield
    forget_open_files()


def test_one_core_is_kept_and_all_cores_are_given_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    assert preparation._cores() == len(psutil.Process().cpu_affinity() or [0])
    preparation.use_one_core()
    assert preparation._cores() == 1


@pytest.mark.parametrize(
    ("tokens", "documents", "characters"),
    [(60, 1000, 1000), (400, 9, 1000), (10**6, 10**6, 40), (10**6, 10**6, 10**6)],
)
def test_pieces_of_any_size_hold_the_same_documents(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, tokens: int, documents: int, characters: int
):
    monkeypatch.setattr(preparation, "PIECE_TOKENS", tokens)
    monkeypatch.setattr(preparation, "PIECE_DOCUMENTS", documents)
    monkeypatch.setattr(preparation, "PIECE_CHARACTERS", characters)
    pieces = corpus.check_whole()
    # The only field of each document is a year of four characters.
    assert all(piece.documents <= min(documents, characters // 4) for piece in pieces)
    assert all(piece.tokens <= tokens or piece.documents == 1 for piece in pieces)
    assert len(pieces) == 1 or max(piece.documents for piece in pieces) > 1
    # Nothing is tokenised twice.
    assert corpus.tokenizer.texts == TEXTS


def test_files_of_all_kinds_and_bad_rows_are_counted(corpus: Corpus, tmp_path: Path):
    lines = ['{"text": "abc"}', "", "{", '{"text": null}', '{"text": ""}', " "]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_text('{"text": "de"}\n')
    seen: list[PreparationProgress] = []
    corpus.portion = portion_of(*(tmp_path / f"{name}.jsonl" for name in "abc"))
    [piece] = corpus.prepare(seen.append)
    assert (piece.documents, piece.tokens, piece.bad) == (5, 5, 2)
    assert seen[-1] == PreparationProgress(documents=5, tokens=5, bad=2, pieces=0)
    table = read_documents(corpus.store, piece, ["source", "row", "n_tokens", "problem"])
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, 0, 3, None), (0, 2, -1, "invalid JSON"), (0, 3, -1, "text is null, expected a string"),
        (0, 4, 0, None), (2, 0, 2, None),
    ]  # fmt: skip


def prepare_and_be_killed(corpus: Corpus) -> None:
    def kill(progress: PreparationProgress) -> None:
        if progress.pieces == 2 and progress.tokens > 2300:
            os.kill(os.getpid(), signal.SIGKILL)

    corpus.prepare(kill)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_preparation_goes_on_behind_its_last_piece(corpus: Corpus):
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=prepare_and_be_killed, args=(corpus,))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    first = corpus.pieces()
    assert len(first) == 2
    # Its lock died with it.
    assert corpus.check_whole()[:2] == first
    assert corpus.tokenizer.texts == TEXTS[sum(piece.documents for piece in first) :]


@pytest.mark.parametrize("has_locks", [True, False])
def test_several_write_one_chain(corpus: Corpus, monkeypatch: pytest.MonkeyPatch, has_locks: bool):
    if not has_locks:
        # As in a store, or on a disk without locks.
        monkeypatch.setattr(preparation, "_alone", lambda _: nullcontext())
    threads = [threading.Thread(target=corpus.prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokenised = len(corpus.tokenizer.texts)
    # Every writer cuts at the same places, so nothing lies beside the chain.
    assert set(corpus.store.committed(corpus.portion.key)) == set(corpus.check_whole())
    # With locks nothing was done twice.
    assert tokenised >= 100 if not has_locks else tokenised == 100


def test_a_file_that_changes_while_it_is_read_commits_nothing(corpus: Corpus):
    def change(progress: PreparationProgress) -> None:
        if progress.pieces == 1:
            os.utime(corpus.file, ns=(0, 0))

    assert "texts.jsonl: changed while it was read" in refused(CorpusError, corpus.prepare, change)
    assert len(corpus.pieces()) == 1
    # The changed file is another portion, prepared from its beginning.
    corpus.portion = portion_of(corpus.file)
    corpus.check_whole()


def test_what_lies_before_a_broken_place_is_kept(corpus: Corpus, tmp_path: Path):
    broken = tmp_path / "texts.csv"
    broken.write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS) + '"no end')
    corpus.portion = portion_of(broken, kind="csv")
    for _ in range(2):
        with pytest.raises(CorpusError, match="not CSV"):
            corpus.prepare()
    # What was read together with the broken row is lost.
    assert sum(piece.documents for piece in corpus.pieces()) >= 90


def test_without_room_one_line_and_nothing_half_written(corpus: Corpus):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        told = refused(RunError, corpus.prepare)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert re.search("cannot be written .*; free space", told)
    assert [file.name for file in corpus.folder.iterdir()] == [".lock"]
    corpus.check_whole()
    # A file is in the place of a folder.
    shutil.rmtree(corpus.folder)
    corpus.folder.write_text("")
    with pytest.raises(RunError, match=r"cannot be written .*choose another place"):
        corpus.prepare()


def test_verification_finds_texts_and_files_that_differ(corpus: Corpus):
    pieces = corpus.check_whole()
    assert verify_portion(corpus.store, corpus.portion) == []
    # Another text of the same size at the same time, in the second piece.
    times = corpus.file.stat()
    corpus.file.write_text(corpus.file.read_text().replace("text 50 ", "test 50 "))
    os.utime(corpus.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    # A bit of the third piece's tokens.
    damaged = corpus.folder / (pieces[2].name + TOKENS)
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    text_line, file_line = verify_portion(corpus.store, corpus.portion)
    assert text_line == f"{corpus.file}, line 51: is not what was tokenised"
    assert file_line.startswith(f"{damaged}: cannot be read (")
    differing = damaged_pieces(corpus.store, corpus.portion)
    assert list(differing) == pieces[1:3]
    forget(corpus.store, differing)
    assert text_of(corpus.store, corpus.prepare()) == TEXT.replace("text 50 ", "test 50 ")
    assert verify_portion(corpus.store, corpus.portion) == []


def test_verification_finds_documents_that_came_or_went(corpus: Corpus):
    corpus.prepare()
    lines = corpus.file.read_text().splitlines(keepends=True)
    for changed, what in [
        (lines[:-1], ": has fewer documents than were tokenised"),
        ([*lines, lines[0]], ", line 101: was not there when the corpus was tokenised"),
    ]:
        corpus.file.write_text("".join(changed))
        assert verify_portion(corpus.store, corpus.portion) == [f"{corpus.file}{what}"]


# What is stored


def test_documents_keep_what_was_read_of_them(corpus: Corpus):
    pieces = corpus.check_whole()
    rows = [row for piece in pieces for row in read_documents(corpus.store, piece).to_pylist()]
    documents = [d for source in corpus.portion.sources for d in source.documents(READING)]
    assert rows == [
        {"source": 0, "row": i, "n_tokens": len(TEXTS[i].encode()),
         "content": documents[i].content_hash, "pile_set_name": "Greek", "problem": None,
         "field:meta.year": str(1900 + i)}
        for i in range(100)
    ]  # fmt: skip


def test_any_range_of_tokens_is_read_and_the_callers_own(corpus: Corpus):
    first, piece, *_ = corpus.prepare()
    expected = BYTES[first.tokens :][: piece.tokens]
    for start in (0, 1, 63, 64, 65, 500, piece.tokens - 1, piece.tokens):
        for length in (0, 1, 64, 130, 640):
            stop = min(start + length, piece.tokens)
            tokens = read_tokens(corpus.store, piece, start, stop)
            assert tokens.tolist() == expected[start:stop].tolist()
            assert tokens.dtype == np.uint16
            # What was read before must not change by this.
            tokens += 1
    with pytest.raises(CorpusError, match="expected tokens within 0 to"):
        read_tokens(corpus.store, piece, 0, piece.tokens + 1)


def test_the_type_of_the_ids_is_the_narrowest(corpus: Corpus, tmp_path: Path):
    large = replace(corpus.store, d_vocab=(1 << 16) + 1)
    assert replace(large, d_vocab=1 << 16).token_type == corpus.store.token_type
    tokens = [np.array([5, 1 << 16], np.uint32)]
    file = tmp_path / "large.parquet"
    file.write_bytes(token_files.token_bytes(tokens, large.token_type, {}))
    content = token_files.TokenFile(file, 2, {}).read(0, 2)
    assert (content.dtype, content.tolist()) == (np.uint32, [5, 1 << 16])


def test_what_is_read_and_who_reads_it_make_the_key(tmp_path: Path, bytes_tokenizer: TextTokenizer):
    readings = [READING, Reading(), Reading("body"), Reading(before=" ")]
    stores = [TokenStore.of(tmp_path, bytes_tokenizer, reading) for reading in readings]
    other = tokenizer_of_bytes(tmp_path / "other")
    assert TokenStore.of(tmp_path, other, READING) == stores[0]
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|end|>"))
    stores.append(TokenStore.of(tmp_path, TextTokenizer(file.parent, 257), READING))
    assert len({store.key for store in stores}) == 5


def test_another_store_is_refused(corpus: Corpus):
    file = corpus.corpora / corpus.store.key / "store.json"
    description = json.loads(file.read_text())
    changes: list[tuple[dict[str, object], str]] = [
        ({"format": 2}, "expected format 1, got 2"),
        ({"tokenizer": "abc"}, "expected tokenizer .*, got abc"),
        ({"d_vocab": None}, "expected d_vocab 257, got None"),
        ({"reading": 5}, "not the description of a token store"),
    ]
    for change, why in changes:
        file.write_text(json.dumps(description | change))
        told = refused(RunError, corpus.store.create)
        assert re.search(f"store.json: {why}; remove this store", told)


# Damage


def test_a_piece_of_which_a_file_is_cut_or_gone_is_prepared_again(corpus: Corpus):
    pieces = corpus.check_whole()
    for ending in (DOCUMENTS, TOKENS):
        for damage in ("cut", "blank", "gone"):
            file = corpus.folder / (pieces[1].name + ending)
            before = file.read_bytes()
            # A power cut leaves a file blank whose content was not written yet.
            file.write_bytes(before[:-7] if damage == "cut" else bytes(len(before)))
            if damage == "gone":
                file.unlink()
            if (damage, ending) == ("blank", TOKENS):
                forget_open_files()
                # Its size is right, so only reading it tells.
                with pytest.raises(CorpusError, match="delete it, then run the same command"):
                    read_tokens(corpus.store, pieces[1], 0, 1)
                file.unlink()
            assert corpus.pieces() == pieces[:1]
            assert corpus.check_whole() == pieces
            assert file.read_bytes() == before


def test_files_of_another_piece_are_not_taken_for_its_own(corpus: Corpus):
    first, second, *_ = corpus.prepare()
    for ending in (DOCUMENTS, TOKENS):
        shutil.copy(corpus.folder / (second.name + ending), corpus.folder / (first.name + ending))
    assert corpus.pieces() == []
    corpus.prepare()
    forget_open_files()
    # Even if it has the right size: the tokens of two pieces of one length may.
    shutil.copy(corpus.folder / (second.name + TOKENS), corpus.folder / (first.name + TOKENS))
    with pytest.raises(CorpusError, match=r"holds the tokens of other documents.*delete it"):
        read_tokens(corpus.store, first, 0, 1)
    # Pieces of another store are none of this one.
    other = store_in(corpus.corpora, corpus.tokenizer.tokenizer, Reading())
    shutil.copytree(corpus.folder, corpus.corpora / other.key / corpus.portion.key)
    assert other.pieces(corpus.portion) == []


def test_a_flipped_bit_is_found_or_changes_nothing(corpus: Corpus):
    store, piece = corpus.store, corpus.prepare()[-1]
    documents = read_documents(store, piece)
    tokens = read_tokens(store, piece, 0, piece.tokens).tolist()
    found: list[bool] = []
    for ending in (DOCUMENTS, TOKENS):
        file = corpus.folder / (piece.name + ending)
        content = file.read_bytes()
        for at in range(0, len(content), 53):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            forget_open_files()
            try:
                same = read_documents(store, piece).equals(documents)
                same &= read_tokens(store, piece, 0, piece.tokens).tolist() == tokens
            except CorpusError:
                found.append(True)
            else:
                found.append(piece not in store.pieces(corpus.portion))
                assert same or found[-1], f"byte {at} of {file.name}"
        file.write_bytes(content)
    assert sum(found) > len(found) / 2


# Lists, and stores of objects


def test_lists_what_is_stored_and_removes_it(corpus: Corpus, tmp_path: Path):
    store, corpora = corpus.store, corpus.corpora
    pieces = corpus.prepare()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "abc"}\n\n{"text": 5}\n')
    write_texts(tmp_path / "more.jsonl", TEXTS[:3])
    small = portion_of(bad, tmp_path / "more.jsonl")
    prepare_portion(store, small, corpus.tokenizer)
    [stored] = stored_corpora(corpora)
    assert (stored.key, stored.store, stored.problem) == (store.key, store, None)
    counts = (stored.portions, stored.pieces, stored.documents, stored.bad)
    assert counts == (2, len(pieces) + 1, 105, 1)
    assert stored.tokens == len(BYTES) + 3 + len("".join(TEXTS[:3]).encode())
    states = [file.stat() for file in corpora.rglob("*.*") if file.name != ".lock"]
    assert stored.bytes == sum(state.st_size for state in states)
    assert stored.changed is not None
    newest = max(state.st_mtime for state in states)
    assert stored.changed.timestamp() == pytest.approx(newest, abs=1e-3)
    forget(store, pieces[1:])
    files = {Path(file.name).name: file for file in stored_files(corpora, store.key)}
    assert [(name, file.whole) for name, file in files.items()] == [
        ("bad.jsonl", True), ("more.jsonl", True), ("texts.jsonl", False),
    ]  # fmt: skip
    of_bad, of_texts = files["bad.jsonl"], files["texts.jsonl"]
    assert of_bad.problems == [f"{bad}, line 3 (text is int, expected a string)"]
    assert (of_bad.documents, of_bad.tokens) == (2, 3)
    assert of_texts.documents == pieces[0].documents
    assert of_texts.bytes == corpus.portion.files[0].bytes
    (corpora / store.key / "store.json").write_text("{")
    assert "not the description" in str(stored_corpus(corpora, store.key).problem)
    with pytest.raises(RunError, match=f"did you mean '{store.key}'"):
        remove_corpus(corpora, store.key[:-1] + "_")
    remove_corpus(corpora, store.key)
    assert stored_corpora(corpora) == []
    assert not (corpora / store.key).exists()


def test_a_store_of_objects_holds_the_same_and_is_asked_little(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    pieces = corpus.check_whole()
    with object_store(monkeypatch) as server:
        corpora = place("s3://bucket/corpora")
        corpus.store = store_in(corpora, corpus.tokenizer.tokenizer)
        assert corpus.check_whole() == pieces
        assert [stored.tokens for stored in stored_corpora(corpora)] == [len(BYTES)]
        forget_open_files()
        piece = pieces[0]
        server.clear()
        for start in range(piece.tokens):
            read_tokens(corpus.store, piece, start, start + 1)
        # 16 row groups: its size, its footer and its tokens.
        assert len(server.requests()) <= 4
        server.clear()
        read_documents(corpus.store, piece, ["n_tokens"])
        assert len(server.requests()) <= 2
        remove_corpus(corpora, corpus.store.key)
        assert stored_corpora(corpora) == []
