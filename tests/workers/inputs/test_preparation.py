"""Portions become pieces: the same tokens, however often preparation stops or is killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from headcount.schemas.errors import CorpusError, RunError
from headcount.workers.inputs.store import preparation
from headcount.workers.inputs.store.preparation import PreparationProgress, prepare_portion
from headcount.workers.inputs.store.token_files import forget_open_files
from headcount.workers.inputs.store.token_store import (
    TOKENS,
    Piece,
    TokenStore,
    forget,
    read_documents,
)
from headcount.workers.inputs.store.verification import damaged_pieces, verify_portion
from headcount.workers.model.files.text_tokenizer import TextTokenizer
from tests import ROOT
from tests.toys.toy_store import (
    TEXTS,
    portion_of,
    rows_of,
    store_in,
    text_of,
    tokenizer_of_bytes,
    write_texts,
)

TEXT = "".join(TEXTS)
N_TOKENS = len(TEXT.encode())


class CountingTokenizer:
    """A tokenizer of bytes that counts what it tokenises, and can do something on the way."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        self.texts += texts
        return self.tokenizer.encode_many(texts)


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return tokenizer_of_bytes(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(bytes_tokenizer: TextTokenizer) -> CountingTokenizer:
    return CountingTokenizer(bytes_tokenizer)


@pytest.fixture
def store(tmp_path: Path, bytes_tokenizer: TextTokenizer) -> TokenStore:
    return store_in(tmp_path / "corpora", bytes_tokenizer)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of few tokens and batches of few texts; nothing stays open between tests."""
    monkeypatch.setattr(preparation, "PIECE_TOKENS", 1000)
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(preparation, "LOOK_SECONDS", 0.02)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    yield
    forget_open_files()


def test_one_core_is_kept_and_all_cores_are_given_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    assert preparation._cores() == len(psutil.Process().cpu_affinity() or [0])
    preparation.use_one_core()
    assert preparation._cores() == 1


def names_of(pieces: list[Piece]) -> list[str]:
    return [piece.name for piece in pieces]


@pytest.mark.parametrize(("tokens", "documents"), [(30, 1000), (400, 9), (10**6, 10**6)])
def test_pieces_of_any_size_hold_the_same_documents(
    store: TokenStore,
    tokenizer: CountingTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    documents: int,
) -> None:
    monkeypatch.setattr(preparation, "PIECE_TOKENS", tokens)
    monkeypatch.setattr(preparation, "PIECE_DOCUMENTS", documents)
    portion = write_texts(tmp_path / "texts.jsonl")
    pieces = prepare_portion(store, portion, tokenizer)
    assert text_of(store, pieces) == TEXT
    assert rows_of(store, pieces) == list(range(100))
    assert [piece.ended for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.documents <= documents for piece in pieces)
    assert all(piece.tokens <= tokens or piece.documents == 1 for piece in pieces)
    assert tokenizer.texts == TEXTS
    # Nothing is left to do.
    assert prepare_portion(store, portion, tokenizer) == pieces
    assert len(tokenizer.texts) == 100


def test_fields_of_any_length_leave_a_piece_small(
    store: TokenStore,
    tokenizer: CountingTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparation, "PIECE_CHARACTERS", 40)
    pieces = prepare_portion(store, write_texts(tmp_path / "texts.jsonl"), tokenizer)
    # Each year has four characters.
    assert {piece.documents for piece in pieces[:-1]} == {10}


@pytest.mark.parametrize("step", [100, 500, 10**6])
def test_a_few_tokens_are_prepared_at_a_time(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path, step: int
) -> None:
    portion = write_texts(tmp_path / "texts.jsonl")
    pieces: list[Piece] = []
    while not pieces or not pieces[-1].ended:
        tokens_before = sum(piece.tokens for piece in pieces)
        pieces = prepare_portion(store, portion, tokenizer, most_tokens=step)
        written = sum(piece.tokens for piece in pieces) - tokens_before
        assert written >= step or pieces[-1].ended
        # No more than a document of 84 bytes too many.
        assert written < step + 84
    assert text_of(store, pieces) == TEXT
    # Little is tokenised that is not written then.
    assert len("".join(tokenizer.texts)) <= len(TEXT) + 400 * len(pieces)


def test_files_of_all_kinds_and_bad_rows_are_counted(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    lines = ['{"text": "abc"}', "", "{", '{"text": null}', '{"text": ""}', " "]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_text('{"text": "de"}\n')
    seen: list[PreparationProgress] = []
    portion = portion_of(*(tmp_path / f"{name}.jsonl" for name in "abc"))
    [piece] = prepare_portion(store, portion, tokenizer, watch=seen.append)
    assert (piece.documents, piece.tokens, piece.bad) == (5, 5, 2)
    assert seen[-1] == PreparationProgress(documents=5, tokens=5, bad=2, pieces=0)
    table = read_documents(store, piece, ["source", "row", "n_tokens", "problem"])
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (0, 0, 3, None),
        (0, 2, -1, "invalid JSON"),
        (0, 3, -1, "text is null, expected a string"),
        (0, 4, 0, None),
        (2, 0, 2, None),
    ]


def test_a_gap_is_filled_exactly(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    portion = write_texts(tmp_path / "texts.jsonl")
    # Pieces that ended early would be longer if nothing lay behind them.
    for _ in range(4):
        pieces = prepare_portion(store, portion, tokenizer, most_tokens=400)
    pieces = prepare_portion(store, portion, tokenizer)
    missing = rows_of(store, pieces[1:2])
    forget(store, pieces[1:2])
    assert store.pieces(portion) == pieces[:1]
    tokenizer.texts.clear()
    assert prepare_portion(store, portion, tokenizer) == pieces
    assert tokenizer.texts[: len(missing)] == [TEXTS[row] for row in missing]
    # The rest of a batch is read in vain.
    assert len(tokenizer.texts) < len(missing) + 10
    assert text_of(store, pieces) == TEXT


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.toys.toy_store import portion_of, store_in
from headcount.workers.inputs.store import preparation
from headcount.workers.model.files.text_tokenizer import TextTokenizer

preparation.PIECE_TOKENS = 1000
preparation.BATCH_CHARACTERS = 300
folder = Path(sys.argv[1])
tokenizer = TextTokenizer(folder / "tokenizer", 257)
store = store_in(folder / "corpora", tokenizer)

def kill(progress):
    if progress.pieces == 2 and progress.tokens > 2300:
        os.kill(os.getpid(), signal.SIGKILL)

preparation.prepare_portion(store, portion_of(folder / "texts.jsonl"), tokenizer, watch=kill)
"""


def test_a_killed_preparation_goes_on_behind_its_last_piece(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    portion = write_texts(tmp_path / "texts.jsonl")
    tokenizer_of_bytes(tmp_path / "tokenizer")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    first = store.pieces(portion)
    assert len(first) == 2
    # Its lock died with it.
    pieces = prepare_portion(store, portion, tokenizer)
    assert pieces[:2] == first
    assert text_of(store, pieces) == TEXT
    assert tokenizer.texts == TEXTS[sum(piece.documents for piece in first) :]


def prepare_in_threads(store: TokenStore, tokenizers: list[CountingTokenizer], file: Path) -> None:
    """Prepare a portion several times at once."""
    threads = [
        threading.Thread(target=prepare_portion, args=(store, portion_of(file), tokenizer))
        for tokenizer in tokenizers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_at_once_write_one_chain(
    store: TokenStore,
    bytes_tokenizer: TextTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_locks: bool,
) -> None:
    if not has_locks:
        # As in a store, or on a disk without locks.
        monkeypatch.setattr(preparation, "_alone", lambda _: nullcontext())
    portion = write_texts(tmp_path / "texts.jsonl")
    tokenizers = [CountingTokenizer(bytes_tokenizer) for _ in range(3)]
    prepare_in_threads(store, tokenizers, tmp_path / "texts.jsonl")
    pieces = store.pieces(portion)
    assert text_of(store, pieces) == TEXT
    # Every writer cuts at the same places, so nothing lies beside the chain.
    assert set(names_of(store.committed(portion.key))) == set(names_of(pieces))
    if has_locks:
        # Nothing was done twice.
        assert sum(len(tokenizer.texts) for tokenizer in tokenizers) == 100


def test_a_waiting_preparation_says_so_and_gives_up_waiting(
    store: TokenStore,
    tokenizer: CountingTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    portion = write_texts(tmp_path / "texts.jsonl")
    monkeypatch.setattr(preparation, "PATIENCE_SECONDS", 0.1)
    seen: list[PreparationProgress] = []

    def prepare_another(progress: PreparationProgress) -> None:
        """The lock is held by whoever called this."""
        if not seen:
            prepare_portion(store, portion, tokenizer, watch=seen.append)

    pieces = prepare_portion(store, portion, tokenizer, watch=prepare_another)
    assert seen[0].waiting
    assert not seen[-1].waiting
    assert text_of(store, pieces) == TEXT


def test_a_file_that_changes_while_it_is_read_commits_nothing(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "texts.jsonl"
    portion = write_texts(file)

    def change(progress: PreparationProgress) -> None:
        if progress.pieces == 1:
            os.utime(file, ns=(0, 0))

    with pytest.raises(CorpusError, match=r"texts.jsonl: changed while it was read") as caught:
        prepare_portion(store, portion, tokenizer, watch=change)
    assert "\n" not in str(caught.value)
    assert len(store.pieces(portion)) == 1
    # The changed file is another portion, prepared from its beginning.
    changed = portion_of(file)
    assert text_of(store, prepare_portion(store, changed, tokenizer)) == TEXT


def test_what_lies_before_a_broken_place_is_kept(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    broken = tmp_path / "texts.csv"
    broken.write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS) + '"no end')
    portion = portion_of(broken, kind="csv")
    for _ in range(2):
        with pytest.raises(CorpusError, match="not CSV"):
            prepare_portion(store, portion, tokenizer)
    pieces = store.pieces(portion)
    rows = rows_of(store, pieces)
    assert rows == list(range(len(rows)))
    # What was read together with the broken row is lost.
    assert len(rows) >= 90
    assert text_of(store, pieces) == "".join(TEXTS[: len(rows)])


def test_without_room_one_line_and_nothing_half_written(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    portion = write_texts(tmp_path / "texts.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
        with pytest.raises(RunError, match=r"cannot be written .*; free space") as caught:
            prepare_portion(store, portion, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, signal_before)
    assert "\n" not in str(caught.value)
    folder = tmp_path / "corpora" / store.key / portion.key
    assert [file.name for file in folder.iterdir()] == [".lock"]
    assert text_of(store, prepare_portion(store, portion, tokenizer)) == TEXT


def test_a_place_that_is_a_file_is_one_line(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    portion = write_texts(tmp_path / "texts.jsonl")
    (tmp_path / "corpora" / store.key / portion.key).write_text("")
    with pytest.raises(RunError, match=r"cannot be written .*choose another place") as caught:
        prepare_portion(store, portion, tokenizer)
    assert "\n" not in str(caught.value)


def test_verification_finds_texts_and_files_that_differ(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "texts.jsonl"
    portion = write_texts(file)
    pieces = prepare_portion(store, portion, tokenizer)
    assert verify_portion(store, portion) == []
    # Another text of the same size at the same time, in the second piece.
    times = file.stat()
    file.write_text(file.read_text().replace("text 50 ", "test 50 "))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    # A bit of the third piece's tokens.
    damaged = tmp_path / "corpora" / store.key / portion.key / (pieces[2].name + TOKENS)
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    assert verify_portion(store, portion) == [
        f"{file}, line 51: is not what was tokenised",
        *(line for line in verify_portion(store, portion) if str(damaged) in line),
    ]
    differing = damaged_pieces(store, portion)
    assert list(differing) == pieces[1:3]
    forget(store, differing)
    texts = [text.replace("text 50 ", "test 50 ") for text in TEXTS]
    assert text_of(store, prepare_portion(store, portion, tokenizer)) == "".join(texts)
    assert verify_portion(store, portion) == []


def test_verification_finds_documents_that_came_or_went(
    store: TokenStore, tokenizer: CountingTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "texts.jsonl"
    portion = write_texts(file)
    prepare_portion(store, portion, tokenizer)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    assert verify_portion(store, portion) == [f"{file}: has fewer documents than were tokenised"]
    file.write_text("".join([*lines, lines[0]]))
    assert verify_portion(store, portion) == [
        f"{file}, line 101: was not there when the corpus was tokenised"
    ]
